#include "condenser.h"

#include <sys/mman.h>

namespace tocsin {
namespace {

constexpr uint32_t kPointers = 1 << 14;  // slots of the cache by pointer
constexpr uint32_t kTexts = 1 << 13;     // of the table by text: twice the rows
constexpr uint32_t kTold = 1 << 15;      // names beyond the rows that are counted once each
constexpr size_t kNamesBytes = 4u << 20;  // as they are given, before they are made readable
constexpr uint32_t kScanBytesMax = 1 << 16;  // of one name

const char* const kCopyNames[] = {"Memcpy",      "Memcpy HtoD", "Memcpy DtoH", "Memcpy HtoA", "Memcpy AtoH", "Memcpy AtoA",
                                  "Memcpy AtoD", "Memcpy DtoA", "Memcpy DtoD", "Memcpy HtoH", "Memcpy PtoP"};
constexpr uint32_t kCopyKinds = sizeof kCopyNames / sizeof *kCopyNames;

inline uint32_t slot_of(const char* name) {
  return (uint32_t)(((uint64_t)(uintptr_t)name * 0x9E3779B97F4A7C15ull) >> 50);  // the upper 14 bits
}
static_assert(kPointers == 1 << (64 - 50), "the cache's slots are the hash's upper bits");

struct Text {
  const char* at;
  uint32_t bytes;
  uint64_t hash;  // FNV-1a
};

Text text_of(const char* name) {
  Text text = {name, 0, 0xCBF29CE484222325ull};
  for (; text.bytes < kScanBytesMax && name[text.bytes]; ++text.bytes) {
    text.hash = (text.hash ^ (uint8_t)name[text.bytes]) * 0x100000001B3ull;
  }
  return text;
}

uint32_t new_row(Condenser& condenser, uint8_t kind) {
  const uint32_t at = condenser.row_count++;
  Row& row = condenser.rows[at];
  row = Row();
  row.kind = kind;
  row.functions = 1;
  return at;
}

// The row for all names of this kind that find no place.
uint32_t others_row(Condenser& condenser, uint8_t kind) {
  condenser.told.unseen |= TOCSIN_UNSEEN_NAMES;
  uint32_t& at = condenser.others[kind];
  if (at == kNoRow) {
    at = new_row(condenser, kind);
    condenser.rows[at].functions = 0;
  }
  return at;
}

// Counts the name once, as far as there is room to remember it.
void count_name(Condenser& condenser, Row& row, uint64_t hash) {
  uint32_t slot = (uint32_t)(hash >> 32) & (kTold - 1);
  for (uint32_t i = 0; i < kTold / 2; ++i, slot = (slot + 1) & (kTold - 1)) {
    if (condenser.told_names[slot] == hash) {
      return;
    }
    if (!condenser.told_names[slot]) {
      condenser.told_names[slot] = hash;
      ++row.functions;
      return;
    }
  }
}

uint32_t rows_of_others(const Condenser& condenser) {
  uint32_t made = 0;
  for (const uint32_t at : condenser.others) {
    made += at != kNoRow;
  }
  return made;
}

bool is_full(const Condenser& condenser, uint32_t name_bytes) {
  return condenser.row_count - rows_of_others(condenser) >= TOCSIN_WINDOW_ROWS_MAX ||
         condenser.name_bytes + name_bytes > kNamesBytes;
}

uint32_t row_of_text(Condenser& condenser, const char* name, uint8_t kind, bool kernel) {
  const Text text = text_of(name);
  const uint32_t kept = text.bytes < TOCSIN_WINDOW_NAME_BYTES_MAX ? text.bytes : TOCSIN_WINDOW_NAME_BYTES_MAX;
  uint32_t slot = (uint32_t)(text.hash >> 32) & (kTexts - 1);
  for (; condenser.by_text[slot]; slot = (slot + 1) & (kTexts - 1)) {
    const uint32_t at = condenser.by_text[slot] - 1;
    const Row& row = condenser.rows[at];
    if (row.name_hash == text.hash && row.name_bytes == kept && memcmp(condenser.names + row.name_at, name, kept) == 0) {
      return at;
    }
  }
  const uint8_t own_kind = kernel && is_collective(name) ? (uint8_t)TOCSIN_KIND_COMM : kind;
  if (is_full(condenser, kept)) {
    const uint32_t others = others_row(condenser, own_kind);
    count_name(condenser, condenser.rows[others], text.hash | 1);
    return others;
  }
  const uint32_t at = new_row(condenser, own_kind);
  Row& row = condenser.rows[at];
  row.name_at = condenser.name_bytes;
  row.name_bytes = kept;
  row.name_hash = text.hash;
  row.cut = text.bytes > kept;
  memcpy(condenser.names + condenser.name_bytes, name, kept);
  condenser.name_bytes += kept;
  condenser.by_text[slot] = at + 1;
  return at;
}

inline uint32_t row_of_pointer(Condenser& condenser, const char* name) {
  Condenser::Cached& cached = condenser.by_pointer[slot_of(name)];
  if (__builtin_expect(cached.name == name, 1)) {
    return cached.row;
  }
  cached.row = row_of_text(condenser, name ? name : "(unnamed kernel)", TOCSIN_KIND_COMPUTE, true);
  cached.name = name;
  return cached.row;
}

// The part of an execution that lies in the window, and its row's own books.
inline void add(Condenser& condenser, uint32_t at, uint64_t start, uint64_t end, uint64_t bytes) {
  start = start < condenser.begin_ns ? condenser.begin_ns : start;
  end = end > condenser.end_ns ? condenser.end_ns : end;
  const uint64_t duration = end - start;
  Row& row = condenser.rows[at];
  if (row.count++ == 0) {
    row.pivot_ns = duration;
  }
  const double apart = (double)(int64_t)(duration - row.pivot_ns);
  row.squares += apart * apart;
  row.total_ns += duration;
  row.max_ns = duration > row.max_ns ? duration : row.max_ns;
  row.bytes += bytes;
  ++condenser.histograms[at][bucket_of(duration)];
  if (__builtin_expect(condenser.execution_count < TOCSIN_WINDOW_EXECUTIONS_MAX, 1)) {
    condenser.executions[condenser.execution_count++] = {start, end, at};
  } else {
    condenser.told.unseen |= TOCSIN_UNSEEN_CRITICAL;
  }
}

// Whether an execution counts: it has both its times, and lies in the window at least in part.
inline bool counts(Condenser& condenser, uint64_t start, uint64_t end) {
  if (__builtin_expect(start == 0 || end < start, 0)) {
    ++condenser.told.untimed;
    return false;
  }
  if (__builtin_expect(end <= condenser.begin_ns || start >= condenser.end_ns, 0)) {
    ++condenser.told.outside;
    return false;
  }
  return true;
}

inline void condense_kernel(Condenser& condenser, const uint8_t* record) {
  ++condenser.told.kernels;
  condenser.told.in_graphs += field<uint32_t>(record, kKernelGraph) != 0;
  const uint64_t start = field<uint64_t>(record, kKernelStart), end = field<uint64_t>(record, kKernelEnd);
  if (counts(condenser, start, end)) {
    add(condenser, row_of_pointer(condenser, field<const char*>(record, kKernelName)), start, end, 0);
  }
}

void condense_copy(Condenser& condenser, const uint8_t* record, bool peer) {
  ++condenser.told.copies;
  const uint64_t start = field<uint64_t>(record, kCopyStart), end = field<uint64_t>(record, kCopyEnd);
  if (!counts(condenser, start, end)) {
    return;
  }
  const uint8_t told = field<uint8_t>(record, kCopyKind);
  const uint32_t direction = told < kCopyKinds ? told : 0;
  uint32_t& at = peer ? condenser.peer_copies : condenser.copies[direction];
  if (at == kNoRow) {
    at = row_of_text(condenser, kCopyNames[peer ? kCopyKinds - 1 : direction], TOCSIN_KIND_MEMCPY, false);
  }
  add(condenser, at, start, end, field<uint64_t>(record, kCopyBytes));
}

void condense_set(Condenser& condenser, const uint8_t* record) {
  ++condenser.told.sets;
  const uint64_t start = field<uint64_t>(record, kSetStart), end = field<uint64_t>(record, kSetEnd);
  if (!counts(condenser, start, end)) {
    return;
  }
  if (condenser.sets == kNoRow) {
    condenser.sets = row_of_text(condenser, "Memset", TOCSIN_KIND_MEMCPY, false);
  }
  add(condenser, condenser.sets, start, end, field<uint64_t>(record, kSetBytes));
}

void condense_call(Condenser& condenser, const uint8_t* record) {
  ++condenser.told.calls;
  const uint64_t start = field<uint64_t>(record, kCallStart), end = field<uint64_t>(record, kCallEnd);
  if (!counts(condenser, start, end)) {
    return;
  }
  constexpr uint32_t kCalls = sizeof condenser.calls / sizeof *condenser.calls;
  const uint32_t told = field<uint32_t>(record, kCallId), call = told < kCalls ? told : 0;
  uint32_t& at = condenser.calls[call];
  if (at == kNoRow) {
    const bool full = is_full(condenser, 0);
    at = full ? others_row(condenser, TOCSIN_KIND_HOST) : new_row(condenser, TOCSIN_KIND_HOST);
    condenser.rows[at].functions += full;
    condenser.rows[at].call = full ? 0 : call + 1;
  }
  add(condenser, at, start, end, 0);
}

void condense_overhead(Condenser& condenser, const uint8_t* record) {
  ++condenser.told.overheads;
  const uint64_t start = field<uint64_t>(record, kOverheadStart), end = field<uint64_t>(record, kOverheadEnd);
  if (counts(condenser, start, end)) {
    condenser.told.overhead_ns += end - start;
  }
}

char lower(char one) { return one >= 'A' && one <= 'Z' ? (char)(one - 'A' + 'a') : one; }

bool is_word(char one) { return (lower(one) >= 'a' && lower(one) <= 'z') || (one >= '0' && one <= '9') || one == '_'; }

bool begins(const char* text, const char* with) {
  while (*with && lower(*text) == *with) {
    ++text, ++with;
  }
  return !*with;
}

}  // namespace

// As `kernel_kind` in diagnosis/evidence/kineto_names.py.
bool is_collective(const char* name) {
  static const char* const kWords[] = {"rccl", "msccl", "nvshmem", "cross_device_reduce", "ncclsymk"};
  const char* const end = name + strnlen(name, kScanBytesMax);
  for (const char* at = name; at < end; ++at) {
    for (const char* word : kWords) {
      if (begins(at, word)) {
        return true;
      }
    }
    if (begins(at, "nccl")) {
      for (const char* rest = at + 4; rest < end; ++rest) {
        if (begins(rest, "kernel")) {
          return true;
        }
        if (!is_word(*rest)) {
          break;
        }
      }
    }
  }
  return false;
}

Condenser* condenser_make(void) {
  size_t bytes = 0;
  const auto place = [&bytes](size_t wanted) {
    const size_t at = bytes;
    bytes += (wanted + 63) & ~(size_t)63;
    return at;
  };
  const size_t self = place(sizeof(Condenser)), rows = place(kRowsMax * sizeof(Row));
  const size_t histograms = place(kRowsMax * sizeof(uint32_t[TOCSIN_HISTOGRAM_BUCKETS]));
  const size_t executions = place(TOCSIN_WINDOW_EXECUTIONS_MAX * sizeof(Execution));
  const size_t stacks = place((size_t)TOCSIN_KINDS * TOCSIN_WINDOW_EXECUTIONS_MAX * sizeof(uint32_t));
  const size_t names = place(kNamesBytes), texts = place(kTexts * sizeof(uint32_t));
  const size_t told_names = place(kTold * sizeof(uint64_t));
  const size_t pointers = place(kPointers * sizeof(Condenser::Cached));
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    return nullptr;
  }
  uint8_t* const base = (uint8_t*)memory;
  Condenser* made = (Condenser*)(base + self);
  made->rows = (Row*)(base + rows);
  made->histograms = (uint32_t(*)[TOCSIN_HISTOGRAM_BUCKETS])(base + histograms);
  made->executions = (Execution*)(base + executions);
  made->stacks = (uint32_t*)(base + stacks);
  made->names = (char*)(base + names);
  made->by_text = (uint32_t*)(base + texts);
  made->told_names = (uint64_t*)(base + told_names);
  made->by_pointer = (Condenser::Cached*)(base + pointers);
  made->mapped_bytes = bytes;
  condenser_clear(*made);
  return made;
}

