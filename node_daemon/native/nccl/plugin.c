// libnccl-profiler-tocsin.so: the profiler plugin that NCCL loads, for its interfaces 4 to 7.
//
// What NCCL calls here runs on the job's own threads: the program's (calls, launches), the network proxy's (transfers)
// and from 2.31 on a profiler thread (kernels), several at once. Nothing here locks, allocates or calls the kernel, and
// whatever is wrong, NCCL is told success: a communicator that cannot be followed has no context, and is asked nothing.
#include "chain.h"
#include "communicators.h"
#include "frame_file.h"
#include "names.h"
#include "nccl_frame.h"
#include "profiler_abi.h"
#include "rounds.h"

static void* pointer(uint64_t handle) { return (void*)(uintptr_t)handle; }
static uint64_t handle_of(const void* pointer) { return (uint64_t)(uintptr_t)pointer; }

// -- beginnings ---------------------------------------------------------------------------------------------------------

// The number that a parent carries if it is of this kind, else 0.
static uint32_t parent_number(const void* parent, uint32_t kind) {
  const uint64_t handle = handle_of(parent);
  return HANDLE_KIND(handle) == kind && communicator_of(handle) ? HANDLE_NUMBER(handle) : 0;
}

static operation collective(const char* function, const char* datatype, uint64_t count, int32_t root) {
  const uint8_t op = op_of(function);
  return (operation){op, dtype_of(datatype), has_root(op) ? root : TOCSIN_FRAME_ROOT_NONE, count};
}

static uint64_t call_begun(communicator* owner, uint64_t self, const nccl_event* event) {
  if (event->coll_api.graph_captured) {
    call_entered(owner);
    STORE(owner->graphs, 1);
    return HANDLE(self, KIND_COLL_API, 0);
  }
  const operation what =
      collective(event->coll_api.function, event->coll_api.datatype, event->coll_api.count, event->coll_api.root);
  return HANDLE(self, KIND_COLL_API, round_entered(owner, &what));
}

static uint64_t coll_begun(communicator* owner, uint64_t self, const nccl_event* event, bool v4) {
  const uint64_t parent = handle_of(event->parent);
  const bool called = !v4 && HANDLE_KIND(parent) == KIND_COLL_API;
  const uint32_t number = parent_number(v4 ? event->parent : event->coll.group, KIND_GROUP);
  uint32_t seq = called ? parent_number(event->parent, KIND_COLL_API) : 0;
  if (!called) {  // the call itself was not told
    const operation what = collective(event->coll.function, event->coll.datatype, event->coll.count, event->coll.root);
    seq = round_entered(owner, &what);
  }
  if (seq && seq == (uint32_t)LOAD(owner->enqueued)) {
    tocsin_slot* slot = slot_of(owner);
    STORE(slot->algo, algo_of(event->coll.algorithm));
    STORE(slot->proto, proto_of(event->coll.protocol));
  }
  task_begun(owner, number, seq, event->coll.channels);
  return HANDLE(self, KIND_COLL, seq);
}

static uint64_t p2p_begun(communicator* owner, uint64_t self, const nccl_event* event, bool v4) {
  follow(owner);
  const uint32_t number = parent_number(v4 ? event->parent : event->p2p.group, KIND_GROUP);
  return HANDLE(self, KIND_P2P, task_begun(owner, number, 0, event->p2p.channels));
}

// Whom a channel sends to: mostly the same as before, and then there is nothing to write.
static void peer_told(communicator* owner, uint64_t handle, int32_t peer) {
  const uint16_t told = (uint32_t)peer < TOCSIN_FRAME_PEER_UNKNOWN ? (uint16_t)peer : TOCSIN_FRAME_PEER_UNKNOWN;
  way* on = way_of(handle);
  if (LOAD(on->peer) != told && hold(handle)) {
    STORE(on->peer, told);
    STORE(channel_of(owner, handle)->peer, told);
    let_go(owner);
  }
}

// A proxy may work for a rank in another process (PXN), and then neither context nor parent mean anything here.
static uint64_t op_begun(communicator* owner, uint64_t self, const nccl_event* event) {
  const uint64_t parent = handle_of(event->parent);
  const bool p2p = HANDLE_KIND(parent) == KIND_P2P;
  const uint32_t number = parent_number(event->parent, p2p ? KIND_P2P : KIND_COLL);
  const uint64_t handle = HANDLE(self, p2p ? KIND_OP_P2P : KIND_OP, number) |
                          HANDLE_WAY(event->proxy_op.channel, event->proxy_op.is_send);
  if (event->proxy_op.is_send) {
    peer_told(owner, handle, event->proxy_op.peer);
  }
  return handle;
}

