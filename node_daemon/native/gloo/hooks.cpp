// The interposed functions. Each has the mangled name of a function of torch or gloo, records, and calls the real one.
//
// Exceptions: the real functions may throw through these frames. Catching and cleaning up in C++ would need
// __gxx_personality_v0, and so libstdc++ in every program of the job, bash included. Instead a hook names a personality
// routine of its own (`.cfi_personality`), which the unwinder calls for this frame on its way up; it takes note and
// lets the exception pass. It needs nothing from the frame, since all that a thread is doing stands in thread-local
// state.
#include <stdint.h>

#include "gloo_frame.h"
#include "rounds.h"
#include "steps.h"
#include "symbols.h"

#define HOOK(name) __asm__(name) __attribute__((visibility("default"), noinline))
#define CALLER __builtin_return_address(0)
// 0x1b: a pc-relative, signed 4-byte address.
#define ON_UNWIND(routine) __asm__ volatile(".cfi_personality 0x1b, " #routine)

using namespace tocsin;

namespace {

// From the Itanium C++ ABI for exception handling.
constexpr int kCleanupPhase = 2;
constexpr int kContinueUnwind = 8;

// c10d::OpType, in its order.
constexpr uint8_t kOps[] = {
    TOCSIN_OP_BROADCAST,  TOCSIN_OP_ALL_REDUCE, TOCSIN_OP_ALL_REDUCE,     TOCSIN_OP_REDUCE,
    TOCSIN_OP_ALL_GATHER, TOCSIN_OP_ALL_GATHER, TOCSIN_OP_ALL_GATHER,     TOCSIN_OP_GATHER,
    TOCSIN_OP_SCATTER,    TOCSIN_OP_REDUCE_SCATTER, TOCSIN_OP_ALL_TO_ALL, TOCSIN_OP_ALL_TO_ALL,
    TOCSIN_OP_SEND,       TOCSIN_OP_RECV,       TOCSIN_OP_RECV,           TOCSIN_OP_BARRIER,
    TOCSIN_OP_REDUCE_SCATTER, TOCSIN_OP_UNKNOWN, TOCSIN_OP_ALL_REDUCE,    TOCSIN_OP_REDUCE_SCATTER,
};

// c10::ScalarType, in its order up to bfloat16.
constexpr uint8_t kDtypes[] = {
    TOCSIN_DTYPE_UINT8,   TOCSIN_DTYPE_INT8,    TOCSIN_DTYPE_OTHER, TOCSIN_DTYPE_INT32,
    TOCSIN_DTYPE_INT64,   TOCSIN_DTYPE_FLOAT16, TOCSIN_DTYPE_FLOAT32, TOCSIN_DTYPE_FLOAT64,
    TOCSIN_DTYPE_OTHER,   TOCSIN_DTYPE_OTHER,   TOCSIN_DTYPE_OTHER, TOCSIN_DTYPE_BOOL,
    TOCSIN_DTYPE_OTHER,   TOCSIN_DTYPE_OTHER,   TOCSIN_DTYPE_OTHER, TOCSIN_DTYPE_BFLOAT16,
};

// std::vector<at::Tensor>; a tensor is one pointer, and its address is the handle of torch's C interface.
struct Tensors {
  void** first;
  void** end;
  void** capacity;
};

struct TensorLists {
  const Tensors* first;
  const Tensors* end;
  const Tensors* capacity;
};

// std::optional<std::vector<at::Tensor>>
struct MaybeTensors {
  Tensors tensors;
  bool present;
};

// The work object that this thread has just constructed and will hand to `enqueue` next.
struct Made {
  const void* work;
  Operation operation;
};
thread_local Made t_made;

// The root that this thread was last asked for, in a broadcast, gather or scatter; their work object comes next.
thread_local int64_t t_root = TOCSIN_FRAME_ROOT_NONE;

// c10d::BroadcastOptions, GatherOptions and ScatterOptions alike; the other members are of no interest.
struct RootedOptions {
  int64_t root;
};

// c10::intrusive_ptr<Work> as a result: being no trivial type, it is returned through a hidden pointer.
struct WorkRef {
  void* work;
  ~WorkRef();
};

bool has_known_root(uint8_t op) {
  return op == TOCSIN_OP_BROADCAST || op == TOCSIN_OP_GATHER || op == TOCSIN_OP_SCATTER;
}

// Elements and type of the tensors that every member has in the same size: the inputs, or, where only the root has
// inputs, the outputs.
void describe(const Tensors& tensors, Operation& operation) {
  const auto numel = optional<int32_t (*)(void*, int64_t*)>(SYMBOL_NUMEL);
  const auto dtype = optional<int32_t (*)(void*, int32_t*)>(SYMBOL_DTYPE);
  if (!numel || !dtype || tensors.first == tensors.end) {
    return;
  }
  uint64_t count = 0;
  for (void** tensor = tensors.first; tensor != tensors.end; ++tensor) {
    int64_t elements = 0;
    if (!*tensor || numel(tensor, &elements) != 0) {
      return;
    }
    count += static_cast<uint64_t>(elements);
  }
  int32_t scalar_type = -1;
  if (dtype(tensors.first, &scalar_type) == 0 && scalar_type >= 0) {
    operation.dtype = scalar_type < static_cast<int32_t>(sizeof kDtypes) ? kDtypes[scalar_type] : uint8_t{TOCSIN_DTYPE_OTHER};
  }
  operation.count = count;
}

void describe_operation(uint8_t op_type, const TensorLists& outputs, const MaybeTensors* inputs, Operation& operation) {
  operation.dtype = TOCSIN_DTYPE_UNKNOWN;
  operation.count = TOCSIN_FRAME_COUNT_UNKNOWN;
  operation.op = op_type < sizeof kOps ? kOps[op_type] : uint8_t{TOCSIN_OP_UNKNOWN};
  operation.root = has_known_root(operation.op) ? static_cast<int32_t>(t_root) : TOCSIN_FRAME_ROOT_NONE;
  const bool has_inputs = inputs && inputs->present && inputs->tensors.first != inputs->tensors.end;
  const bool has_outputs = outputs.first != outputs.end;
  if (operation.op == TOCSIN_OP_BARRIER) {
    operation.count = 0;
  } else if (has_inputs && operation.op != TOCSIN_OP_SCATTER) {
    describe(inputs->tensors, operation);
  } else if (has_outputs) {
    describe(*outputs.first, operation);
  }
}

// Calls the real function. Looking it up the first time is apart, so that arguments stay in their registers.
template <class Result, class... Arguments>
__attribute__((cold, noinline)) Result look_up_and_pass_on(Symbol symbol, const void* caller, Arguments... arguments) {
  return reinterpret_cast<Result (*)(Arguments...)>(resolve_hooked(symbol, caller))(arguments...);
}

template <class Result, class... Arguments>
TOCSIN_HOT Result pass_on(Symbol symbol, const void* caller, Arguments... arguments) {
  void* const address = load(g_real[symbol]);
  if (__builtin_expect(!address, 0)) {
    return look_up_and_pass_on<Result>(symbol, caller, arguments...);
  }
  return reinterpret_cast<Result (*)(Arguments...)>(address)(arguments...);
}

using PostFunction = void (*)(void*, int, uint64_t, uint64_t, uint64_t);

// A transfer from or into a buffer that is not at hand, or the first one.
template <uint8_t direction>
__attribute__((cold, noinline)) void post_slowly(Symbol symbol, const void* caller, void* self, int peer, uint64_t slot,
                                                 uint64_t offset, uint64_t bytes) {
  if (this_thread()->slot) {
    step_posted_further<direction>(self, peer, bytes);
  }
  real<PostFunction>(symbol, caller)(self, peer, slot, offset, bytes);
}

template <uint8_t direction>
TOCSIN_HOT bool wait_through(Symbol symbol, const void* caller, void* self, int* peer, int64_t timeout_ms) {
  int own = -1;
  int* const told = peer ? peer : &own;
  const Wait wait = step_waiting<direction>(self);
  const bool done = pass_on<bool>(symbol, caller, self, told, timeout_ms);
  if (done) {
    step_done<direction>(wait, *told);
  } else {
    step_failed();
  }
  return done;
}

}  // namespace

