"""Hangs: who waits for whom, and who waits for nobody.

In a synchronous job one stuck rank stops all, so nobody's waiting time says anything. Only edges do. Each rank
inside a round waits for the members that have not entered that round; a receiver waits for its sender. A rank that
others wait for and that is itself inside nothing is the root (class H1, "not entered": CCL-D, PPoPP'26). Chains
through several communicators (TP, then DP, then PP) need no walk: everybody in the middle of a chain is inside a
round himself.

* Members of one round that run different operations are a divergent program (H2). The majority is right; a tie is
  decided by what the same round looks like in communicators of the same shape, else by nobody.
* If every blamed rank is itself inside some round, two or more ranks wait for each other in a circle: operations were
  called in a different order (H2 as well). Whoever is blamed by more ranks than he blames stands alone against the
  rest.
* A round that all have entered alike and that does not move is H3, and `cuts` says where it stands still.
* A rank without words is unseen. It is a suspect only if nobody alive explains the stall (a dump that is missing is
  evidence of nothing while somebody else stands outside: NVRx names a rank for its missing dump alone).

The host may run ahead of the GPU: then several rounds are enqueued on a rank and nobody knows which one it stands
in. A root has nothing enqueued at all, so its rule does not need to know. For the others: a round that is enqueued has
certainly not begun where the rank is seen running another one, where no step was made on a transport that counts them,
or where NCCL tells that it runs no kernel there; the rank is then as absent from it as one that has not called it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from diagnosis.contracts.incident import Kind, State
from diagnosis.engine.circles import find_circle
from diagnosis.engine.lanes import Bools, Lanes, Longs, Now, newest
from diagnosis.engine.presence import Signs, begun, filled
from diagnosis.engine.thresholds import Thresholds

HALTED = frozenset("TtXZ")
GONE = frozenset("XZ")
NAMED_MAX = 64


@dataclass(slots=True)
class Stall:
    """What stands still. Ranks as sorted lists.

    `left`: ranks alone inside a round that all others have left; `innermost`: communicators that all heard members have
    entered alike; `undecided`: communicators whose members run different operations without a majority; `circle`: ranks
    that wait for each other; `crossed`: the calls of its ranks contradict each other; `receivers`: (receiver, sender)
    of open point-to-point transfers where nothing else explains the stall; `silent`: ranks without words that the stall
    would need; `fell_silent`: they were heard before; `vague`: all roots leave the state of some communicator out.
    `begun` (M,): as `presence` tells. `mute` (W,): ranks without words that did send a frame.
    """

    quiet_ms: float
    stalled: Bools
    waiting: Bools
    unheard: Bools
    now: Now
    begun: Signs
    mute: Bools
    crossed: bool = False
    roots: list[int] = field(default_factory=list)
    waiters: dict[int, int] = field(default_factory=dict)
    entered: set[int] = field(default_factory=set)
    divergent: list[int] = field(default_factory=list)
    operations: dict[int, str] = field(default_factory=dict)
    undecided: list[int] = field(default_factory=list)
    circle: list[int] = field(default_factory=list)
    innermost: list[int] = field(default_factory=list)
    receivers: list[tuple[int, int]] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    silent: list[int] = field(default_factory=list)
    fell_silent: bool = False
    vague: bool = False


def longest_round_ms(lanes: Lanes) -> float:
    """The longest round that ended in any sample but a rank's newest, own time included; 0 where none is told."""
    frames = lanes.incident.frames
    earlier = lanes.nth_last[frames.frame] > 0
    with np.errstate(all="ignore"):
        spent = np.fmax(frames.dur_max_ms, 0.0) + np.nan_to_num(frames.gap_ms / frames.rounds)
    spent = spent[earlier & ~np.isnan(spent) & np.isfinite(spent)]
    return float(spent.max(initial=0.0))


