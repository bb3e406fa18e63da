#include "rounds.h"

#include <string.h>

#include "frame_file.h"
#include "gloo_frame.h"
#include "steps.h"

namespace tocsin {

struct Round {
  const void* work;  // key; null: free
  Communicator* communicator;
  tocsin_round* entry;  // null: not recorded
  uint64_t seq;
  uint64_t entered_ns;
  uint32_t signature;
  bool started;
};

__thread Thread t_thread;

namespace {

constexpr uint32_t kRoundsMax = 1024;  // in flight at once; more are counted in works_lost
constexpr uint32_t kProbesMax = 16;

Round g_rounds[kRoundsMax];
uint64_t g_last_enter_ns;

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

void release_open(tocsin_open& open) {
  store(open.send_steps, 0u);
  store(open.recv_steps, 0u);
  store(open.signature, TOCSIN_FRAME_SIGNATURE_UNKNOWN);
  store_release(open.seq, 0u);
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
    thread.slot = nullptr;
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
  const bool own = !work || (thread.round && load(thread.round->work) == work);
  Round* round = own ? thread.round : find_round(work);
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
    thread.slot = nullptr;
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

void point_to_point_done() {
  if (load_acquire(g_frame_state) == FRAME_ON) {
    store(g_frame->header.last_leave_ns, tocsin_now_ns());
  }
}

Posted* find_posted_further(Thread& thread, const void* buffer) {
  for (Posted& posted : thread.posted) {
    if (posted.buffer == buffer) {
      return &posted;
    }
  }
  return nullptr;
}

Posted* replace_posted(Thread& thread, const void* buffer) {
  Posted& posted = thread.posted[thread.replaced++ % kBuffersMax];
  posted = {buffer, {-1, -1}};
  return &posted;
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
