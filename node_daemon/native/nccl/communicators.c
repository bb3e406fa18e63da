#include "communicators.h"

#include <sched.h>

#include "nccl_frame.h"

communicator g_communicators[COMMUNICATORS_MAX];
way g_ways[COMMUNICATORS_MAX * WAYS];

static uint32_t g_lock;  // of slots and of the table
static uint32_t g_generation;

enum { kAttemptsMax = 100000 };

// Never waited for: who does not get it goes on without, and tries again at its next round.
static bool try_lock(void) { return SWAP_IF(g_lock, 0, 1); }
static void unlock(void) { STORE_RELEASE(g_lock, 0); }

// For the making and ending of communicators alone, and not for ever: a holder may have been stopped.
static bool lock(void) {
  for (uint32_t attempt = 0; attempt < kAttemptsMax; ++attempt) {
    if (try_lock()) {
      return true;
    }
    sched_yield();
  }
  return false;
}

// Word by word, for another thread may write a counter meanwhile: what it adds between the copy and the new aim of the
// ways is lost, for nobody waits here. Totals are therefore at most what was done. The id is left to the caller.
static void copy_slot(tocsin_slot* to, const tocsin_slot* from) {
  _Static_assert(sizeof *to % sizeof(uint64_t) == 0 && offsetof(tocsin_slot, comm_id) == 0, "words, the id first");
  uint64_t* target = (uint64_t*)to;
  const uint64_t* source = (const uint64_t*)from;
  for (size_t i = 1; i < sizeof *to / sizeof(uint64_t); ++i) {
    STORE(target[i], LOAD(source[i]));
  }
}

static way* ways_of(const communicator* owner) { return g_ways + (owner - g_communicators) * WAYS; }

static void aim_ways(communicator* owner, tocsin_slot* slot) {
  way* ways = ways_of(owner);
  for (uint32_t i = 0; i < WAYS; ++i) {
    tocsin_channel* channel = (tocsin_channel*)slot->lanes + (i >> 1);
    const bool is_send = i & HANDLE_SEND;
    STORE(ways[i].state, is_send ? &channel->send_state : &channel->recv_state);
    STORE(ways[i].steps, is_send ? &channel->send_steps : &channel->recv_steps);
    STORE(ways[i].total, is_send ? &slot->send_steps : &slot->recv_steps);
    STORE(ways[i].bytes, &slot->bytes);
    STORE(ways[i].open_seq, &slot->open[0].seq);
    STORE(ways[i].open_steps, is_send ? &slot->open[0].send_steps : &slot->open[0].recv_steps);
  }
}

// 0: closed.
static void open_ways(communicator* owner, uint32_t step_key) {
  for (uint32_t i = 0; i < WAYS; ++i) {
    STORE_RELEASE(ways_of(owner)[i].step_key, step_key);
  }
}

// An entry of the rounds stands at the same place in either slot.
static void move_to(communicator* owner, tocsin_slot* to) {
  tocsin_slot* from = owner->slot;
  copy_slot(to, from);
  for (size_t i = 0; i < ROUNDS_MAX; ++i) {
    tocsin_round* entry = LOAD(owner->rounds[i].entry);
    if (entry) {
      STORE(owner->rounds[i].entry, to->rounds + (entry - from->rounds));
    }
  }
  if (to != &owner->parked) {
    STORE_RELEASE(to->comm_id, owner->id);
  }
  STORE_RELEASE(owner->slot, to);
  aim_ways(owner, to);
  if (from != &owner->parked) {
    STORE_RELEASE(from->comm_id, 0);
  }
}

static bool has_slot(const communicator* candidate) {
  return LOAD(candidate->generation) && LOAD(candidate->slot) != &candidate->parked;
}

// Its newest round is over, or it cannot be known whether it is; and none of its transfers counts steps.
static bool is_idle(const communicator* candidate) {
  const tocsin_slot* slot = LOAD(candidate->slot);
  const bool over = (LOAD(slot->unknown) & TOCSIN_UNTOLD_DONE) || LOAD(slot->done) >= LOAD(slot->enqueued);
  return over && LOAD(candidate->transfers) <= 0;
}

// Takes away the slot of the communicator that has been idle the longest, null where all are busy.
static tocsin_slot* evict(void) {
  communicator* idle = NULL;
  for (size_t i = 0; i < COMMUNICATORS_MAX; ++i) {
    communicator* candidate = &g_communicators[i];
    if (has_slot(candidate) && is_idle(candidate) &&
        (!idle || LOAD(candidate->slot->t_enqueued_ns) < LOAD(idle->slot->t_enqueued_ns))) {
      idle = candidate;
    }
  }
  if (!idle) {
    return NULL;
  }
  tocsin_slot* slot = idle->slot;
  move_to(idle, &idle->parked);
  ADD(g_frame->header.slots_reused, 1);
  return slot;
}

static tocsin_slot* free_slot(void) {
  for (size_t i = 0; i < TOCSIN_FRAME_SLOT_COUNT; ++i) {
    if (LOAD(g_frame->slots[i].comm_id) == 0) {
      return &g_frame->slots[i];
    }
  }
  return evict();
}

void follow(communicator* owner) {
  if (LOAD(owner->slot) != &owner->parked) {
    return;
  }
  tocsin_slot* slot = NULL;
  if (try_lock()) {
    slot = LOAD(owner->generation) ? free_slot() : NULL;
    if (slot) {
      move_to(owner, slot);
    }
    unlock();
  }
  if (!slot) {
    ADD(g_frame->header.works_lost, 1);
  }
}

static uint32_t next_generation(void) {
  g_generation = g_generation % 0x7FFF + 1;
  return g_generation;
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
    for (size_t i = 0; i < sizeof *made / sizeof(uint64_t); ++i) {  // word by word: a late event may still look
      STORE(((uint64_t*)made)[i], 0);
    }
    made->id = id ? id : 1;
    made->mask = mask;
    made->parked.comm_size = (uint32_t)ranks;
    made->parked.comm_rank = (uint32_t)rank;
    made->parked.root = TOCSIN_FRAME_ROOT_NONE;
    made->parked.count = TOCSIN_FRAME_COUNT_UNKNOWN;
    made->parked.stride = 1;
    made->slot = &made->parked;
    const uint32_t generation = next_generation();
    handle = HANDLE((uint32_t)(made - g_communicators) << 6 | generation << 17, KIND_COMMUNICATOR, 0);
    for (uint32_t i = 0; i < WAYS; ++i) {
      STORE(ways_of(made)[i].posted, 0);
    }
    aim_ways(made, made->slot);
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
  STORE_RELEASE(gone->generation, 0);
  open_ways(gone, 0);
  if (gone->slot != &gone->parked) {
    STORE_RELEASE(gone->slot->comm_id, 0);
  }
  if (locked) {
    unlock();
  }
}

void forget_communicators(void) {
  for (size_t i = 0; i < COMMUNICATORS_MAX; ++i) {
    if (LOAD(g_communicators[i].generation)) {
      STORE(g_communicators[i].generation, 0);
      open_ways(&g_communicators[i], 0);
    }
  }
  unlock();
}