def find_stall(lanes: Lanes, limits: Thresholds) -> Stall | None:
    """The hang of a job; None while it moves."""
    now = filled(lanes, newest(lanes))
    bound_ms = max(limits.hang_floor_s * 1000, limits.hang_factor * longest_round_ms(lanes))
    long = _long(lanes, now, bound_ms)
    stalled = lanes.members_in(long) > 0
    if not stalled.any():
        return None
    in_stall = stalled[lanes.comm]
    unheard, mute = _unheard(lanes, now, long), _mute(lanes, now)
    now = replace(now, heard=now.heard & ~unheard[lanes.rank])
    stands_nowhere = lanes.ranks_in(now.kept_out)[lanes.rank] & ~np.isnan(now.idle_seq)
    waiting = lanes.ranks_in(now.pending & ~stands_nowhere & in_stall)
    ages = now.age_ms[now.heard & ~np.isnan(now.age_ms) & in_stall]
    quiet_ms = float(ages.min()) if len(ages) else np.nan
    stall = Stall(quiet_ms, stalled, waiting, unheard, now, begun(lanes, now, stalled), mute)
    _find_divergence(lanes, stall)
    if not stall.divergent:
        _find_roots(lanes, stall)
    return stall


def _long(lanes: Lanes, now: Now, bound_ms: float) -> Bools:
    """Lanes that are inside a round for longer than the bound (M,).

    Where the age is not told, a rank that ended no round in its window is as long inside as the others are; where no
    age is told at all, that must be so of all ranks, and an earlier sample must show that it was not always so.
    """
    known, moved = ~np.isnan(now.age_ms), np.nan_to_num(now.rounds) > 0
    sure = now.pending & known & (now.age_ms >= bound_ms)
    if not sure.any() and (moved.any() or lanes.nth_last.max(initial=0) == 0):
        return sure
    return np.asarray(sure | (now.pending & ~known & ~lanes.ranks_in(moved)[lanes.rank]), np.bool_)


def _find_divergence(lanes: Lanes, stall: Stall) -> None:
    """H2: in one round of one communicator, members run different operations."""
    now, kind = stall.now, lanes.incident.communicators.kind
    counted = now.heard & (now.signature >= 0) & ~np.isnan(now.seq) & (kind[lanes.comm] != Kind.P2P)
    for comm in np.flatnonzero(stall.stalled & differ(lanes, now, counted)):
        members = lanes.of_comm(int(comm))
        lanes_here = np.arange(members.start, members.stop)[counted[members]]
        pending_seq = now.seq[lanes_here[now.pending[lanes_here]]]
        for seq in np.unique(pending_seq):
            vote(lanes, stall, int(comm), lanes_here[now.seq[lanes_here] == seq])


def differ(lanes: Lanes, now: Now, counted: Bools) -> Bools:
    """Communicators whose counted members do not all tell the same operation (C,)."""
    told = now.signature.astype(np.float64)
    least = lanes.over_members(np.where(counted, told, np.inf), np.minimum)
    most = lanes.over_members(np.where(counted, told, -np.inf), np.maximum)
    return np.asarray(most > least)


def vote(lanes: Lanes, stall: Stall, comm: int, here: Longs) -> None:
    """Who of the lanes `here`, all in one round, runs another operation than most: into `stall`, or `undecided`."""
    now, words = stall.now, lanes.incident.frames.signatures
    votes = Counter(int(code) for code in now.signature[here]).most_common()
    if len(votes) < 2:
        return
    right = votes[0][0]
    if votes[0][1] == votes[1][1]:
        tied = {code for code, count in votes if count == votes[0][1]}
        told = _clear(_same_shape(lanes, now, comm, here), tied)
        told = _clear(_run_before(lanes, comm), tied) if told is None else told
        if told is None:
            stall.undecided.append(comm)
            return
        right = told
    for lane in here[now.signature[here] != right]:
        rank = int(lanes.rank[lane])
        if len(stall.divergent) < NAMED_MAX and rank not in stall.divergent:
            stall.divergent.append(rank)
            stall.operations[rank] = f"{words[now.signature[lane]]} where the others run {words[right]}"
    stall.divergent.sort()


def _same_shape(lanes: Lanes, now: Now, comm: int, here: Longs) -> Counter[int]:
    """Operations of the same round in the other communicators of the same size and transport."""
    mask = lanes.kind == lanes.kind[comm]
    mask[comm] = False
    others = mask[lanes.comm] & now.heard & (now.seq == now.seq[here[0]]) & (now.signature >= 0)
    return Counter(int(code) for code in now.signature[others])


