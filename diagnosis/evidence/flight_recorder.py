"""PyTorch flight-recorder dumps, one per rank, as an `Incident` to which the general rules for hangs apply.

**Where a rank stands.** The host runs ahead of the GPU, so several operations of a dump may be unfinished. They run in
order; hence a rank stands in its earliest unfinished operation, and of every other communicator it has entered nothing
beyond what has ended, whatever was handed over. So a rank is RUNNING in at most one communicator, and DONE in the
others. A rank that is RUNNING in a round that other members have left (`done_seq`) is stuck inside it; a rank that is
RUNNING nowhere has not entered what the others wait in.

**Which round.** `collective_seq_id` counts the collectives of a group alike on all members; sends and receives are
counted elsewhere and never compared. Each pair of ranks that send or receive is a communicator of kind P2P: only a
rank that stands there has a row, and `peer` is whom it waits for. gloo records neither, and only a gap in the numbers
of a later collective shows them: then a rank that stands nowhere may well wait in one, and its state is unknown.

**Who belongs to a group.** As `pg_config` says; gloo describes only the default group, under an empty name, so members
are then all ranks that ran something in the group. A rank without a dump is a rank without a report: the world is the
largest rank that any group names, plus one.

**Ended operations that a dump leaves out.** NCCL dumps often hold only unfinished operations. What has ended then
stands in `pg_status`, under a number of the rank's own. On ranks with the same such numbers, a number means the same
kind of group, so one rank that names it lends the name to those that do not.

**Time.** A dump does not say when it was taken. What has not ended is taken to hang: each rank has an older frame with
what it did, and a newest one in which nothing more ended. Rounds have times only in libraries that work on the host,
from the moments of the calls (`call_times`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from diagnosis.contracts.incident import UNKNOWN, Communicators, Frames, Incident, Job, Kind, State
from diagnosis.evidence.bundle.files import ROW_NUMBERS
from diagnosis.evidence.call_times import Calls, own_times
from diagnosis.evidence.flight_dump import Dump, Entry
from diagnosis.evidence.limits import DEFAULT, Names
from diagnosis.evidence.notes import Notes

SOURCE: Final = "flight recorder"
DEFAULT_GROUP: Final = "default_pg"


Role = tuple[str, tuple[int, ...]]
Times = dict[tuple[int, int], dict[str, float]]


@dataclass(slots=True)
class _Group:
    """A communicator. `ranks` in its own order."""

    kind: int
    ranks: Sequence[int]


def incident_of_dumps(dumps: Iterable[Dump], notes: Notes) -> Incident | None:
    """The incident; None where there is no dump. One dump per rank counts, of the form (JSON or pickle) that most ranks
    have; JSON where both have as many: it is written first and disturbs less."""
    chosen = _one_per_rank(list(dumps), notes)
    if not chosen:
        return None
    members = _members(chosen)
    groups = _groups(chosen, members)
    told = (max(ranks, default=0) for dump in chosen for ranks in dump.members.values())
    world = 1 + max(*(dump.rank for dump in chosen), *told, 0)
    frames = _FrameBuilder(chosen, members, groups, notes).build()
    on_host = any(entry.on_host for dump in chosen for entry in dump.entries)
    nobody = np.full(world, UNKNOWN, np.int32)
    return Incident(
        job=Job(None, world, (), nobody, nobody.copy(), fidelity="full" if on_host else "nccl"),
        communicators=_communicators(groups),
        frames=frames,
        unseen=notes.lines(),
    )


def _one_per_rank(dumps: list[Dump], notes: Notes) -> list[Dump]:
    by_form = {form: {dump.rank: dump for dump in reversed(dumps) if dump.is_json == form} for form in (True, False)}
    first = len(by_form[True]) >= len(by_form[False])
    chosen = by_form[not first] | by_form[first]
    twice = len(dumps) - len(by_form[True]) - len(by_form[False])
    notes.add(SOURCE, "a second dump of a rank is left out", count=twice)
    return [chosen[rank] for rank in sorted(chosen)]


def _members(dumps: list[Dump]) -> dict[str, Sequence[int]]:
    """Ranks of every group in which somebody did something, in the group's own order."""
    users: dict[str, list[int]] = {}
    told: dict[str, Sequence[int]] = {}
    for dump in dumps:
        for name in dict.fromkeys(entry.group for entry in dump.entries):
            users.setdefault(name, []).append(dump.rank)
            config = "" if dump.kind.get(name) == DEFAULT_GROUP and name not in dump.members else name
            if dump.members.get(config):
                told.setdefault(name, dump.members[config])
    return {name: told.get(name) or ranks for name, ranks in users.items()}


