// NCCL's profiler interface, versions 4 to 7 (NCCL 2.27 to 2.32), as facts: what lies where on x86-64 Linux.
//
// NCCL looks for the newest `ncclProfiler_vN` that it knows. The four differ in the width of the event's type (one byte
// in v4, with whatever was on the stack above it), in the order of init's arguments, and in what v5 and later add; all
// members that they share lie at the same places. tests/integration/test_nccl_real.py compares this with the debug
// information of a real libnccl.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {  // event types, one bit each: of a descriptor, and of the mask
  NCCL_GROUP = 1 << 0,
  NCCL_COLL = 1 << 1,
  NCCL_P2P = 1 << 2,
  NCCL_PROXY_OP = 1 << 3,
  NCCL_PROXY_STEP = 1 << 4,
  NCCL_PROXY_CTRL = 1 << 5,
  NCCL_KERNEL_CH = 1 << 6,
  NCCL_NET_PLUGIN = 1 << 7,
  NCCL_GROUP_API = 1 << 8,  // from here on v5
  NCCL_COLL_API = 1 << 9,
  NCCL_P2P_API = 1 << 10,
  NCCL_KERNEL_LAUNCH = 1 << 11,
  NCCL_CE_COLL = 1 << 12,  // v6
  NCCL_CE_SYNC = 1 << 13,
  NCCL_CE_BATCH = 1 << 14,
  NCCL_KERNEL_PHASE = 1 << 15,  // v7
};

enum {  // states that this plugin looks at
  NCCL_STATE_SEND_GPU_WAIT = 8,
  NCCL_STATE_SEND_WAIT = 9,
  NCCL_STATE_RECV_WAIT = 10,
  NCCL_STATE_RECV_FLUSH_WAIT = 11,
  NCCL_STATE_RECV_GPU_WAIT = 12,
  NCCL_STATE_PROXY_OP_IN_PROGRESS = 19,
  NCCL_STATE_SEND_PEER_WAIT = 20,
  NCCL_STATE_KERNEL_CH_STOP = 22,
};

typedef struct nccl_event {
  uint64_t type;  // v4: the lowest byte alone
  void* parent;
  int32_t rank;
  union {
    struct {
      uint64_t number;  // per function
      const char* function;
      const void* send_buffer;
      void* recv_buffer;
      uint64_t count;
      int32_t root;
      const char* datatype;
      uint8_t channels;
      uint8_t warps;
      const char* algorithm;
      const char* protocol;
      void* group;  // v5
    } coll;
    struct {
      const char* function;
      void* buffer;
      const char* datatype;
      uint64_t count;
      int32_t peer;
      uint8_t channels;
      void* group;  // v5
    } p2p;
    struct {
      int32_t pid;  // of the process that wants it done: not always this one
      uint8_t channel;
      int32_t peer;
      int32_t steps;
      int32_t chunk_bytes;
      int32_t is_send;
    } proxy_op;
    struct {
      int32_t step;
    } proxy_step;
    struct {
      uint8_t channel;
      uint64_t gpu_ns;
    } kernel_ch;
    struct {
      const char* function;
      uint64_t count;
      const char* datatype;
      int32_t root;
      void* stream;
      bool graph_captured;
    } coll_api;
  };
} nccl_event;

typedef union nccl_state_args {
  uint64_t transferred_bytes;  // of a proxy step
  uint64_t gpu_ns;             // of a kernel's stop
} nccl_state_args;

#define TOCSIN_AT(field, offset) _Static_assert(offsetof(nccl_event, field) == (offset), #field)
TOCSIN_AT(parent, 8);
TOCSIN_AT(rank, 16);
TOCSIN_AT(coll.number, 24);
TOCSIN_AT(coll.function, 32);
TOCSIN_AT(coll.count, 56);
TOCSIN_AT(coll.root, 64);
TOCSIN_AT(coll.datatype, 72);
TOCSIN_AT(coll.channels, 80);
TOCSIN_AT(coll.algorithm, 88);
TOCSIN_AT(coll.protocol, 96);
TOCSIN_AT(coll.group, 104);
TOCSIN_AT(p2p.peer, 56);
TOCSIN_AT(p2p.channels, 60);
TOCSIN_AT(p2p.group, 64);
TOCSIN_AT(proxy_op.channel, 28);
TOCSIN_AT(proxy_op.peer, 32);
TOCSIN_AT(proxy_op.is_send, 44);
TOCSIN_AT(kernel_ch.channel, 24);
TOCSIN_AT(kernel_ch.gpu_ns, 32);
TOCSIN_AT(coll_api.count, 32);
TOCSIN_AT(coll_api.datatype, 40);
TOCSIN_AT(coll_api.root, 48);
TOCSIN_AT(coll_api.graph_captured, 64);

// Severities and subsystem of the logger that NCCL hands over.
enum { NCCL_LOG_INFO = 3, NCCL_LOG_PROFILE = 1 << 14 };
typedef void (*nccl_log)(int level, unsigned long subsystems, const char* file, int line, const char* format, ...);

typedef int nccl_start_event(void* context, void** handle, nccl_event* event);
typedef int nccl_stop_event(void* handle);
typedef int nccl_record_state(void* handle, int state, nccl_state_args* args);
typedef int nccl_finalize(void* context);

typedef struct nccl_profiler_v4 {
  const char* name;
  int (*init)(void** context, int* mask, const char* comm_name, uint64_t comm_id, int nodes, int ranks, int rank,
              nccl_log log);
  nccl_start_event* start_event;
  nccl_stop_event* stop_event;
  nccl_record_state* record_state;
  nccl_finalize* finalize;
} nccl_profiler_v4;

typedef struct nccl_profiler_v5 {  // v6 and v7 too
  const char* name;
  int (*init)(void** context, uint64_t comm_id, int* mask, const char* comm_name, int nodes, int ranks, int rank,
              nccl_log log);
  nccl_start_event* start_event;
  nccl_stop_event* stop_event;
  nccl_record_state* record_state;
  nccl_finalize* finalize;
} nccl_profiler_v5;
