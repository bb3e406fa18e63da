// The condenser behind plain C functions, for records that a test has made.
#include <stdlib.h>
#include <time.h>

#include "records.h"
#include "window_file.h"

using namespace tocsin;

namespace {

tocsin_test::Sizes g_sizes;

int next(uint8_t* buffer, size_t valid, uint8_t** record) {
  return tocsin_test::next_by_size(g_sizes, buffer, valid, record);
}

int call_name(uint32_t domain, uint32_t id, const char** name) {
  *name = domain == kDomainRuntime && id == 13 ? "cudaMalloc_v3020" : nullptr;
  return *name ? 0 : 1;
}

// Of this thread alone: a machine with other work gives the same figure, but for what the caches lose.
uint64_t processor_ns(void) {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

}  // namespace

extern "C" {

Condenser* feed_make(uint64_t begin_ns, uint64_t end_ns) {
  Condenser* made = condenser_make();
  if (made) {
    made->begin_ns = begin_ns, made->end_ns = end_ns;
  }
  return made;
}

void feed_clear(Condenser* condenser, uint64_t begin_ns, uint64_t end_ns) {
  condenser_clear(*condenser);
  condenser->begin_ns = begin_ns, condenser->end_ns = end_ns;
}

void feed_free(Condenser* condenser) { condenser_free(condenser); }

void feed_size(uint32_t kind, uint32_t bytes) { g_sizes.of_kind[kind] = bytes; }

void feed_buffer(Condenser* condenser, uint8_t* buffer, size_t valid) {
  condense_buffer(*condenser, buffer, valid, next);
}

// The same buffer again and again: nanoseconds of the processor that it took.
uint64_t feed_time_ns(Condenser* condenser, uint8_t* buffer, size_t valid, uint32_t times) {
  const uint64_t begun_ns = processor_ns();
  for (uint32_t i = 0; i < times; ++i) {
    condense_buffer(*condenser, buffer, valid, next);
  }
  return processor_ns() - begun_ns;
}

uint64_t feed_sweep_ns(Condenser* condenser) {
  const uint64_t begun_ns = processor_ns();
  sweep(*condenser);
  return processor_ns() - begun_ns;
}

int feed_write(Condenser* condenser, const char* directory, const char* name) {
  tocsin_window_header header = condenser->told;
  header.magic = TOCSIN_WINDOW_MAGIC_WINDOW;
  header.version = TOCSIN_WINDOW_VERSION;
  header.header_bytes = sizeof header;
  header.row_bytes = sizeof(tocsin_window_row);
  header.begin_ns = condenser->begin_ns, header.end_ns = condenser->end_ns;
  return write_window(*condenser, header, directory, name, call_name);
}

uint32_t feed_bucket(uint64_t duration_ns) { return bucket_of(duration_ns); }

int feed_is_collective(const char* name) { return is_collective(name); }

}  // extern "C"
