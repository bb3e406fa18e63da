"""Gathers what tells of a hang beside the frames, before anybody ends the job; it goes with the next reports.

One job is gathered at a time. First the processes (an instant), then flight recorders and NCCL's RAS side by side; each
is a part of its own and leaves with the first report after it is there, so nothing waits for the slowest. RAS knows the
whole job, so only one node asks it: the one with rank 0, or the one that the controller names. Of one standstill each
kind is gathered once, whoever asks for it how often; what movement follows makes the next one a new one.

No verdict waits for this, no report does, and nothing here touches the job: it reads, and asks doors that the job
itself has opened.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from diagnosis.contracts.control import GatherEvent
from diagnosis.contracts.gathered import (
    PART_BYTES_MAX,
    PARTS_BYTES_MAX,
    PARTS_MAX,
    PROCESSES_MAX,
    FlightFacts,
    Gathered,
    ProcessFacts,
    RasFacts,
    pack,
)
from diagnosis.evidence.ras.answer import noted, shrunk
from node_daemon.collectors.doors import Process
from node_daemon.collectors.flight import FlightCollector
from node_daemon.collectors.frames import JobFrames
from node_daemon.collectors.liveness import Liveness
from node_daemon.collectors.process import Processes
from node_daemon.collectors.ras import ask_twice, find_doors, placed
from node_daemon.log import EventLog
from node_daemon.suspicion import Attempt, Suspicion, SuspicionWatch, comm_ranks_of, members_of
from node_daemon.threads import OwnThread

JOBS_WAITING_MAX: Final = 8
PARTS_HELD_MAX: Final = 32
PROC_DEADLINE_S: Final = 3.0
FLIGHTS_DEADLINE_S: Final = 20.0
RAS_DEADLINE_S: Final = 45.0
"""More than all doors, both answers and the pause between them may take together."""
RAS, FLIGHTS, PROCESSES = "ras", "flights", "processes"
_log = EventLog("node_daemon.gatherer")


@dataclass(frozen=True, slots=True)
class _Task:
    attempt: Attempt
    kinds: frozenset[str]
    quiet_ms: int | None
    incident: str | None


@dataclass(frozen=True, slots=True)
class _Held:
    part: Gathered
    made_at: float


class Gatherer:
    """See the module. `look` with each sweep of the frames; `run` does the work; `take` what is to be sent."""

    def __init__(self, *, floor_s: float, per_minute_max: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._watch = SuspicionWatch(floor_s)
        self._processes = Processes()
        self._liveness = Liveness(self._processes)
        self._flights = FlightCollector()
        self._thread = OwnThread("gather")
        self._tasks: asyncio.Queue[_Task] = asyncio.Queue(JOBS_WAITING_MAX)
        self._done: dict[Attempt, set[str]] = {}
        self._jobs: dict[Attempt, JobFrames] = {}
        self._held: deque[_Held] = deque(maxlen=PARTS_HELD_MAX)
        self._began_at: deque[float] = deque(maxlen=per_minute_max)
        self._seen: frozenset[tuple[int, int]] = frozenset()
        self._count = 0

    async def look(self, jobs: Sequence[JobFrames]) -> None:
        """Take in the newest frames. Gathers nothing itself, but remembers the cgroups of new processes."""
        suspicions, moved = self._watch.look(jobs, self._clock())
        self._jobs = {(job.job_id, job.restart): job for job in jobs}
        still = self._jobs.keys() - moved
        self._done = {attempt: kinds for attempt, kinds in self._done.items() if attempt in still}
        members = [member for job in jobs for member in members_of(job)]
        seen = frozenset((member.pid, member.start_ticks) for member in members)
        if seen != self._seen:
            await self._remember(members, seen)
        for suspicion in suspicions:
            self._suspect(suspicion)

    async def _remember(self, members: list[Process], seen: frozenset[tuple[int, int]]) -> None:
        try:
            await self._thread.run(lambda: self._liveness.remember(members), PROC_DEADLINE_S)
            self._seen = seen
        except OSError as error:  # TimeoutError is one
            _log.sparsely("remember", "cgroups not read", error=str(error))

    def _suspect(self, suspicion: Suspicion) -> None:
        attempt = (suspicion.job_id, suspicion.restart)
        asks_ras = any(member.rank == 0 for member in members_of(self._jobs[attempt]))
        _log.info("suspicion", job=suspicion.job_id, restart=suspicion.restart, quiet_s=round(suspicion.quiet_s, 1))
        kinds = {PROCESSES, FLIGHTS, RAS} if asks_ras else {PROCESSES, FLIGHTS}
        self._add(_Task(attempt, frozenset(kinds), int(suspicion.quiet_s * 1000), None))

    def ask(self, event: GatherEvent) -> None:
        """The controller suspects a job."""
        attempt = (event.job_id, event.restart)
        kinds = {PROCESSES, FLIGHTS, RAS} if event.ras else {PROCESSES, FLIGHTS}
        if attempt in self._jobs:
            self._add(_Task(attempt, frozenset(kinds), None, event.incident))

    def _add(self, task: _Task) -> None:
        left = task.kinds - self._done.get(task.attempt, set())
        if not left:
            return
        try:
            self._tasks.put_nowait(_Task(task.attempt, left, task.quiet_ms, task.incident))
        except asyncio.QueueFull:
            _log.sparsely("full", "not gathered", job=task.attempt[0], why="too many jobs stand still")
            return
        self._done.setdefault(task.attempt, set()).update(left)

    def take(self) -> list[bytes]:
        """The parts for one report, oldest first; they are then this side's no more."""
        taken: list[bytes] = []
        size = 0
        while self._held and len(taken) < PARTS_MAX:
            held = self._held[0]
            raw = fitted(msgspec.structs.replace(held.part, age_ms=int((self._clock() - held.made_at) * 1000)))
            if size + len(raw) > PARTS_BYTES_MAX:
                break
            self._held.popleft()
            size += len(raw)
            taken.append(raw)
        return taken

    async def run(self) -> None:
        """Gather one job after the other, for ever."""
        try:
            while True:
                task = await self._tasks.get()
                if len(self._began_at) == self._began_at.maxlen:
                    await asyncio.sleep(max(0.0, self._began_at[0] + 60.0 - self._clock()))
                self._began_at.append(self._clock())
                await self._gather(task)
        finally:
            self._thread.close()
            self._flights.close()

    async def _gather(self, task: _Task) -> None:
        job = self._jobs.get(task.attempt)
        if job is None:
            return
        self._count += 1
        blank = Gathered(
            job_id=job.job_id,
            restart=job.restart,
            uid=job.uid,
            suspicion=self._count,
            quiet_ms=task.quiet_ms,
            incident=task.incident,
        )
        members = members_of(job)[:PROCESSES_MAX]
        began = self._clock()
        if PROCESSES in task.kinds:
            self.hold(msgspec.structs.replace(blank, processes=await self._look_at(members)))
        async with asyncio.TaskGroup() as both:
            if FLIGHTS in task.kinds:
                both.create_task(self._ask_flights(blank, members))
            if RAS in task.kinds:
                both.create_task(self._ask_ras(blank, members, comm_ranks_of([job])))
        took_s = round(self._clock() - began, 1)
        _log.info("gathered", job=job.job_id, restart=job.restart, kinds=",".join(sorted(task.kinds)), took_s=took_s)

    def hold(self, part: Gathered) -> None:
        """Keep a part for the next report."""
        self._held.append(_Held(part, self._clock()))

    async def _look_at(self, members: list[Process]) -> list[ProcessFacts]:
        try:
            return await self._thread.run(lambda: [self._liveness.facts(one) for one in members], PROC_DEADLINE_S)
        except OSError as error:
            note = f"/proc was not read: {error or 'it did not answer in time'}"
            return [ProcessFacts(world_rank=one.rank, pid=one.pid, notes=[note]) for one in members]

    async def _ask_flights(self, blank: Gathered, members: list[Process]) -> None:
        try:
            async with asyncio.timeout(FLIGHTS_DEADLINE_S):
                flights = await self._flights.collect(members)
        except TimeoutError:
            note = f"the flight recorders of this node took longer than {FLIGHTS_DEADLINE_S:g} s"
            flights = [FlightFacts(world_rank=one.rank, notes=[note]) for one in members]
        self.hold(msgspec.structs.replace(blank, flights=flights))

    async def _ask_ras(self, blank: Gathered, members: list[Process], comm_ranks: dict[str, dict[int, int]]) -> None:
        try:
            async with asyncio.timeout(RAS_DEADLINE_S):
                found, notes = await self._thread.run(lambda: find_doors(members, self._processes), PROC_DEADLINE_S)
                facts = noted(await ask_twice(found), *notes)
                facts = await self._thread.run(lambda: placed(facts, members, comm_ranks), PROC_DEADLINE_S)
        except OSError as error:  # TimeoutError is one
            facts = RasFacts(state="silent", notes=[f"not asked to the end: {error or 'it took too long'}"])
        self.hold(msgspec.structs.replace(blank, ras=facts))


def fitted(part: Gathered) -> bytes:
    """The part as it travels, within its bound: ranks that are many are counted and no longer named."""
    raw = pack(part)
    for listed_max, comms_max in ((16, 64), (8, 32), (4, 16), (0, 8)):
        if len(raw) <= PART_BYTES_MAX:
            return raw
        few = max(1, listed_max * 8)
        part = msgspec.structs.replace(
            part,
            ras=shrunk(part.ras, listed_max, comms_max) if part.ras is not None else None,
            flights=[
                msgspec.structs.replace(one, groups=one.groups[:listed_max], notes=one.notes[:1])
                for one in part.flights[: max(few, 64)]
            ],
            processes=[msgspec.structs.replace(one, notes=one.notes[:1]) for one in part.processes],
        )
        raw = pack(part)
    return raw
