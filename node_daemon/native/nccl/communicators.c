#include "communicators.h"

#include <sched.h>

#include "frame_file.h"
#include "nccl_frame.h"

communicator g_communicators[COMMUNICATORS_MAX];
way g_ways[COMMUNICATORS_MAX * WAYS] = {[0 ... COMMUNICATORS_MAX * WAYS - 1] = {.step_key = STEP_KEY_NONE}};

static uint32_t g_lock;  // of slots and of the table
static uint32_t g_generation;

enum { kMovesMax = 4 };

static const uint64_t kOthersWait_ns = 1000000000;

// Never waited for: who does not get it goes on without, and tries again at its next round.
static bool try_lock(void) { return SWAP_IF(g_lock, 0, 1); }
static void unlock(void) { STORE_RELEASE(g_lock, 0); }

// For the making and ending of communicators alone, and not for ever: who is waited for may have been stopped.
static bool lock(void) {
  const uint64_t give_up_ns = tocsin_now_ns() + kOthersWait_ns;
  bool locked = try_lock();
  while (!locked && tocsin_now_ns() < give_up_ns) {
    sched_yield();
    locked = try_lock();
  }
  return locked;
}

// -- steps that are counted while their communicator gets a slot ---------------------------------------------------------

static void aim(way* on, tocsin_slot* slot, uint32_t index) {
  tocsin_channel* channel = (tocsin_channel*)slot->lanes + (index >> 1);
  const bool is_send = index & HANDLE_SEND;
  STORE(on->state, is_send ? &channel->send_state : &channel->recv_state);
  STORE(on->steps, is_send ? &channel->send_steps : &channel->recv_steps);
  STORE(on->total, is_send ? &slot->send_steps : &slot->recv_steps);
  STORE(on->bytes, &slot->bytes);
  STORE(on->open_seq, &slot->open[0].seq);
  STORE(on->open_steps, is_send ? &slot->open[0].send_steps : &slot->open[0].recv_steps);
}

static way* ways_of(const communicator* owner) { return g_ways + (owner - g_communicators) * WAYS; }

static void aim_ways(communicator* owner, tocsin_slot* slot) {
  for (uint32_t i = 0; i < WAYS; ++i) {
    aim(&ways_of(owner)[i], slot, i);
  }
}

#define FETCH(to, from) ADD(to, __atomic_exchange_n(&(from), 0, __ATOMIC_RELAXED))

// Whatever was counted in `parked` by steps that had looked before their communicator got this slot.
void fetch_steps(communicator* owner, tocsin_slot* slot) {
  tocsin_slot* parked = &owner->parked;
  FETCH(slot->send_steps, parked->send_steps);
  FETCH(slot->recv_steps, parked->recv_steps);
  FETCH(slot->bytes, parked->bytes);
  for (size_t i = 0; i < TOCSIN_FRAME_OPEN_COUNT; ++i) {
    const uint32_t sent = __atomic_exchange_n(&parked->open[i].send_steps, 0, __ATOMIC_RELAXED);
    const uint32_t received = __atomic_exchange_n(&parked->open[i].recv_steps, 0, __ATOMIC_RELAXED);
    if (LOAD(slot->open[i].seq) == LOAD(parked->open[i].seq)) {  // else of a round that is over
      ADD(slot->open[i].send_steps, sent);
      ADD(slot->open[i].recv_steps, received);
    }
  }
  for (size_t i = 0; i < TOCSIN_FRAME_LANE_COUNT; ++i) {
    tocsin_channel* to = (tocsin_channel*)slot->lanes + i;
    tocsin_channel* from = (tocsin_channel*)parked->lanes + i;
    FETCH(to->send_steps, from->send_steps);
    FETCH(to->recv_steps, from->recv_steps);
  }
}

static void clear_steps(tocsin_slot* slot) {
  slot->send_steps = slot->recv_steps = slot->bytes = 0;
  for (size_t i = 0; i < TOCSIN_FRAME_OPEN_COUNT; ++i) {
    slot->open[i].send_steps = slot->open[i].recv_steps = 0;
  }
  for (size_t i = 0; i < TOCSIN_FRAME_LANE_COUNT; ++i) {
    tocsin_channel* channel = (tocsin_channel*)slot->lanes + i;
    channel->send_steps = channel->recv_steps = 0;
  }
}

