"""From NCCL's events to the verdict: a rank whose kernel never began, while those of its peers run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from diagnosis.contracts.verdict import Verdict
from diagnosis.engine.history import JobHistory
from diagnosis.engine.live import examine
from diagnosis.engine.thresholds import Thresholds
from diagnosis.engine.verdict import judge
from diagnosis.evidence.bundle.reader import read_bundle
from diagnosis.evidence.bundle.writer import write_bundle
from node_daemon.collectors.frames import FrameReader
from node_daemon.collectors.process import Processes
from node_daemon.native.nccl.masks import Event
from node_daemon.summarise import Memory, summarise
from tests.integration.nccl_double import COMM_ID, Driver, build, running
from tests.nodeframes import NODE

RANKS, BEHIND = 4, 2
QUIET_S = 60
LIMITS = Thresholds(hang_floor_s=10.0, startup_floor_s=10.0)


@pytest.fixture(params=["22907", "23102"])
def ranks(
    request: pytest.FixtureRequest, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Driver]]:
    """Four ranks that have ended two rounds and called two more; a release that loses kernel events, and one that
    does not."""
    directory = tmp_path / NODE / "42.0"
    directory.mkdir(parents=True)
    tmp_path.chmod(0o755)
    (tmp_path / NODE).chmod(0o1777)
    double = build(tmp_path_factory.getbasetemp())
    events = str(int(Event.COLL | Event.COLL_API | Event.KERNEL_CH | Event.P2P))
    with ExitStack() as stack:
        made = []
        for rank in range(RANKS):
            env = {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "FAKE_NCCL_VERSION": request.param}
            one = stack.enter_context(running(double, directory, 7, TOCSIN_NCCL_EVENTS=events, **env))
            one.ask(f"comm a {COMM_ID} {RANKS} {rank}")
            one.ask("allreduce a 2 1 1")
            one.coll("x")
            one.coll("y")
            made.append(one)
        yield made


def verdict_after_a_while(root: Path) -> Verdict:
    """What is said of the frames as they are, when they have been so for a minute; read back from a bundle too."""
    look = FrameReader(root, NODE, Processes(), gone_keep_s=600, idle_keep_s=600)
    history = JobHistory(42, 0, LIMITS, 0.0)
    memory: Memory = {}
    for later_s in (0, QUIET_S):
        (job,) = look.collect().jobs
        later = [replace(frame, read_ns=frame.read_ns + later_s * 10**9) for frame in job.frames]
        sample, memory = summarise(replace(job, frames=later), memory)
        history.observe(NODE, "boot", sample, 1000.0 + later_s)
    judged = examine(history, {}, 1000.0 + QUIET_S)
    assert judged.incident is not None
    kept = read_bundle((name, [content]) for name, content in write_bundle(judged.incident).items())
    assert judge(kept).culprits == judged.verdict.culprits
    return judged.verdict


def test_the_rank_whose_kernel_never_began_is_named(ranks: list[Driver], tmp_path: Path) -> None:
    for rank, one in enumerate(ranks):
        if rank != BEHIND:
            one.kernel("x", 0, 9_000_000, None)
    verdict = verdict_after_a_while(tmp_path)
    (culprit,) = verdict.culprits
    assert (verdict.anomaly, verdict.class_, culprit.rank, culprit.cause) == ("hang", "H1", BEHIND, "process_stuck")
    assert culprit.confidence == 0.75


def test_a_rank_that_waits_in_another_operation_is_not(ranks: list[Driver], tmp_path: Path) -> None:
    """Its stream stands in a receive, which is no round: who owes it that is not told."""
    for rank, one in enumerate(ranks):
        if rank != BEHIND:
            one.kernel("x", 0, 9_000_000, None)
    stands = ranks[BEHIND]
    stands.begin("g", "a", Event.GROUP)
    stands.begin("p", "a", Event.P2P, "g", function="Recv", peer=1, channels=1)
    stands.kernel("p", 0, 9_000_000, None)
    assert all(culprit.confidence < 0.75 for culprit in verdict_after_a_while(tmp_path).culprits)
