// Rounds and launches: how NCCL's events become the frame's numbers.
//
// A round is a collective that the program called for: its number is given at the call (CollApi, or Coll in v4, which has
// no other), so that every member counts alike whatever NCCL does with it afterwards. One captured in a CUDA graph is no
// round, for its replays are launched without the program's calls.
//
// NCCL then launches a kernel, for one round or for a group of them. A launch is over as a whole: when the last of the
// channels that its tasks announced has told the kernel's end. `done` follows launches, in stream order; whatever event
// NCCL lost on the way (several releases drop some), the next launch makes good. Where kernel events are off, the ends of
// the network proxy's transfers tell the same approximately, for rounds that have such transfers on this rank.
//
// Times are the GPU's own (globaltimer): how long a round's kernel ran, waiting for peers included, and as own time the
// gap on the GPU since the process's last kernel of NCCL began or ended. The program's thread runs ahead of the GPU, so
// the time between its calls would tell nothing. Only three events of a round look at the clock of the host.
#pragma once

#include "communicators.h"
#include "profiler_abi.h"

// What the program asked for.
typedef struct operation {
  uint8_t op;
  uint8_t dtype;
  int32_t root;
  uint64_t count;
} operation;

// The program has called: NCCL has just read the mask for it.
void call_entered(communicator* owner);

// The number of the new round.
uint32_t round_entered(communicator* owner, const operation* what);

uint32_t launch_begun(communicator* owner);
// A task of a launch: a round, or with `seq` 0 a point-to-point operation. `number` 0: a launch of its own.
uint32_t task_begun(communicator* owner, uint32_t number, uint32_t seq, uint32_t channels);

void kernel_begun(communicator* owner, uint64_t handle, uint64_t gpu_ns);
// Writes to no slot.
void kernel_timed(communicator* owner, uint64_t handle, uint64_t gpu_ns);
void kernel_ended(communicator* owner, uint64_t handle);

// Both let their communicator go.
void transfer_begun(communicator* owner, uint64_t handle);
void transfer_ended(communicator* owner, uint64_t handle);
