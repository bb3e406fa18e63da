"""What only a real slurmctld can show: arrays, hostile names, silence, and whole cases carried out to their end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diagnosis.contracts.errors import SlurmFault
from remediation.backends.scontrol import ScontrolBackend
from remediation.policy.case import Case
from remediation.policy.facts import Facts
from remediation.policy.rules import Policy
from remediation.policy.world import JobView, World
from tests.casework import Casework, look_at
from tests.clusters import LabCluster, enter_commands, until, until_job
from tests.eventually import eventually
from tests.lab.cluster import Lab

DRAIN = "tocsin:ab12cd:gpu_clock_throttle:GPU5:drain job 42 slow, 97% sure"
REQUEUE = "tocsin:ab12cd:process_stuck:rank3:requeue job 42 hang, 97% sure"
POLICY = Policy.model_validate(
    {
        "mode": "act",
        "budget": {"nodes_held_max": 3, "nodes_held_pct_max": 50},
        "slow": {"checkpoint_signal": "none"},
        "completing": {"down_after_s": 3},
    }
)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabCluster]:
    """A cluster that leaves a node DOWN until somebody says otherwise, as most do.

    Without GPUs, since this Slurm forgets those of a job whose last node is set DOWN, and tocsin therefore does not.
    """
    with Lab(nodes=6, gpus=False, conf={"ReturnToService": "1"}) as lab:
        yield LabCluster(lab, tmp_path_factory.mktemp("lab"))


@pytest.fixture
def cluster(running: LabCluster) -> Iterator[LabCluster]:
    """The same, clean after each test."""
    try:
        yield running
    finally:
        running.tidy()


def case_of(job: JobView, bad: str, *, drain: bool) -> Case:
    """A decided case about one node of the job."""
    return Case(
        incident="ab12cd",
        job_id=job.job_id,
        submit_time=job.submit_time,
        restart=job.restarts or 0,
        anomaly="slow" if drain else "hang",
        drain=(bad,) if drain else (),
        avoid=(bad,),
        requeue=True,
        reason=DRAIN if drain else REQUEUE,
        progressing=drain,
        decided_at=time.time(),
    )


def casework(cluster: LabCluster, case: Case, look: Callable[[World], Facts] | None = None) -> Casework:
    """The case on the real clock."""
    look = look or look_at(case.job_id, case.restart)
    return Casework(case, POLICY, cluster.backend, look, time.time, cluster.rest)


# -- whole cases -----------------------------------------------------------------------------------------------------


async def test_a_slow_job_ends_up_elsewhere_and_exactly_the_guilty_node_drained(cluster: LabCluster) -> None:
    job = await until_job(cluster, cluster.submit(3, exclude="gpu006"), "RUNNING")
    bad = job.nodes[1]
    work = casework(cluster, case_of(job, bad, drain=True))
    end = await work.run()
    assert (end.outcome, work.kinds()) == ("resolved", ["drain", "requeue", "set_exclude", "start_in"])
    assert all(act.outcome == "ok" for act in work.acts)
    world = await cluster.backend.snapshot()
    assert {name: view.reason for name, view in world.nodes.items() if view.held} == {bad: DRAIN}
    after = world.jobs[job.job_id]
    assert after.restarts == 1 and bad not in after.nodes and after.exclude == tuple(sorted((bad, "gpu006")))


async def test_a_hanging_job_ends_up_elsewhere_and_nothing_is_drained(cluster: LabCluster) -> None:
    job = await until_job(cluster, cluster.submit(3, exclude="gpu006"), "RUNNING")
    bad = job.nodes[0]
    work = casework(cluster, case_of(job, bad, drain=False))
    end = await work.run()
    assert (end.outcome, work.kinds()) == ("resolved", ["requeue", "set_exclude", "start_in", "release"])
    world = await cluster.backend.snapshot()
    assert not any(view.held for view in world.nodes.values())
    after = world.jobs[job.job_id]
    assert bad not in after.nodes and after.exclude == tuple(sorted((bad, "gpu006"))) and not after.held


@pytest.mark.parametrize("drain", [True, False])
async def test_a_node_that_does_not_let_go_is_set_down_and_ends_as_it_should(cluster: LabCluster, drain: bool) -> None:
    job = await until_job(cluster, cluster.submit(2), "RUNNING")
    bad = job.nodes[1]
    cluster.freeze(bad)
    well: list[bool] = []

    def look(world: World) -> Facts:
        now = world.jobs[job.job_id]
        stepping = now.state == "RUNNING" and now.restarts == 1
        if stepping and not well:
            cluster.thaw(bad)
            well.append(True)
        return Facts(stepping_elsewhere=stepping, old_ranks_gone={bad: True if well else None})

    work = casework(cluster, case_of(job, bad, drain=drain), look)
    end = await work.run()
    assert end.outcome == "resolved", end
    assert work.kinds().count("set_down") == 1 and work.kinds()[-1] == "undown"
    world = await until(cluster, lambda world: "NOT_RESPONDING" not in world.nodes[bad].flags)
    view = world.nodes[bad]
    assert "DOWN" not in view.flags
    assert (view.held, view.reason) == ((True, DRAIN) if drain else (False, ""))


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_a_controller_killed_around_each_act_brings_the_job_to_the_same_place(
    cluster: LabCluster, moment: str
) -> None:
    job = await until_job(cluster, cluster.submit(3), "RUNNING")
    bad = job.nodes[1]
    work = casework(cluster, case_of(job, bad, drain=False))
    quick = POLICY.limits.model_copy(update={"settle_s": 1.0, "retry_after_s": 0.5})
    work.policy = POLICY.model_copy(update={"limits": quick})
    every_second = frozenset(range(0, 20, 2))
    if moment == "before":
        work.die_before = every_second
    else:
        work.die_after = every_second
    end = await work.run()
    assert end.outcome == "resolved", (end, work.acts)
    after = (await cluster.backend.snapshot()).jobs[job.job_id]
    assert after.restarts == 1 and bad not in after.nodes and after.exclude == (bad,)


async def requeue_in_a_row(cluster: LabCluster, times: int) -> None:
    """Each time the job must be running elsewhere; the requeues meet every part of a second. Three of each job."""
    job: JobView | None = None
    for number in range(times):
        if job is None or job.restarts == 3:
            cluster.lab.cancel_all()
            job = await until_job(cluster, cluster.submit(2), "RUNNING")
        await asyncio.sleep(0.13 * number % 1)
        bad, drain = job.nodes[number % 2], number % 2 == 1
        work = casework(cluster, case_of(job, bad, drain=drain))
        end = await work.run()
        assert end.outcome == "resolved", (number, end, work.acts)
        after = await until_job(cluster, job.job_id, "RUNNING", restarts=(job.restarts or 0) + 1)
        assert bad not in after.nodes
        if drain:
            await cluster.backend.resume(bad)
        await until(cluster, lambda world: not any(view.held for view in world.nodes.values()))
        job = after


async def test_three_requeues_in_a_row_lose_no_job(cluster: LabCluster) -> None:
    await requeue_in_a_row(cluster, 3)


@pytest.mark.acceptance
@pytest.mark.timeout(900)
async def test_twenty_requeues_in_a_row_lose_no_job(cluster: LabCluster) -> None:
    await requeue_in_a_row(cluster, 20)


# -- jobs ------------------------------------------------------------------------------------------------------------


async def test_a_requeue_of_an_array_task_leaves_its_brothers_alone(cluster: LabCluster) -> None:
    """The last task of an array has the id of the array itself, by which all of them are meant."""
    array = cluster.lab.submit(cluster.script, nodes=1, array="1-3")
    listed = await until(cluster, lambda world: sum(job.state == "RUNNING" for job in world.jobs.values()) == 3)
    assert array in listed.jobs
    await cluster.backend.requeue(array, hold=True)
    task = await until_job(cluster, array, "PENDING", restarts=1)
    assert task.held
    await cluster.backend.set_exclude(array, ("gpu001",))
    await cluster.backend.start_in(array, 2)
    await cluster.backend.release(array)
    task = await until_job(cluster, array, "RUNNING", restarts=1)
    assert task.nodes != ("gpu001",)
    others = [job for job in (await cluster.backend.snapshot()).jobs.values() if job.state == "RUNNING"]
    assert sorted(job.restarts or 0 for job in others) == [0, 0, 1]


async def test_tasks_that_still_wait_in_one_record_cannot_be_acted_upon(cluster: LabCluster) -> None:
    array = cluster.lab.submit(cluster.script, nodes=1, array="1-3", hold=True)
    with pytest.raises(SlurmFault) as caught:
        await cluster.backend.release(array)
    assert caught.value.reason == "refused"


async def test_a_job_cannot_forge_fields_by_its_name_comment_or_directory(cluster: LabCluster, tmp_path: Path) -> None:
    hostile = "x|RUNNING|99\n43|N/A|2026|RUNNING|9|0|root|main|1|1|0|gpu001|None RestartCnt=9 UserId=root(0)"
    directory = tmp_path / "d|RUNNING 9"
    directory.mkdir()
    job_id = cluster.lab.submit(cluster.script, nodes=1, job_name=hostile, comment=hostile, chdir=str(directory))
    job = await until_job(cluster, job_id, "RUNNING")
    assert job.restarts == 0
    assert 43 not in (await cluster.backend.snapshot()).jobs


async def test_a_signal_reaches_the_steps_and_not_the_batch_shell(cluster: LabCluster, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(
        "#!/bin/bash\ntrap 'echo shell told' USR1\n"
        "srun bash -c 'trap \"echo step told\" USR1; echo ready; while :; do sleep 0.1; done'\n"
    )
    job_id = cluster.lab.submit(script, nodes=2)
    await eventually(lambda: cluster.lab.output(job_id).count("ready") == 2, 30)
    await cluster.backend.signal(job_id, "USR1")
    await eventually(lambda: cluster.lab.output(job_id).count("step told") == 2, 30)
    assert "shell told" not in cluster.lab.output(job_id)


async def test_nothing_starts_on_a_drained_node_while_its_down_is_undone(cluster: LabCluster) -> None:
    await cluster.backend.drain("gpu005", DRAIN)
    wants_it = cluster.lab.submit(cluster.script, nodes=1, nodelist="gpu005")
    for _ in range(5):
        await cluster.backend.set_down("gpu005", DRAIN)
        await cluster.backend.undown("gpu005")
    world = await until(cluster, lambda world: world.nodes["gpu005"].flags == {"IDLE", "DRAIN"})
    assert world.jobs[wants_it].state == "PENDING"


# -- silence ---------------------------------------------------------------------------------------------------------


async def test_a_hanging_scontrol_is_a_timeout_and_not_an_empty_cluster(cluster: LabCluster, tmp_path: Path) -> None:
    path = enter_commands(cluster.lab, tmp_path)
    (path / "scontrol").write_text("#!/bin/sh\nexec sleep 600\n")
    backend = ScontrolBackend(path=path, deadline_s=1.0)
    for call in (backend.snapshot(), backend.drain("gpu001", DRAIN)):
        with pytest.raises(SlurmFault) as caught:
            await call
        assert caught.value.reason == "timeout"


async def test_a_dead_slurmctld_is_unreachable_and_not_an_empty_cluster(cluster: LabCluster) -> None:
    cluster.restart_slurmctld()  # a killed one comes back with what it saved last, and that can be an earlier test's
    await eventually(lambda: cluster.lab.idle(cluster.lab.node_names), 60)
    cluster.lab.kill_slurmctld()
    try:
        calls = (cluster.backend.snapshot(), cluster.backend.drain("gpu001", DRAIN))
        for fault in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(fault, SlurmFault) and fault.reason == "unreachable"
    finally:
        cluster.lab.start_slurmctld()
        await eventually(lambda: cluster.lab.idle(cluster.lab.node_names), 60)
    assert not (await cluster.backend.snapshot()).nodes["gpu001"].held


async def test_a_user_who_may_not_is_refused_by_slurm(cluster: LabCluster, tmp_path: Path) -> None:
    path = enter_commands(cluster.lab, tmp_path)
    text = (path / "scontrol").read_text()
    (path / "scontrol").write_text(
        text.replace(' scontrol "$@"', ' setpriv --reuid=65534 --clear-groups scontrol "$@"')
    )
    backend = ScontrolBackend(path=path, deadline_s=20)
    with pytest.raises(SlurmFault) as caught:
        await backend.drain("gpu001", DRAIN)
    assert caught.value.reason == "permission"


async def test_a_held_job_waits_for_its_release_over_a_restart_of_slurmctld(cluster: LabCluster) -> None:
    job = await until_job(cluster, cluster.submit(1), "RUNNING")
    work = casework(cluster, case_of(job, job.nodes[0], drain=False))
    while work.kinds()[-1:] != ["set_exclude"]:
        await work.step()
        await cluster.rest()
    await asyncio.to_thread(cluster.restart_slurmctld)
    end = await work.run()
    assert end.outcome == "resolved", (end, work.acts)
