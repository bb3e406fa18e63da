// A stand-in for libcupti: the same functions and callbacks, one client, records of version 13, buffers given back when
// full or flushed. It ends the program where it is used in a way that CUPTI forbids.
#include "fake_cupti.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "records.h"

namespace {

constexpr size_t kKernelBytes = 248;
constexpr int kNotInitialized = 15, kInvalidOperation = 7, kMaxLimit = 12;

std::recursive_mutex g_lock;  // callbacks call back
std::map<std::string, int> g_failing;
std::map<std::string, uint64_t> g_calls;
uint32_t g_version = 130500;
void* g_subscriber;
tocsin::ApiCallback g_callback;
bool g_domains[3], g_kinds[64], g_other, g_at_exit_site;
tocsin::BufferRequested g_requested;
tocsin::BufferCompleted g_completed;
uint8_t* g_buffer;
size_t g_size, g_used, g_dropped;
bool g_hold;
struct Held {
  uint8_t* buffer;
  size_t size, used;
};
std::vector<Held> g_held;
thread_local bool g_in_buffer_callback;

[[noreturn]] void misused(const char* how) {
  fprintf(stderr, "CUPTI misused: %s\n", how);
  _Exit(70);
}

// What the function is to answer without doing anything, 0: it works.
int begin(const char* function, bool from_anywhere = false) {
  if (g_in_buffer_callback && !from_anywhere) {
    misused(function);
  }
  ++g_calls[function];
  const auto failing = g_failing.find(function);
  return failing == g_failing.end() ? 0 : failing->second;
}

uint64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void hold() {
  if (g_buffer) {
    g_held.push_back({g_buffer, g_size, g_used});
    g_buffer = nullptr;
  }
}

void give_back() {
  hold();
  g_in_buffer_callback = true;
  for (const Held& one : g_held) {
    g_completed(nullptr, 0, one.buffer, one.size, one.used);
  }
  g_in_buffer_callback = false;
  g_held.clear();
}

uint8_t* place(size_t bytes) {
  if (g_buffer && g_used + bytes > g_size) {
    g_hold ? hold() : give_back();
  }
  if (!g_buffer) {
    size_t records_max = 1;
    g_used = 0;
    g_in_buffer_callback = true;
    g_requested(&g_buffer, &g_size, &records_max);
    g_in_buffer_callback = false;
    if (records_max != 0 || (uintptr_t)g_buffer % tocsin::kRecordAlignment) {
      misused("a buffer");
    }
  }
  if (!g_buffer || g_used + bytes > g_size) {
    ++g_dropped;
    return nullptr;
  }
  g_used += bytes;
  return g_buffer + g_used - bytes;
}

template <class T>
void put(uint8_t* record, size_t offset, T value) {
  memcpy(record + offset, &value, sizeof value);
}

}  // namespace

#define CUPTI(name_, ...)                                                                     \
  std::lock_guard<std::recursive_mutex> held(g_lock);                                         \
  if (const int failed = begin(name_ __VA_OPT__(, ) __VA_ARGS__)) return failed

