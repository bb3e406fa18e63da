"""What nodes gathered of one job on suspicion of a hang, as a live job's history keeps it: the newest of each kind.

A node speaks for the ranks that run on it. RAS speaks for the whole job, so any node of it may bring its answer; the
ranks that it names are placed in the job by the communicators and processes that the frames have told, and where these
contradict each other the rank stays unknown. What was gathered before the job last moved says nothing of its stall.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from diagnosis.contracts.gathered import FlightFacts, Gathered, PingFacts, ProcessFacts, RasFacts, RasRank
from diagnosis.evidence.ras.answer import map_ranks

if TYPE_CHECKING:
    from diagnosis.engine.history import JobHistory

CLOCKS_S: Final = 1.0
"""Ages travel, clocks do not; what was gathered this little before the last movement may still be after it."""
ANSWER_KEPT_S: Final = 60.0
"""So long an answer of RAS stays before a failure to get one replaces it."""
PINGS_KEPT_S: Final = 120.0
"""So long pings tell of a job that moves on: there no standstill says what they belong to."""
PATHS_MAX: Final = 256
"""Paths of which pings are kept."""


@dataclass(slots=True)
class Witnessed:
    """By rank: facts and when they were gathered, in seconds of the controller's clock."""

    ras: tuple[RasFacts, float] | None = None
    flights: dict[int, tuple[FlightFacts, float]] = field(default_factory=dict)
    processes: dict[int, tuple[ProcessFacts, float]] = field(default_factory=dict)
    pings: dict[tuple[str, str], tuple[PingFacts, float]] = field(default_factory=dict)

    def take(self, part: Gathered, node: str, at: float, history: JobHistory) -> None:
        """Take in one part that `node` gathered at `at`."""
        here = {rank.rank for rank in history.ranks.values() if rank.node == node}
        for flight in part.flights:
            if flight.world_rank in here and _newer(self.flights.get(flight.world_rank), at):
                self.flights[flight.world_rank] = (flight, at)
        for process in part.processes:
            if process.world_rank in here and _newer(self.processes.get(process.world_rank), at):
                self.processes[process.world_rank] = (process, at)
        for ping in part.pings:
            path = (ping.local, ping.remote)
            if history.network.node_of.get(ping.local) == node and _newer(self.pings.get(path), at):
                self.pings[path] = (ping, at)
        while len(self.pings) > PATHS_MAX:
            del self.pings[min(self.pings, key=lambda path: self.pings[path][1])]
        if part.ras is not None and self._is_better(part.ras, at):
            self.ras = (placed(part.ras, history), at)

    def _is_better(self, facts: RasFacts, at: float) -> bool:
        if self.ras is None or facts.state == "ok":
            return _newer(self.ras, at)
        return self.ras[0].state != "ok" or at - self.ras[1] > ANSWER_KEPT_S

    def ras_since(self, quiet_since: float | None) -> RasFacts | None:
        """RAS's answer, if it was asked after that moment."""
        return self.ras[0] if self.ras is not None and _after(quiet_since, self.ras[1]) else None

    def flights_since(self, quiet_since: float | None) -> tuple[FlightFacts, ...]:
        """By rank, as far as they were asked after that moment."""
        return tuple(facts for _, (facts, at) in sorted(self.flights.items()) if _after(quiet_since, at))

    def processes_since(self, quiet_since: float | None) -> tuple[ProcessFacts, ...]:
        """By rank, as far as they were looked at after that moment."""
        return tuple(facts for _, (facts, at) in sorted(self.processes.items()) if _after(quiet_since, at))

    def pings_since(self, at: float) -> list[PingFacts]:
        """By path, as far as they were sent after that moment."""
        return [facts for _, (facts, sent_at) in sorted(self.pings.items()) if sent_at >= at - CLOCKS_S]


def _newer(known: tuple[object, float] | None, at: float) -> bool:
    return known is None or at >= known[1]


def _after(quiet_since: float | None, at: float) -> bool:
    return quiet_since is not None and at >= quiet_since - CLOCKS_S


def placed(facts: RasFacts, history: JobHistory) -> RasFacts:
    """The facts with `world_rank` as the frames tell it: by communicator and by process, which must not differ."""
    by_pid: dict[int, int | None] = {}
    for rank in history.ranks.values():
        by_pid[rank.pid] = None if rank.pid in by_pid else rank.rank  # a number on two nodes names nobody

    def place(comm: str, rank: RasRank) -> RasRank:
        return msgspec.structs.replace(rank, world_rank=_world_rank(history, by_pid, comm, rank))

    return map_ranks(facts, place, lambda process: by_pid.get(process.pid, _known(history, process.world_rank)))


def _world_rank(history: JobHistory, by_pid: Mapping[int, int | None], comm: str, rank: RasRank) -> int | None:
    try:
        known = history.comms.get(int(comm, 16))
    except ValueError:
        return None
    member = known.members.get(rank.rank) if known is not None else None
    if member is not None:
        told = history.ranks.get(member.rank)
        same = rank.pid is None or told is None or told.pid in (rank.pid, 0)
        return member.rank if same else None
    if rank.pid is not None and by_pid.get(rank.pid) is not None:
        return by_pid[rank.pid]
    return _known(history, rank.world_rank)


def _known(history: JobHistory, rank: int | None) -> int | None:
    return rank if rank in history.ranks else None