def _run_before(lanes: Lanes, comm: int) -> Counter[int]:
    """Operations that any communicator of the same size and transport ran in earlier samples: what a program repeats
    every step is right against what it never ran."""
    frames = lanes.incident.frames
    earlier = (lanes.nth_last[frames.frame] > 0) & (lanes.lane_of_row >= 0) & (frames.signature >= 0)
    rows = np.flatnonzero(earlier)
    rows = rows[lanes.kind[lanes.comm[lanes.lane_of_row[rows]]] == lanes.kind[comm]]
    return Counter(frames.signature[rows].tolist())


def _clear(votes: Counter[int], tied: set[int]) -> int | None:
    """The one of the tied operations that has most votes; None where none has, or two as many."""
    most = Counter({code: count for code, count in votes.items() if code in tied}).most_common(2)
    return None if not most or (len(most) == 2 and most[0][1] == most[1][1]) else most[0][0]


def _find_roots(lanes: Lanes, stall: Stall) -> None:
    blamed, behind = _blame(lanes, stall)
    idle = (blamed > 0) & ~stall.waiting & ~stall.unheard
    vague = lanes.ranks_in(stall.now.heard & (stall.now.state == State.UNKNOWN) & np.isnan(stall.now.idle_seq))
    stall.vague = bool(idle.any() and not (idle & ~vague).any())
    outside = np.flatnonzero(idle & (~vague | stall.vague))
    stall.left = _left_inside(lanes, stall)
    halted = [rank for rank, state in lanes.incident.process_state.items() if state in HALTED]
    halted = [rank for rank in halted if rank < lanes.world and (blamed[rank] > 0 or stall.waiting[rank])]
    stall.roots = sorted({int(rank) for rank in outside} | set(halted))[:NAMED_MAX]
    everybody = int(stall.waiting.sum())
    stall.waiters = {rank: int(blamed[rank]) or everybody - int(stall.waiting[rank]) for rank in stall.roots}
    stall.entered = {rank for rank in stall.roots if stall.waiting[rank]}
    _find_still(lanes, stall, lanes.members_in(behind) > 0)
    if stall.roots or stall.left:
        return
    # Each rank of a circle has called what the one before it waits in, and not what the next one has: whatever they
    # stand in now, no one order of calls fits them all.
    called = find_circle(lanes, stall.now.pending, behind & ~stall.now.pending)
    if called.ranks or (not stall.fell_silent and (stall.silent or not stall.innermost)):
        _find_circle(lanes, stall, behind)
    stall.crossed = bool(called.ranks)
    if called.ranks and not (stall.divergent and set(stall.divergent) <= set(called.ranks)):
        stall.circle, stall.divergent, stall.receivers = called.ranks, called.odd, []


def _find_still(lanes: Lanes, stall: Stall, someone_behind: Bools) -> None:
    """Rounds that nobody heard is missing in: all have entered, or only silent members can be missing.

    A silent rank that its neighbours' steps show inside one of these rounds is a victim there; a round that lacks it
    elsewhere waits for a victim and needs no other explanation.
    """
    steps, unheard = stall.begun, stall.unheard[lanes.rank]
    inside = lanes.members_in(_current(lanes, stall)) > 0
    seen_inside = lanes.ranks_in(unheard & (steps > 0) & stall.stalled[lanes.comm])[lanes.rank]
    may_lack = unheard & (steps <= 0)
    explained = lanes.members_in(may_lack & seen_inside) > 0
    suspects = may_lack & ~seen_inside
    still = stall.stalled & inside & ~someone_behind & ~explained
    fell_silent = suspects & _spoke_once(lanes)[lanes.rank]
    of_fallen = still & (lanes.members_in(fell_silent) > 0)
    if not stall.roots and not stall.left:
        stall.fell_silent = bool(of_fallen.any())
        if stall.fell_silent:
            _find_silent(lanes, stall, of_fallen, fell_silent)
        else:
            _find_silent(lanes, stall, still & (lanes.members_in(suspects) > 0), suspects)
    lacking = lanes.members_in(unheard & (steps < 0)) > 0
    is_p2p = lanes.incident.communicators.kind == Kind.P2P
    stall.innermost = [int(comm) for comm in np.flatnonzero(still & ~lacking & ~is_p2p)][:NAMED_MAX]


