"""From the RAS threads of a real libnccl, through a daemon process and its reports, to the verdict's evidence."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from controller.settings import Server
from diagnosis.contracts.control import GatherEvent
from diagnosis.contracts.gathered import Gathered, RasFacts, unpack
from diagnosis.contracts.report import Report
from diagnosis.engine.history import JobHistory
from diagnosis.engine.live import examine
from diagnosis.engine.thresholds import Thresholds
from tests import eventually as waiting
from tests.integration.controller_site import IngestSite
from tests.integration.nccl_real import layout, library
from tests.integration.test_nccl_real import COMM_ID
from tests.integration.test_node_daemon import NODE, Daemon
from tests.integration.test_node_ras_real import LATE, RANKS, job, joined
from tests.nodeframes import FrameImage

JOB = 7
eventually = partial(waiting.eventually, within_s=60.0)


@pytest_asyncio.fixture
async def site(tmp_path: Path) -> AsyncIterator[IngestSite]:
    (tmp_path / "site").mkdir()
    started = await IngestSite(tmp_path / "site", Server()).start()
    started.channels.set_report_period(100)
    yield started
    await started.stop()


@pytest.fixture
def daemon(tmp_path: Path, site: IngestSite) -> Iterator[Daemon]:
    (tmp_path / "node").mkdir()
    one = Daemon(tmp_path / "node", site.port)
    yield one
    if one.process is not None:
        one.process.kill()
        one.process.wait()


def images(pids: list[int]) -> list[FrameImage]:
    """What the probes of the four would tell: all but one wait in the second round of their communicator."""
    made = []
    for rank, pid in enumerate(pids):
        image = FrameImage(pid, rank=rank, world_size=RANKS)
        image.join(comm_id=COMM_ID, size=RANKS, rank=rank)
        image.step()
        if rank != LATE:
            image.enter()
        made.append(image)
    return made


def parts(site: IngestSite) -> list[Gathered]:
    raws = [raw for told, _ in site.reports for raw in told.gathered]
    return [part for part in map(unpack, raws) if isinstance(part, Gathered)]


def ras_of(site: IngestSite) -> RasFacts | None:
    return next((part.ras for part in parts(site) if part.ras is not None), None)


def judged(reports: list[Report]) -> list[tuple[bool, str]]:
    """What RAS says in the verdict that the controller would give on these reports."""
    history = JobHistory(JOB, 0, Thresholds(hang_floor_s=0.5, startup_floor_s=0.5), 0.0)
    for told in reports:
        at = told.mono_ms / 1000
        for sample in told.jobs:
            history.observe(told.node, told.boot_id, sample, at)
        for part in map(unpack, told.gathered):
            assert isinstance(part, Gathered)
            history.witnessed.take(part, told.node, at - part.age_ms / 1000, history)
    verdict = examine(history, {}, max(told.mono_ms for told in reports) / 1000).verdict
    assert (verdict.class_, [culprit.rank for culprit in verdict.culprits]) == ("H1", [LATE])
    return [(item.against, item.text) for item in verdict.evidence if item.witness == "ras"]


async def test_a_hang_of_real_processes_is_confirmed_by_their_own_ras(
    site: IngestSite, daemon: Daemon, tmp_path: Path
) -> None:
    daemon.configure(evidence="[evidence]\nsuspect_after_s = 1")
    daemon.start()
    await eventually(lambda: bool(site.reports))
    (tmp_path / "nccl").mkdir()
    with job(layout(library()), tmp_path / "nccl", {LATE: 6649}) as (hosts, members):
        await joined(members)
        directory = daemon.job()
        for image in images([process.pid for process in hosts]):
            image.save(directory)
        await eventually(lambda: ras_of(site) is not None)
        await eventually(lambda: any(part.processes for part in parts(site)))
    facts = ras_of(site)
    assert facts is not None
    assert (facts.state, facts.answers) == ("ok", 2)
    (processes,) = [part.processes for part in parts(site) if part.processes]
    assert [one.pid for one in processes] == [process.pid for process in hosts]
    ((against, text),) = judged([told for told, _ in site.reports])
    assert not against
    assert f"rank {LATE} has launched 6649 AllReduce, 3 members" in text


async def test_the_controller_can_ask_sooner(site: IngestSite, daemon: Daemon, tmp_path: Path) -> None:
    daemon.configure(evidence="[evidence]\nsuspect_after_s = 0")
    daemon.start()
    await eventually(lambda: NODE in site.channels.nodes())
    (tmp_path / "nccl").mkdir()
    with job(layout(library()), tmp_path / "nccl", {}) as (hosts, _):
        directory = daemon.job()
        for image in images([process.pid for process in hosts]):
            image.save(directory)
        await eventually(lambda: any(told.jobs for told, _ in site.reports))
        assert parts(site) == []
        assert site.channels.send(NODE, GatherEvent(incident="a1", job_id=JOB, restart=0, ras=True))
        await eventually(lambda: ras_of(site) is not None)
    assert {part.incident for part in parts(site)} == {"a1"}