static uint64_t kernel_of(communicator* owner, uint64_t self, const nccl_event* event) {
  const bool p2p = HANDLE_KIND(handle_of(event->parent)) == KIND_P2P;
  const uint32_t number = parent_number(event->parent, p2p ? KIND_P2P : KIND_COLL);
  const uint64_t handle =
      HANDLE(self, p2p ? KIND_KERNEL_P2P : KIND_KERNEL, number) | HANDLE_WAY(event->kernel_ch.channel, 0);
  kernel_begun(owner, handle, event->kernel_ch.gpu_ns);
  return handle;
}

// One thread drives a way; threads of several proxies (PXN within one process) may drive one communicator.
static inline void step_begun(way* on) { STORE(on->posted, LOAD(on->posted) + 1); }

// Where the parent is an operation of a launch without a round.
static uint64_t p2p_step_begun(uint64_t parent) {
  way* on = way_of(parent);
  if (HANDLE_KIND(parent) != KIND_OP_P2P || !communicator_of(parent)) {
    return 0;
  }
  step_begun(on);
  return parent + HANDLE_NEXT_KIND;
}

// What writes to the communicator's slot.
static uint64_t held_begun(uint64_t self, const nccl_event* event, uint64_t type, bool v4) {
  communicator* owner = hold(self);
  if (!owner) {
    return 0;
  }
  uint64_t begun = 0;
  switch (type) {
    case NCCL_KERNEL_CH: begun = kernel_of(owner, self, event); break;
    case NCCL_COLL_API: begun = call_begun(owner, self, event); break;
    case NCCL_COLL: begun = coll_begun(owner, self, event, v4); break;
    default: begun = p2p_begun(owner, self, event, v4); break;
  }
  let_go(owner);
  return begun;
}

__attribute__((noinline)) static int start_other(void* context, void** handle, nccl_event* event, uint64_t type,
                                                 bool v4) {
  const uint64_t self = handle_of(context);
  const bool foreign = type == NCCL_PROXY_OP && event->proxy_op.pid != g_pid;
  communicator* owner = foreign || HANDLE_KIND(self) != KIND_COMMUNICATOR ? NULL : communicator_of(self);
  uint64_t begun = 0;
  if (type == NCCL_PROXY_STEP) {
    begun = p2p_step_begun(handle_of(event->parent));
  } else if (owner) {
    switch (type) {
      case NCCL_PROXY_OP: begun = op_begun(owner, self, event); break;
      case NCCL_GROUP: begun = HANDLE(self, KIND_GROUP, launch_begun(owner)); break;
      case NCCL_P2P_API: call_entered(owner); break;
      case NCCL_KERNEL_CH:
      case NCCL_COLL_API:
      case NCCL_COLL:
      case NCCL_P2P: begun = held_begun(self, event, type, v4); break;
      default: break;
    }
  }
  *handle = pointer(begun);
  return 0;
}

// A step needs neither its context nor its place in the descriptor: all of it is in its parent.
static inline int start(void* context, void** handle, nccl_event* event, uint64_t type, bool v4) {
  if (__builtin_expect(type == NCCL_PROXY_STEP, 1)) {
    const uint64_t step = handle_of(event->parent) + HANDLE_NEXT_KIND;
    way* on = way_of(step);
    if (__builtin_expect(HANDLE_KEY(step) == LOAD_ACQUIRE(on->step_key), 1)) {
      step_begun(on);
      *handle = pointer(step);
      return 0;
    }
  }
  return start_other(context, handle, event, type, v4);
}

static int start_event_v4(void* context, void** handle, nccl_event* event) {
  return start(context, handle, event, (uint8_t)event->type, true);
}

static int start_event(void* context, void** handle, nccl_event* event) {
  return start(context, handle, event, event->type, false);
}

// -- states and ends ----------------------------------------------------------------------------------------------------

// What a step in each state waits for, two bits a state.
#define WAITS(state, for) ((uint64_t)TOCSIN_STEPSTATE_##for << 2 * NCCL_STATE_##state)
static const uint64_t kWaits = WAITS(SEND_GPU_WAIT, OWN_GPU) |         // for data to send
                               WAITS(SEND_PEER_WAIT, PEER_CREDIT) |    //
                               WAITS(SEND_WAIT, FABRIC) |              //
                               WAITS(RECV_WAIT, FABRIC) |              // or for the peer to send
                               WAITS(RECV_FLUSH_WAIT, OWN_GPU) |       // the bytes are in this node
                               WAITS(RECV_GPU_WAIT, OWN_GPU);

static inline int step_state(way* on, int state, const nccl_state_args* args) {
  STORE(*LOAD(on->state), (uint8_t)(kWaits >> (2 * state & 63) & 3));
  if (state == NCCL_STATE_SEND_WAIT && args) {
    ADD(*LOAD(on->bytes), args->transferred_bytes);
  }
  return 0;
}

