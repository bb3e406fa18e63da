// Compiled beside NVIDIA's headers of a release: what cupti_abi.h says must be what they say.
#include <cupti.h>
#include <stddef.h>

#include <type_traits>

#include "cupti_abi.h"

#define AT(struct_, field_, offset_, type_)                                                              \
  static_assert(offsetof(struct_, field_) == (offset_), #struct_ "." #field_ " lies elsewhere");         \
  static_assert(sizeof(((struct_*)nullptr)->field_) == sizeof(type_), #struct_ "." #field_ " has another size")
#define SAME(name_, ours_) static_assert((uint64_t)(name_) == (uint64_t)(ours_), #name_ " has another value")

#define KERNEL(version_, bytes_)                                                             \
  static_assert(sizeof(CUpti_ActivityKernel##version_) == (bytes_), "kernel " #version_);    \
  AT(CUpti_ActivityKernel##version_, kind, 0, uint32_t);                                     \
  AT(CUpti_ActivityKernel##version_, start, tocsin::kKernelStart, uint64_t);                 \
  AT(CUpti_ActivityKernel##version_, end, tocsin::kKernelEnd, uint64_t);                     \
  AT(CUpti_ActivityKernel##version_, name, tocsin::kKernelName, const char*);                \
  AT(CUpti_ActivityKernel##version_, graphId, tocsin::kKernelGraph, uint32_t)

#define COPY(version_, bytes_)                                                               \
  static_assert(sizeof(CUpti_Activity##version_) == (bytes_), "copy " #version_);            \
  AT(CUpti_Activity##version_, copyKind, tocsin::kCopyKind, uint8_t);                        \
  AT(CUpti_Activity##version_, bytes, tocsin::kCopyBytes, uint64_t);                         \
  AT(CUpti_Activity##version_, start, tocsin::kCopyStart, uint64_t);                         \
  AT(CUpti_Activity##version_, end, tocsin::kCopyEnd, uint64_t)

#define SET(version_, bytes_)                                                                \
  static_assert(sizeof(CUpti_Activity##version_) == (bytes_), "set " #version_);             \
  AT(CUpti_Activity##version_, bytes, tocsin::kSetBytes, uint64_t);                          \
  AT(CUpti_Activity##version_, start, tocsin::kSetStart, uint64_t);                          \
  AT(CUpti_Activity##version_, end, tocsin::kSetEnd, uint64_t)

KERNEL(9, 208);
COPY(Memcpy6, 96);
COPY(MemcpyPtoP4, 96);
SET(Memset4, 88);
#if CUPTI_API_VERSION >= 130500
KERNEL(10, 216);
KERNEL(11, 224);
KERNEL(12, 232);
KERNEL(13, 248);
COPY(Memcpy7, 112);
SET(Memset5, 104);
#endif
AT(CUpti_ActivityAPI, cbid, tocsin::kCallId, uint32_t);
AT(CUpti_ActivityAPI, start, tocsin::kCallStart, uint64_t);
AT(CUpti_ActivityAPI, end, tocsin::kCallEnd, uint64_t);
AT(CUpti_ActivityOverhead3, start, tocsin::kOverheadStart, uint64_t);
AT(CUpti_ActivityOverhead3, end, tocsin::kOverheadEnd, uint64_t);
AT(CUpti_CallbackData, callbackSite, 0, uint32_t);

SAME(CUPTI_ACTIVITY_KIND_MEMCPY, tocsin::kMemcpy);
SAME(CUPTI_ACTIVITY_KIND_MEMSET, tocsin::kMemset);
SAME(CUPTI_ACTIVITY_KIND_KERNEL, tocsin::kKernelSerial);
SAME(CUPTI_ACTIVITY_KIND_RUNTIME, tocsin::kRuntimeCall);
SAME(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, tocsin::kConcurrentKernel);
SAME(CUPTI_ACTIVITY_KIND_MARKER, tocsin::kMarker);
SAME(CUPTI_ACTIVITY_KIND_OVERHEAD, tocsin::kOverhead);
SAME(CUPTI_ACTIVITY_KIND_MEMCPY2, tocsin::kMemcpyPeer);
SAME(CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION, tocsin::kExternalCorrelation);
SAME(CUPTI_ACTIVITY_MEMCPY_KIND_HTOD, 1);
SAME(CUPTI_ACTIVITY_MEMCPY_KIND_DTOD, 8);
SAME(CUPTI_ACTIVITY_MEMCPY_KIND_PTOP, 10);
SAME(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED, tocsin::kFlushForced);
SAME(CUPTI_CB_DOMAIN_DRIVER_API, tocsin::kDomainDriver);
SAME(CUPTI_CB_DOMAIN_RUNTIME_API, tocsin::kDomainRuntime);
SAME(CUPTI_API_EXIT, tocsin::kSiteExit);
SAME(CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED, tocsin::kMultipleSubscribers);
SAME(ACTIVITY_RECORD_ALIGNMENT, tocsin::kRecordAlignment);

// Functions: equal where each argument is as wide and of the same sort. An enum of theirs is a number here, a struct's
// address is void*.
template <size_t bytes>
struct Number {};
template <class T>
struct Sort {
  using type = Number<sizeof(T)>;
};
template <class T>
struct Sort<T*> {
  using type = void*;
};
template <>
struct Sort<void> {
  using type = void;
};
template <class T>
using Plain = typename Sort<T>::type;
template <class... A>
struct Pack {};
template <class F>
struct Shape;
template <class R, class... A>
struct Shape<R (*)(A...)> {
  using type = Pack<Plain<R>, Plain<A>...>;
};
#define CALLED(function_, member_)                                                                             \
  static_assert(std::is_same<Shape<decltype(&function_)>::type, Shape<decltype(tocsin::Cupti::member_)>::type>::value, \
                #function_ " takes something else")

CALLED(cuptiGetVersion, get_version);
CALLED(cuptiSubscribe, subscribe);
CALLED(cuptiUnsubscribe, unsubscribe);
CALLED(cuptiEnableDomain, enable_domain);
CALLED(cuptiActivityRegisterCallbacks, register_callbacks);
CALLED(cuptiActivityEnable, enable);
CALLED(cuptiActivityDisable, disable);
CALLED(cuptiActivityFlushAll, flush_all);
CALLED(cuptiActivityGetNextRecord, next_record);
CALLED(cuptiActivityGetNumDroppedRecords, dropped_records);
CALLED(cuptiGetTimestamp, get_timestamp);
CALLED(cuptiFinalize, finalize);
CALLED(cuptiGetCallbackName, call_name);
static_assert(std::is_same<Shape<CUpti_CallbackFunc>::type, Shape<tocsin::ApiCallback>::type>::value, "the callback");
static_assert(std::is_same<Shape<CUpti_BuffersCallbackRequestFunc>::type, Shape<tocsin::BufferRequested>::type>::value,
              "requests for buffers");
static_assert(std::is_same<Shape<CUpti_BuffersCallbackCompleteFunc>::type, Shape<tocsin::BufferCompleted>::type>::value,
              "completed buffers");
