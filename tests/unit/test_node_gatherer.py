"""When a node suspects a hang by itself, what it then gathers, once, and what goes with the reports."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from diagnosis.contracts.control import GatherEvent
from diagnosis.contracts.gathered import (
    PART_BYTES_MAX,
    PARTS_BYTES_MAX,
    FlightFacts,
    FlightGroup,
    Gathered,
    ProcessFacts,
    RasComm,
    RasDifference,
    RasFacts,
    RasRank,
    RasValue,
    unpack,
)
from diagnosis.contracts.probeframe import Untold
from node_daemon import gatherer
from node_daemon.collectors.frames import FrameReader, JobFrames
from node_daemon.collectors.process import Processes
from node_daemon.gatherer import Gatherer, fitted
from node_daemon.suspicion import Suspicion, SuspicionWatch, comm_ranks_of, members_of
from tests.eventually import eventually
from tests.nodeframes import NODE, FrameImage, idle_process

FLOOR_S = 60.0


class Job:
    """A job's frames on this node, of processes that live, read as the daemon reads them."""

    def __init__(self, root: Path, pids: list[int], first_rank: int = 0) -> None:
        self.root, self.directory = root, root / NODE / "7.0"
        self.directory.mkdir(parents=True)
        self.images = [FrameImage(pid, rank=first_rank + at) for at, pid in enumerate(pids)]
        for at, image in enumerate(self.images):
            image.join(rank=at)
            image.step()
        self.reader = FrameReader(root, NODE, Processes(), gone_keep_s=900, idle_keep_s=900)

    def enter(self, *ranks: int) -> None:
        for rank in ranks:
            self.images[rank].enter()

    def read(self) -> list[JobFrames]:
        for image in self.images:
            image.save(self.directory)
        return self.reader.collect().jobs


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with ExitStack() as stack:
        yield Job(tmp_path, [stack.enter_context(idle_process()).pid for _ in range(2)])


def suspected(watch: SuspicionWatch, job: Job, at: float) -> list[Suspicion]:
    return watch.look(job.read(), at)[0]


# -- when ------------------------------------------------------------------------------------------------------------


def test_a_round_that_stands_longer_than_the_floor_is_suspected_once(job: Job) -> None:
    watch = SuspicionWatch(FLOOR_S)
    job.enter(0)
    assert [suspected(watch, job, at) for at in (0.0, 59.0)] == [[], []]
    assert suspected(watch, job, 61.0) == [Suspicion(7, 0, 61.0)]
    assert [suspected(watch, job, at) for at in (62.0, 600.0)] == [[], []]


def test_what_moves_is_not_suspected_and_makes_the_next_standstill_a_new_one(job: Job) -> None:
    watch = SuspicionWatch(FLOOR_S)
    job.enter(0)
    watch.look(job.read(), 0.0)
    assert len(suspected(watch, job, 61.0)) == 1
    job.images[1].step()
    assert watch.look(job.read(), 62.0) == ([], {(7, 0)})
    assert suspected(watch, job, 121.0) == []
    assert len(suspected(watch, job, 62.0 + 3 * 62.0)) == 1  # three times the pause that ended


def test_a_job_that_rests_between_rounds_is_not_suspected_unless_its_probe_cannot_tell(job: Job) -> None:
    watch = SuspicionWatch(FLOOR_S)
    watch.look(job.read(), 0.0)
    assert suspected(watch, job, 1000.0) == []
    for image in job.images:
        image.slots[0]["unknown"] = Untold.DONE
    assert len(suspected(watch, job, 1001.0)) == 1


def test_a_job_whose_processes_have_all_ended_does_not_hang(tmp_path: Path) -> None:
    watch = SuspicionWatch(FLOOR_S)
    with idle_process() as child:
        job = Job(tmp_path, [child.pid])
        job.enter(0)
        watch.look(job.read(), 0.0)
    assert suspected(watch, job, 1000.0) == []


@pytest.mark.filterwarnings("error")
def test_numbers_that_a_job_makes_up_are_numbers_and_nothing_more(job: Job) -> None:
    for image in job.images:
        image.header["rank"], image.header["last_leave_ns"] = -5, (1 << 64) - 1
        for name in ("enqueued", "started", "done", "comm_id"):
            image.slots[:][name] = (1 << 64) - 1
        image.slots[0]["done"] = 0
        image.slots[:]["comm_size"], image.slots[:]["comm_rank"] = (1 << 32) - 1, (1 << 32) - 2
    watch = SuspicionWatch(FLOOR_S)
    watch.look(job.read(), 0.0)
    assert len(suspected(watch, job, 61.0)) == 1
    (one,) = job.read()
    assert [member.rank for member in members_of(one)] == [-5, -5]
    assert all(-5 in ranks.values() for ranks in comm_ranks_of([one]).values())


def test_with_a_floor_of_zero_nothing_is_suspected(job: Job) -> None:
    watch = SuspicionWatch(0.0)
    job.enter(0)
    watch.look(job.read(), 0.0)
    assert suspected(watch, job, 1e6) == []


def test_members_and_places_in_communicators_come_from_the_frames(tmp_path: Path) -> None:
    with idle_process() as one, idle_process() as other:
        jobs = Job(tmp_path, [one.pid, other.pid], first_rank=4).read()
        members = members_of(jobs[0])
    assert [(member.rank, member.pid) for member in members] == [(4, one.pid), (5, other.pid)]
    assert comm_ranks_of(jobs) == {"0xc0ffee": {0: 4, 1: 5}}


# -- what ------------------------------------------------------------------------------------------------------------


