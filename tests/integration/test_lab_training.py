"""The training job of the lab does what a user's job does: it steps, saves when told, and resumes after a requeue."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from tests.lab.cluster import Lab
from tests.lab.faults import RankProcess, ranks, stop_forever
from tests.lab.system import eventually


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A cluster with tocsin's TaskProlog, and without the two minutes that Slurm lets a requeued job wait."""
    with Lab(probe=True, cred_expire_s=5) as running:
        yield running


@pytest.fixture
def training(lab: Lab) -> Iterator[int]:
    """A training job that has done its first steps."""
    job = lab.submit("train.sh", env={"PAUSE_FILE": "pause", "SAVE_EVERY": "1000000"})
    eventually(lambda: last_step(lab.output(job)) >= 10, 60, "10 steps", 0.2)
    yield job
    lab.run("scancel", str(job))
    lab.wait_idle(lab.node_names)


def last_step(output: str) -> int:
    """The newest step that rank 0 has reported."""
    return max((int(step) for step in re.findall(r"^step (\d+) ", output, re.MULTILINE)), default=0)


def saved_steps(output: str) -> list[int]:
    """The steps at which rank 0 has saved out of turn."""
    return [int(step) for step in re.findall(r"^saved at step (\d+)", output, re.MULTILINE)]


def test_training_saves_on_a_signal_and_resumes_there_on_other_nodes_after_a_requeue(lab: Lab, training: int) -> None:
    assert lab.job_nodes(training) == lab.node_names[:4]
    lab.run("scancel", "--signal=USR1", str(training))
    eventually(lambda: saved_steps(lab.output(training)), 10, "a checkpoint on SIGUSR1", 0.1)
    (saved,) = saved_steps(lab.output(training))

    lab.run("scontrol", "requeuehold", str(training))
    lab.wait_job(training, "PENDING")
    lab.run("scontrol", "update", f"JobId={training}", "ExcNodeList=gpu002")
    lab.run("scontrol", "release", str(training))
    eventually(lambda: f"starting at step {saved}\n" in lab.output(training), 60, "resumed from the checkpoint", 0.2)
    eventually(lambda: last_step(lab.output(training)) >= saved + 10, 30, "steps after it", 0.2)
    assert lab.job(training)["Restarts"] == "1"
    assert "gpu002" not in lab.job_nodes(training) and len(lab.job_nodes(training)) == 4


def test_a_long_checkpoint_of_rank_0_lets_the_others_wait_and_then_training_goes_on(lab: Lab, training: int) -> None:
    (lab.work / "pause").touch()
    eventually(lambda: saved_steps(lab.output(training)), 20, "the long checkpoint saved", 0.2)
    (saved,) = saved_steps(lab.output(training))
    eventually(lambda: last_step(lab.output(training)) >= saved + 10, 20, "training goes on", 0.2)
    assert len(saved_steps(lab.output(training))) == 1


def test_every_rank_has_a_frame_that_names_its_process_and_node(lab: Lab, training: int) -> None:
    found = ranks(lab.frame_root, training)
    assert {rank: process.node for rank, process in found.items()} == {
        rank: lab.node_names[rank // 2] for rank in range(8)
    }
    assert len({process.pid for process in found.values()}) == 8
    before = {rank: process.rounds_done() for rank, process in found.items()}
    eventually(lambda: _everybody_past(found, before), 10, "rounds counted by every rank")
    stop_forever(found[5].pid)
    eventually(lambda: _all_stand_still(found), 20, "everybody waits for the stopped rank", 0.5)


def _everybody_past(found: dict[int, RankProcess], before: dict[int, int]) -> bool:
    return all(process.rounds_done() > before[rank] for rank, process in found.items())


def _all_stand_still(found: dict[int, RankProcess]) -> bool:
    first = [process.rounds_done() for process in found.values()]
    time.sleep(0.5)
    return first == [process.rounds_done() for process in found.values()]
