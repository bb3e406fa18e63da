// Which communicator a process group of torch is, and which slot of the frame it has.
//
// A communicator's id must be equal on all its members although they never talk: it is a hash of the members' global
// ranks and of the communicator's ordinal among those with the same members, in order of creation (creating a group is
// itself a collective act, so every member counts alike). torch fills in the members after the constructor, so the id
// is made at the group's first collective, together with the ids of all groups that were created before it.
//
// A frame has 16 slots. A communicator that finds none takes the slot that has been idle the longest; the evicted one
// keeps its figures in private memory and gets them back with its next slot.
#pragma once

#include <stdint.h>

#include "atomics.h"
#include "recording.h"
#include "tocsin_frame.h"

namespace tocsin {

struct Communicator {
  uint64_t id;           // 0: not identified yet
  uint64_t creation;     // order among the process's groups
  int32_t group_rank;    // as given to the constructor, -1 where it was not seen
  int32_t group_size;
  uint32_t busy;         // rounds entered and not left, and MOVING
  uint32_t hidden;       // members unknown: never followed
  tocsin_slot* slot;     // null: none at the moment
  uint64_t enqueued;     // rounds entered, with or without a slot
  uint64_t unfollowed;   // rounds entered without a slot that the slot's counters do not show yet
  tocsin_recording recording;  // of the entries in slot->rounds
  tocsin_slot parked;    // the slot's content while another communicator has it
};

struct FirstGroup {
  int32_t rank = -1;
  int32_t size = -1;
};

// The first process group that this process made, which in torch is the world.
FirstGroup first_group();

void group_made(const void* group, int32_t rank, int32_t size);

// Around the real destructor: `group_ending` before it, `group_ended` with its answer after it.
Communicator* group_ending(const void* group);  // null: not known
void group_ended(Communicator* communicator);  // null: nothing to do

// The communicator of a group with a slot, and one more busy round; null where it cannot be followed (counted).
Communicator* enter_communicator(const void* group);
inline void leave_communicator(Communicator& communicator) { add_release(communicator.busy, -1); }

// In the child of a fork. Untouched: there is nothing to forget, and no thread was at it.
bool communicators_untouched();
void forget_communicators();

}  // namespace tocsin
