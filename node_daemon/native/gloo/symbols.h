// The functions of torch and gloo that the probe stands in front of or asks, by mangled name (torch 2.13.0, Itanium
// C++ ABI). A mangled name spells the argument types, so a library that changed a signature lacks the symbol and the
// probe goes blind there instead of misreading arguments.
#pragma once

#include <stdint.h>

#include "atomics.h"

#define TOCSIN_NAME_ENQUEUE                                                                              \
  "_ZN4c10d16ProcessGroupGloo7enqueueEN3c1013intrusive_ptrINS0_9AsyncWorkENS1_6detail34intrusive_target" \
  "_default_null_typeIS3_EEEE"
#define TOCSIN_NAME_EXECUTE                                                                                   \
  "_ZN4c10d16ProcessGroupGloo9AsyncWork7executeERKN3c1013intrusive_ptrIS1_NS2_6detail34intrusive_target_default" \
  "_null_typeIS1_EEEE"
#define TOCSIN_NAME_FINISH "_ZN4c10d16ProcessGroupGloo9AsyncWork14finishWorkGlooEv"
#define TOCSIN_NAME_FINISH_ERROR \
  "_ZN4c10d16ProcessGroupGloo9AsyncWork19finishWorkGlooErrorERKNSt15__exception_ptr13exception_ptrE"
#define TOCSIN_NAME_WORK                                                                                           \
  "_ZN4c10d16ProcessGroupGloo9AsyncWorkC2ESt10shared_ptrIN4gloo7ContextEESt6vectorIS6_IN2at6TensorESaIS8_EESaISA_" \
  "EENS_6OpTypeEmNSt6chrono8durationIlSt5ratioILl1ELl1000EEEEPKcRKSt8optionalISA_E"
#define TOCSIN_NAME_GROUP_C1                                                                                        \
  "_ZN4c10d16ProcessGroupGlooC1ERKN3c1013intrusive_ptrINS_5StoreENS1_6detail34intrusive_target_default_null_typeIS" \
  "3_EEEEiiNS2_INS0_7OptionsENS5_ISA_EEEE"
#define TOCSIN_NAME_GROUP_C2                                                                                        \
  "_ZN4c10d16ProcessGroupGlooC2ERKN3c1013intrusive_ptrINS_5StoreENS1_6detail34intrusive_target_default_null_typeIS" \
  "3_EEEEiiNS2_INS0_7OptionsENS5_ISA_EEEE"
#define TOCSIN_NAME_GROUP_D1 "_ZN4c10d16ProcessGroupGlooD1Ev"
#define TOCSIN_NAME_GROUP_D2 "_ZN4c10d16ProcessGroupGlooD2Ev"
#define TOCSIN_NAME_BROADCAST \
  "_ZN4c10d16ProcessGroupGloo9broadcastERSt6vectorIN2at6TensorESaIS3_EERKNS_16BroadcastOptionsE"
#define TOCSIN_NAME_GATHER                                                                                        \
  "_ZN4c10d16ProcessGroupGloo6gatherERSt6vectorIS1_IN2at6TensorESaIS3_EESaIS5_EERS5_RKNS_13GatherOptionsE"
#define TOCSIN_NAME_SCATTER                                                                                       \
  "_ZN4c10d16ProcessGroupGloo7scatterERSt6vectorIN2at6TensorESaIS3_EERS1_IS5_SaIS5_EERKNS_14ScatterOptionsE"
#define TOCSIN_NAME_SEND "_ZN4gloo9transport3tcp13UnboundBuffer4sendEimmm"
#define TOCSIN_NAME_RECV "_ZN4gloo9transport3tcp13UnboundBuffer4recvEimmm"
#define TOCSIN_NAME_WAIT_SEND \
  "_ZN4gloo9transport3tcp13UnboundBuffer8waitSendEPiNSt6chrono8durationIlSt5ratioILl1ELl1000EEEE"
#define TOCSIN_NAME_WAIT_RECV \
  "_ZN4gloo9transport3tcp13UnboundBuffer8waitRecvEPiNSt6chrono8durationIlSt5ratioILl1ELl1000EEEE"
#define TOCSIN_NAME_GROUP_RANKS "_ZNK4c10d16ProcessGroupGloo10groupRanksEv"
#define TOCSIN_NAME_NUMEL "aoti_torch_get_numel"
#define TOCSIN_NAME_DTYPE "aoti_torch_get_dtype"

namespace tocsin {

// The order is the bit number in the frame's `symbols_missing` (docs/probe-frame.md).
enum Symbol : unsigned {
  SYMBOL_ENQUEUE,
  SYMBOL_EXECUTE,
  SYMBOL_FINISH,
  SYMBOL_FINISH_ERROR,
  SYMBOL_WORK,
  SYMBOL_GROUP_C1,
  SYMBOL_GROUP_C2,
  SYMBOL_GROUP_D1,
  SYMBOL_GROUP_D2,
  SYMBOL_SEND,
  SYMBOL_RECV,
  SYMBOL_WAIT_SEND,
  SYMBOL_WAIT_RECV,
  SYMBOL_GROUP_RANKS,
  SYMBOL_NUMEL,
  SYMBOL_DTYPE,
  SYMBOL_BROADCAST,
  SYMBOL_GATHER,
  SYMBOL_SCATTER,
  SYMBOL_COUNT,
};

extern void* g_real[SYMBOL_COUNT];

// The function behind one of our hooks. `caller` is an address inside the library that called the hook: the last
// resort for finding a libtorch under another name. Ends the program with a line on stderr when there is none, which
// cannot happen: the caller was linked against one.
void* resolve_hooked(Symbol symbol, const void* caller);

// The function, or null where this libtorch lacks it.
void* resolve_optional(Symbol symbol);

// Bit per symbol that this libtorch lacks.
uint32_t symbols_missing();

template <class Function>
inline Function real(Symbol symbol, const void* caller) {
  void* address = load(g_real[symbol]);
  return reinterpret_cast<Function>(address ? address : resolve_hooked(symbol, caller));
}

// Null where this libtorch lacks it, and before `symbols_missing` looked.
template <class Function>
inline Function optional(Symbol symbol) {
  return reinterpret_cast<Function>(load(g_real[symbol]));
}

}  // namespace tocsin