extern "C" {

int cuptiGetVersion(uint32_t* version) {
  CUPTI("GetVersion");
  *version = g_version;
  return 0;
}

int cuptiSubscribe(void** subscriber, tocsin::ApiCallback callback, void*) {
  CUPTI("Subscribe");
  if (g_subscriber || g_other) {
    return tocsin::kMultipleSubscribers;
  }
  g_callback = callback;
  *subscriber = g_subscriber = &g_subscriber;
  return 0;
}

int cuptiUnsubscribe(void* subscriber) {
  CUPTI("Unsubscribe");
  if (!subscriber || subscriber != g_subscriber) {
    misused("unsubscribed, and was not");
  }
  g_subscriber = nullptr;
  memset(g_domains, 0, sizeof g_domains);
  return 0;
}

int cuptiEnableDomain(uint32_t enable, void* subscriber, uint32_t domain) {
  CUPTI("EnableDomain");
  if (!subscriber || subscriber != g_subscriber) {
    misused("a domain for nobody");
  }
  g_domains[domain] = enable;
  return 0;
}

int cuptiActivityRegisterCallbacks(tocsin::BufferRequested requested, tocsin::BufferCompleted completed) {
  CUPTI("ActivityRegisterCallbacks");
  g_requested = requested;
  g_completed = completed;
  return 0;
}

int cuptiActivityEnable(uint32_t kind) {
  CUPTI("ActivityEnable");
  if (!g_subscriber) {
    misused("recording without a subscription");
  }
  g_kinds[kind] = true;
  return 0;
}

int cuptiActivityDisable(uint32_t kind) {
  CUPTI("ActivityDisable");
  g_kinds[kind] = false;
  return 0;
}

int cuptiActivityFlushAll(uint32_t) {
  CUPTI("ActivityFlushAll");
  if (!g_completed) {
    return kInvalidOperation;
  }
  give_back();
  return 0;
}

int cuptiActivityGetNextRecord(uint8_t* buffer, size_t valid, uint8_t** record) {
  CUPTI("ActivityGetNextRecord", true);
  tocsin_test::Sizes sizes = {};
  sizes.of_kind[tocsin::kConcurrentKernel] = kKernelBytes;
  return tocsin_test::next_by_size(sizes, buffer, valid, record);
}

int cuptiActivityGetNumDroppedRecords(void*, uint32_t, size_t* dropped) {
  CUPTI("ActivityGetNumDroppedRecords", true);
  *dropped = g_dropped;
  g_dropped = 0;
  return 0;
}

int cuptiGetTimestamp(uint64_t* ns) {
  CUPTI("GetTimestamp");
  *ns = now_ns();
  return 0;
}

int cuptiGetCallbackName(uint32_t, uint32_t, const char** name) {
  *name = nullptr;
  return kNotInitialized;
}

int cuptiFinalize(void) {
  CUPTI("Finalize");
  if (!g_at_exit_site) {
    misused("finalised outside a call's end");
  }
  g_subscriber = nullptr;
  memset(g_domains, 0, sizeof g_domains);
  memset(g_kinds, 0, sizeof g_kinds);
  g_buffer = nullptr;
  g_held.clear();
  g_requested = nullptr;
  g_completed = nullptr;
  return 0;
}

void fake_call(void) {
  std::lock_guard<std::recursive_mutex> held(g_lock);
  for (uint32_t site = 0; site <= tocsin::kSiteExit; ++site) {
    if (g_subscriber && g_domains[tocsin::kDomainRuntime]) {
      g_at_exit_site = site == tocsin::kSiteExit;
      g_callback(nullptr, tocsin::kDomainRuntime, 211, &site);
      g_at_exit_site = false;
    }
  }
}

void fake_launch(const char* name, uint64_t ns) {
  {
    std::lock_guard<std::recursive_mutex> held(g_lock);
    uint8_t* const record = g_kinds[tocsin::kConcurrentKernel] ? place(kKernelBytes) : nullptr;
    if (record) {
      const uint64_t end_ns = now_ns();
      memset(record, 0, kKernelBytes);
      put(record, 0, (uint32_t)tocsin::kConcurrentKernel);
      put(record, tocsin::kKernelStart, end_ns - ns);
      put(record, tocsin::kKernelEnd, end_ns);
      put(record, tocsin::kKernelName, name);
    }
  }
  fake_call();
}

void fake_fail(const char* function, int result) {
  std::lock_guard<std::recursive_mutex> held(g_lock);
  if (result) {
    g_failing[function] = result;
  } else {
    g_failing.erase(function);
  }
}

uint64_t fake_calls(const char* function) {
  std::lock_guard<std::recursive_mutex> held(g_lock);
  return g_calls[function];
}

void fake_other_client(int there) {
  std::lock_guard<std::recursive_mutex> held(g_lock);
  g_other = there != 0;
}

void fake_hold(int hold) {
  std::lock_guard<std::recursive_mutex> held(g_lock);
  g_hold = hold != 0;
}

void fake_version(uint32_t version) {
  std::lock_guard<std::recursive_mutex> held(g_lock);
  g_version = version;
}

}  // extern "C"