def _find_circle(lanes: Lanes, stall: Stall, behind: Bools) -> None:
    """Who waits for each other. A circle that somebody is to blame for is seen, so it goes before what is unheard."""
    found = find_circle(lanes, stall.now.pending & ~_queued(lanes, stall), behind)
    stall.divergent = found.odd
    if not stall.silent:
        stall.circle = found.ranks
        stall.receivers = _receivers(lanes, stall)


def _left_inside(lanes: Lanes, stall: Stall) -> list[int]:
    """Ranks alone inside a round that every other member has left: whatever is wrong is wrong with them."""
    now = stall.now
    collective = lanes.incident.communicators.kind[lanes.comm] != Kind.P2P
    told = now.heard & collective & ~np.isnan(now.done)
    least = lanes.over_members(np.where(told, now.done, np.inf), np.minimum)
    last = told & now.pending & (now.state == State.RUNNING) & (now.done == least[lanes.comm])
    alone = lanes.members_in(told & (now.done == least[lanes.comm])) == 1
    whole = lanes.members_in(told) == lanes.sizes
    chosen = last & (alone & whole & stall.stalled & (lanes.sizes > 1))[lanes.comm]
    return sorted({int(rank) for rank in lanes.rank[chosen]})[:NAMED_MAX]


def _unheard(lanes: Lanes, now: Now, long: Bools) -> Bools:
    """Ranks whose newest words are no words about now (W,): none at all, older than their node's, or full of rounds
    while somebody has long waited for them to enter one."""
    told = now.heard & (now.state != State.UNKNOWN)
    spoke = lanes.ranks_in(told)
    moving = _moving(lanes, now)
    wanted = lanes.over_members(np.where(long, now.done + 1, -1.0), np.maximum)
    missed = now.heard & (now.seq < wanted[lanes.comm])
    missing = lanes.ranks_in(missed)
    return ~spoke | (moving & missing) | _older_than_its_node(lanes)


def _moving(lanes: Lanes, now: Now) -> Bools:
    """Ranks that end rounds in their newest frame (W,)."""
    return lanes.ranks_in(now.heard & (np.nan_to_num(now.rounds) > 0))


def _mute(lanes: Lanes, now: Now) -> Bools:
    """Ranks that sent a frame about now in which no state is told (W,): alive, but unheard."""
    heard, told = lanes.ranks_in(now.heard), lanes.ranks_in(now.heard & (now.state != State.UNKNOWN))
    return heard & ~told & ~_moving(lanes, now) & ~_older_than_its_node(lanes)


def _spoke_once(lanes: Lanes) -> Bools:
    """Ranks that were ever heard (W,). A silence that began is an event, one that always was a gap in what came."""
    spoke = np.zeros(lanes.world, np.bool_)
    spoke[lanes.incident.frames.rank] = True
    return spoke


def _older_than_its_node(lanes: Lanes) -> Bools:
    """Ranks whose newest frame is older than those of their node by more than one and a half windows (W,)."""
    frames, job = lanes.incident.frames, lanes.incident.job
    last = np.flatnonzero(lanes.nth_last == 0)
    result = np.zeros(lanes.world, np.bool_)
    rank = frames.rank[last]
    node = job.node[rank]
    placed = node >= 0
    newest_of_node = np.full(len(job.node_names), -np.inf)
    times = np.nan_to_num(frames.t_ms[last], nan=-np.inf)
    np.maximum.at(newest_of_node, node[placed], times[placed])
    window = np.nan_to_num(frames.window_ms[last], nan=1000.0)
    result[rank[placed]] = times[placed] < newest_of_node[node[placed]] - 1.5 * window[placed]
    return result


def _blame(lanes: Lanes, stall: Stall) -> tuple[Longs, Bools]:
    """How many pending lanes wait for each rank to enter (W,), and which lanes are behind (M,)."""
    now, pending = stall.now, stall.now.pending
    kind = lanes.incident.communicators.kind
    p2p = kind[lanes.comm] == Kind.P2P
    waits = pending & stall.stalled[lanes.comm] & ~p2p
    wanted = lanes.over_members(np.where(waits, now.done + 1, -1.0), np.maximum)
    here = now.heard & ~p2p & stall.stalled[lanes.comm]
    behind = here & ((~pending & (now.seq < wanted[lanes.comm])) | _queued(lanes, stall))
    waiters = lanes.members_in(waits & (now.done + 1 >= wanted[lanes.comm]))
    blamed = np.zeros(lanes.world, np.int64)
    np.add.at(blamed, lanes.rank[behind], waiters[lanes.comm[behind]].astype(np.int64))
    receivers = np.flatnonzero(pending & p2p & stall.stalled[lanes.comm] & (now.state != State.ENQUEUED))
    peer = _peer_of(lanes, receivers)
    np.add.at(blamed, peer[peer >= 0], 1)
    return blamed, behind