void aim_way(communicator* owner, way* on, tocsin_slot* slot) { aim(on, slot, (uint32_t)(on - ways_of(owner))); }

// STEP_KEY_NONE: closed.
static void open_ways(communicator* owner, uint32_t step_key) {
  for (uint32_t i = 0; i < WAYS; ++i) {
    STORE_RELEASE(ways_of(owner)[i].step_key, step_key);
  }
}

// -- moves --------------------------------------------------------------------------------------------------------------

// Word by word, for another thread may write meanwhile; then the copy is not used. The id is left to the caller.
static void copy_slot(tocsin_slot* to, const tocsin_slot* from) {
  _Static_assert(sizeof *to % sizeof(uint64_t) == 0 && offsetof(tocsin_slot, comm_id) == 0, "words, the id first");
  uint64_t* target = (uint64_t*)to;
  const uint64_t* source = (const uint64_t*)from;
  for (size_t i = 1; i < sizeof *to / sizeof(uint64_t); ++i) {
    STORE(target[i], LOAD(source[i]));
  }
}

// False where anything began since `seen`.
static bool moved(communicator* owner, uint64_t seen, uint32_t place) {
  return SWAP_IF(owner->hold, seen, (seen & ~(uint64_t)0xFFFF) | place);
}

// Gives a slot to a communicator that the caller, and nobody else, holds at this moment.
static bool move_in(communicator* owner, tocsin_slot* to) {
  for (int attempt = 0; attempt < kMovesMax; ++attempt) {
    const uint64_t seen = LOAD_ACQUIRE(owner->hold);
    if (HOLD_EVENTS(seen) != 1) {
      continue;
    }
    copy_slot(to, &owner->parked);
    clear_steps(to);
    if (moved(owner, seen, (uint32_t)((uint64_t*)to - (uint64_t*)g_frame))) {
      aim_ways(owner, to);
      fetch_steps(owner, to);
      STORE_RELEASE(to->comm_id, owner->id);
      return true;
    }
  }
  return false;
}

// Takes away the slot of a communicator on which nothing is under way.
static bool move_out(communicator* owner) {
  const uint64_t seen = LOAD_ACQUIRE(owner->hold);
  if (HOLD_EVENTS(seen) || HOLD_TRANSFERS(seen)) {
    return false;
  }
  tocsin_slot* from = slot_of(owner);
  copy_slot(&owner->parked, from);
  if (!moved(owner, seen, PARKED)) {
    clear_steps(&owner->parked);
    return false;
  }
  aim_ways(owner, &owner->parked);
  STORE_RELEASE(from->comm_id, 0);
  return true;
}

static bool has_slot(const communicator* candidate) {
  return LOAD(candidate->generation) && HOLD_PLACE(LOAD(candidate->hold)) != PARKED;
}

// Its newest round is over, or it cannot be known whether it is; and none of its transfers counts steps.
static bool is_idle(communicator* candidate) {
  const tocsin_slot* slot = slot_of(candidate);
  const bool over = (LOAD(slot->unknown) & TOCSIN_UNTOLD_DONE) || LOAD(slot->done) >= LOAD(slot->enqueued);
  return over && !HOLD_TRANSFERS(LOAD(candidate->hold));
}

// Takes away the slot of the communicator that has been idle the longest, null where all are busy.
static tocsin_slot* evict(void) {
  communicator* idle = NULL;
  for (size_t i = 0; i < COMMUNICATORS_MAX; ++i) {
    communicator* candidate = &g_communicators[i];
    if (has_slot(candidate) && is_idle(candidate) &&
        (!idle || LOAD(slot_of(candidate)->t_enqueued_ns) < LOAD(slot_of(idle)->t_enqueued_ns))) {
      idle = candidate;
    }
  }
  tocsin_slot* slot = idle ? slot_of(idle) : NULL;
  if (!slot || !move_out(idle)) {
    return NULL;
  }
  ADD(g_frame->header.slots_reused, 1);
  return slot;
}

static tocsin_slot* free_slot(void) {
  for (size_t i = 0; i < TOCSIN_FRAME_SLOT_COUNT; ++i) {
    if (LOAD(g_frame->slots[i].comm_id) == 0) {
      return &g_frame->slots[i];
    }
  }
  tocsin_slot* slot = NULL;
  for (int attempt = 0; !slot && attempt < kMovesMax; ++attempt) {
    slot = evict();
  }
  return slot;
}