class Clock:
    """Moved by hand."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def running(floor_s: float = FLOOR_S) -> AsyncIterator[tuple[Gatherer, Clock]]:
    clock = Clock()
    one = Gatherer(floor_s=floor_s, per_minute_max=6, clock=clock)
    task = asyncio.create_task(one.run())
    try:
        yield one, clock
    finally:
        task.cancel()
        await asyncio.wait([task])


async def parts(one: Gatherer, count: int) -> list[Gathered]:
    """The next parts, as they come out of reports."""
    found: list[Gathered] = []

    def enough() -> bool:
        found.extend(part for part in map(unpack, one.take()) if isinstance(part, Gathered))
        return len(found) >= count

    await eventually(enough, within_s=30)
    return found


async def test_on_its_own_suspicion_a_node_gathers_everything_once(job: Job) -> None:
    job.enter(0)
    async with running() as (one, clock):
        await one.look(job.read())
        assert one.take() == []
        clock.now += 61
        await one.look(job.read())
        told = await parts(one, 3)
        clock.now += 100
        await one.look(job.read())
        one.ask(GatherEvent(incident="a1", job_id=7, restart=0, ras=True))
        assert one._tasks.empty()
    assert {(part.job_id, part.restart, part.uid, part.suspicion, part.quiet_ms) for part in told} == {
        (7, 0, os.getuid(), 1, 61_000)
    }
    (processes,) = [part.processes for part in told if part.processes]
    (flights,) = [part.flights for part in told if part.flights]
    (ras,) = [part.ras for part in told if part.ras is not None]
    assert [(one.world_rank, one.state) for one in processes] == [(0, "S"), (1, "S")]
    assert [one.source for one in flights] == ["", ""]
    assert (ras.state, ras.comms) == ("absent", [])


async def test_a_node_without_rank_0_leaves_ras_to_another_until_the_controller_asks(tmp_path: Path) -> None:
    with idle_process() as child:
        job = Job(tmp_path, [child.pid], first_rank=4)
        job.enter(0)
        async with running() as (one, clock):
            await one.look(job.read())
            clock.now += 61
            await one.look(job.read())
            assert all(part.ras is None for part in await parts(one, 2))
            one.ask(GatherEvent(incident="a1", job_id=7, restart=0, ras=True))
            (part,) = await parts(one, 1)
    assert (part.ras is not None, part.incident, part.quiet_ms, part.processes) == (True, "a1", None, [])


async def test_the_controller_may_ask_early_but_for_no_job_that_is_not_here(job: Job) -> None:
    async with running(0.0) as (one, _):
        await one.look(job.read())
        one.ask(GatherEvent(incident="a1", job_id=8, restart=0))
        one.ask(GatherEvent(incident="a2", job_id=7, restart=0))
        told = await parts(one, 2)
    assert {part.incident for part in told} == {"a2"}
    assert [part.ras for part in told] == [None, None]


async def test_requests_without_end_are_bounded(job: Job) -> None:
    async with running(0.0) as (one, _):
        for number in range(1000):
            job.images[0].step()
            await one.look(job.read()) if number % 100 == 0 else None
            one.ask(GatherEvent(incident=f"{number}", job_id=7, restart=0))
        assert one._tasks.qsize() <= gatherer.JOBS_WAITING_MAX


async def test_the_age_of_a_part_is_that_at_the_time_of_its_report(job: Job) -> None:
    async with running(0.0) as (one, clock):
        await one.look(job.read())
        one.ask(GatherEvent(incident="a2", job_id=7, restart=0))
        await eventually(lambda: len(one._held) == 2)
        clock.now += 2.5
        told = [unpack(raw) for raw in one.take()]
    assert [part.age_ms for part in told if isinstance(part, Gathered)] == [2500, 2500]


# -- how much ----------------------------------------------------------------------------------------------------------


def test_a_part_that_is_too_large_names_fewer_and_says_how_many() -> None:
    listed = [RasRank(rank=rank, host="h" * 200, pid=rank) for rank in range(64)]
    values = [RasValue(value=n, ranks=64, listed=listed) for n in range(16)]
    differs = [RasDifference(what="AllReduce", values=values)]
    comms = [RasComm(hash=f"{n:#x}", size=9, differs=differs) for n in range(64)]
    groups = [FlightGroup(group="g" * 250, operation="o" * 250) for _ in range(32)]
    part = Gathered(
        job_id=7,
        restart=0,
        uid=1,
        suspicion=1,
        ras=RasFacts(state="ok", comms=comms),
        flights=[FlightFacts(world_rank=n, groups=groups, notes=["n" * 250] * 32) for n in range(256)],
        processes=[ProcessFacts(world_rank=n, pid=n, notes=["n" * 250] * 32) for n in range(256)],
    )
    raw = fitted(part)
    assert len(raw) <= PART_BYTES_MAX
    told = unpack(raw)
    assert isinstance(told, Gathered)
    assert told.ras is not None
    assert {value.ranks for comm in told.ras.comms for one in comm.differs for value in one.values} == {64}
    assert len(told.processes) == 256


def test_one_report_takes_parts_within_its_bound_and_the_next_the_rest() -> None:
    one = Gatherer(floor_s=0, per_minute_max=1)
    flights = [FlightFacts(world_rank=n, notes=["n" * 250]) for n in range(256)]
    for number in range(20):
        one.hold(Gathered(job_id=number, restart=0, uid=1, suspicion=1, flights=flights))
    sent = []
    while raws := one.take():
        assert sum(map(len, raws)) <= PARTS_BYTES_MAX
        sent += [part.job_id for part in map(unpack, raws) if isinstance(part, Gathered)]
    assert sent == list(range(20))


def test_an_older_controller_s_event_without_ras_is_understood() -> None:
    event = msgspec.json.decode(b'{"incident": "a", "job_id": 7, "restart": 0, "more": 1}', type=GatherEvent)
    assert event == GatherEvent(incident="a", job_id=7, restart=0)
