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
// Communicators move between the two at their rounds, under a lock that nobody waits for, and no writer is ever stopped
// for it. So that nothing is lost and nothing lands in what has become another's slot, one word (`hold`) says where a
// communicator writes and who is about to; `hold` and `let_go` count in it, and a move is one comparing exchange of it:
//
//   bits  0-15 place: how far into the frame, in words, or PARKED | 16-25 events in hand
//        26-41 network transfers under way | 42-63 how often anything began
//
// * Whatever writes to a slot, but for steps, holds its communicator meanwhile. What holds it is where it was.
// * Steps do not: they are most of all callbacks, and would pay for it. NCCL makes them between the beginning and the
//   end of their operation, in one thread, and that operation is counted.
// * A slot is taken away only where neither events nor transfers were there since its contents were copied: the exchange
//   fails where anything began meanwhile, even if it has ended again. Whoever begins later is led to `parked`.
// * A slot is given where no other event is in hand. Steps may go on: those that are still led to `parked` are fetched
//   from there (taken out and added, so it may be done at any time and by anybody), at once and when the operation ends.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "atomic_fields.h"
#include "nccl_frame.h"
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
#define STEP_KEY_NONE 0xFFFFFFFFu  // no handle has it

// One direction of one channel, and where its steps count. All pointers lead into the communicator's slot.
typedef struct way {
  uint32_t step_key;  // of its steps' handles for rounds, STEP_KEY_NONE: no such communicator
  uint32_t posted;    // steps begun
  uint8_t* state;
  uint32_t* steps;
  uint64_t* total;
  uint64_t* bytes;
  uint32_t* open_seq;    // of the first of the slot's `open`
  uint32_t* open_steps;  // likewise
  uint16_t transfers;    // under way on it
  uint16_t peer;         // told last
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
  uint32_t entry;  // of the slot's rounds, from 1; 0: not recorded
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
  uint64_t hold;        // see above; outlives the communicator, for an event that comes late may be counted in it
  uint32_t generation;  // 0: free
  uint32_t graphs;      // a collective was captured in a graph
  uint32_t call_events;  // that NCCL delivers for what the program called for last
  uint32_t told_events;  // our wish, as NCCL was last told
  events allowed;
  uint64_t id;
  int* mask;
  const int* others_mask;  // what a plugin behind this one asks for, null: there is none
  uint64_t enqueued;
  uint32_t launches;
  uint64_t kernel_ns[32];  // start of each channel's newest kernel, by the GPU's clock
  uint32_t kernel_us[32];  // how long it took, when that is known
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

enum { PARKED = 0 };
#define HOLD_PLACE(word) ((uint32_t)(word) & 0xFFFF)
#define HOLD_EVENT ((uint64_t)1 << 16)
#define HOLD_TRANSFER ((uint64_t)1 << 26)
#define HOLD_BEGUN ((uint64_t)1 << 42)
#define HOLD_EVENTS(word) ((uint32_t)((word) >> 16) & 0x3FF)
#define HOLD_TRANSFERS(word) ((uint32_t)((word) >> 26) & 0xFFFF)
_Static_assert(sizeof(nccl_frame) / sizeof(uint64_t) <= 0xFFFF, "a place fits");

static inline void let_go(communicator* owner) { __atomic_fetch_sub(&owner->hold, HOLD_EVENT, __ATOMIC_RELEASE); }

// The communicator of a handle, which stays where it is until it is let go; null where it is gone. (Who ends it looks
// for holders after it has taken the generation away: one of the two sees the other.)
static inline communicator* hold(uint64_t handle) {
  communicator* found = &g_communicators[(handle >> 6) & (COMMUNICATORS_MAX - 1)];
  const uint32_t generation = (uint32_t)handle >> 17;
  __atomic_fetch_add(&found->hold, HOLD_EVENT + HOLD_BEGUN, __ATOMIC_SEQ_CST);
  if (generation && __atomic_load_n(&found->generation, __ATOMIC_SEQ_CST) == generation) {
    return found;
  }
  let_go(found);
  return NULL;
}

// Where it writes: for those that hold it, and for those that have the lock.
static inline tocsin_slot* slot_of(communicator* owner) {
  const uint32_t place = HOLD_PLACE(LOAD_ACQUIRE(owner->hold));
  return place == PARKED ? &owner->parked : (tocsin_slot*)((uint64_t*)g_frame + place);
}

static inline tocsin_channel* channel_of(communicator* owner, uint64_t handle) {
  return (tocsin_channel*)slot_of(owner)->lanes + HANDLE_CHANNEL(handle);
}

void aim_way(communicator* owner, way* on, tocsin_slot* slot);
void fetch_steps(communicator* owner, tocsin_slot* slot);

// A transfer of the network proxy begins on this way, or ends, in the thread that makes its steps. The communicator is
// held, and is let go.
static inline void way_taken(communicator* owner, way* on, tocsin_slot* slot) {
  STORE(on->transfers, (uint16_t)(LOAD(on->transfers) + 1));
  if (__builtin_expect(LOAD(on->bytes) != &slot->bytes, 0)) {  // a move has not come to this way yet
    aim_way(owner, on, slot);
  }
  ADD(owner->hold, HOLD_TRANSFER - HOLD_EVENT);
}

static inline void way_left(communicator* owner, way* on, tocsin_slot* slot) {
  uint64_t let_go = HOLD_EVENT;
  if (LOAD(on->transfers)) {  // proxies of shared memory end without ever having told a beginning
    if (slot != &owner->parked && __builtin_expect(LOAD(owner->parked.send_steps) | LOAD(owner->parked.recv_steps), 0)) {
      fetch_steps(owner, slot);
    }
    STORE(on->transfers, (uint16_t)(LOAD(on->transfers) - 1));
    let_go += HOLD_TRANSFER;
  }
  __atomic_fetch_sub(&owner->hold, let_go, __ATOMIC_RELEASE);
}

// A handle of KIND_COMMUNICATOR, 0 where there are too many communicators, or where this process already is another
// rank of the same one: a frame tells of one rank.
uint64_t communicator_made(uint64_t id, int32_t ranks, int32_t rank, int* mask);
void communicator_gone(uint64_t handle);

// Where the communicator, which is held, writes. Gives it a slot of the frame if it has none and there is one; counted
// in works_lost if not.
tocsin_slot* follow(communicator* owner);

// In the child of a fork.
void forget_communicators(void);
