// Rounds: one collective on one communicator, from the program's call (enter) to the end of the transfer (leave).
//
// The program's thread enters a round (`round_entered`), one of gloo's two worker threads executes it
// (`round_started`, steps, `round_ended`). In between the round waits in a fixed table keyed by the address of torch's
// work object. Nothing here locks, allocates or calls the kernel; several threads write one slot with single stores
// and relaxed additions, released in the order that the reader relies on (diagnosis/contracts/probeframe.py).
//
// A step counts when it is complete: a send when its bytes were taken by the kernel, a receive when all of its bytes
// arrived. Completed receives name a stopped rank (its successor in the ring has the fewest), completed sends name a
// link that takes nothing any more.
#pragma once

#include <stdint.h>

#include "communicators.h"

namespace tocsin {

// What the program asked for.
struct Operation {
  uint8_t op = TOCSIN_OP_UNKNOWN;
  uint8_t dtype = TOCSIN_DTYPE_UNKNOWN;
  int32_t root = TOCSIN_FRAME_ROOT_NONE;
  uint64_t count = TOCSIN_FRAME_COUNT_UNKNOWN;
};

void round_entered(const void* group, const void* work, const Operation& operation);
void round_started(const void* work);
// `work` null: the round that this thread executes.
void round_ended(const void* work, bool failed);

void forget_rounds_of(const Communicator& communicator);
void forget_rounds();

}  // namespace tocsin
