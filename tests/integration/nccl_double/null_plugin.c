/* The plugin that does nothing, for comparison: what remains is the price of being called. */
#include <stddef.h>

#include "profiler_abi.h"

static int init(void** context, uint64_t id, int* mask, const char* name, int nodes, int ranks, int rank, nccl_log log) {
  (void)id, (void)name, (void)nodes, (void)ranks, (void)rank, (void)log;
  *context = (void*)1;
  *mask = 0xFFFF;
  return 0;
}
static int start_event(void* context, void** handle, nccl_event* event) {
  (void)context, (void)event;
  *handle = (void*)1;
  return 0;
}
static int stop_event(void* handle) { return (void)handle, 0; }
static int record_state(void* handle, int state, nccl_state_args* args) {
  return (void)handle, (void)state, (void)args, 0;
}
static int finalize(void* context) { return (void)context, 0; }

const nccl_profiler_v5 ncclProfiler_v5 = {"null", init, start_event, stop_event, record_state, finalize};
