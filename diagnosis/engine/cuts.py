"""Where a round stands still that all members have entered alike (H3): the cut in send and receive counts.

*Ring.* Position i sends to i + 1. A member that waits for data has received r steps and sent r + 1 (its own chunk
first); a member that waits for credit has sent as many as its neighbour's buffer holds beyond what that one received.
So when a ring stands still,

    in_flight_i = send of i - 1, less recv of i     data that was sent to i and not taken
    owed_i      = recv of i + 1 - send of i         steps that i could have sent and did not

A rank that stopped owes its next step and lets data pile up before it, and before those that wait for its credit: it
is the last of the pile, and nothing piles up behind it, where all wait for data. A connection that was cut owes
nothing: i has sent all it could, and the data before it never arrived. The lowest count alone is no proof: after a
cut it may stand at the wrong end, and rates drop together everywhere.

*Tree.* Members have different numbers of steps by role (root, inner, leaf), so counts are compared with the member's
own healthy rounds: the least part of its usual steps is where the tree stands still, the lowest one of equals.

Counts that are null (NVLink under a stock NCCL) decide nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diagnosis.contracts.incident import Floats, Ints, State
from diagnosis.engine.lanes import Lanes, Longs, Now

PILE_UP_MIN = 2.0
PART_CLEAR = 0.02


@dataclass(frozen=True, slots=True)
class Cut:
    """Where one communicator stands still. `ranks`: suspects, most guilty first; `edge`: (from, to) where the
    connection rather than a rank is suspected; `counts`: words for people; `sure`: the counts on both sides agree. No
    suspects: the counts do not tell."""

    comm: int
    ranks: tuple[int, ...]
    edge: tuple[int, int] | None
    counts: str
    sure: bool = False


def find_cut(lanes: Lanes, now: Now, comm: int, steps_per_round: Floats) -> Cut:
    """The cut in one communicator. `steps_per_round` (M,): steps sent per healthy round, NaN unknown."""
    members = lanes.of_comm(comm)
    ranks = lanes.rank[members]
    send, recv = now.send[members], now.recv[members]
    inside = now.heard[members] & (now.state[members] != State.DONE)
    send, recv = np.where(inside, send, np.nan), np.where(inside, recv, np.nan)
    if np.isnan(send).all() or (np.nan_to_num(send) == 0).all():
        return Cut(comm, (), None, "no transfer steps are told of this round")
    if lanes.incident.communicators.algo[comm].upper().startswith("TREE"):
        return _in_tree(comm, ranks, send, steps_per_round[members])
    return _in_ring(comm, ranks, send, recv, steps_per_round[members])


def _in_ring(comm: int, ranks: Ints, send: Floats, recv: Floats, usual: Floats) -> Cut:
    before = np.roll(send, 1)
    in_flight = before - recv
    owed = np.fmin(recv + 1, usual) - send
    piled = np.nan_to_num(in_flight) >= PILE_UP_MIN
    after = np.roll(in_flight, -1)  # unknown where the next member is silent: then it may be that one
    ends = np.flatnonzero(piled & (after < PILE_UP_MIN))
    if not len(ends):
        owing = np.flatnonzero(np.nan_to_num(owed) >= 1)
        if len(owing) == 1:
            at = int(owing[0])
            words = f"rank {ranks[at]} received {recv[at]:.0f} steps and sent {send[at]:.0f}: it owes the next"
            return Cut(comm, (int(ranks[at]),), None, words)
        return _least(comm, ranks, send)
    worst = int(ends[np.argmin(np.nan_to_num(recv[ends]))])
    previous, rank = int(ranks[worst - 1]), int(ranks[worst])
    pile = f"rank {previous} sent {before[worst]:.0f} steps, rank {rank} received {recv[worst]:.0f}"
    if np.isnan(owed[worst]):
        return Cut(comm, (rank, previous), (previous, rank), pile)
    if owed[worst] >= 1:
        return Cut(comm, (rank,), None, f"{pile} and sent on {send[worst]:.0f}: it stopped between two steps", True)
    return Cut(comm, (), (previous, rank), f"{pile} and sent on all of them: the data between them is lost")


def _least(comm: int, ranks: Ints, send: Floats) -> Cut:
    """No pile-up: the member with the fewest steps, if it is clearly alone."""
    counts = np.where(np.isnan(send), np.inf, send)
    order = np.argsort(counts, kind="stable")
    if len(order) > 1 and counts[order[1]] - counts[order[0]] >= PILE_UP_MIN:
        at = int(order[0])
        return Cut(comm, (int(ranks[at]),), None, f"rank {ranks[at]} sent {send[at]:.0f} steps, the least of all")
    return Cut(comm, (), None, "the transfer steps of all members are alike")


def _in_tree(comm: int, ranks: Ints, send: Floats, usual: Floats) -> Cut:
    with np.errstate(invalid="ignore", divide="ignore"):
        part = np.where(usual > 0, send / usual, np.nan)
    if np.isnan(part).all():
        return _least(comm, ranks, send)
    part = np.where(np.isnan(part), np.inf, part)
    least = np.flatnonzero(part <= part.min() + PART_CLEAR)
    if len(least) > 1:
        least = _lowest(least, usual)
    if len(least) != 1:
        return Cut(comm, (), None, f"{len(least)} members of the tree did the same least part of their steps")
    at = int(least[0])
    words = f"rank {ranks[at]} sent {send[at]:.0f} of its usual {usual[at]:.0f} steps, the least part of all below it"
    return Cut(comm, (int(ranks[at]),), None, words, _is_heap(usual) and _hears_children(at, send))


def _hears_children(at: int, send: Floats) -> bool:
    """Whether nobody beneath a position of the heap is silent: else it may be that one."""
    children = [place for place in (2 * at + 1, 2 * at + 2) if place < len(send)]
    return not np.isnan(send[children]).any() if children else True


def _lowest(tied: Longs, usual: Floats) -> Longs:
    """Those of the tied positions that have no tied one beneath them; all, where the tree's shape is not known.

    A member that stopped holds up its parent, that one's parent and so on to the root: the lowest is the cause. The
    shape is taken to be the heap (children of i: 2i + 1, 2i + 2) only if each member's usual steps fit its number of
    neighbours there.
    """
    if not _is_heap(usual):
        return tied
    parents = {(int(position) - 1) // 2 for position in tied if position > 0}
    return np.array([position for position in tied if int(position) not in parents], np.int64)


def _is_heap(usual: Floats) -> bool:
    """Whether usual steps fit the numbers of neighbours in a heap. A silent member has no usual steps."""
    count = len(usual)
    place = np.arange(count)
    neighbours = (place > 0).astype(np.float64) + (2 * place + 1 < count) + (2 * place + 2 < count)
    unit = usual / np.maximum(neighbours, 1)
    told = unit[np.isfinite(unit)]
    return len(told) >= max(2, count // 2) and bool(told.max() <= (1 + PART_CLEAR) * told.min())
