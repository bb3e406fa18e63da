"""The whole of tocsin on a real cluster: real Slurm, a real training job, real faults, a controller that is killed.

The three stories of the demo are run as a user runs them; the rest is what the demo does not tell.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab import system
from tests.lab.cluster import Lab
from tests.lab.faults import Duty, RankProcess, stop_forever
from tests.lab.gate import ScontrolGate
from tests.lab.stack import Stack
from tests.lab.system import eventually

ROOT = Path(__file__).parents[2]
CULPRIT = 5


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """ReturnToService=1: a node that was set DOWN stays so, as on most clusters. Parameter: whether it has GPUs."""
    with Lab(probe=True, gpus=getattr(request, "param", True), conf={"ReturnToService": "1"}) as running:
        yield running


@pytest.fixture
def gate(lab: Lab) -> ScontrolGate:
    return ScontrolGate(lab.directory / "gate")


@pytest.fixture
def stack(lab: Lab, gate: ScontrolGate) -> Iterator[Stack]:
    with Stack(lab, path=gate.directory) as running:
        yield running


@pytest.fixture
def job(lab: Lab, stack: Stack) -> int:
    """A training job whose normal speed is known."""
    number = lab.submit("train.sh", gpus_per_node=2 if lab.has_gpus else 0)
    stack.wait_healthy(number)
    return number


@pytest.mark.parametrize("fault", ["s1", "s2", "s3", "h1", "h2", "h3", "none"])
def test_the_demo_ends_as_its_story_says(fault: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.lab.demo"],
        env={**os.environ, "FAULT": fault},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _acts(stack: Stack, incident: str) -> list[tuple[str, str]]:
    return [(act["kind"], act["outcome"]) for act in stack.detail(incident)["acts"]]


def _slow(stack: Stack, job: int, *, throttled: bool) -> Duty:
    victim = stack.ranks(job)[CULPRIT]
    if throttled:
        stack.gpus[victim.node].throttle(CULPRIT % 2)
    return Duty(victim.pid)


def _closed_as_if_nothing_had_happened(stack: Stack, lab: Lab, job: int, incident: str, node: str) -> None:
    """One drain, one requeue, the job elsewhere: the same end as without the crash."""
    closed = stack.wait_closed(incident, 90)["incident"]
    assert closed["outcome"] == "resolved", closed["timeline"]
    assert list(lab.drain_reasons()) == [node]
    assert lab.job(job)["Restarts"] == "1"
    assert node not in lab.job_nodes(job)


def test_a_slow_rank_without_a_hardware_witness_is_named_and_told_and_nothing_is_drained(
    lab: Lab, stack: Stack, job: int
) -> None:
    with _slow(stack, job, throttled=False):
        incident = stack.wait_incident(job, 60)
        assert [culprit["rank"] for culprit in incident["verdict"]["culprits"]] == [CULPRIT]
        assert incident["verdict"]["action"]["kind"] == "collect"
        (post,) = stack.chat.wait(1)
        assert isinstance(post.body, dict) and f"rank {CULPRIT}" in post.body["text"]
    assert lab.drain_reasons() == {}
    assert lab.job(job)["Restarts"] == "0"
    assert stack.detail(incident["id"])["acts"] == []


def test_a_controller_killed_after_the_drain_and_before_the_requeue_ends_the_same(
    lab: Lab, gate: ScontrolGate, stack: Stack, job: int
) -> None:
    held = gate.block(f"requeue Incomplete {job}")
    with _slow(stack, job, throttled=True):
        incident: dict[str, Any] = stack.wait_incident(job, 60)
        gate.wait_blocked(held)
        assert len(lab.drain_reasons()) == 1
        stack.kill_controller()
        gate.drop()
        stack.start_controller()
        _closed_as_if_nothing_had_happened(stack, lab, job, incident["id"], "gpu003")
    assert len(gate.calls("State=DRAIN")) == 1
    assert [kind for kind, outcome in _acts(stack, incident["id"]) if outcome == "ok"].count("drain") == 1


def test_a_controller_killed_between_intent_and_drain_drains_once(
    lab: Lab, gate: ScontrolGate, stack: Stack, job: int
) -> None:
    held = gate.block("State=DRAIN")
    with _slow(stack, job, throttled=True):
        incident: dict[str, Any] = stack.wait_incident(job, 60)
        gate.wait_blocked(held)
        assert [(act["kind"], act["outcome"]) for act in stack.detail(incident["id"])["acts"]] == [("drain", None)]
        stack.kill_controller()
        gate.drop()
        assert lab.drain_reasons() == {}
        stack.start_controller()
        _closed_as_if_nothing_had_happened(stack, lab, job, incident["id"], "gpu003")
    assert len(gate.calls(f"requeue Incomplete {job}")) == 1


def test_a_controller_killed_when_slurm_had_drained_but_it_did_not_know_drains_no_second_time(
    lab: Lab, gate: ScontrolGate, stack: Stack, job: int
) -> None:
    held = gate.block("State=DRAIN", after=True)
    with _slow(stack, job, throttled=True):
        incident: dict[str, Any] = stack.wait_incident(job, 60)
        gate.wait_blocked(held)
        stack.kill_controller()
        gate.drop()
        assert len(lab.drain_reasons()) == 1
        stack.start_controller()
        _closed_as_if_nothing_had_happened(stack, lab, job, incident["id"], "gpu003")
    assert len(gate.calls("State=DRAIN")) == 1


def test_dead_daemons_and_an_absent_controller_do_not_disturb_the_job_and_reports_arrive_afterwards(
    lab: Lab, stack: Stack, job: int
) -> None:
    stack.kill_daemon("gpu002")
    stack.kill_controller()
    rounds = {rank: process.rounds_done() for rank, process in stack.ranks(job).items()}
    later = 60  # rounds, several seconds of training
    eventually(
        lambda: all(p.rounds_done() >= rounds[r] + later for r, p in stack.ranks(job).items()), 40, "the job going on"
    )
    spools = list((stack.directory / "gpu001.state" / "spool").iterdir())
    assert spools, "reports are spooled while the controller is away"
    stack.start_controller()
    stack.start_daemon("gpu002")

    def late() -> int:
        return sum(node["late_reports"] for node in stack.status()["nodes"] if node["node"] == "gpu001")

    eventually(lambda: late() >= 3, 40, "spooled reports taken")
    eventually(lambda: (stack.job(job) or {}).get("ranks_seen") == 8, 30, "all ranks seen again")
    assert stack.incidents() == [] and lab.drain_reasons() == {}
    assert lab.job_state(job) == "RUNNING" and lab.job(job)["Restarts"] == "0"


@pytest.fixture
def stuck(lab: Lab, stack: Stack, job: int) -> Iterator[RankProcess]:
    """The culprit, whose slurmstepd is stopped: it will neither die nor be reported dead."""
    victim = stack.ranks(job)[CULPRIT]
    steps = [p.pid for p in system.all_processes() if p.comm.startswith("slurmstepd") and _steps_on(p.pid, victim.pid)]
    assert steps, "the slurmstepd above the culprit is found"
    try:
        for pid in steps:
            os.kill(pid, signal.SIGSTOP)
        stop_forever(victim.pid)
        yield victim
    finally:
        _let_go()


@pytest.mark.parametrize("lab", [False], indirect=True, ids=["no GPUs"])
def test_a_node_that_keeps_the_job_completing_is_set_down_and_returned_when_its_old_ranks_are_gone(
    lab: Lab, stack: Stack, job: int, stuck: RankProcess
) -> None:
    incident: dict[str, Any] = stack.wait_incident(job, 60)
    eventually(lambda: lab.node_states()[stuck.node].startswith("down"), 60, f"{stuck.node} DOWN")
    assert lab.drain_reasons()[stuck.node].startswith(f"tocsin:{incident['id']}:process_stuck:rank5:down ")
    eventually(lambda: len(stack.ranks(job, 1)) == 8, 90, "the ranks of the new attempt")
    assert lab.job_state(job) == "RUNNING" and stuck.node not in lab.job_nodes(job)
    assert lab.node_states()[stuck.node].startswith("down"), "not returned while its old ranks live"
    _let_go()
    closed = stack.wait_closed(incident["id"], 90)["incident"]
    assert closed["outcome"] == "resolved", closed["timeline"]
    eventually(lambda: lab.node_states()[stuck.node] == "idle", 30, f"{stuck.node} back in service")
    assert lab.drain_reasons() == {}


def test_a_gpu_node_that_keeps_the_job_completing_is_left_to_slurm_which_would_forget_the_jobs_gpus(
    lab: Lab, gate: ScontrolGate, stack: Stack, job: int, stuck: RankProcess
) -> None:
    incident: dict[str, Any] = stack.wait_incident(job, 60)

    def timeline() -> str:
        return " ".join(text for _, text in stack.detail(incident["id"])["incident"]["timeline"])

    eventually(lambda: "UnkillableStepTimeout frees it" in timeline(), 60, "the reason why the node is not set DOWN")
    _let_go()
    eventually(lambda: len(stack.ranks(job, 1)) == 8, 90, "the ranks of the new attempt")
    assert stuck.node not in lab.job_nodes(job)
    closed = stack.wait_closed(incident["id"], 60)["incident"]
    assert closed["outcome"] == "resolved", closed["timeline"]
    assert gate.calls("State=DOWN") == []
    assert "tocsin:" not in lab.drain_reasons().get(stuck.node, "")


def _let_go() -> None:
    """The node comes to itself: what was stopped of Slurm's runs on, and ends the old ranks."""
    for process in system.all_processes():
        if process.comm.startswith("slurmstepd") and process.state == "T":
            os.kill(process.pid, signal.SIGCONT)


def _steps_on(stepd: int, pid: int) -> bool:
    return any(process.pid == pid for process in system.descendants(stepd))
