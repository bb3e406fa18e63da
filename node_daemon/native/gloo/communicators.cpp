#include "communicators.h"

#include <sched.h>
#include <string.h>

#include "gloo_frame.h"
#include "identity.h"
#include "rounds.h"
#include "symbols.h"

namespace tocsin {

namespace {

constexpr uint32_t kCommunicatorsMax = 128;  // alive at once; more are not followed
constexpr uint32_t kMemberSetsMax = 1024;    // different member lists in the life of the process
constexpr uint32_t kMoving = 0x80000000u;    // in `busy`: the slot is being taken away
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;

const void* g_groups[kCommunicatorsMax];  // keys, apart from the rest: the hot path reads only these
Communicator g_communicators[kCommunicatorsMax];
uint32_t g_used;  // keys at and above this one were never used
uint64_t g_creations;
FirstGroup g_first;

struct MemberSet {
  uint64_t hash;
  uint64_t communicators;
};
MemberSet g_member_sets[kMemberSetsMax];

uint32_t g_lock;

// Groups come, go and change slots rarely: a spin lock that a forked child can simply clear.
class Lock {
 public:
  Lock() {
    while (!swap_if<uint32_t>(g_lock, 0, 1)) {
      sched_yield();
    }
  }
  ~Lock() { store_release(g_lock, 0u); }
};

uint64_t mix(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * kGolden;
  return hash ^ (hash >> 29);
}

struct Members {
  const uint64_t* ranks = nullptr;  // null: 0 .. size-1
  uint32_t size = 0;                // 0: unknown
};

// The head of a std::vector: first element, behind the last one.
struct VectorHead {
  const uint64_t* first;
  const uint64_t* end;
};

// A group without a list is the world, if it has the world's size: torch leaves the world's list empty. Another group
// without a list (a helper group of torch's debug mode) could be anyone's and stays unknown.
Members members_of(const void* group, const Communicator& communicator) {
  void* known = load(g_real[SYMBOL_GROUP_RANKS]);
  const auto group_ranks = reinterpret_cast<const VectorHead* (*)(const void*)>(
      known ? known : resolve_optional(SYMBOL_GROUP_RANKS));
  const VectorHead* list = group_ranks ? group_ranks(group) : nullptr;
  if (list && list->end > list->first) {
    return {list->first, static_cast<uint32_t>(list->end - list->first)};
  }
  const int32_t world = g_first.size > 0 ? g_first.size : tocsin_env_number("WORLD_SIZE");
  const bool is_world = world > 0 && (communicator.group_size == world || communicator.group_size < 0);
  return {nullptr, is_world ? static_cast<uint32_t>(world) : 0};
}

// How many communicators had these members before; -1 where the table is full.
int64_t ordinal_of(uint64_t members_hash) {
  for (uint32_t i = 0; i < kMemberSetsMax; ++i) {
    MemberSet& set = g_member_sets[(members_hash + i) % kMemberSetsMax];
    if (set.communicators == 0 || set.hash == members_hash) {
      set.hash = members_hash;
      return static_cast<int64_t>(set.communicators++);
    }
  }
  return -1;
}

// This rank's position in the group where the constructor was not seen.
int32_t position_of(const Members& members, int32_t rank) {
  for (uint32_t i = 0; i < members.size && rank >= 0; ++i) {
    if ((members.ranks ? members.ranks[i] : i) == static_cast<uint64_t>(rank)) {
      return static_cast<int32_t>(i);
    }
  }
  return -1;
}

void identify(const void* group, Communicator& communicator) {
  const Members members = members_of(group, communicator);
  if (communicator.group_rank < 0) {
    communicator.group_rank = position_of(members, tocsin_env_number("RANK"));
  }
  const bool sound = members.size > 0 && communicator.group_rank >= 0 &&
                     static_cast<uint32_t>(communicator.group_rank) < members.size;
  uint64_t hash = mix(kGolden, members.size);
  for (uint32_t i = 0; i < members.size; ++i) {
    hash = mix(hash, members.ranks ? members.ranks[i] : i);
  }
  const int64_t ordinal = sound ? ordinal_of(hash) : -1;
  communicator.hidden = ordinal < 0;
  communicator.group_size = static_cast<int32_t>(members.size);
  const uint64_t id = mix(hash, static_cast<uint64_t>(ordinal));
  store_release(communicator.id, id ? id : 1);
}

// Identifies every group up to `creation`, oldest first, so that ordinals follow the order of creation.
void identify_up_to(uint64_t creation) {
  for (;;) {
    uint32_t oldest = kCommunicatorsMax;
    for (uint32_t i = 0; i < g_used; ++i) {
      const Communicator& candidate = g_communicators[i];
      if (g_groups[i] && candidate.id == 0 && candidate.creation <= creation &&
          (oldest == kCommunicatorsMax || candidate.creation < g_communicators[oldest].creation)) {
        oldest = i;
      }
    }
    if (oldest == kCommunicatorsMax) {
      return;
    }
    identify(g_groups[oldest], g_communicators[oldest]);
  }
}

Communicator* find(const void* group) {
  const uint32_t used = load_acquire(g_used);
  for (uint32_t i = 0; i < used; ++i) {
    if (load(g_groups[i]) == group) {
      return &g_communicators[i];
    }
  }
  return nullptr;
}

void release_slot(Communicator& communicator) {
  if (communicator.slot) {
    store_release(communicator.slot->comm_id, 0u);
    communicator.slot = nullptr;
  }
}

Communicator* register_group(const void* group, int32_t rank, int32_t size) {
  Communicator* stale = find(group);  // its destructor was not seen, and its memory is another group's now
  if (stale) {
    forget_rounds_of(*stale);
    release_slot(*stale);
    store(g_groups[stale - g_communicators], nullptr);
  }
  uint32_t index = 0;
  while (index < g_used && g_groups[index]) {
    ++index;
  }
  if (index == kCommunicatorsMax) {
    return nullptr;
  }
  Communicator& communicator = g_communicators[index];
  memset(&communicator, 0, sizeof communicator);
  communicator.creation = ++g_creations;
  communicator.group_rank = rank;
  communicator.group_size = size;
  store_release(g_groups[index], group);
  if (index >= g_used) {
    store_release(g_used, index + 1);
  }
  return &communicator;
}

// Takes away the slot that has been idle the longest; null where every communicator with a slot is busy.
tocsin_slot* evict() {
  for (uint32_t attempt = 0; attempt < TOCSIN_FRAME_SLOT_COUNT; ++attempt) {
    Communicator* idle = nullptr;
    for (uint32_t i = 0; i < g_used; ++i) {
      Communicator& candidate = g_communicators[i];
      if (g_groups[i] && candidate.slot && load(candidate.busy) == 0 &&
          (!idle || load(candidate.slot->t_enqueued_ns) < load(idle->slot->t_enqueued_ns))) {
        idle = &candidate;
      }
    }
    if (!idle) {
      return nullptr;
    }
    if (swap_if<uint32_t>(idle->busy, 0, kMoving)) {
      tocsin_slot* slot = idle->slot;
      memcpy(&idle->parked, slot, sizeof *slot);
      release_slot(*idle);
      __atomic_fetch_sub(&idle->busy, kMoving, __ATOMIC_ACQ_REL);
      add(g_frame->header.slots_reused, 1);
      return slot;
    }
  }
  return nullptr;
}

tocsin_slot* free_slot() {
  for (tocsin_slot& slot : g_frame->slots) {
    if (load(slot.comm_id) == 0) {
      return &slot;
    }
  }
  return evict();
}

void take_slot(Communicator& communicator) {
  tocsin_slot* slot = free_slot();
  if (!slot) {
    return;
  }
  tocsin_slot& content = communicator.parked;
  content.comm_id = 0;
  content.comm_size = static_cast<uint32_t>(communicator.group_size);
  content.comm_rank = static_cast<uint32_t>(communicator.group_rank);
  content.root = content.enqueued ? content.root : TOCSIN_FRAME_ROOT_NONE;
  content.count = content.enqueued ? content.count : TOCSIN_FRAME_COUNT_UNKNOWN;
  content.stride = content.stride ? content.stride : 1;
  content.enqueued += communicator.unfollowed;
  content.started += communicator.unfollowed;
  content.done += communicator.unfollowed;
  communicator.unfollowed = 0;
  memcpy(slot, &content, sizeof content);
  store_release(slot->comm_id, communicator.id);
  store_release(communicator.slot, slot);
}

}  // namespace

FirstGroup first_group() {
  const Lock lock;
  return g_first;
}

void group_made(const void* group, int32_t rank, int32_t size) {
  const Lock lock;
  if (g_first.size < 0) {
    g_first = {rank, size};
  }
  register_group(group, rank, size);
}

Communicator* group_ending(const void* group) {
  const Lock lock;
  Communicator* communicator = find(group);
  if (communicator && load_acquire(g_frame_state) != FRAME_OFF) {
    identify_up_to(communicator->creation);  // it counts in the ordinals of later groups, used or not
  }
  return communicator;
}

void group_ended(Communicator* communicator) {
  if (!communicator) {
    return;
  }
  const Lock lock;
  forget_rounds_of(*communicator);
  release_slot(*communicator);
  store(g_groups[communicator - g_communicators], nullptr);
}

Communicator* enter_communicator(const void* group) {
  Communicator* communicator = find(group);
  if (!communicator || !load_acquire(communicator->id)) {
    const Lock lock;
    communicator = communicator ? communicator : register_group(group, -1, -1);
    if (communicator && communicator->id == 0) {
      identify_up_to(communicator->creation);
    }
  }
  if (!communicator || communicator->hidden) {
    add(g_frame->header.works_lost, 1);
    return nullptr;
  }
  const uint32_t busy = add_release(communicator->busy, 1);
  if ((busy & kMoving) || !load_acquire(communicator->slot)) {
    const Lock lock;
    if (!communicator->slot) {
      take_slot(*communicator);
    }
    if (!communicator->slot) {
      ++communicator->enqueued;
      ++communicator->unfollowed;
      add_release(communicator->busy, -1);
      add(g_frame->header.works_lost, 1);
      return nullptr;
    }
  }
  return communicator;
}

bool communicators_untouched() { return load(g_lock) == 0 && load(g_creations) == 0; }

void forget_communicators() {
  memset(g_groups, 0, sizeof g_groups);
  memset(g_member_sets, 0, sizeof g_member_sets);
  g_used = 0;
  g_creations = 0;
  g_first = FirstGroup();
  store_release(g_lock, 0u);
}

}  // namespace tocsin
