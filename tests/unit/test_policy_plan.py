"""The plan of a case, step by step, against Slurm in memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from remediation.backends.fake import FakeSlurm
from remediation.policy.case import Case
from remediation.policy.rules import Policy
from remediation.policy.world import JobView
from tests.casework import Casework, look_at

REASON = "tocsin:ab12cd:gpu_clock_throttle:GPU5:drain job 42 slow, 97% sure"
POLICY = Policy.model_validate(
    {
        "mode": "act",
        "budget": {"nodes_held_max": 2, "nodes_held_pct_max": 50},
        "slow": {"checkpoint_signal": "USR1", "checkpoint_grace_s": 5},
        "completing": {"down_after_s": 5},
    }
)


def slow_case(job: JobView, *nodes: str) -> Case:
    """Hardware of these nodes is convicted."""
    return Case("ab12cd", 42, job.submit_time, 0, "slow", nodes, nodes, True, REASON, True, 1_000_000.0)


def hang_case(job: JobView, *nodes: str) -> Case:
    """These nodes are to be avoided, and are not drained."""
    reason = REASON.replace(":drain", ":requeue")
    return Case("ab12cd", 42, job.submit_time, 0, "hang", (), nodes, True, reason, False, 1_000_000.0)


def casework(slurm: FakeSlurm, case: Case, policy: Policy = POLICY) -> Casework:
    """The case with a clock that stands still while the controller works."""

    async def rest() -> None:
        slurm.advance(0.5)

    return Casework(case, policy, slurm, look_at(42, 0), lambda: slurm.now, rest)


async def test_convicted_hardware_is_drained_and_the_job_goes_on_elsewhere() -> None:
    slurm = FakeSlurm()
    work = casework(slurm, slow_case(slurm.submit("gpu001", "gpu002"), "gpu002"))
    end = await work.run()
    assert work.kinds() == ["drain", "signal", "requeue", "set_exclude", "start_in"]
    assert end.outcome == "resolved"
    assert slurm.nodes["gpu002"].reason == REASON
    assert slurm.jobs[42].view.nodes == ("gpu001", "gpu003")
    assert slurm.jobs[42].signals == ["USR1"]


async def test_a_hanging_job_is_requeued_held_and_released_only_when_the_node_is_excluded() -> None:
    slurm = FakeSlurm()
    work = casework(slurm, hang_case(slurm.submit("gpu001", "gpu002", exclude=("gpu007",)), "gpu002"))
    end = await work.run()
    assert work.kinds() == ["requeue", "set_exclude", "start_in", "release"]
    assert end.outcome == "resolved"
    assert slurm.jobs[42].view.exclude == ("gpu002", "gpu007")
    assert not any(node.held for node in slurm.nodes.values())


async def test_a_node_that_does_not_let_go_is_set_down_and_brought_back() -> None:
    slurm = FakeSlurm()
    slurm.frozen.add("gpu002")
    work = casework(slurm, hang_case(slurm.submit("gpu001", "gpu002"), "gpu002"))
    end = await work.run()
    assert work.kinds() == ["requeue", "set_down", "set_exclude", "start_in", "release", "undown"]
    assert end.outcome == "resolved"
    assert not slurm.nodes["gpu002"].held and slurm.nodes["gpu002"].reason == ""


@pytest.mark.parametrize("version", [(22, 5), (23, 11)])
async def test_a_gpu_node_is_not_set_down_by_a_slurm_that_then_forgets_the_jobs_gpus(version: tuple[int, int]) -> None:
    slurm = FakeSlurm()
    slurm.version = version
    slurm.frozen.add("gpu002")
    work = casework(slurm, hang_case(slurm.submit("gpu001", "gpu002"), "gpu002"))
    end = await work.run()
    assert work.kinds() == ["requeue"] and end.outcome == "abandoned"
    assert any("UnkillableStepTimeout" in why for why in work.waits)


async def test_a_cpu_node_is_set_down_by_any_slurm() -> None:
    slurm = FakeSlurm()
    slurm.version = (22, 5)
    slurm.nodes["gpu002"] = replace(slurm.nodes["gpu002"], gpus=0)
    slurm.frozen.add("gpu002")
    work = casework(slurm, hang_case(slurm.submit("gpu001", "gpu002"), "gpu002"))
    await work.run()
    assert "set_down" in work.kinds()


async def test_a_drained_node_that_was_set_down_ends_drained() -> None:
    slurm = FakeSlurm()
    slurm.frozen.add("gpu002")
    work = casework(slurm, slow_case(slurm.submit("gpu001", "gpu002"), "gpu002"))
    await work.run()
    assert work.kinds().count("set_down") == 1
    assert slurm.nodes["gpu002"].flags == {"IDLE", "DRAIN"} and slurm.nodes["gpu002"].reason == REASON


@pytest.mark.parametrize("ordinal", range(5))
@pytest.mark.parametrize("moment", ["before", "after"])
async def test_a_controller_killed_around_any_act_comes_to_the_same_end(ordinal: int, moment: str) -> None:
    slurm = FakeSlurm()
    work = casework(slurm, slow_case(slurm.submit("gpu001", "gpu002"), "gpu002"))
    if moment == "before":
        work.die_before = frozenset({ordinal})
    else:
        work.die_after = frozenset({ordinal})
    end = await work.run()
    assert end.outcome == "resolved"
    assert slurm.nodes["gpu002"].reason == REASON
    assert slurm.jobs[42].view.restarts == 1
    assert slurm.jobs[42].view.nodes == ("gpu001", "gpu003")
