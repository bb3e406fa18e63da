#include "rounds.h"

#include <string.h>

#include "frame_file.h"

namespace tocsin {

namespace {

constexpr uint32_t kRoundsMax = 1024;  // in flight at once; more are counted in works_lost
constexpr uint32_t kProbesMax = 16;
constexpr uint32_t kBuffersMax = 8;
constexpr uint32_t kStrideMax = 1u << 20;
constexpr uint64_t kSpan_ns = 2000000000;      // what the recorded rounds must span at least
constexpr uint64_t kSpacing_ns = 1000000000;   // and how far apart two of them may be
constexpr uint64_t kNanosecondsPerMicrosecond = 1000;

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

uint32_t microseconds(uint64_t ns) {
  const uint64_t us = ns / kNanosecondsPerMicrosecond;
  return us < TOCSIN_FRAME_DUR_OPEN ? static_cast<uint32_t>(us) : TOCSIN_FRAME_DUR_OPEN - 1;
}

// As `signatures` in diagnosis/contracts/probeframe.py. An all-to-all may have another count on each member.
uint32_t signature_of(const Operation& operation) {
  uint64_t hash = 0x9E3779B97F4A7C15u;
  const uint64_t words[] = {operation.op, operation.dtype,
                            operation.op == TOCSIN_OP_ALL_TO_ALL ? 0 : operation.count,
                            static_cast<uint64_t>(operation.root)};
  for (const uint64_t word : words) {
    hash = (hash ^ word) * 0xD6E8FEB86659FD93u;
    hash ^= hash >> 32;
  }
  const uint32_t low = static_cast<uint32_t>(hash);
  return low == TOCSIN_FRAME_SIGNATURE_UNKNOWN ? 1 : low;
}

// Keeps the recorded rounds 2 to 32 seconds apart from first to last: see `stride` in the frame's definition.
void adapt_stride(Communicator& communicator, tocsin_slot& slot, uint64_t now) {
  const uint32_t stride = load(slot.stride);
  if (stride > 1 && now - load(communicator.recorded_ns) > kSpacing_ns) {
    store(slot.stride, stride / 2);
    store(communicator.restrided, load(communicator.recorded));
    return;
  }
  const uint64_t recorded = load(communicator.recorded);
  const uint64_t oldest_ns = load(communicator.entered_ns[recorded % TOCSIN_FRAME_ROUND_COUNT]);
  if (recorded - load(communicator.restrided) >= TOCSIN_FRAME_ROUND_COUNT && now - oldest_ns < kSpan_ns &&
      stride < kStrideMax) {
    store(slot.stride, stride * 2);
    store(communicator.restrided, recorded);
  }
}

// The entry's duration says "open" before anything else of it changes, and its seq comes last.
tocsin_round* record(Communicator& communicator, tocsin_slot& slot, const Round& round, uint64_t gap_ns) {
  adapt_stride(communicator, slot, round.entered_ns);
  const uint32_t seq = static_cast<uint32_t>(round.seq);
  if (seq == 0 || (seq & (load(slot.stride) - 1))) {  // 0 marks an unused entry
    return nullptr;
  }
  const uint64_t position = add(communicator.recorded, 1) % TOCSIN_FRAME_ROUND_COUNT;
  store(communicator.entered_ns[position], round.entered_ns);
  store(communicator.recorded_ns, round.entered_ns);
  tocsin_round& entry = slot.rounds[position];
  store_release(entry.dur_us, TOCSIN_FRAME_DUR_OPEN);
  store_release(entry.gap_us, microseconds(gap_ns));
  store_release(entry.signature, round.signature);
  store_release(entry.seq, seq);
  return &entry;
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
  const uint64_t now = now_ns();
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
  round->signature = signature_of(operation);
  round->started = false;
  round->entry = record(*communicator, slot, *round, gap_ns);
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
  store(slot.t_started_ns, now_ns());
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
  const uint64_t now = now_ns();
  const uint64_t duration_ns = now - round->entered_ns;
  if (round == thread.round) {
    failed |= thread.failed;
    if (thread.open) {
      release_open(*thread.open);
    }
    thread.round = nullptr;
  }
  if (round->entry && load(round->entry->seq) == static_cast<uint32_t>(round->seq)) {
    store(round->entry->dur_us, microseconds(duration_ns));
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
    thread.waiting_since_ns = now_ns();
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
      store(g_frame->header.last_leave_ns, now_ns());
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
    add(lane->recv_wait_us, microseconds(now_ns() - thread.waiting_since_ns));
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