extern "C" {

__attribute__((used, visibility("hidden"))) int tocsin_round_unwound(int, int actions, uint64_t, void*, void*) {
  if (actions & kCleanupPhase) {
    round_ended(nullptr, true);
  }
  return kContinueUnwind;
}

__attribute__((used, visibility("hidden"))) int tocsin_step_unwound(int, int actions, uint64_t, void*, void*) {
  if (actions & kCleanupPhase) {
    step_failed();
  }
  return kContinueUnwind;
}

void group_hook_c1(void* self, const void* store, int rank, int size, void* options) HOOK(TOCSIN_NAME_GROUP_C1);
void group_hook_c1(void* self, const void* store, int rank, int size, void* options) {
  using Function = void (*)(void*, const void*, int, int, void*);
  real<Function>(SYMBOL_GROUP_C1, CALLER)(self, store, rank, size, options);
  group_made(self, rank, size);
}

void group_hook_c2(void* self, const void* store, int rank, int size, void* options) HOOK(TOCSIN_NAME_GROUP_C2);
void group_hook_c2(void* self, const void* store, int rank, int size, void* options) {
  using Function = void (*)(void*, const void*, int, int, void*);
  real<Function>(SYMBOL_GROUP_C2, CALLER)(self, store, rank, size, options);
  group_made(self, rank, size);
}

void group_hook_d1(void* self) HOOK(TOCSIN_NAME_GROUP_D1);
void group_hook_d1(void* self) {
  Communicator* communicator = group_ending(self);
  real<void (*)(void*)>(SYMBOL_GROUP_D1, CALLER)(self);
  group_ended(communicator);
}

void group_hook_d2(void* self) HOOK(TOCSIN_NAME_GROUP_D2);
void group_hook_d2(void* self) {
  Communicator* communicator = group_ending(self);
  real<void (*)(void*)>(SYMBOL_GROUP_D2, CALLER)(self);
  group_ended(communicator);
}

WorkRef broadcast_hook(void* self, void* tensors, const RootedOptions* options) HOOK(TOCSIN_NAME_BROADCAST);
WorkRef broadcast_hook(void* self, void* tensors, const RootedOptions* options) {
  t_root = options->root;
  return real<WorkRef (*)(void*, void*, const RootedOptions*)>(SYMBOL_BROADCAST, CALLER)(self, tensors, options);
}

WorkRef gather_hook(void* self, void* outputs, void* inputs, const RootedOptions* options) HOOK(TOCSIN_NAME_GATHER);
WorkRef gather_hook(void* self, void* outputs, void* inputs, const RootedOptions* options) {
  using Function = WorkRef (*)(void*, void*, void*, const RootedOptions*);
  t_root = options->root;
  return real<Function>(SYMBOL_GATHER, CALLER)(self, outputs, inputs, options);
}

WorkRef scatter_hook(void* self, void* outputs, void* inputs, const RootedOptions* options) HOOK(TOCSIN_NAME_SCATTER);
WorkRef scatter_hook(void* self, void* outputs, void* inputs, const RootedOptions* options) {
  using Function = WorkRef (*)(void*, void*, void*, const RootedOptions*);
  t_root = options->root;
  return real<Function>(SYMBOL_SCATTER, CALLER)(self, outputs, inputs, options);
}

void work_hook(void* self, void* context, const TensorLists* outputs, uint8_t op_type, uint64_t seq, int64_t timeout_ms,
               const char* title, const MaybeTensors* inputs) HOOK(TOCSIN_NAME_WORK);
void work_hook(void* self, void* context, const TensorLists* outputs, uint8_t op_type, uint64_t seq, int64_t timeout_ms,
               const char* title, const MaybeTensors* inputs) {
  using Function = void (*)(void*, void*, const TensorLists*, uint8_t, uint64_t, int64_t, const char*,
                            const MaybeTensors*);
  if (frame()) {
    t_made.work = self;
    describe_operation(op_type, *outputs, inputs, t_made.operation);
  }
  real<Function>(SYMBOL_WORK, CALLER)(self, context, outputs, op_type, seq, timeout_ms, title, inputs);
}

void enqueue_hook(void* self, void** work) HOOK(TOCSIN_NAME_ENQUEUE);
void enqueue_hook(void* self, void** work) {
  if (frame() && *work) {
    static constexpr Operation kUnknown;
    round_entered(self, *work, t_made.work == *work ? t_made.operation : kUnknown);
    t_made.work = nullptr;
  }
  pass_on<void>(SYMBOL_ENQUEUE, CALLER, self, work);
}

void execute_hook(void** work) HOOK(TOCSIN_NAME_EXECUTE);
void execute_hook(void** work) {
  ON_UNWIND(tocsin_round_unwound);
  const bool on = frame() != nullptr;
  if (on) {
    round_started(*work);
  }
  pass_on<void>(SYMBOL_EXECUTE, CALLER, work);
  if (on && this_thread()->round) {  // else its end was seen already
    round_ended(nullptr, false);
  }
}

void finish_hook(void* self) HOOK(TOCSIN_NAME_FINISH);
void finish_hook(void* self) {
  if (frame()) {
    round_ended(self, false);  // before anyone who waits can go on and enter the next round
  }
  pass_on<void>(SYMBOL_FINISH, CALLER, self);
}

void finish_error_hook(void* self, const void* error) HOOK(TOCSIN_NAME_FINISH_ERROR);
void finish_error_hook(void* self, const void* error) {
  if (frame()) {
    round_ended(self, true);
  }
  pass_on<void>(SYMBOL_FINISH_ERROR, CALLER, self, error);
}

void send_hook(void* self, int peer, uint64_t slot, uint64_t offset, uint64_t bytes) HOOK(TOCSIN_NAME_SEND);
void send_hook(void* self, int peer, uint64_t slot, uint64_t offset, uint64_t bytes) {
  void* const send = load(g_real[SYMBOL_SEND]);
  if (__builtin_expect(!send || !step_posted<TOCSIN_WAITSTATE_SEND>(self, peer, bytes), 0)) {
    return post_slowly<TOCSIN_WAITSTATE_SEND>(SYMBOL_SEND, CALLER, self, peer, slot, offset, bytes);
  }
  reinterpret_cast<PostFunction>(send)(self, peer, slot, offset, bytes);
}

void recv_hook(void* self, int peer, uint64_t slot, uint64_t offset, uint64_t bytes) HOOK(TOCSIN_NAME_RECV);
void recv_hook(void* self, int peer, uint64_t slot, uint64_t offset, uint64_t bytes) {
  void* const recv = load(g_real[SYMBOL_RECV]);
  if (__builtin_expect(!recv || !step_posted<TOCSIN_WAITSTATE_RECV>(self, peer, bytes), 0)) {
    return post_slowly<TOCSIN_WAITSTATE_RECV>(SYMBOL_RECV, CALLER, self, peer, slot, offset, bytes);
  }
  reinterpret_cast<PostFunction>(recv)(self, peer, slot, offset, bytes);
}

bool wait_send_hook(void* self, int* peer, int64_t timeout_ms) HOOK(TOCSIN_NAME_WAIT_SEND);
bool wait_send_hook(void* self, int* peer, int64_t timeout_ms) {
  ON_UNWIND(tocsin_step_unwound);
  return wait_through<TOCSIN_WAITSTATE_SEND>(SYMBOL_WAIT_SEND, CALLER, self, peer, timeout_ms);
}

bool wait_recv_hook(void* self, int* peer, int64_t timeout_ms) HOOK(TOCSIN_NAME_WAIT_RECV);
bool wait_recv_hook(void* self, int* peer, int64_t timeout_ms) {
  ON_UNWIND(tocsin_step_unwound);
  return wait_through<TOCSIN_WAITSTATE_RECV>(SYMBOL_WAIT_RECV, CALLER, self, peer, timeout_ms);
}

}  // extern "C"
