"""What every backend must do, asked of Slurm in memory and of a real slurmctld alike."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from diagnosis.contracts.errors import SlurmFault
from remediation.policy.world import World
from tests.clusters import Cluster, FakeCluster, LabCluster, until, until_job
from tests.lab.cluster import Lab

REASON = "tocsin:ab12cd:gpu_clock_throttle:GPU5:drain job 42 slow, 97% sure"
DOWN = "tocsin:ab12cd:gpu_clock_throttle:GPU5:down job 42 slow, 97% sure"


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabCluster]:
    """A cluster that leaves a node DOWN until somebody says otherwise, as most do."""
    with Lab(nodes=6, conf={"ReturnToService": "1"}) as lab:
        yield LabCluster(lab, tmp_path_factory.mktemp("lab"))


@pytest.fixture(params=["scontrol", "fake"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """One of the two, clean before and after."""
    if request.param == "fake":
        yield FakeCluster()
        return
    running: LabCluster = request.getfixturevalue("real")
    try:
        yield running
    finally:
        running.tidy()


def in_service(world: World, node: str) -> bool:
    return not world.nodes[node].held and "NOT_RESPONDING" not in world.nodes[node].flags


async def refused(call: object, reason: str) -> None:
    """The call raises SlurmFault with this word."""
    with pytest.raises(SlurmFault) as caught:
        await call  # type: ignore[misc]
    assert caught.value.reason == reason, caught.value


async def test_a_picture_shows_all_nodes_with_their_gpus(cluster: Cluster) -> None:
    world = await cluster.backend.snapshot()
    assert sorted(world.nodes) == [f"gpu00{number}" for number in range(1, 7)]
    assert all(view.gpus > 0 and not view.held and view.reason == "" for view in world.nodes.values())
    assert abs(world.taken_at - cluster.now()) < 20


async def test_a_picture_shows_a_running_job(cluster: Cluster) -> None:
    job = await until_job(cluster, cluster.submit(3, exclude="gpu002,gpu003"), "RUNNING")
    assert len(job.nodes) == 3 and not {"gpu002", "gpu003"} & set(job.nodes)
    assert job.exclude == ("gpu002", "gpu003")
    assert (job.restarts, job.batch, job.requeueable, job.held) == (0, True, True, False)
    assert job.uid is not None and job.user is not None and job.submit_time


async def test_a_drain_holds_exactly_one_node_with_exactly_our_reason(cluster: Cluster) -> None:
    await cluster.backend.drain("gpu003", REASON)
    world = await cluster.backend.snapshot()
    assert "DRAIN" in world.nodes["gpu003"].flags and world.nodes["gpu003"].reason == REASON
    assert [name for name, view in world.nodes.items() if view.held] == ["gpu003"]


async def test_a_drained_node_keeps_its_running_job(cluster: Cluster) -> None:
    job = await until_job(cluster, cluster.submit(2), "RUNNING")
    await cluster.backend.drain(job.nodes[1], REASON)
    world = await cluster.backend.snapshot()
    assert world.jobs[job.job_id].state == "RUNNING" and world.jobs[job.job_id].restarts == 0


async def test_resume_undoes_a_drain_and_a_down(cluster: Cluster) -> None:
    await cluster.backend.drain("gpu001", REASON)
    await cluster.backend.set_down("gpu002", DOWN)
    for node in ("gpu001", "gpu002"):
        await cluster.backend.resume(node)
    world = await until(cluster, lambda world: in_service(world, "gpu001") and in_service(world, "gpu002"))
    assert world.nodes["gpu001"].reason == "" and world.nodes["gpu002"].reason == ""


async def test_a_down_on_a_drained_node_keeps_both_and_undown_leaves_the_drain(cluster: Cluster) -> None:
    await cluster.backend.drain("gpu003", REASON)
    await cluster.backend.set_down("gpu003", REASON)
    world = await cluster.backend.snapshot()
    assert {"DOWN", "DRAIN"} <= world.nodes["gpu003"].flags
    await cluster.backend.undown("gpu003")
    world = await cluster.backend.snapshot()
    assert "DRAIN" in world.nodes["gpu003"].flags and "DOWN" not in world.nodes["gpu003"].flags
    assert world.nodes["gpu003"].reason == REASON


async def test_undown_brings_a_node_that_is_only_down_back_into_service(cluster: Cluster) -> None:
    await cluster.backend.set_down("gpu004", DOWN)
    await cluster.backend.undown("gpu004")
    world = await until(cluster, lambda world: in_service(world, "gpu004"))
    assert world.nodes["gpu004"].reason == ""


async def test_a_node_in_service_can_be_neither_resumed_nor_undowned(cluster: Cluster) -> None:
    await refused(cluster.backend.resume("gpu001"), "refused")
    await refused(cluster.backend.undown("gpu001"), "refused")


async def test_what_somebody_else_holds_is_left_alone(cluster: Cluster) -> None:
    cluster.hold_node("gpu005", "bad DIMM, do not touch")
    await refused(cluster.backend.drain("gpu005", REASON), "foreign")
    await refused(cluster.backend.set_down("gpu005", DOWN), "foreign")
    await refused(cluster.backend.resume("gpu005"), "foreign")
    await refused(cluster.backend.undown("gpu005"), "foreign")
    view = (await cluster.backend.snapshot()).nodes["gpu005"]
    assert view.reason == "bad DIMM, do not touch" and "DRAIN" in view.flags and "DOWN" not in view.flags


async def test_an_unknown_node_is_told_as_such(cluster: Cluster) -> None:
    for call in (cluster.backend.drain("gpu099", REASON), cluster.backend.resume("gpu099")):
        await refused(call, "unknown_node")


async def test_an_unknown_job_is_told_as_such(cluster: Cluster) -> None:
    backend = cluster.backend
    for call in (
        backend.requeue(4999, hold=True),
        backend.release(4999),
        backend.set_exclude(4999, ("gpu001",)),
        backend.start_in(4999, 2),
        backend.signal(4999, "USR1"),
    ):
        await refused(call, "unknown_job")


async def test_a_requeue_counts_the_attempt_at_once_and_the_job_waits_for_its_credential(cluster: Cluster) -> None:
    before = await until_job(cluster, cluster.submit(2), "RUNNING")
    await cluster.backend.requeue(before.job_id, hold=False)
    assert (await cluster.backend.snapshot()).jobs[before.job_id].restarts == 1
    after = await until_job(cluster, before.job_id, "PENDING", restarts=1)
    assert after.reason == "BeginTime" and not after.held
    assert after.submit_time != before.submit_time


async def test_a_held_requeue_starts_without_the_node_only_when_it_is_released(cluster: Cluster) -> None:
    job = await until_job(cluster, cluster.submit(2, exclude="gpu006"), "RUNNING")
    await cluster.backend.requeue(job.job_id, hold=True)
    held = await until_job(cluster, job.job_id, "PENDING", restarts=1)
    assert held.held
    bad = job.nodes[0]
    await cluster.backend.set_exclude(job.job_id, (bad, "gpu006"))
    await cluster.backend.start_in(job.job_id, 2)
    still = (await cluster.backend.snapshot()).jobs[job.job_id]
    assert still.held and still.exclude == (bad, "gpu006")
    await cluster.backend.release(job.job_id)
    after = await until_job(cluster, job.job_id, "RUNNING", restarts=1)
    assert len(after.nodes) == 2 and not {bad, "gpu006"} & set(after.nodes)


async def test_starting_early_twice_in_a_row_loses_no_job(cluster: Cluster) -> None:
    job = await until_job(cluster, cluster.submit(2), "RUNNING")
    await cluster.backend.requeue(job.job_id, hold=False)
    await until_job(cluster, job.job_id, "PENDING", restarts=1)
    for _ in range(2):
        await cluster.backend.start_in(job.job_id, 2)
    await until_job(cluster, job.job_id, "RUNNING", restarts=1)


async def test_starting_in_the_very_second_is_not_possible(cluster: Cluster) -> None:
    job_id = cluster.submit(1)
    for seconds in (-1, 0, 1):
        with pytest.raises(ValueError):
            await cluster.backend.start_in(job_id, seconds)


async def test_a_cancelled_job_is_not_brought_back_by_a_requeue(cluster: Cluster) -> None:
    job = await until_job(cluster, cluster.submit(2), "RUNNING")
    cluster.cancel(job.job_id)
    for hold in (False, True):
        await cluster.backend.requeue(job.job_id, hold=hold)
    after = await until_job(cluster, job.job_id, "CANCELLED")
    assert after.ended and after.restarts == 0


async def test_only_batch_jobs_that_allow_it_are_requeued(cluster: Cluster) -> None:
    for job_id in (cluster.submit(1, batch=False), cluster.submit(1, requeue=False)):
        job = await until_job(cluster, job_id, "RUNNING")
        assert False in (job.batch, job.requeueable)
        await refused(cluster.backend.requeue(job.job_id, hold=False), "refused")


async def test_exclusions_of_a_running_job_cannot_be_changed(cluster: Cluster) -> None:
    job = await until_job(cluster, cluster.submit(1), "RUNNING")
    await refused(cluster.backend.set_exclude(job.job_id, ("gpu006",)), "refused")


async def test_a_node_set_down_is_given_up_on_and_the_job_starts_elsewhere(cluster: Cluster) -> None:
    job = await until_job(cluster, cluster.submit(2), "RUNNING")
    bad = job.nodes[1]
    cluster.freeze(bad)
    await cluster.backend.drain(bad, REASON)
    await cluster.backend.requeue(job.job_id, hold=False)
    await until(cluster, lambda world: world.jobs[job.job_id].nodes == (bad,))
    await cluster.backend.set_down(bad, REASON)
    after = await until_job(cluster, job.job_id, "RUNNING", restarts=1)
    assert len(after.nodes) == 2 and bad not in after.nodes


@pytest.mark.parametrize("name", ["", "gpu001;reboot", "gpu001 State=DOWN", "-x", "gpu[001-004]", "gpu001,gpu002"])
async def test_what_is_no_node_name_never_reaches_slurm(real: LabCluster, name: str, tmp_path: Path) -> None:
    backend = real.backend
    for call in (backend.drain(name, REASON), backend.resume(name), backend.set_exclude(1, (name,))):
        with pytest.raises(ValueError):
            await call