tocsin_slot* follow(communicator* owner) {
  if (HOLD_PLACE(LOAD_ACQUIRE(owner->hold)) == PARKED) {
    bool has_one = false;
    if (try_lock()) {
      tocsin_slot* slot = LOAD(owner->generation) ? free_slot() : NULL;
      has_one = slot && move_in(owner, slot);
      unlock();
    }
    if (!has_one) {
      ADD(g_frame->header.works_lost, 1);
    }
  }
  return slot_of(owner);
}

static uint32_t next_generation(void) {
  g_generation = g_generation % 0x7FFF + 1;
  return g_generation;
}

// Whoever still is counted in it stays so.
static void park(communicator* owner, uint64_t forgotten) {
  uint64_t seen = LOAD(owner->hold);
  while (!SWAP_IF(owner->hold, seen, seen & ~(forgotten | 0xFFFF))) {
    seen = LOAD(owner->hold);
  }
}

static communicator* claim(uint64_t id) {
  communicator* unused = NULL;
  for (size_t i = 0; i < COMMUNICATORS_MAX; ++i) {
    communicator* candidate = &g_communicators[i];
    if (!LOAD(candidate->generation)) {
      unused = unused ? unused : candidate;
    } else if (candidate->id == id) {
      return NULL;
    }
  }
  return unused;
}

uint64_t communicator_made(uint64_t id, int32_t ranks, int32_t rank, int* mask) {
  uint64_t handle = 0;
  if (!lock()) {
    return 0;
  }
  communicator* made = ranks > 0 && rank >= 0 && rank < ranks ? claim(id ? id : 1) : NULL;
  if (made) {
    for (size_t i = 1; i < sizeof *made / sizeof(uint64_t); ++i) {  // word by word: a late event may still look
      STORE(((uint64_t*)made)[i], 0);
    }
    park(made, HOLD_TRANSFER * 0xFFFF);
    made->id = id ? id : 1;
    made->mask = mask;
    made->parked.comm_size = (uint32_t)ranks;
    made->parked.comm_rank = (uint32_t)rank;
    made->parked.root = TOCSIN_FRAME_ROOT_NONE;
    made->parked.count = TOCSIN_FRAME_COUNT_UNKNOWN;
    made->parked.stride = 1;
    const uint32_t generation = next_generation();
    handle = HANDLE((uint32_t)(made - g_communicators) << 6 | generation << 17, KIND_COMMUNICATOR, 0);
    for (uint32_t i = 0; i < WAYS; ++i) {
      STORE(ways_of(made)[i].posted, 0);
      STORE(ways_of(made)[i].transfers, 0);
      STORE(ways_of(made)[i].peer, 0);
    }
    aim_ways(made, &made->parked);
    STORE_RELEASE(made->generation, generation);
    open_ways(made, HANDLE_KEY(HANDLE(handle, KIND_STEP, 0)));
  }
  unlock();
  return handle;
}

void communicator_gone(uint64_t handle) {
  communicator* gone = HANDLE_KIND(handle) == KIND_COMMUNICATOR ? communicator_of(handle) : NULL;
  if (!gone) {
    return;
  }
  const bool locked = lock();
  __atomic_store_n(&gone->generation, 0, __ATOMIC_SEQ_CST);
  open_ways(gone, STEP_KEY_NONE);
  const uint64_t give_up_ns = tocsin_now_ns() + kOthersWait_ns;
  uint64_t seen = __atomic_load_n(&gone->hold, __ATOMIC_SEQ_CST);
  while (HOLD_EVENTS(seen) && tocsin_now_ns() < give_up_ns) {  // events in hand end at once
    sched_yield();
    seen = __atomic_load_n(&gone->hold, __ATOMIC_SEQ_CST);
  }
  if (HOLD_PLACE(seen) != PARKED) {
    tocsin_slot* slot = slot_of(gone);
    park(gone, 0);
    STORE_RELEASE(slot->comm_id, 0);
  }
  if (locked) {
    unlock();
  }
}

void forget_communicators(void) {
  for (size_t i = 0; i < COMMUNICATORS_MAX; ++i) {
    if (LOAD(g_communicators[i].generation)) {
      STORE(g_communicators[i].generation, 0);
      open_ways(&g_communicators[i], STEP_KEY_NONE);
    }
    STORE(g_communicators[i].hold, (uint64_t)PARKED);  // the parent's other threads, which may have held it, are not here
  }
  unlock();
}
