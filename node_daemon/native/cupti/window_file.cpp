#include "window_file.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "frame_file.h"
#include "old_glibc.h"

namespace tocsin {
namespace {

using Demangle = char* (*)(const char* mangled, char* buffer, size_t* length, int* status);

// Of the C++ library that the program itself has loaded; null where it has none.
Demangle find_demangler(void) {
  void* library = dlopen("libstdc++.so.6", RTLD_LAZY | RTLD_NOLOAD);
  if (!library) {
    return nullptr;
  }
  const Demangle found = (Demangle)(uintptr_t)dlsym(library, "__cxa_demangle");
  dlclose(library);
  return found;
}

struct Writer {
  Condenser& condenser;
  CallName call_name;
  Demangle demangle;
  uint8_t* base;  // null: only the sizes are wanted
  uint32_t rows, cells, name_bytes;

  tocsin_window_row* row_at(uint32_t at) const {
    return (tocsin_window_row*)(base + sizeof(tocsin_window_header)) + at;
  }

  // How many cells the row fills, 0 where they find no place; they are put `into` that where it is not null.
  uint32_t put_cells(uint32_t at, tocsin_window_cell* into) {
    const uint32_t* const counts = condenser.histograms[at];
    uint32_t filled = 0;
    for (uint32_t bucket = 0; bucket < TOCSIN_HISTOGRAM_BUCKETS; ++bucket) {
      filled += counts[bucket] != 0;
    }
    if (cells + filled > TOCSIN_WINDOW_CELLS_MAX) {
      condenser.told.unseen |= TOCSIN_UNSEEN_CELLS;
      return 0;
    }
    for (uint32_t bucket = 0; into && bucket < TOCSIN_HISTOGRAM_BUCKETS; ++bucket) {
      if (counts[bucket]) {
        *into++ = {counts[bucket], bucket};
      }
    }
    return filled;
  }

  // `name` must have room for NAME_BYTES_MAX and a zero. How many bytes it has.
  uint32_t readable(const Row& row, char* name) const {
    const char* told = nullptr;
    if (row.call) {
      if (!call_name || call_name(kDomainRuntime, row.call - 1, &told) != kSuccess || !told) {
        return (uint32_t)snprintf(name, TOCSIN_WINDOW_NAME_BYTES_MAX, "cuda runtime call %u", row.call - 1);
      }
      return (uint32_t)strnlen(strncpy(name, told, TOCSIN_WINDOW_NAME_BYTES_MAX), TOCSIN_WINDOW_NAME_BYTES_MAX);
    }
    memcpy(name, condenser.names + row.name_at, row.name_bytes);
    name[row.name_bytes] = '\0';
    if (!demangle || row.cut || strncmp(name, "_Z", 2) != 0) {
      return row.name_bytes;
    }
    int status = 0;
    char* const plain = demangle(name, nullptr, nullptr, &status);
    if (!plain) {
      return row.name_bytes;
    }
    const uint32_t length = (uint32_t)strnlen(plain, TOCSIN_WINDOW_NAME_BYTES_MAX);
    memcpy(name, plain, length);
    free(plain);
    return length;
  }
};

// What the rows take, and then, with `base`, the rows themselves: the same walk twice.
void walk(Writer& writer) {
  char name[TOCSIN_WINDOW_NAME_BYTES_MAX + 1];
  uint8_t* const base = writer.base;
  const uint32_t all_rows = writer.rows, all_cells = writer.cells;
  tocsin_window_cell* const cells = base ? (tocsin_window_cell*)writer.row_at(all_rows) : nullptr;
  char* const names = base ? (char*)(cells + all_cells) : nullptr;
  writer.rows = writer.cells = writer.name_bytes = 0;
  for (uint32_t at = 0; at < writer.condenser.row_count; ++at) {
    const Row& row = writer.condenser.rows[at];
    if (!row.count) {
      continue;
    }
    const uint32_t filled = writer.put_cells(at, cells ? cells + writer.cells : nullptr);
    uint32_t length = writer.readable(row, name);
    const bool fits = writer.name_bytes + length <= TOCSIN_WINDOW_NAMES_BYTES_MAX;
    if (!fits) {
      writer.condenser.told.unseen |= TOCSIN_UNSEEN_NAMES;
      length = 0;
    }
    if (base) {
      const double off = (double)(int64_t)(row.total_ns - row.count * row.pivot_ns);
      const double scatter = row.squares - off * off / (double)row.count;
      *writer.row_at(writer.rows) = {row.count,    row.total_ns,  scatter > 0 ? scatter : 0, row.max_ns, row.critical_ns,
                                     row.bytes,    row.name_hash, row.functions,             filled,     length,
                                     row.kind,     (uint8_t)(row.cut || length == TOCSIN_WINDOW_NAME_BYTES_MAX), 0};
      memcpy(names + writer.name_bytes, name, length);
    }
    writer.rows += 1;
    writer.cells += filled;
    writer.name_bytes += length;
  }
}

size_t bytes_of(const Writer& writer) {
  return sizeof(tocsin_window_header) + writer.rows * sizeof(tocsin_window_row) +
         writer.cells * sizeof(tocsin_window_cell) + writer.name_bytes;
}

}  // namespace

bool write_window(Condenser& condenser, const tocsin_window_header& header, const char* directory, const char* name,
                  CallName call_name) {
  Writer writer = {condenser, call_name, find_demangler(), nullptr, 0, 0, 0};
  walk(writer);
  const size_t bytes = bytes_of(writer);
  char made[kFileNameBytes];
  snprintf(made, sizeof made, "%s.new", name);
  writer.base = (uint8_t*)tocsin_map_frame_file(directory, made, bytes);
  if (!writer.base) {
    return false;
  }
  const uint32_t rows = writer.rows, cells = writer.cells, name_bytes = writer.name_bytes;
  walk(writer);
  tocsin_window_header* const whole = (tocsin_window_header*)writer.base;
  *whole = header;
  whole->unseen |= condenser.told.unseen;
  whole->rows = rows, whole->cells = cells, whole->name_bytes = name_bytes;
  munmap(writer.base, bytes);
  const int directory_fd = open(directory, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  const bool moved = directory_fd >= 0 && renameat(directory_fd, made, directory_fd, name) == 0;
  if (directory_fd >= 0) {
    close(directory_fd);
  }
  return moved;
}

}  // namespace tocsin
