// A buffer is one of a few in one mapping, never waited for: where none is free CUPTI drops records and says how many. A
// completed one is condensed in CUPTI's thread, under a lock that nobody else holds for longer than it takes to set a
// border of the window.
//
// To detach, CUPTI wants to be called from the end of one of the program's own calls, where nothing of it is on any
// stack. So a callback is asked for at all of them, the first to come does it, and whoever waits for it too long (the
// program may make no call any more) takes the callback back: one atomic word decides which of the two it is.
#include "client.h"

#include <dlfcn.h>
#include <pthread.h>
#include <link.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#include <initializer_list>

#include "frame_file.h"
#include "identity.h"
#include "old_glibc.h"

namespace tocsin {
namespace {

constexpr uint32_t kBuffers = 8;
constexpr size_t kBufferBytes = 4u << 20;
constexpr uint64_t kSettle_ns = 200000000;      // for what runs on the GPU when recording ends
constexpr uint64_t kDetachWait_ns = 5000000000;  // for a call of the program

enum Detaching : uint32_t { kNotAsked, kAsked, kClaimed, kDone };

Cupti g_cupti;
uint32_t g_version;
void* g_library;
Subscriber g_subscriber;
uint8_t* g_buffers;
uint32_t g_buffer_taken[kBuffers];
pthread_mutex_t g_lock = PTHREAD_MUTEX_INITIALIZER;
Condenser* g_condenser;  // under g_lock; null: what still comes is dropped
uint64_t g_dropped;
uint32_t g_detaching;
uint32_t g_enabled[8];
uint32_t g_enabled_count;

void nap(uint64_t ns) {
  const timespec length = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
  nanosleep(&length, nullptr);
}

// -- what CUPTI calls ---------------------------------------------------------------------------------------------------

void buffer_requested(uint8_t** buffer, size_t* size, size_t* records_max) {
  *buffer = nullptr;
  *size = *records_max = 0;
  for (uint32_t at = 0; g_buffers && at < kBuffers; ++at) {
    if (__atomic_exchange_n(&g_buffer_taken[at], 1, __ATOMIC_ACQUIRE) == 0) {
      *buffer = g_buffers + at * kBufferBytes;
      *size = kBufferBytes;
      return;
    }
  }
}

void buffer_completed(void* context, uint32_t stream, uint8_t* buffer, size_t, size_t valid) {
  if (!buffer || buffer < g_buffers || buffer >= g_buffers + kBuffers * kBufferBytes) {
    return;
  }
  pthread_mutex_lock(&g_lock);
  if (g_condenser) {
    const uint64_t begun_ns = tocsin_now_ns();
    condense_buffer(*g_condenser, buffer, valid < kBufferBytes ? valid : kBufferBytes, g_cupti.next_record);
    size_t dropped = 0;
    if (g_cupti.dropped_records(context, stream, &dropped) == kSuccess) {
      g_dropped += dropped;
      g_condenser->told.dropped = g_dropped;
      g_condenser->told.unseen |= g_dropped ? (uint32_t)TOCSIN_UNSEEN_RECORDS : 0;
    }
    g_condenser->told.condense_ns += tocsin_now_ns() - begun_ns;
  }
  pthread_mutex_unlock(&g_lock);
  __atomic_store_n(&g_buffer_taken[(size_t)(buffer - g_buffers) / kBufferBytes], 0, __ATOMIC_RELEASE);
}

void call_ended(void*, uint32_t domain, uint32_t, const void* data) {
  if ((domain != kDomainRuntime && domain != kDomainDriver) || !data ||
      field<uint32_t>((const uint8_t*)data, 0) != kSiteExit) {
    return;
  }
  uint32_t expected = kAsked;
  if (__atomic_compare_exchange_n(&g_detaching, &expected, kClaimed, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
    g_cupti.finalize();
    __atomic_store_n(&g_detaching, (uint32_t)kDone, __ATOMIC_RELEASE);
  }
}

// -- finding it ---------------------------------------------------------------------------------------------------------

// The one that the program has loaded (torch brings one), else the one that the system's paths know.
void* open_library(void) {
  static const char* const kNames[] = {"libcupti.so.13", "libcupti.so.12"};
  const char* const named = getenv("TOCSIN_CUPTI_LIBRARY");
  if (named && *named) {
    return dlopen(named, RTLD_NOW | RTLD_LOCAL);
  }
  for (const int how : {RTLD_NOLOAD, 0}) {
    for (const char* name : kNames) {
      void* const library = dlopen(name, RTLD_NOW | RTLD_LOCAL | how);
      if (library) {
        return library;
      }
    }
  }
  return nullptr;
}

template <class F>
bool find(F& function, const char* name) {
  function = (F)(uintptr_t)dlsym(g_library, name);
  return function != nullptr;
}

bool find_functions(void) {
  Cupti& to = g_cupti;
  find(to.call_name, "cuptiGetCallbackName");
  return find(to.get_version, "cuptiGetVersion") && find(to.subscribe, "cuptiSubscribe") &&
         find(to.unsubscribe, "cuptiUnsubscribe") && find(to.enable_domain, "cuptiEnableDomain") &&
         find(to.register_callbacks, "cuptiActivityRegisterCallbacks") && find(to.enable, "cuptiActivityEnable") &&
         find(to.disable, "cuptiActivityDisable") && find(to.flush_all, "cuptiActivityFlushAll") &&
         find(to.next_record, "cuptiActivityGetNextRecord") &&
         find(to.dropped_records, "cuptiActivityGetNumDroppedRecords") &&
         find(to.get_timestamp, "cuptiGetTimestamp") && find(to.finalize, "cuptiFinalize");
}

// Nsight's injected libraries. CUPTI itself turns a second client away, but says so only of those that it knows.
int is_foreign_tool(dl_phdr_info* info, size_t, void*) {
  const char* const name = info->dlpi_name ? info->dlpi_name : "";
  return strstr(name, "libToolsInjection") || strstr(name, "libcuda-injection") || strstr(name, "libnsys");
}

Outcome find_cupti(void) {
  if (!g_library) {
    g_library = open_library();
  }
  if (!g_library || !find_functions()) {
    return {TOCSIN_WHY_NO_CUPTI, 0};
  }
  const int result = g_cupti.get_version(&g_version);
  if (result != kSuccess) {
    return {TOCSIN_WHY_REFUSED, (uint32_t)result};
  }
  return {(uint32_t)(g_version < kVersion_12_6 ? TOCSIN_WHY_OLD_CUPTI : TOCSIN_WHY_NONE), 0};
}

bool map_buffers(void) {
  if (!g_buffers) {
    void* const memory = mmap(nullptr, kBuffers * kBufferBytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    g_buffers = memory == MAP_FAILED ? nullptr : (uint8_t*)memory;
  }
  return g_buffers != nullptr;
}

int enable(uint32_t kind) {
  const int result = g_cupti.enable(kind);
  if (result == kSuccess) {
    g_enabled[g_enabled_count++] = kind;
  }
  return result;
}

// What is asked for beyond the GPU's own work may be refused: then it is missing.
int enable_all(uint32_t collect) {
  static const struct {
    uint32_t asked, kind;
  } kMore[] = {{TOCSIN_COLLECT_CALLS, kRuntimeCall},
               {TOCSIN_COLLECT_OVERHEAD, kOverhead},
               {TOCSIN_COLLECT_MARKERS, kMarker},
               {TOCSIN_COLLECT_CORRELATIONS, kExternalCorrelation}};
  for (const uint32_t kind : {kConcurrentKernel, kMemcpy, kMemset}) {
    const int result = enable(kind);
    if (result != kSuccess) {
      return result;
    }
  }
  for (const auto& more : kMore) {
    if (collect & more.asked) {
      enable(more.kind);
    }
  }
  return kSuccess;
}

void disable_all(void) {
  while (g_enabled_count) {
    g_cupti.disable(g_enabled[--g_enabled_count]);
  }
}

void set_condenser(Condenser* condenser) {
  pthread_mutex_lock(&g_lock);
  g_condenser = condenser;
  pthread_mutex_unlock(&g_lock);
}

// Where it fails, or the program makes no call, CUPTI stays in the process, dormant. Asked for last: with the first call
// of the program after that, CUPTI may be gone.
bool take_out(void) {
  const bool asked = g_cupti.enable_domain(1, g_subscriber, kDomainRuntime) == kSuccess &&
                     g_cupti.enable_domain(1, g_subscriber, kDomainDriver) == kSuccess;
  if (asked) {
    __atomic_store_n(&g_detaching, (uint32_t)kAsked, __ATOMIC_RELEASE);
  }
  const uint64_t give_up_ns = tocsin_now_ns() + kDetachWait_ns;
  while (asked && __atomic_load_n(&g_detaching, __ATOMIC_ACQUIRE) == kAsked && tocsin_now_ns() < give_up_ns) {
    nap(1000000);
  }
  uint32_t expected = kAsked;
  if (!asked ||
      __atomic_compare_exchange_n(&g_detaching, &expected, kNotAsked, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
    g_cupti.enable_domain(0, g_subscriber, kDomainRuntime);
    g_cupti.enable_domain(0, g_subscriber, kDomainDriver);
    g_cupti.unsubscribe(g_subscriber);
    return false;
  }
  while (__atomic_load_n(&g_detaching, __ATOMIC_ACQUIRE) != kDone) {  // somebody is at it
    nap(1000000);
  }
  return true;
}

}  // namespace

Outcome client_attach(Condenser* condenser, uint32_t collect) {
  if (dl_iterate_phdr(is_foreign_tool, nullptr)) {
    return {TOCSIN_WHY_OTHER_CLIENT, 0};
  }
  const Outcome found = find_cupti();
  if (found.why != TOCSIN_WHY_NONE) {
    return found;
  }
  if (!map_buffers()) {
    return {TOCSIN_WHY_REFUSED, 0};
  }
  const int subscribed = g_cupti.subscribe(&g_subscriber, call_ended, nullptr);
  if (subscribed != kSuccess) {
    const bool other = subscribed == kMultipleSubscribers;
    return {(uint32_t)(other ? TOCSIN_WHY_OTHER_CLIENT : TOCSIN_WHY_REFUSED), (uint32_t)subscribed};
  }
  g_dropped = 0;
  g_enabled_count = 0;
  __atomic_store_n(&g_detaching, (uint32_t)kNotAsked, __ATOMIC_RELEASE);
  set_condenser(condenser);
  int result = g_cupti.register_callbacks(buffer_requested, buffer_completed);
  result = result == kSuccess ? enable_all(collect) : result;
  if (result != kSuccess) {
    disable_all();
    set_condenser(nullptr);
    g_cupti.unsubscribe(g_subscriber);
    return {TOCSIN_WHY_REFUSED, (uint32_t)result};
  }
  return {TOCSIN_WHY_NONE, 0};
}

uint64_t client_now_ns(void) {
  uint64_t now_ns = 0;
  return g_cupti.get_timestamp && g_cupti.get_timestamp(&now_ns) == kSuccess ? now_ns : 0;
}

void client_begin(uint64_t ns) {
  pthread_mutex_lock(&g_lock);
  g_condenser->begin_ns = ns;
  pthread_mutex_unlock(&g_lock);
}

void client_end(uint64_t ns) {
  pthread_mutex_lock(&g_lock);
  g_condenser->end_ns = ns;
  pthread_mutex_unlock(&g_lock);
}

Outcome client_detach(bool leaving) {
  disable_all();
  if (leaving) {
    set_condenser(nullptr);
    g_cupti.unsubscribe(g_subscriber);
    return {TOCSIN_WHY_ATTACHED, 0};
  }
  nap(kSettle_ns);
  g_cupti.flush_all(0);
  const int flushed = g_cupti.flush_all(kFlushForced);
  set_condenser(nullptr);
  const bool out = take_out();
  if (out) {
    // The memory goes back; its addresses stay ours, so that nothing late can write where something else lies.
    madvise(g_buffers, kBuffers * kBufferBytes, MADV_DONTNEED);
    memset(g_buffer_taken, 0, sizeof g_buffer_taken);
  }
  if (flushed != kSuccess) {
    return {TOCSIN_WHY_REFUSED, (uint32_t)flushed};
  }
  return {(uint32_t)(out ? TOCSIN_WHY_NONE : TOCSIN_WHY_ATTACHED), 0};
}

uint32_t client_version(void) { return g_version; }

int client_call_name(uint32_t domain, uint32_t id, const char** name) {
  return g_cupti.call_name ? g_cupti.call_name(domain, id, name) : -1;
}

void client_forget(void) {
  // The lock may be held by a thread that is not here, and CUPTI in the child is nobody's: it is never called.
  g_lock = PTHREAD_MUTEX_INITIALIZER;
  g_condenser = nullptr;
}

}  // namespace tocsin
