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

A count that is not told lies between bounds: one received at least what it sent on but for its own chunk, and at least
what was sent to it but for the slots of a connection; one sent what its successor received, if that one waits and the
connection lives. A member of which nothing is told is bridged: data that all members between two others passed on has
lost one step's distance at each.

In a chain (broadcast) a member sends only what it received: it owes nothing when it stops, so the pile alone tells
where, and not whether the rank or the connection before it is to blame.

*Tree.* Let each member pass u parts up and d parts down; with k neighbours below it sends u + k d. Nothing is passed
up or down that did not come up from all below. A member that stopped after c parts holds all those above it, and what
comes down everywhere, at c, while the others could pass up more. So it is the lowest of those whose steps are the
fewest for their number of neighbours. That the tree is a heap (children of i: 2i + 1, 2i + 2) is believed only where
the healthy rounds fit it; else steps are compared with the member's own healthy rounds.

Counts that are null (NVLink under a stock NCCL) decide nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diagnosis.contracts.incident import Floats, Ints, State
from diagnosis.engine.lanes import Bools, Lanes, Longs, Now
from diagnosis.engine.presence import Signs
from diagnosis.engine.shapes import CHAIN_OPS, RING_OPS, SLOTS, heap_above, heap_links, is_heap
from diagnosis.evidence.signatures import Signature, signature_parts

PILE_UP_MIN = 2.0
PART_CLEAR = 0.02
STEP_CLEAR = 0.25


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


def find_cut(lanes: Lanes, now: Now, begun: Signs, comm: int, steps_per_round: Floats) -> Cut:
    """The cut in one communicator. `begun` (M,): as `presence` tells; `steps_per_round` (M,): steps sent per healthy
    round, NaN unknown."""
    members = lanes.of_comm(comm)
    ranks = lanes.rank[members]
    send, recv = now.send[members], now.recv[members]
    # What is enqueued may not have begun: its counts are then of no round, or of another.
    inside = now.heard[members] & ((now.state[members] == State.RUNNING) | (begun[members] > 0))
    send, recv = np.where(inside, send, np.nan), np.where(inside, recv, np.nan)
    if np.isnan(send).all() or (np.nan_to_num(send) == 0).all():
        return Cut(comm, (), None, "no transfer steps are told of this round")
    algorithm, operation = lanes.incident.communicators.algo[comm].upper(), _operation(lanes, now, members, inside)
    usual = steps_per_round[members]
    if algorithm.startswith("TREE"):
        whole = bool((inside | (begun[members] > 0)).all())
        return _in_tree(comm, ranks, send, recv, usual, whole)
    if not algorithm.startswith("RING") or operation.op not in RING_OPS | CHAIN_OPS:
        return _least(comm, ranks, send)
    if operation.op in CHAIN_OPS:
        return _in_chain(comm, ranks, send, recv, operation.root)
    return _in_ring(comm, ranks, send, recv)


def _operation(lanes: Lanes, now: Now, members: slice, inside: Bools) -> Signature:
    """What most members inside run."""
    told = now.signature[members][inside & (now.signature[members] >= 0)]
    if not len(told):
        return Signature()
    return signature_parts(lanes.incident.frames.signatures[int(np.bincount(told).argmax())])


def _in_ring(comm: int, ranks: Ints, send: Floats, recv: Floats) -> Cut:
    in_flight = _in_flight(send, recv)
    piled = in_flight >= PILE_UP_MIN
    ends = np.flatnonzero(piled & ~np.roll(piled, -1))
    if not len(ends):
        return _owing(comm, ranks, send, recv)
    worst = int(ends[np.argmin(_received(send, recv)[ends])])
    previous, rank, sent = int(ranks[worst - 1]), int(ranks[worst]), send[worst - 1]
    if np.isnan(send[worst]) and np.isnan(recv[worst]):
        return _at_silent(comm, ranks, send, recv, worst)
    pile = f"rank {previous} sent {_told(sent)} steps, rank {rank} received {_told(recv[worst])}"
    sure = not np.isnan([send[worst], recv[worst], sent]).any()
    taken = recv[worst] if not np.isnan(recv[worst]) else sent - SLOTS
    passed = _passed_on(send, recv, worst)
    if taken + 1 - passed >= 1:
        return Cut(comm, (rank,), None, f"{pile} and sent on {passed:.0f}: it stopped between two steps", sure)
    if not sure:
        return Cut(comm, (rank, previous), (previous, rank), pile)
    return Cut(comm, (), (previous, rank), f"{pile} and sent on all of them: the data between them is lost")