void condenser_clear(Condenser& condenser) {
  memset(condenser.histograms, 0, condenser.row_count * sizeof *condenser.histograms);
  memset(condenser.by_text, 0, kTexts * sizeof *condenser.by_text);
  if (condenser.told.unseen & TOCSIN_UNSEEN_NAMES) {
    memset(condenser.told_names, 0, kTold * sizeof *condenser.told_names);
  }
  for (uint32_t i = 0; i < kPointers; ++i) {
    condenser.by_pointer[i] = {(const char*)~(uintptr_t)0, kNoRow};  // no name's place
  }
  condenser.row_count = condenser.name_bytes = condenser.execution_count = 0;
  condenser.begin_ns = condenser.end_ns = kNever_ns;
  memset(condenser.others, 0xFF, sizeof condenser.others);
  memset(condenser.copies, 0xFF, sizeof condenser.copies);
  memset(condenser.calls, 0xFF, sizeof condenser.calls);
  condenser.peer_copies = condenser.sets = kNoRow;
  condenser.told = tocsin_window_header();
}

void condenser_free(Condenser* condenser) {
  if (condenser) {
    munmap(condenser, condenser->mapped_bytes);
  }
}

void condense(Condenser& condenser, const uint8_t* record) {
  ++condenser.told.records;
  switch (field<uint32_t>(record, 0)) {
    case kConcurrentKernel:
    case kKernelSerial: condense_kernel(condenser, record); break;
    case kMemcpy: condense_copy(condenser, record, false); break;
    case kMemcpyPeer: condense_copy(condenser, record, true); break;
    case kMemset: condense_set(condenser, record); break;
    case kRuntimeCall: condense_call(condenser, record); break;
    case kOverhead: condense_overhead(condenser, record); break;
    case kMarker: ++condenser.told.markers; break;
    case kExternalCorrelation: ++condenser.told.correlations; break;
    default: ++condenser.told.unknown; break;
  }
}

void condense_buffer(Condenser& condenser, uint8_t* buffer, size_t valid, NextRecord next) {
  ++condenser.told.buffers;
  uint8_t* record = nullptr;
  while (valid && next(buffer, valid, &record) == kSuccess) {
    condense(condenser, record);
  }
}

}  // namespace tocsin