def _groups(dumps: list[Dump], members: dict[str, Sequence[int]]) -> dict[str, _Group]:
    """Groups with collectives, then the pairs of senders and receivers that somebody stands in."""
    collective = dict.fromkeys(entry.group for dump in dumps for entry in dump.entries if entry.pair is None)
    groups = {name: _Group(Kind.COLLECTIVE, members[name]) for name in collective}
    for dump in dumps:
        pair = _pair(dump.stands_at, members)
        if pair is not None:
            groups.setdefault(pair[0], _Group(Kind.P2P, pair[1]))
    return groups


def _pair(entry: Entry | None, members: dict[str, Sequence[int]]) -> tuple[str, tuple[int, int]] | None:
    """Name and (source, destination) of the pair that a send or receive belongs to; None for anything else."""
    if entry is None or entry.pair is None:
        return None
    ranks = members[entry.group]
    if max(entry.pair) >= len(ranks) or entry.pair[0] == entry.pair[1]:
        return None
    source, destination = ranks[entry.pair[0]], ranks[entry.pair[1]]
    return f"{entry.group}:{source}>{destination}", (source, destination)


class _FrameBuilder:
    """Rows of all ranks: an older frame with what each has done and, if anybody stands, a newest one."""

    def __init__(
        self, dumps: list[Dump], members: dict[str, Sequence[int]], groups: dict[str, _Group], notes: Notes
    ) -> None:
        self._dumps = dumps
        self._ranks = members
        self._members = {name: frozenset(group.ranks) for name, group in groups.items()}
        self._comms = {name: at for at, name in enumerate(groups)}
        self._signatures = Names(DEFAULT)
        self._standing = any(dump.stands_at for dump in dumps)
        self._secretive = {name for dump in dumps for name in dump.hidden}
        self._words: list[tuple[int, int, int, int, int]] = []  # frame, comm, peer, state, signature
        self._values: list[dict[str, float]] = []
        self._numbers = _own_numbers(dumps)
        self._times = _times(dumps, self._comms, groups, notes)
        if self._standing:
            hidden = sum(sum(dump.hidden.values()) for dump in dumps)
            notes.add(SOURCE, "an operation that the dumps do not record (a send or receive) was called", count=hidden)
            notes.add(SOURCE, "dumps do not say when they were taken: what has not ended is taken to hang")

    def build(self) -> Frames:
        """The columns."""
        frames: list[tuple[int, float, float]] = []
        for dump in self._dumps:
            newest_ms = dump.last_ns / 1e6 if dump.last_ns else np.nan
            self._add_past(len(frames), dump)
            frames.append((dump.rank, newest_ms, newest_ms - dump.first_ns / 1e6))
            if self._standing:
                self._add_newest(len(frames), dump)
                frames.append((dump.rank, newest_ms, np.nan))
        told = np.array(frames, np.float64).reshape(-1, 3)
        words = np.array(self._words, np.int32).reshape(-1, 5)
        numbers = {name: np.array([row.get(name, np.nan) for row in self._values]) for name in ROW_NUMBERS}
        return Frames(
            rank=told[:, 0].astype(np.int32),
            t_ms=told[:, 1],
            window_ms=told[:, 2],
            frame=words[:, 0],
            comm=words[:, 1],
            peer=words[:, 2],
            state=words[:, 3].astype(np.uint8),
            signature=words[:, 4],
            signatures=self._signatures.all(),
            **numbers,
        )

    def _add_past(self, frame: int, dump: Dump) -> None:
        for name, entries in self._collectives(dump).items():
            done = self._done(dump, name, entries)
            times = self._times.get((dump.rank, self._comms[name]), {})
            ended = {"rounds": float(dump.ended[name])} | times
            self._add_done(frame, dump, name, entries, done, ended)

    def _add_newest(self, frame: int, dump: Dump) -> None:
        stands = dump.stands_at
        pair = _pair(stands, self._ranks)
        if pair is not None:
            other = pair[1][0] if pair[1][1] == dump.rank else pair[1][1]
            values = {"seq": 1.0, "done_seq": 0.0, "rounds": 0.0}
            self._add(frame, pair[0], State.RUNNING, UNKNOWN, values, peer=other)
        for name, entries in self._collectives(dump).items():
            if stands is not None and stands.pair is None and stands.group == name:
                values = {"seq": float(stands.number), "done_seq": stands.number - 1.0, "rounds": 0.0}
                self._add(frame, name, State.RUNNING, self._signatures.index(stands.signature), values)
            else:
                unsure = stands is None and name in self._secretive
                self._add_done(frame, dump, name, entries, self._done(dump, name, entries), {"rounds": 0.0}, unsure)

    def _add_done(
        self,
        frame: int,
        dump: Dump,
        name: str,
        entries: list[Entry],
        done: float | None,
        values: dict[str, float],
        unsure: bool = False,
    ) -> None:
        """A group in which the rank does not stand: what it has ended, or that it never used it; nothing if unknown.
        `unsure`: it may stand in an operation that is not recorded."""
        if done is not None:
            last = next((entry.signature for entry in reversed(entries) if entry.ended and entry.number == done), None)
            code = self._signatures.index(last)
            state = State.UNKNOWN if unsure else State.DONE
            self._add(frame, name, state, code, {"seq": done, "done_seq": done} | values)
        elif dump.whole:
            self._add(frame, name, State.NONE, UNKNOWN, {"rounds": 0.0})

    def _add(
        self, frame: int, name: str, state: int, signature: int, values: dict[str, float], peer: int = UNKNOWN
    ) -> None:
        self._words.append((frame, self._comms[name], peer, state, signature))
        self._values.append(values)

    def _collectives(self, dump: Dump) -> dict[str, list[Entry]]:
        """Collectives by group, in the order of the program; groups of the rank without any are there too."""
        out: dict[str, list[Entry]] = {name: [] for name in dump.members if dump.rank in self._members.get(name, ())}
        for entry in dump.entries:
            if entry.pair is None and dump.rank in self._members[entry.group]:
                out.setdefault(entry.group, []).append(entry)
        return out

    def _done(self, dump: Dump, name: str, entries: list[Entry]) -> float | None:
        """Number of the newest round of the group that has ended before the first that has not; None: not told."""
        done: float | None = None
        for entry in entries:
            if not entry.ended:
                return done if done is not None else entry.number - 1.0
            done = float(entry.number)
        if done is not None or any(entry.on_host for entry in dump.entries):
            return done
        role: Role = (dump.kind.get(name, ""), tuple(sorted(dump.status)))
        number = dump.own_number.get(name, self._numbers.get(role, UNKNOWN))
        ended = dump.status.get(number)
        return None if ended is None or ended < 0 else float(ended)