def _passed_on(send: Floats, recv: Floats, at: int) -> float:
    """Steps that a member sent: as told, else what its successor received, who would have received more."""
    return float(recv[(at + 1) % len(recv)] if np.isnan(send[at]) else send[at])


def _taken(send: Floats, recv: Floats, at: int) -> float:
    """The fewest steps that a member can have received: as told, else one less than it sent, or its successor took."""
    fewest = -np.inf
    for far in range(len(recv)):
        place = (at + far) % len(recv)
        if not np.isnan(recv[place]):
            return float(max(fewest, recv[place] - far))
        if not np.isnan(send[place]):
            fewest = max(fewest, send[place] - 1 - far)
    return float(fewest)


def _told(count: float) -> str:
    return "an unknown number of" if np.isnan(count) else f"{count:.0f}"


def _received(send: Floats, recv: Floats) -> Floats:
    """Steps received, or the fewest that may be (n,); infinite where nothing is told."""
    least = np.where(np.isnan(recv), np.maximum(send - 1, 0), recv)
    return np.where(np.isnan(least), np.inf, least)


def _in_flight(send: Floats, recv: Floats) -> Floats:
    """Steps sent to each position and not taken, the most that may be (n,); 0 where nothing is told.

    Behind members of which nothing is told, the first of them stands for all: what the last one told before them sent,
    one more for each of them, should have come out.
    """
    count = len(send)
    sent = np.where(np.isnan(send), recv + 1, send)
    received = np.where(np.isnan(recv), np.maximum(send - 1, 0), recv)
    result = np.zeros(count)
    told = np.flatnonzero(~np.isnan(sent))
    for number, place in enumerate(told.tolist()):
        before = int(told[number - 1])
        gap = (place - before) % count or count
        if gap < count:
            result[(before + 1) % count] = sent[before] + gap - 1 - received[place]
    return result


def _at_silent(comm: int, ranks: Ints, send: Floats, recv: Floats, first: int) -> Cut:
    """The pile ends before members of which nothing is told: it is one of them, or a connection between."""
    count = len(ranks)
    silent = [first]
    while len(silent) < count and np.isnan(send[(silent[-1] + 1) % count]) and np.isnan(recv[(silent[-1] + 1) % count]):
        silent.append((silent[-1] + 1) % count)
    beyond = (silent[-1] + 1) % count
    previous, following = int(ranks[first - 1]), int(ranks[beyond])
    passed = _passed_on(send, recv, beyond)
    if recv[beyond] + 1 - passed >= 1 and passed - _taken(send, recv, (beyond + 1) % count) < SLOTS:
        words = f"rank {following} received {recv[beyond]:.0f} steps and sent {passed:.0f}"
        sure = not np.isnan(send[beyond])
        return Cut(comm, (following,), None, f"{words}: it owes the next, and its successor has room for it", sure)
    words = f"what rank {previous} sent did not reach rank {following}; nothing is told of those between"
    return Cut(comm, tuple(int(ranks[at]) for at in silent), (previous, int(ranks[first])), words)


