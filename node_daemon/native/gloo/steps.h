// Transfer steps of the round that a thread executes: the hot path, which every send and receive of gloo takes, so it is
// inlined into the hooks with its direction known.
//
// A step has two hooks: one posts a transfer, one waits for it. A wait tells its peer only when it is over, so the peer
// is remembered when the transfer is posted, by the buffer's address. Steps outside of a round (point-to-point
// operations) count nowhere, but their end is the end of an operation.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "atomics.h"
#include "frame_file.h"
#include "gloo_frame.h"
#include "tocsin_frame.h"

namespace tocsin {

struct Round;

constexpr uint32_t kBuffersMax = 8;
constexpr uint64_t kMicrosecond_ns = 1000;

// The peers that a buffer of gloo was last posted to, by direction: TOCSIN_WAITSTATE_SEND, _RECV less 1.
struct Posted {
  const void* buffer;
  int32_t peer[2];
};

struct Thread {
  Round* round;  // executing, null: none that is followed
  tocsin_slot* slot;  // null with `round`
  tocsin_open* open;  // null: more than OPEN_COUNT at once
  bool failed;
  tocsin_lane* waiting_on;
  uint32_t replaced;
  Posted posted[kBuffersMax];  // a ring uses two, so the first ones are nearly always those that are looked for
};

// `__thread`, for `thread_local` would be reached through a function where it is defined elsewhere.
extern __thread Thread t_thread;

#define TOCSIN_HOT inline __attribute__((always_inline))

// This thread's, by an address that the compiler keeps instead of working it out at each use.
TOCSIN_HOT Thread* this_thread() {
  Thread* thread = &t_thread;
  __asm__("" : "+r"(thread));
  return thread;
}

__attribute__((cold)) Posted* find_posted_further(Thread& thread, const void* buffer);

TOCSIN_HOT Posted* find_posted(Thread& thread, const void* buffer) {
  Posted* const posted = thread.posted;
  if (posted->buffer == buffer) {
    return posted;
  }
  return posted[1].buffer == buffer ? posted + 1 : find_posted_further(thread, buffer);
}

// A place for a buffer that none has: the one that was filled the longest time ago.
__attribute__((cold)) Posted* replace_posted(Thread& thread, const void* buffer);

// One more, in a field that no other thread writes.
TOCSIN_HOT void bump(uint32_t& field) { store(field, load(field) + 1); }

TOCSIN_HOT tocsin_lane& lane_of(tocsin_slot& slot, int32_t peer) {
  return slot.lanes[static_cast<uint32_t>(peer) % TOCSIN_FRAME_LANE_COUNT];
}

// A lane's `peer`, `wait_state` and `used`, which lie in one aligned word, are written with one store.
typedef uint32_t __attribute__((may_alias)) LaneWord;
static_assert(offsetof(tocsin_lane, peer) % sizeof(LaneWord) == 0 &&
              offsetof(tocsin_lane, wait_state) == offsetof(tocsin_lane, peer) + 2 &&
              offsetof(tocsin_lane, used) == offsetof(tocsin_lane, peer) + 3, "peer, wait state, used");

TOCSIN_HOT void wait_on(tocsin_lane& lane, int32_t peer, uint8_t direction) {
  LaneWord& word = *reinterpret_cast<LaneWord*>(&lane.peer);
  store(word, static_cast<uint16_t>(peer) | static_cast<uint32_t>(direction) << 16 | 1u << 24);
}

template <uint8_t direction>
TOCSIN_HOT void note_posted(Thread& thread, Posted& posted, int32_t peer, uint64_t bytes) {
  posted.peer[direction - 1] = peer;
  if (direction == TOCSIN_WAITSTATE_SEND && bytes != UINT64_MAX) {  // all ones: to the end of a buffer of unknown size
    add(thread.slot->bytes, bytes);
  }
}

// False where the buffer is none of the first two: `step_posted_further` then.
template <uint8_t direction>
TOCSIN_HOT bool step_posted(const void* buffer, int32_t peer, uint64_t bytes) {
  Thread& thread = *this_thread();
  if (!thread.slot) {
    return true;
  }
  Posted* posted = thread.posted;
  if (posted->buffer != buffer) {
    ++posted;
    if (posted->buffer != buffer) {
      return false;
    }
  }
  note_posted<direction>(thread, *posted, peer, bytes);
  return true;
}

template <uint8_t direction>
void step_posted_further(const void* buffer, int32_t peer, uint64_t bytes) {
  Thread& thread = *this_thread();
  Posted* posted = find_posted(thread, buffer);
  note_posted<direction>(thread, posted ? *posted : *replace_posted(thread, buffer), peer, bytes);
}

// The end of an operation that is no round.
__attribute__((cold)) void point_to_point_done();

// What a wait has to know when it is over, kept by the hook.
struct Wait {
  Thread* thread;
  tocsin_slot* slot;  // null: outside of a round
  tocsin_lane* lane;  // null: the peer is not known yet
  uint64_t since_ns;
};

template <uint8_t direction>
TOCSIN_HOT Wait step_waiting(const void* buffer) {
  Thread& thread = *this_thread();
  Wait wait{&thread, thread.slot, nullptr, 0};
  if (!wait.slot) {
    return wait;
  }
  const Posted* posted = find_posted(thread, buffer);
  const int32_t peer = posted ? posted->peer[direction - 1] : -1;
  if (peer >= 0) {
    wait.lane = &lane_of(*wait.slot, peer);
    wait_on(*wait.lane, peer, direction);
  }
  thread.waiting_on = wait.lane;
  if (direction == TOCSIN_WAITSTATE_RECV) {
    wait.since_ns = tocsin_now_ns();
  }
  return wait;
}

template <uint8_t direction>
TOCSIN_HOT void step_done(const Wait& wait, int32_t peer) {
  tocsin_lane* lane = wait.lane;
  if (!wait.slot) {
    point_to_point_done();
    return;
  }
  if (lane) {
    store(lane->wait_state, TOCSIN_WAITSTATE_NONE);
  }
  if (__builtin_expect((!lane || load(lane->peer) != static_cast<uint16_t>(peer)) && peer >= 0, 0)) {
    lane = &lane_of(*wait.slot, peer);  // it was another one that answered; whoever waits for it waits on
    store(lane->peer, static_cast<uint16_t>(peer));
    store(lane->used, 1u);
  }
  const bool sent = direction == TOCSIN_WAITSTATE_SEND;
  add(sent ? wait.slot->send_steps : wait.slot->recv_steps, 1);
  if (tocsin_open* open = wait.thread->open) {
    bump(sent ? open->send_steps : open->recv_steps);
  }
  if (!lane) {
    return;
  }
  add(sent ? lane->send_steps : lane->recv_steps, 1);
  if (!sent) {
    add(lane->recv_wait_us, (tocsin_now_ns() - wait.since_ns) / kMicrosecond_ns);  // wraps, as the field does
  }
}

// Of the wait that this thread is in.
__attribute__((cold)) void step_failed();

}  // namespace tocsin
