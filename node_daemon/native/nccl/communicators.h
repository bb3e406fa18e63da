// The communicators of this process, and the handles that stand for them and for their events.
//
// NCCL keeps what `startEvent` returns and hands it back at the event's states and end, and as its children's parent. It
// looks into none of it. So a handle here is no address but a value that says by itself what it stands for: kind,
// communicator with its generation, channel, direction, and the number of a round or of a launch. Nothing is allocated,
// no slot can run out or be taken over, and one that comes late, twice or from a communicator that is gone is recognised.
//
//   bits  0- 5 way: channel modulo 32, and direction | 6-12 communicator | 13-16 kind | 17-31 generation | 32-63 number
//
// Nearly all events are steps of transfers. Their handles are looked up in a table of ways (bits 0 to 12), where kind and
// generation are checked by one comparison and all that a step touches is at hand.
//
// A communicator always writes to a slot: one of the frame's 16, or its own `parked` one while it has none there.
// Communicators move between the two at their rounds, under a lock that nobody waits for.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "atomic_fields.h"
#include "recording.h"
#include "tocsin_frame.h"

enum { COMMUNICATORS_MAX = 128, ROUNDS_MAX = 1024, LAUNCHES_MAX = 1024 };

enum {  // kinds of handles
  KIND_NONE,
  KIND_COMMUNICATOR,
  KIND_GROUP,       // number: of the launch
  KIND_COLL_API,    // number: of the round, 0: no round (captured in a graph)
  KIND_COLL,        // likewise
  KIND_P2P,         // number: of the launch
  KIND_OP,          // a proxy's work for a round
  KIND_STEP,        // .. and a step of it
  KIND_OP_P2P,      // .. for a launch without a round
  KIND_STEP_P2P,
  KIND_KERNEL,      // a channel's kernel for a round
  KIND_KERNEL_P2P,  // .. for a launch
};

#define HANDLE_SEND 1u
#define HANDLE_WAY(channel, is_send) (((uint32_t)(channel) & 31) << 1 | ((is_send) ? HANDLE_SEND : 0))
#define HANDLE_CHANNEL(handle) (((uint32_t)(handle) >> 1) & 31)
#define HANDLE_KIND(handle) (((uint32_t)(handle) >> 13) & 15)
#define HANDLE_KEY(handle) ((uint32_t)(handle) >> 13)  // kind and generation
#define HANDLE_NUMBER(handle) ((uint32_t)((handle) >> 32))
#define HANDLE(owner, kind, number) (((owner) & 0xFFFE1FC0u) | (uint64_t)(kind) << 13 | (uint64_t)(number) << 32)
#define HANDLE_NEXT_KIND ((uint64_t)1 << 13)

enum { WAYS = 64 };  // of one communicator

// One direction of one channel, and where its steps count. All pointers lead into the communicator's slot.
typedef struct way {
  uint32_t step_key;  // of its steps' handles for rounds, 0: no such communicator
  uint32_t posted;    // steps begun
  uint8_t* state;
  uint32_t* steps;
  uint64_t* total;
  uint64_t* bytes;
  uint32_t* open_seq;    // of the first of the slot's `open`
  uint32_t* open_steps;  // likewise
} __attribute__((aligned(64))) way;  // a line of the cache each, for each has its thread

// One collective, from the program's call to the end of its kernel. Low halves of numbers; 0: unused.
typedef struct coll_round {
  uint32_t seq;
  uint32_t launch;
  uint32_t signature;
  uint32_t events;       // that NCCL delivers for it
  int32_t kernels_left;  // channels whose kernel has not ended
  uint64_t first_ns;     // by the GPU's clock; 0: has not started, or is untimed
  uint64_t last_ns;
  tocsin_round* entry;  // null: not recorded
  uint32_t started;
} coll_round;

// One kernel launch, which may hold several rounds and point-to-point operations. It ends as a whole.
typedef struct launch {
  uint32_t number;
  uint32_t first;  // lowest round in it, 0: none
  uint32_t last;   // newest round that is over when it is
  int32_t kernels_left;
  int32_t transfers;  // of the network proxy, under way
  uint32_t has_kernels;
} launch;

typedef struct communicator {
  uint32_t generation;  // 0: free
  uint32_t graphs;      // a collective was captured in a graph
  uint32_t call_events;  // that NCCL delivers for what the program called for last
  uint32_t told_events;  // our wish, as NCCL was last told
  int32_t transfers;     // of the network proxy, under way
  uint64_t id;
  int* mask;
  const int* others_mask;  // what a plugin behind this one asks for, null: there is none
  tocsin_slot* slot;  // never null while it lives
  uint64_t enqueued;
  uint32_t launches;
  uint64_t kernel_ns[32];  // start of each channel's newest kernel, by the GPU's clock
  tocsin_recording recording;
  coll_round rounds[ROUNDS_MAX];
  launch launch_ring[LAUNCHES_MAX];
  tocsin_slot parked;
} communicator;
_Static_assert(sizeof(communicator) % sizeof(uint64_t) == 0, "made anew word by word");

extern communicator g_communicators[COMMUNICATORS_MAX];
extern way g_ways[COMMUNICATORS_MAX * WAYS];

static inline communicator* communicator_of(uint64_t handle) {
  communicator* found = &g_communicators[(handle >> 6) & (COMMUNICATORS_MAX - 1)];
  const uint32_t generation = (uint32_t)handle >> 17;
  return generation && LOAD_ACQUIRE(found->generation) == generation ? found : NULL;
}

static inline way* way_of(uint64_t handle) { return &g_ways[handle & (COMMUNICATORS_MAX * WAYS - 1)]; }

static inline tocsin_channel* channel_of(communicator* owner, uint64_t handle) {
  return (tocsin_channel*)LOAD_ACQUIRE(owner->slot)->lanes + HANDLE_CHANNEL(handle);
}

// A handle of KIND_COMMUNICATOR, 0 where there are too many communicators, or where this process already is another
// rank of the same one: a frame tells of one rank.
uint64_t communicator_made(uint64_t id, int32_t ranks, int32_t rank, int* mask);
void communicator_gone(uint64_t handle);

// Gives it a slot of the frame if it has none and there is one; counted in works_lost if not.
void follow(communicator* owner);

// In the child of a fork.
void forget_communicators(void);