def _owing(comm: int, ranks: Ints, send: Floats, recv: Floats) -> Cut:
    """No pile-up: the one member that could have sent on and did not."""
    # Who has sent as much as anybody may have sent all: a round has no more steps than its busiest member made.
    owing = np.flatnonzero((np.nan_to_num(recv + 1 - send) >= 1) & (send < np.nanmax(send)))
    if len(owing) == 1:
        at = int(owing[0])
        words = f"rank {ranks[at]} received {recv[at]:.0f} steps and sent {send[at]:.0f}: it owes the next"
        return Cut(comm, (int(ranks[at]),), None, words)
    return Cut(comm, (), None, "the transfer steps of all members are alike")


def _in_chain(comm: int, ranks: Ints, send: Floats, recv: Floats, root: int | None) -> Cut:
    """A broadcast: the last member with data before it that it did not take."""
    start = np.flatnonzero(ranks == root)
    if root is None or len(start) != 1:
        return Cut(comm, (), None, "the steps of a broadcast tell nothing without its root")
    order = np.roll(np.arange(len(ranks)), -int(start[0]))
    waiting = np.nan_to_num(send[order][:-1] - recv[order][1:])
    piled = np.flatnonzero(waiting >= 1)
    if not len(piled):
        return Cut(comm, (), None, "all that was sent was taken")
    at, before = order[int(piled[-1]) + 1], order[int(piled[-1])]
    words = f"rank {ranks[before]} sent {send[before]:.0f} steps, rank {ranks[at]} received {recv[at]:.0f}"
    return Cut(comm, (int(ranks[at]), int(ranks[before])), (int(ranks[before]), int(ranks[at])), words)


def _least(comm: int, ranks: Ints, send: Floats) -> Cut:
    """An algorithm of unknown shape: the member with the fewest steps, if all are told and it is clearly alone."""
    order = np.argsort(send, kind="stable")
    if not np.isnan(send).any() and len(order) > 2 and send[order[1]] - send[order[0]] >= PILE_UP_MIN:
        at = int(order[0])
        return Cut(comm, (int(ranks[at]),), None, f"rank {ranks[at]} sent {send[at]:.0f} steps, the least of all")
    return Cut(comm, (), None, "the transfer steps tell nobody apart")


def _in_tree(comm: int, ranks: Ints, send: Floats, recv: Floats, usual: Floats, whole: bool) -> Cut:
    """`whole`: all members have begun; else a silent one may be missing."""
    if not whole:
        return Cut(comm, (), None, "members are silent, and nothing shows that they have begun")
    heap = is_heap(usual)
    links = heap_links(len(ranks))
    with np.errstate(invalid="ignore", divide="ignore"):
        inner = np.isnan(send) & (links > 1)  # what came up and down there is as much as what went
        part = np.where(inner, recv, send) / links if heap else np.where(usual > 0, send / usual, np.nan)
    if np.isnan(part).all():
        return _least(comm, ranks, send)
    part = np.where(np.isnan(part), np.inf, part)
    least = np.flatnonzero(part <= part.min() + (STEP_CLEAR if heap else PART_CLEAR))
    if heap:
        least = _lowest(least)
    if len(least) != 1:
        return Cut(comm, (), None, f"{len(least)} members of the tree did the same least part of their steps")
    at = int(least[0])
    words = f"rank {ranks[at]} sent {send[at]:.0f} steps over {links[at]:.0f} connections, the least of all below it"
    if not heap:
        words = f"rank {ranks[at]} sent {send[at]:.0f} of its usual {usual[at]:.0f} steps, the least part of all"
    below = [place for place in (2 * at + 1, 2 * at + 2) if heap and place < len(ranks) and np.isinf(part[place])]
    if below:
        words += f"; nothing is told of {len(below)} of those"
    return Cut(comm, tuple(int(ranks[place]) for place in (at, *below)), None, words, heap and not below)


def _lowest(tied: Longs) -> Longs:
    """Those of the tied positions of a heap that have no tied one beneath them: one that stopped holds up all above."""
    above = {place for position in tied.tolist() for place in heap_above(position)}
    return np.array([position for position in tied.tolist() if position not in above], np.int64)
