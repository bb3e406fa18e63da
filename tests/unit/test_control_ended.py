"""The control loop and jobs that end by themselves: last words are waited for, one incident is told, no act follows."""

from __future__ import annotations

import dataclasses
import io
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zstandard

from controller.ended import GONE_AFTER_S, GRACE_S
from controller.store.base import Incident
from diagnosis.engine.verdict import judge
from remediation.policy.rules import Policy
from tests.judged import read
from tests.unit.test_control_loop import ACT, CULPRIT, GUILTY, JOB, World


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    it = World(tmp_path, Policy.model_validate(ACT))
    await it.start()
    yield it
    await it.store.close()


def slurm_says(world: World, state: str) -> None:
    world.slurm.change_job(JOB, lambda view: dataclasses.replace(view, state=state))


def unpacked(archive: bytes) -> dict[str, bytes]:
    """The files of a bundle."""
    plain = zstandard.ZstdDecompressor().decompress(archive, max_output_size=1 << 24)
    with tarfile.open(fileobj=io.BytesIO(plain)) as files:
        return {one.name.rsplit("/", 1)[-1]: (files.extractfile(one) or io.BytesIO()).read() for one in files}


async def seconds(world: World, count: float) -> None:
    for _ in range(int(count)):
        await world.second()


async def the_incident(world: World) -> Incident:
    (incident,) = await world.incidents()
    return incident


@pytest.mark.parametrize("state", ["FAILED", "OUT_OF_MEMORY"])
async def test_a_killed_rank_is_told_once_and_nothing_is_done(world: World, state: str) -> None:
    await world.healthy()
    world.sim.kill(CULPRIT)
    slurm_says(world, state)
    await seconds(world, GRACE_S + 10)
    incident = await the_incident(world)
    told = incident.verdict
    assert (told.anomaly, told.class_, told.action.kind) == ("failed", None, "notify")
    assert [(one.rank, one.node, one.cause) for one in told.culprits] == [(CULPRIT, GUILTY, "process_exit")]
    assert "SIGKILL" in told.summary
    assert "has ended" in incident.decision
    assert (incident.phase, incident.outcome) == ("closed", "observed")
    assert world.told == [(incident.id, "opened"), (incident.id, "closed")]
    assert await world.store.acts(incident.id) == []
    assert not {"drain", "requeue"} & {call for call, _ in world.slurm.calls}


async def test_the_words_that_came_after_the_end_are_what_is_judged(world: World) -> None:
    await world.healthy()
    slurm_says(world, "FAILED")
    world.unheard = set(world.sim.nodes)
    await seconds(world, 3)
    assert await world.incidents() == []
    world.sim.kill(CULPRIT)
    world.unheard = set()
    await seconds(world, 2)
    assert [one.rank for one in (await the_incident(world)).verdict.culprits] == [CULPRIT]


async def test_a_node_that_is_silent_is_waited_for_no_longer_than_the_grace(world: World) -> None:
    await world.healthy()
    world.sim.kill(CULPRIT)
    slurm_says(world, "FAILED")
    world.unheard = {"gpu001"}
    await seconds(world, GRACE_S - 3)
    assert await world.incidents() == []
    await seconds(world, 5)
    assert [one.rank for one in (await the_incident(world)).verdict.culprits] == [CULPRIT]


@pytest.mark.parametrize("state", ["COMPLETED", "CANCELLED", "TIMEOUT", "PREEMPTED", "DEADLINE"])
async def test_what_ended_in_order_gives_nothing(world: World, state: str) -> None:
    await world.healthy()
    world.sim.kill(CULPRIT)
    slurm_says(world, "COMPLETING")
    await seconds(world, GONE_AFTER_S + 8)
    slurm_says(world, state)
    await seconds(world, GRACE_S + 5)
    assert await world.incidents() == []


async def test_what_is_requeued_by_its_user_gives_nothing(world: World) -> None:
    await world.healthy()
    world.sim.kill(CULPRIT)
    world.slurm.requeue_by_user(JOB)
    await seconds(world, GRACE_S + 5)
    assert await world.incidents() == []


async def test_a_job_whose_ranks_have_gone_and_that_slurm_takes_for_running_is_told_once(world: World) -> None:
    await world.healthy()
    world.sim.kill(CULPRIT)
    await seconds(world, GONE_AFTER_S)
    assert await world.incidents() == []
    await seconds(world, 6)
    assert (await the_incident(world)).verdict.anomaly == "failed"
    slurm_says(world, "FAILED")
    await seconds(world, GRACE_S + 5)
    assert (await the_incident(world)).phase == "closed"


async def test_a_hang_that_ends_the_job_stays_the_one_incident(world: World) -> None:
    world.policy = Policy()
    await world.healthy()
    world.sim.hang(absent=[CULPRIT])
    await seconds(world, 12)
    assert (await the_incident(world)).verdict.anomaly == "hang"
    slurm_says(world, "FAILED")
    await seconds(world, GRACE_S + 5)
    assert (await the_incident(world)).outcome == "observed"


async def test_a_lost_node_is_named_from_slurms_word(world: World) -> None:
    await world.healthy()
    world.unheard = {GUILTY}
    world.slurm.change_node(GUILTY, add="DOWN")
    slurm_says(world, "NODE_FAIL")
    await seconds(world, GRACE_S + 3)
    told = (await the_incident(world)).verdict
    assert [(one.kind, one.node) for one in told.culprits] == [("node", GUILTY)]
    assert not told.action.nodes


async def test_frames_of_an_ended_job_that_is_not_watched_are_passed_over(world: World) -> None:
    slurm_says(world, "FAILED")
    world.sim.kill(CULPRIT)
    await seconds(world, GRACE_S + 3)
    assert world.registry.histories == {}
    assert await world.incidents() == []


async def test_the_captured_bundle_gives_the_same_verdict(world: World) -> None:
    await world.healthy()
    world.sim.kill(CULPRIT)
    slurm_says(world, "FAILED")
    await seconds(world, 5)
    incident = await the_incident(world)
    kept = await world.store.inputs(incident.id)
    assert kept is not None
    again = judge(read(unpacked(kept)))
    known = incident.verdict
    assert (again.anomaly, again.class_, again.culprits, again.action, again.evidence) == (
        known.anomaly,
        known.class_,
        known.culprits,
        known.action,
        known.evidence,
    )