def _own_numbers(dumps: list[Dump]) -> dict[Role, int]:
    """The own number of a kind of group on ranks that have the same numbers in use; by majority."""
    votes: dict[Role, Counter[int]] = {}
    for dump in dumps:
        in_use = tuple(sorted(dump.status))
        for name, number in dump.own_number.items():
            votes.setdefault((dump.kind.get(name, ""), in_use), Counter())[number] += 1
    return {role: counter.most_common(1)[0][0] for role, counter in votes.items()}


def _times(dumps: list[Dump], comms: dict[str, int], groups: dict[str, _Group], notes: Notes) -> Times:
    """By (rank, communicator): sums over the rounds whose times are known. Empty where the calls tell nothing."""
    calls = [
        (dump.rank, comms[entry.group], entry.number, entry.called_ns / 1e6)
        for dump in dumps
        for entry in dump.entries
        if entry.on_host and entry.ended and entry.called_ns and entry.pair is None
    ]
    if not calls:
        return {}
    rank, comm, number, called_ms = zip(*calls, strict=True)
    members = np.array([len(group.ranks) for group in groups.values()], np.int64)
    table = Calls(np.array(rank, np.int32), np.array(comm, np.int32), np.array(number), np.array(called_ms), members)
    told = own_times(table)
    if isinstance(told, str):
        notes.add(SOURCE, f"the moments of the calls tell no times: {told}")
        return {}
    notes.add(SOURCE, "times are from the moments of the calls, on the word that the clocks of all ranks agree")
    known = np.flatnonzero(~np.isnan(told.gap_ms) & ~np.isnan(told.dur_ms))
    key = table.rank[known].astype(np.int64) * len(groups) + table.comm[known]
    keys, at = np.unique(key, return_inverse=True)
    dur, gap = told.dur_ms[known], told.gap_ms[known]
    least, most = np.full(len(keys), np.inf), np.zeros(len(keys))
    np.minimum.at(least, at, dur)
    np.maximum.at(most, at, dur)
    sums = zip(
        keys.tolist(),
        np.bincount(at).tolist(),
        np.bincount(at, gap).tolist(),
        np.bincount(at, dur).tolist(),
        least.tolist(),
        most.tolist(),
        strict=True,
    )
    return {
        divmod(key, len(groups)): {
            "rounds": rounds,
            "gap_ms": gap_ms,
            "dur_ms": dur_ms,
            "dur_min_ms": dur_min_ms,
            "dur_max_ms": dur_max_ms,
        }
        for key, rounds, gap_ms, dur_ms, dur_min_ms, dur_max_ms in sums
    }


def _communicators(groups: dict[str, _Group]) -> Communicators:
    sizes = [len(group.ranks) for group in groups.values()]
    return Communicators(
        ids=tuple(groups),
        start=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        member=np.array([rank for group in groups.values() for rank in group.ranks], np.int32),
        kind=np.array([group.kind for group in groups.values()], np.uint8),
        algo=("",) * len(groups),
        transport=("",) * len(groups),
    )