def _queued(lanes: Lanes, stall: Stall) -> Bools:
    """Rounds that are enqueued and have not begun (M,): the rank is seen running another, no step was made, or its GPU
    says so."""
    now = stall.now
    running = _running(stall)
    untouched = ((now.send == 0) & (now.recv == 0)) | (stall.begun < 0)
    waits = now.pending & (now.state == State.ENQUEUED) & ~running
    return np.asarray(waits & (lanes.ranks_in(running)[lanes.rank] | untouched | now.kept_out), np.bool_)


def _running(stall: Stall) -> Bools:
    """Rounds that a rank is known to stand in (M,): it says so, or steps were made in one that it says is enqueued."""
    now = stall.now
    return np.asarray(now.pending & ((now.state == State.RUNNING) | (stall.begun > 0)), np.bool_)


def _peer_of(lanes: Lanes, receivers: Longs) -> Longs:
    """The sender that each receiving lane waits for, -1 unknown: as told, else the only other member."""
    frames = lanes.incident.frames
    told = np.full(lanes.count, -1, np.int64)
    rows = np.flatnonzero((lanes.nth_last[frames.frame] == 0) & (lanes.lane_of_row >= 0))
    told[lanes.lane_of_row[rows]] = frames.peer[rows]
    peer = told[receivers]
    for i in np.flatnonzero((peer < 0) | (peer >= lanes.world)):
        members = lanes.rank[lanes.of_comm(int(lanes.comm[receivers[i]]))]
        others = members[members != lanes.rank[receivers[i]]]
        peer[i] = others[0] if len(others) == 1 else -1
    return peer


def _current(lanes: Lanes, stall: Stall) -> Bools:
    """Pending lanes that a rank may stand in (M,): those known to run, or all where none is."""
    running = _running(stall)
    return np.asarray(running | (stall.now.pending & ~lanes.ranks_in(running)[lanes.rank]), np.bool_)


def _receivers(lanes: Lanes, stall: Stall) -> list[tuple[int, int]]:
    """Pending point-to-point receives as (receiver, sender), those that wait longest first; sender -1: unknown."""
    now, kind = stall.now, lanes.incident.communicators.kind
    open_lanes = np.flatnonzero(now.pending & (kind[lanes.comm] == Kind.P2P) & (now.state == State.RUNNING))
    oldest = open_lanes[np.argsort(-np.nan_to_num(now.age_ms[open_lanes]), kind="stable")][:NAMED_MAX]
    peers = _peer_of(lanes, oldest)
    return [(int(rank), int(peer)) for rank, peer in zip(lanes.rank[oldest], peers, strict=True)]


def _find_silent(lanes: Lanes, stall: Stall, comms: Bools, unheard: Bools) -> None:
    """The fewest silent ranks that explain the communicators in which only silent members can be missing."""
    unexplained = {int(comm) for comm in np.flatnonzero(comms)}
    while unexplained and len(stall.silent) < NAMED_MAX:
        votes: Counter[int] = Counter()
        for comm in sorted(unexplained)[:NAMED_MAX]:
            members = lanes.of_comm(comm)
            votes.update(int(rank) for rank in lanes.rank[members][unheard[members]])
        top = votes.most_common(1)[0][1]
        best = sorted(rank for rank, count in votes.items() if count == top)
        stall.silent += best if len(best) <= NAMED_MAX - len(stall.silent) else best[:1]
        of_best = set(best)
        for comm in sorted(unexplained):
            members = lanes.of_comm(comm)
            if of_best & {int(rank) for rank in lanes.rank[members][unheard[members]]}:
                unexplained.discard(comm)
        if not of_best:
            return
    stall.silent.sort()
