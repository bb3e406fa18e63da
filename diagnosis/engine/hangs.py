"""Hangs: who waits for whom, and who waits for nobody.

In a synchronous job one stuck rank stops all. Each rank stands at its oldest open round of some communicator; it
waits for the members that have not entered that round. Follow the edges: a rank that others wait for and that itself
waits for nobody is the root (class H1, "not entered": CCL-D, PPoPP'26). What the roots have in common with victims is
that nobody makes progress, so waiting time says nothing; only the edges do.

A root is named even where other members are silent: it stands outside every round by itself, whatever they do.
A rank inside a round that all have entered waits as well, though no edge of this kind says for whom: it is no root
unless the node daemon's word about its process makes it one (a process that is stopped or gone will never take its
next step). Often some members have already left that round and wait in the next one for those still inside. If all
processes live, the cut lies inside the library or the network (H3) and this module says what would decide it. Members
of one round whose operation signatures differ are a program's divergence (H2): the minority is named, a tie is left
undecided.

Never guessed: a rank whose node is silent is unseen, not stuck.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from diagnosis.contracts.report import CommState
from diagnosis.engine.history import CommHistory, JobHistory, MemberNow, RankNow

STOPPED = frozenset("Tt")
GONE = frozenset("XZ")


@dataclass(frozen=True, slots=True)
class Root:
    """One guilty rank. `entered`: it is inside the round with the others, stopped there."""

    rank: RankNow
    waiters: int
    entered: bool


@dataclass(slots=True)
class Hang:
    """Findings. `class_` None: not decided. `missing`: members that nobody has heard of lately."""

    class_: str | None
    quiet_s: float
    roots: list[Root] = field(default_factory=list)
    waiting: int = 0
    missing: list[str] = field(default_factory=list)
    divergent: list[RankNow] = field(default_factory=list)
    tie: bool = False
    cycle: bool = False


def bound_s(history: JobHistory) -> float:
    """How long a job may be quiet before that is suspicious."""
    limits = history.limits
    if history.rounds_seen <= limits.warmup_rounds:
        return max(limits.startup_floor_s, limits.hang_floor_s)
    return max(limits.hang_floor_s, limits.hang_factor * history.longest_round_s)


def find_hang(history: JobHistory, now: float, share: float = 1.0) -> Hang | None:
    """The hang of a job, or None while it moves. `share` < 1 asks earlier: a suspicion, to collect evidence by."""
    quiet_since = history.quiet_since
    if quiet_since is None or now - quiet_since < share * bound_s(history):
        return None
    waiting = _waiting(history, now)
    if not waiting:
        return None
    hang = Hang(class_=None, quiet_s=now - quiet_since, waiting=len(waiting))
    _find_divergence(history, waiting, hang)
    if hang.class_ is None and not hang.tie:
        _find_roots(history, waiting, now, hang)
    return hang


def _fresh(history: JobHistory, member: MemberNow, now: float) -> bool:
    rank = history.ranks[member.rank]
    return now - rank.measured_at <= history.limits.stale_after_s and member.measured_at == rank.measured_at


def _waiting(history: JobHistory, now: float) -> dict[int, tuple[CommHistory, MemberNow]]:
    """For each rank inside a round: where. A rank inside several stands in the one that it entered first."""
    found: dict[int, tuple[CommHistory, MemberNow]] = {}
    for comm in history.comms.values():
        for member in comm.members.values():
            if member.state != CommState.RUNNING or not _fresh(history, member, now):
                continue
            known = found.get(member.rank)
            if known is None or member.since < known[1].since:
                found[member.rank] = (comm, member)
    return found


def _find_divergence(history: JobHistory, waiting: dict[int, tuple[CommHistory, MemberNow]], hang: Hang) -> None:
    """H2: in one round of one communicator, members run different operations."""
    rounds: dict[tuple[int, int], list[MemberNow]] = {}
    for comm, member in waiting.values():
        if member.seq == member.done_seq + 1 and member.signature is not None:
            rounds.setdefault((comm.comm_id, member.seq), []).append(member)
    for members in rounds.values():
        votes = Counter(member.signature for member in members).most_common()
        if len(votes) < 2:
            continue
        if votes[0][1] == votes[1][1]:
            hang.tie = True
            continue
        hang.class_ = "H2"
        hang.divergent += [history.ranks[m.rank] for m in members if m.signature != votes[0][0]]


def _find_roots(history: JobHistory, waiting: dict[int, tuple[CommHistory, MemberNow]], now: float, hang: Hang) -> None:
    blamed, bound = _edges(history, waiting, now, hang)
    halted = {
        rank.rank
        for rank in history.ranks.values()
        if rank.process_state in STOPPED | GONE and rank.rank not in history.conflicts
    }
    outside = {rank for rank in blamed if rank not in waiting}
    roots = outside | (halted & (set(waiting) | set(blamed)))
    if roots:
        hang.class_ = "H1"
        found = [
            Root(
                history.ranks[rank],
                waiters=blamed[rank] or hang.waiting - (rank in waiting),
                entered=rank in waiting,
            )
            for rank in roots
        ]
        hang.roots = sorted(found, key=lambda root: (-root.waiters, root.rank.rank))
    else:
        hang.cycle = bool(blamed) and all(rank in bound for rank in blamed)


def _edges(
    history: JobHistory, waiting: dict[int, tuple[CommHistory, MemberNow]], now: float, hang: Hang
) -> tuple[Counter[int], set[int]]:
    """How many ranks wait for each rank to enter, and which ranks wait for anybody to enter. Notes who is not heard."""
    blamed: Counter[int] = Counter()
    bound: set[int] = set()
    missing: set[str] = set()
    for rank, (comm, member) in waiting.items():
        fresh = [other for other in comm.members.values() if _fresh(history, other, now)]
        late = [other.rank for other in fresh if other.seq <= member.done_seq]
        blamed.update(late)
        if late:
            bound.add(rank)
        if len(fresh) < comm.size:
            missing.update(_silent(history, comm, now))
    hang.missing = sorted(missing)
    return blamed, bound


def _silent(history: JobHistory, comm: CommHistory, now: float) -> list[str]:
    """Who is not heard in a communicator: by rank and node where known, else as a number of members."""
    known = [member for member in comm.members.values() if not _fresh(history, member, now)]
    names = [f"rank {m.rank} on {history.ranks[m.rank].node}" for m in known]
    never = comm.size - len(comm.members)
    return names + ([f"{never} members that never reported"] if never else [])
