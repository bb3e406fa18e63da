// Records of GPU activity in, one row a function out. No record is kept.
//
// A kernel's name is one pointer for all its executions, so a small cache by pointer finds the row; what is not in it is
// found by the text. Of each execution its beginning, end and row stay until the window ends, up to a limit: who was the
// critical path is known only then. Everything lies in one mapping, of which only what is used takes memory.
//
// One thread at a time.
#pragma once

#include "cupti_abi.h"
#include "tocsin_histogram.h"
#include "tocsin_window.h"

namespace tocsin {

constexpr uint32_t kRowsMax = TOCSIN_WINDOW_ROWS_MAX + TOCSIN_KINDS;
constexpr uint32_t kNoRow = ~0u;
constexpr uint64_t kNever_ns = ~0ull;

struct Row {
  uint64_t count, total_ns, max_ns, bytes, critical_ns;
  uint64_t pivot_ns;        // the first duration: squares are taken of distances from it, which keeps them small
  double squares;
  uint64_t name_hash;
  uint32_t name_at, name_bytes;
  uint32_t functions;
  uint32_t call;            // 1 + the runtime call's number; 0: not one
  uint8_t kind, cut;
};

struct Execution {
  uint64_t start, end;
  uint32_t row;
};

struct Condenser {
  Row* rows;
  uint32_t (*histograms)[TOCSIN_HISTOGRAM_BUCKETS];
  Execution* executions;
  uint32_t* stacks;         // TOCSIN_KINDS of EXECUTIONS_MAX
  char* names;
  uint32_t* by_text;        // 1 + row; open addressing
  uint64_t* told_names;     // hashes of names that found no row
  struct Cached {
    const char* name;
    uint32_t row;
  }* by_pointer;
  size_t mapped_bytes;

  uint64_t begin_ns, end_ns;  // records outside are only counted; begin is kNever_ns until the window begins
  uint32_t row_count, name_bytes, execution_count;
  uint32_t others[TOCSIN_KINDS];  // rows of what did not fit; kNoRow
  uint32_t copies[16], peer_copies, sets;
  uint32_t calls[1024];
  tocsin_window_header told;      // its counters, `unseen`, overlaps and critical times
};

// Null where there is no memory for it.
Condenser* condenser_make(void);
void condenser_clear(Condenser& condenser);
void condenser_free(Condenser* condenser);

// One record.
void condense(Condenser& condenser, const uint8_t* record);

// All records of a buffer, by CUPTI's own walk.
void condense_buffer(Condenser& condenser, uint8_t* buffer, size_t valid, NextRecord next);

// The critical path and the overlaps, once, after the last record.
void sweep(Condenser& condenser);

// The bucket of a duration, as diagnosis/contracts/histogram.py defines it.
inline uint32_t bucket_of(uint64_t duration_ns) {
  if (duration_ns == 0) {
    return 0;
  }
  const uint32_t octave = 63 - (uint32_t)__builtin_clzll(duration_ns);
  if (octave >= TOCSIN_HISTOGRAM_OCTAVES) {
    return TOCSIN_HISTOGRAM_BUCKETS - 1;
  }
  const uint64_t mantissa = duration_ns << (63 - octave);
  const uint32_t low = kCellBuckets[mantissa >> 58 & (TOCSIN_HISTOGRAM_CELLS - 1)];
  return 1 + octave * TOCSIN_HISTOGRAM_OCTAVE_BUCKETS + low + (mantissa >= kMantissaBorders[low + 1]);
}

// Whether a kernel is one of a communication library, by its name.
bool is_collective(const char* name);

}  // namespace tocsin
