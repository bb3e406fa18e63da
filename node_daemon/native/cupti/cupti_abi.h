// What this library knows of CUPTI: the places of the few fields that it reads, and the functions that it calls.
//
// It is compiled without NVIDIA's headers and never linked with libcupti, so one build serves every release from 12.6 on.
// The places have been the same in all kernel records since version 9, and in all copies since version 5; a test compiles
// this file beside the headers of several releases (tests/integration/cupti_double/abi_check.cpp).
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

namespace tocsin {

enum ActivityKind : uint32_t {
  kMemcpy = 1,
  kMemset = 2,
  kKernelSerial = 3,
  kDriverCall = 4,
  kRuntimeCall = 5,
  kConcurrentKernel = 10,
  kMarker = 12,
  kOverhead = 17,
  kMemcpyPeer = 22,
  kExternalCorrelation = 39,
};

enum CuptiResult : int { kSuccess = 0, kMultipleSubscribers = 39 };

constexpr uint32_t kVersion_12_6 = 24;  // cuptiGetVersion: 24 is 12.6, 28 is 12.9.1, 130500 is 13.5
constexpr uint32_t kDomainDriver = 1, kDomainRuntime = 2;
constexpr uint32_t kSiteExit = 1;  // CUpti_CallbackData.callbackSite, its first word
constexpr uint32_t kFlushForced = 1;
constexpr size_t kRecordAlignment = 8;

// Offsets in records, whose first word is their kind.
constexpr size_t kKernelStart = 16, kKernelEnd = 24, kKernelName = 104, kKernelGraph = 156;
constexpr size_t kCopyKind = 4, kCopyBytes = 8, kCopyStart = 16, kCopyEnd = 24;
constexpr size_t kSetBytes = 8, kSetStart = 16, kSetEnd = 24;
constexpr size_t kCallId = 4, kCallStart = 8, kCallEnd = 16;
constexpr size_t kOverheadStart = 24, kOverheadEnd = 32;

template <class T>
inline T field(const uint8_t* record, size_t offset) {
  T value;
  memcpy(&value, record + offset, sizeof value);
  return value;
}

using Subscriber = void*;
using ApiCallback = void (*)(void* user, uint32_t domain, uint32_t id, const void* data);
using BufferRequested = void (*)(uint8_t** buffer, size_t* size, size_t* records_max);
using BufferCompleted = void (*)(void* context, uint32_t stream, uint8_t* buffer, size_t size, size_t valid);
using NextRecord = int (*)(uint8_t* buffer, size_t valid, uint8_t** record);

struct Cupti {
  int (*get_version)(uint32_t* version);
  int (*subscribe)(Subscriber* subscriber, ApiCallback callback, void* user);
  int (*unsubscribe)(Subscriber subscriber);
  int (*enable_domain)(uint32_t enable, Subscriber subscriber, uint32_t domain);
  int (*register_callbacks)(BufferRequested requested, BufferCompleted completed);
  int (*enable)(uint32_t kind);
  int (*disable)(uint32_t kind);
  int (*flush_all)(uint32_t flag);
  NextRecord next_record;
  int (*dropped_records)(void* context, uint32_t stream, size_t* dropped);
  int (*get_timestamp)(uint64_t* ns);
  int (*finalize)(void);
  int (*call_name)(uint32_t domain, uint32_t id, const char** name);  // may be null
};

}  // namespace tocsin