__attribute__((noinline)) static int record_other(uint64_t handle, int state, const nccl_state_args* args) {
  const uint32_t kind = HANDLE_KIND(handle);
  if (kind == KIND_STEP_P2P) {
    return communicator_of(handle) ? step_state(way_of(handle), state, args) : 0;
  }
  communicator* owner = communicator_of(handle);
  if (state == NCCL_STATE_KERNEL_CH_STOP && (kind == KIND_KERNEL || kind == KIND_KERNEL_P2P) && args && owner) {
    kernel_timed(owner, handle, args->gpu_ns);
  } else if (state == NCCL_STATE_PROXY_OP_IN_PROGRESS && (kind == KIND_OP || kind == KIND_OP_P2P) && hold(handle)) {
    transfer_begun(owner, handle);
  }
  return 0;
}

static int record_state(void* pointer_, int state, nccl_state_args* args) {
  const uint64_t handle = handle_of(pointer_);
  way* on = way_of(handle);
  if (__builtin_expect(HANDLE_KEY(handle) == LOAD_ACQUIRE(on->step_key), 1)) {
    return step_state(on, state, args);
  }
  return record_other(handle, state, args);
}

static inline void step_ended(way* on) {
  const uint32_t ended = ADD(*LOAD(on->steps), 1) + 1;
  if (ended == LOAD(on->posted)) {
    STORE(*LOAD(on->state), TOCSIN_STEPSTATE_NONE);
  }
  ADD(*LOAD(on->total), 1);
}

__attribute__((noinline)) static int stop_other(uint64_t handle) {
  const uint32_t kind = HANDLE_KIND(handle);
  const bool kernel = kind == KIND_KERNEL || kind == KIND_KERNEL_P2P;
  if (kind == KIND_STEP_P2P && communicator_of(handle)) {
    step_ended(way_of(handle));
  }
  // The end of a call or of its enqueueing says nothing about the operation's.
  communicator* owner = kernel || kind == KIND_OP || kind == KIND_OP_P2P ? hold(handle) : NULL;
  if (!owner) {
    return 0;
  }
  if (!kernel) {
    transfer_ended(owner, handle);
    return 0;
  }
  kernel_ended(owner, handle);
  let_go(owner);
  return 0;
}

static int stop_event(void* pointer_) {
  const uint64_t handle = handle_of(pointer_);
  const uint32_t seq = HANDLE_NUMBER(handle);
  way* on = way_of(handle);
  if (!__builtin_expect(HANDLE_KEY(handle) == LOAD_ACQUIRE(on->step_key), 1)) {
    return stop_other(handle);
  }
  step_ended(on);
  const size_t open = seq % TOCSIN_FRAME_OPEN_COUNT * (sizeof(tocsin_open) / sizeof(uint32_t));
  if (LOAD(LOAD(on->open_seq)[open]) == seq) {
    ADD(LOAD(on->open_steps)[open], 1);
  }
  return 0;
}

// -- communicators ------------------------------------------------------------------------------------------------------

static int init(void** context, int* mask, uint64_t id, int ranks, int rank, nccl_log log, uint32_t interface) {
  if (!context) {
    return 0;
  }
  *context = NULL;
  if (!mask || !frame_ready(rank, ranks, log)) {
    return 0;
  }
  const uint64_t handle = communicator_made(id, ranks, rank, mask);
  if (!handle) {
    say_once(log, "tocsin does not follow a communicator: too many, or a second rank of one in this process");
    return 0;
  }
  communicator* made = communicator_of(handle);
  made->allowed = events_of(log, interface);
  const uint32_t wanted = events_wanted(&made->allowed, tocsin_now_ns());
  STORE(made->told_events, wanted);
  STORE(g_frame->header.event_mask, wanted);
  STORE(*mask, (int)wanted);
  call_entered(made);
  *context = pointer(handle);
  return 0;
}

static int init_v4(void** context, int* mask, const char* name, uint64_t id, int nodes, int ranks, int rank,
                   nccl_log log) {
  (void)name, (void)nodes;
  return init(context, mask, id, ranks, rank, log, 4);
}

#define INIT(version)                                                                                            \
  static int init_v##version(void** context, uint64_t id, int* mask, const char* name, int nodes, int ranks,     \
                             int rank, nccl_log log) {                                                           \
    (void)name, (void)nodes;                                                                                     \
    return init(context, mask, id, ranks, rank, log, version);                                                   \
  }
INIT(5)
INIT(6)
INIT(7)

static int finalize(void* context) {
  communicator_gone(handle_of(context));
  return 0;
}

nccl_profiler_v4 ncclProfiler_v4 = {"tocsin", init_v4, start_event_v4, stop_event, record_state, finalize};
nccl_profiler_v5 ncclProfiler_v5 = {"tocsin", init_v5, start_event, stop_event, record_state, finalize};
nccl_profiler_v5 ncclProfiler_v6 = {"tocsin", init_v6, start_event, stop_event, record_state, finalize};
nccl_profiler_v5 ncclProfiler_v7 = {"tocsin", init_v7, start_event, stop_event, record_state, finalize};
