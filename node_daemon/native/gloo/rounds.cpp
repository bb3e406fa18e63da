#include "rounds.h"

#include <string.h>

#include "frame_file.h"
#include "gloo_frame.h"

namespace tocsin {

namespace {

constexpr uint32_t kRoundsMax = 1024;  // in flight at once; more are counted in works_lost
constexpr uint32_t kProbesMax = 16;
constexpr uint32_t kBuffersMax = 8;

struct Round {
  const void* work;  // key; null: free
  Communicator* communicator;
  tocsin_round* entry;  // null: not recorded
  uint64_t seq;
  uint64_t entered_ns;
  uint32_t signature;
  bool started;
};

Round g_rounds[kRoundsMax];
uint64_t g_last_enter_ns;

// The peers that a buffer of gloo was last posted to: a wait tells its peer only when it is over.
struct Posted {
  const void* buffer;
  int32_t send_peer;
  int32_t recv_peer;
};

struct Thread {
  Round* round;  // executing, null: none that is followed
  tocsin_slot* slot;
  tocsin_open* open;  // null: more than OPEN_COUNT at once
  bool failed;
  uint64_t waiting_since_ns;
  tocsin_lane* waiting_on;
  Posted posted[kBuffersMax];
};

thread_local Thread t_thread;

uint32_t hash_of(const void* address) {
  return static_cast<uint32_t>((reinterpret_cast<uintptr_t>(address) * 0x9E3779B97F4A7C15u) >> 40);
}

Round* find_round(const void* work) {
  const uint32_t hash = hash_of(work);
  for (uint32_t i = 0; i < kProbesMax; ++i) {
    Round& round = g_rounds[(hash + i) % kRoundsMax];
    if (load_acquire(round.work) == work) {
      return &round;
    }
  }
  return nullptr;
}

// A place for a new round. A round with the same key never ran: its work object died and its address is used again.
// (One that lies behind the new round's place is never found before it.)
Round* claim_round(const void* work) {
  const uint32_t hash = hash_of(work);
  for (uint32_t i = 0; i < kProbesMax; ++i) {
    Round& round = g_rounds[(hash + i) % kRoundsMax];
    if (load(round.work) == work) {
      round_ended(work, true);
    }
    if (!load(round.work) && swap_if<const void*>(round.work, nullptr, work)) {
      return &round;
    }
  }
  return nullptr;
}

// Own time before a round: since the process last left or entered any operation.
uint64_t gap_before(uint64_t now) {
  const uint64_t left = load(g_frame->header.last_leave_ns);
  const uint64_t entered = load(g_last_enter_ns);
  const uint64_t since = left > entered ? left : entered;
  return since && now > since ? now - since : 0;
}

tocsin_open* claim_open(tocsin_slot& slot, const Round& round) {
  for (tocsin_open& open : slot.open) {
    if (!load(open.seq) && swap_if<uint32_t>(open.seq, 0, static_cast<uint32_t>(round.seq))) {
      store(open.signature, round.signature);
      return &open;
    }
  }
  return nullptr;
}

// One more, in a field that no other thread writes.
void bump(uint32_t& field) { store(field, load(field) + 1); }

void release_open(tocsin_open& open) {
  store(open.send_steps, 0u);
  store(open.recv_steps, 0u);
  store(open.signature, TOCSIN_FRAME_SIGNATURE_UNKNOWN);
  store_release(open.seq, 0u);
}

tocsin_lane& lane_of(tocsin_slot& slot, int32_t peer) {
  tocsin_lane& lane = slot.lanes[static_cast<uint32_t>(peer) % TOCSIN_FRAME_LANE_COUNT];
  store(lane.peer, static_cast<uint16_t>(peer));
  store(lane.used, 1u);
  return lane;
}

}  // namespace

void round_entered(const void* group, const void* work, const Operation& operation) {
  Communicator* communicator = enter_communicator(group);
  if (!communicator) {
    return;
  }
  tocsin_slot& slot = *communicator->slot;
  const uint64_t seq = add(communicator->enqueued, 1) + 1;
  const uint64_t now = tocsin_now_ns();
  const uint64_t gap_ns = gap_before(now);
  store(g_last_enter_ns, now);
  store(slot.op, operation.op);
  store(slot.dtype, operation.dtype);
  store(slot.root, operation.root);
  store(slot.count, operation.count);
  store(slot.t_enqueued_ns, now);
  add(slot.gap_sum_ns, gap_ns);
  Round* round = claim_round(work);
  if (!round) {  // it counts as over, for its end will not be seen
    add(g_frame->header.works_lost, 1);
    add_release(slot.enqueued, 1);
    add_release(slot.started, 1);
    add_release(slot.done, 1);
    leave_communicator(*communicator);
    return;
  }
  round->communicator = communicator;
  round->seq = seq;
  round->entered_ns = now;
  round->signature = tocsin_signature(operation.op, operation.dtype, operation.count, operation.root);
  round->started = false;
  round->entry = tocsin_record(&communicator->recording, &slot, seq, now, gap_ns, round->signature);
  add_release(slot.enqueued, 1);
}

void round_started(const void* work) {
  Round* round = find_round(work);
  Thread& thread = t_thread;
  thread.round = round;
  if (!round) {
    return;
  }
  tocsin_slot& slot = *round->communicator->slot;
  thread.slot = &slot;
  thread.failed = false;
  thread.open = claim_open(slot, *round);
  round->started = true;
  store(slot.t_started_ns, tocsin_now_ns());
  add_release(slot.started, 1);
}

void round_ended(const void* work, bool failed) {
  Thread& thread = t_thread;
  Round* round = work ? find_round(work) : thread.round;
  if (!round) {
    return;
  }
  Communicator& communicator = *round->communicator;
  tocsin_slot& slot = *communicator.slot;
  const uint64_t now = tocsin_now_ns();
  const uint64_t duration_ns = now - round->entered_ns;
  if (round == thread.round) {
    failed |= thread.failed;
    if (thread.open) {
      release_open(*thread.open);
    }
    thread.round = nullptr;
  }
  if (round->entry && load(round->entry->seq) == static_cast<uint32_t>(round->seq)) {
    store(round->entry->dur_us, tocsin_microseconds(duration_ns));
  }
  if (failed) {
    add(slot.errors, 1);
  }
  if (!round->started) {
    add(slot.started, 1);
  }
  add(slot.dur_sum_ns, duration_ns);
  store(slot.t_done_ns, now);
  store(g_frame->header.last_leave_ns, now);
  add_release(slot.done, 1);
  store_release(round->work, nullptr);
  leave_communicator(communicator);
}

void step_posted(const void* buffer, int32_t peer, uint8_t direction, uint64_t bytes) {
  Thread& thread = t_thread;
  if (!thread.round) {
    return;
  }
  Posted& posted = thread.posted[hash_of(buffer) % kBuffersMax];
  if (posted.buffer != buffer) {
    posted = {buffer, -1, -1};
  }
  (direction == TOCSIN_WAITSTATE_SEND ? posted.send_peer : posted.recv_peer) = peer;
  if (direction == TOCSIN_WAITSTATE_SEND && bytes != UINT64_MAX) {  // all ones: to the end of a buffer whose size nobody tells
    add(thread.slot->bytes, bytes);
  }
}

void step_waiting(const void* buffer, uint8_t direction) {
  Thread& thread = t_thread;
  if (!thread.round) {
    return;
  }
  if (direction == TOCSIN_WAITSTATE_RECV) {
    thread.waiting_since_ns = tocsin_now_ns();
  }
  const Posted& posted = thread.posted[hash_of(buffer) % kBuffersMax];
  const int32_t peer = direction == TOCSIN_WAITSTATE_SEND ? posted.send_peer : posted.recv_peer;
  thread.waiting_on = posted.buffer == buffer && peer >= 0 ? &lane_of(*thread.slot, peer) : nullptr;
  if (thread.waiting_on) {
    store(thread.waiting_on->wait_state, direction);
  }
}

void step_done(int32_t peer, uint8_t direction) {
  Thread& thread = t_thread;
  if (!thread.round) {
    if (load_acquire(g_frame_state) == FRAME_ON) {
      store(g_frame->header.last_leave_ns, tocsin_now_ns());
    }
    return;
  }
  if (thread.waiting_on) {
    store(thread.waiting_on->wait_state, TOCSIN_WAITSTATE_NONE);
  }
  tocsin_lane* lane = peer >= 0 ? &lane_of(*thread.slot, peer) : thread.waiting_on;
  if (direction == TOCSIN_WAITSTATE_SEND) {
    add(thread.slot->send_steps, 1);
    if (thread.open) {
      bump(thread.open->send_steps);
    }
    if (lane) {
      add(lane->send_steps, 1);
    }
    return;
  }
  add(thread.slot->recv_steps, 1);
  if (thread.open) {
    bump(thread.open->recv_steps);
  }
  if (lane) {
    add(lane->recv_steps, 1);
    add(lane->recv_wait_us, tocsin_microseconds(tocsin_now_ns() - thread.waiting_since_ns));
  }
}

void step_failed() {
  Thread& thread = t_thread;
  thread.failed = true;
  if (thread.round && thread.waiting_on) {
    store(thread.waiting_on->wait_state, TOCSIN_WAITSTATE_NONE);
  }
}

void forget_rounds_of(const Communicator& communicator) {
  for (Round& round : g_rounds) {
    if (load(round.work) && round.communicator == &communicator) {
      store_release(round.work, nullptr);
    }
  }
}

void forget_rounds() {
  memset(g_rounds, 0, sizeof g_rounds);
  memset(&t_thread, 0, sizeof t_thread);
  g_last_enter_ns = 0;
}

}  // namespace tocsin
