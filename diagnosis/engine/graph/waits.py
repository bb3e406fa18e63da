"""Who waits for whom around a suspect, read off the lanes: the edges of a hang for the causal graph.

Each question is about one rank or one communicator and costs a look at its lanes; nothing here walks over all ranks.
The rules are those of the engine's `waits`: who is inside a round waits for the members that have not entered it, a
receiver waits for its sender, and where the host runs ahead only rounds seen running count, if there are any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from diagnosis.contracts.incident import Floats, Ints, Kind, State
from diagnosis.engine.lanes import Lanes, Longs
from diagnosis.engine.waits import Stall

TRANSFERS_MAX: Final = 16
RoundKey = tuple[int, int | None]
_NOBODY: Final = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """One round that does not end. `receiver`: of a point-to-point transfer, else None.

    `waiters`: ranks inside, those that wait longest first, with `waited_s` of each (NaN not told). `missing`: ranks
    that they wait for. `silent`: where nobody is known to be missing, ranks without words that may be.
    """

    comm: int
    receiver: int | None
    waiters: Ints
    waited_s: Floats
    missing: Ints
    silent: Ints

    @property
    def key(self) -> RoundKey:
        """What tells it from others."""
        return self.comm, self.receiver

    def waited(self, rank: int) -> float:
        """For how long a rank has waited in it, NaN not told."""
        at = np.flatnonzero(self.waiters == rank)
        return float(self.waited_s[at[0]]) if len(at) else float("nan")


class WaitGraph:
    """The wait-for graph of a stall, asked piece by piece. `accused`: ranks that stand inside a round and are what the
    others in it wait for all the same (they stopped there, or run another operation)."""

    def __init__(self, lanes: Lanes, stall: Stall, accused: set[int]) -> None:
        self._lanes = lanes
        self._now = stall.now
        self._accused = np.array(sorted(accused), np.int64)
        self._silent = np.array(stall.silent, np.int64)
        self._p2p = lanes.incident.communicators.kind == Kind.P2P
        self._waiting = stall.waiting
        self._unheard = stall.unheard
        enqueued = self._p2p[lanes.comm] & (self._now.state == State.ENQUEUED)
        self._pending = self._now.pending & stall.stalled[lanes.comm] & ~enqueued
        self._stalled = stall.stalled
        self._asked: dict[int, Round] = {}

    def lanes_of(self, rank: int) -> Longs:
        """The lanes of a rank."""
        return self._lanes.order[self._lanes.by_rank[rank] : self._lanes.by_rank[rank + 1]]

    def inside(self, rank: int) -> list[Round]:
        """The rounds that a rank stands in: those seen running, else all that are enqueued."""
        mine = self.lanes_of(rank)
        mine = mine[self._pending[mine]]
        running = mine[self._now.state[mine] == State.RUNNING]
        return [self._round_of(int(lane)) for lane in (running if len(running) else mine)]

    def behind(self, rank: int) -> list[Round]:
        """The rounds that others wait in for this rank."""
        found = []
        for comm in self._lanes.comm[self.lanes_of(rank)]:
            if not self._stalled[comm]:
                continue
            if self._p2p[comm]:
                members = self._lanes.of_comm(int(comm))
                lanes = members.start + np.flatnonzero(self._pending[members])[:TRANSFERS_MAX]
                rounds = [self._transfer(int(lane)) for lane in lanes if self._lanes.rank[lane] != rank]
            else:
                rounds = [self.collective(int(comm))]
            wanted = [round_ for round_ in rounds if rank in round_.missing or rank in round_.silent]
            found += [round_ for round_ in wanted if len(round_.waiters)]
        return found

    def longest(self, count: int) -> list[int]:
        """The ranks that have waited longest, one per communicator."""
        lanes = np.flatnonzero(self._pending)
        age = np.nan_to_num(self._now.age_ms[lanes])
        most = np.zeros(self._lanes.comms)
        np.maximum.at(most, self._lanes.comm[lanes], age)
        comms = np.argsort(-most, kind="stable")[:count]
        first = [lanes[self._lanes.comm[lanes] == comm] for comm in comms if most[comm] > 0]
        return [int(self._lanes.rank[of[np.argmax(np.nan_to_num(self._now.age_ms[of]))]]) for of in first if len(of)]

    def _round_of(self, lane: int) -> Round:
        comm = int(self._lanes.comm[lane])
        return self._transfer(lane) if self._p2p[comm] else self.collective(comm)

    def collective(self, comm: int) -> Round:
        """The newest round of a communicator: who is in it, and who is not."""
        if comm not in self._asked:
            self._asked[comm] = self._look_at(comm)
        return self._asked[comm]

    def _look_at(self, comm: int) -> Round:
        now, members = self._now, self._lanes.of_comm(comm)
        ranks, pending = self._lanes.rank[members], self._pending[members]
        done, seq = now.done[members], now.seq[members]
        wanted = float(np.max(done[pending], initial=-2.0)) + 1
        accused = np.isin(ranks, self._accused)
        inside = pending & (done + 1 >= wanted) & ~accused
        with np.errstate(invalid="ignore"):
            outside = now.heard[members] & ~pending & (seq < wanted)
        missing = np.flatnonzero(outside | (pending & accused))
        # Those that wait for nobody come first: they are why nobody else comes either.
        missing = missing[np.argsort(self._waiting[ranks[missing]] & ~accused[missing], kind="stable")]
        silent = ranks[np.isin(ranks, self._silent)] if not len(missing) else _NOBODY
        return self._round(comm, None, members.start + np.flatnonzero(inside), ranks[missing], silent)

    def _transfer(self, lane: int) -> Round:
        """A receive that does not end."""
        lanes, frames = self._lanes, self._lanes.incident.frames
        comm, receiver = int(lanes.comm[lane]), int(lanes.rank[lane])
        rows = np.flatnonzero(lanes.lane_of_row == lane)
        told = [int(frames.peer[row]) for row in rows if lanes.nth_last[frames.frame[row]] == 0]
        members = lanes.rank[lanes.of_comm(comm)]
        others = members[members != receiver]
        peer = told[-1] if told and 0 <= told[-1] < lanes.world else int(others[0]) if len(others) == 1 else -1
        sender = np.array([peer] if peer >= 0 else [], np.int32)
        quiet = self._unheard[sender] & ~np.isin(sender, self._accused)
        return self._round(comm, receiver, np.array([lane]), sender[~quiet], sender[quiet])

    def _round(self, comm: int, receiver: int | None, inside: Longs, missing: Ints, silent: Ints) -> Round:
        age = self._now.age_ms[inside]
        order = np.argsort(-np.nan_to_num(age), kind="stable")
        return Round(comm, receiver, self._lanes.rank[inside[order]], age[order] / 1000, missing, silent)
