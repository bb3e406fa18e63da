// Who owns each moment of the window: the rule of diagnosis/evidence/critical_path.py in one pass over all classes.
//
// Executions in the order of their beginnings go on a stack of their class, whose ends fall from bottom to top: whoever
// would end before the new one can own no moment any more and is taken off. A moment belongs to the top of the first
// class, by priority, that has one. A class runs as long as its stack's bottom does.
#include <algorithm>

#include "condenser.h"

namespace tocsin {
namespace {

struct Stack {
  uint32_t* entries;
  uint32_t depth;
};

struct Sweep {
  Condenser& condenser;
  Stack stacks[TOCSIN_KINDS];

  const Execution& top(const Stack& stack) const { return condenser.executions[stack.entries[stack.depth - 1]]; }
  const Execution& bottom(const Stack& stack) const { return condenser.executions[stack.entries[0]]; }

  // Takes off what has ended, and finds how far the state that remains holds. False: nothing runs.
  bool settle(uint64_t now, uint64_t& until, const Execution*& owner) {
    owner = nullptr;
    bool runs = false;
    for (Stack& stack : stacks) {
      while (stack.depth && top(stack).end <= now) {
        --stack.depth;
      }
      if (stack.depth) {
        runs = true;
        owner = owner ? owner : &top(stack);
        until = std::min(until, bottom(stack).end);
      }
    }
    if (owner) {
      until = std::min(until, owner->end);
    }
    return runs;
  }

  void own(uint64_t now, uint64_t until) {
    tocsin_window_header& told = condenser.told;
    while (now < until) {
      uint64_t upto = until;
      const Execution* owner;
      if (!settle(now, upto, owner)) {
        return;
      }
      const uint64_t length = upto - now;
      condenser.rows[owner->row].critical_ns += length;
      told.critical_ns[condenser.rows[owner->row].kind] += length;
      const bool compute = stacks[TOCSIN_KIND_COMPUTE].depth != 0, comm = stacks[TOCSIN_KIND_COMM].depth != 0;
      told.compute_ns += compute ? length : 0;
      told.comm_ns += comm ? length : 0;
      told.both_ns += compute && comm ? length : 0;
      now = upto;
    }
  }
};

bool begins_earlier(const Execution& one, const Execution& other) {
  if (one.start != other.start) {
    return one.start < other.start;
  }
  return one.end != other.end ? one.end > other.end : one.row < other.row;
}

}  // namespace

void sweep(Condenser& condenser) {
  if (condenser.told.unseen & TOCSIN_UNSEEN_CRITICAL) {
    return;
  }
  std::sort(condenser.executions, condenser.executions + condenser.execution_count, begins_earlier);
  Sweep over = {condenser, {}};
  for (uint32_t kind = 0; kind < TOCSIN_KINDS; ++kind) {
    over.stacks[kind] = {condenser.stacks + (size_t)kind * TOCSIN_WINDOW_EXECUTIONS_MAX, 0};
  }
  uint64_t now = 0;
  for (uint32_t i = 0; i < condenser.execution_count; ++i) {
    const Execution& one = condenser.executions[i];
    over.own(now, one.start);
    now = one.start;
    Stack& stack = over.stacks[condenser.rows[one.row].kind];
    while (stack.depth && over.top(stack).end <= one.end) {
      --stack.depth;
    }
    stack.entries[stack.depth++] = i;
  }
  over.own(now, kNever_ns);
}

}  // namespace tocsin
