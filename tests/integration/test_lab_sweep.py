"""What a lab leaves whose owner was killed goes away at the next sweep; what lives is not touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import network, sweep, system
from tests.lab.cluster import Lab

ROOT = Path(__file__).parents[2]
OWNER = """
import sys, time
from tests.lab.cluster import Lab
lab = Lab(nodes=2)
lab.start()
lab.popen_controller(["sleep", "620"])
with open(lab.work / "job.sh", "w") as script:
    script.write("#!/bin/bash\\nsrun bash -c 'sleep 621'\\n")
job = lab.submit("job.sh", nodes=2)
lab.wait_job(job, "RUNNING")
print(lab.directory, flush=True)
time.sleep(600)
"""


@pytest.fixture
def dead_owners_lab() -> Iterator[Path]:
    """The directory of a lab that was running a job when its owner was killed."""
    with subprocess.Popen([sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        directory = Path(owner.stdout.readline().strip())
        owner.kill()
    assert directory.name.startswith(sweep.LAB_PREFIX)
    yield directory
    sweep.sweep()


def _lives(mark: str) -> bool:
    return any(mark in system.command_line(process.pid) for process in system.all_processes())


def test_a_sweep_removes_processes_namespaces_and_files_of_a_killed_owner(dead_owners_lab: Path) -> None:
    tag = dead_owners_lab.name.removeprefix(sweep.LAB_PREFIX)
    assert _lives("sleep 620")
    system.eventually(lambda: _lives("sleep 621"), 20, "the job's step")  # it follows a moment after RUNNING
    done = subprocess.run([sys.executable, "-m", "tests.lab", "sweep"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == f"swept lab {tag}\n"
    assert not dead_owners_lab.exists() and not (sweep.SHARED_MEMORY / dead_owners_lab.name).exists()
    assert [name for name in network.namespaces() if tag in name] == []
    assert not _lives("sleep 620") and not _lives("sleep 621")


def test_the_next_start_sweeps_by_itself(dead_owners_lab: Path) -> None:
    with Lab(nodes=1):
        assert not dead_owners_lab.exists()
        assert not _lives("sleep 621")


def test_a_sweep_leaves_a_living_lab_alone() -> None:
    with Lab(nodes=1) as lab:
        assert lab.tag not in sweep.sweep()
        assert list(lab.node_states().values()) == ["idle"]


def test_a_reused_pid_does_not_protect_a_dead_lab(dead_owners_lab: Path) -> None:
    tag = dead_owners_lab.name.removeprefix(sweep.LAB_PREFIX)
    (dead_owners_lab / "owner").write_text(f"{os.getpid()} 1\n")  # our pid, started at another time
    assert tag in sweep.sweep()


def test_a_pid_file_that_names_a_later_process_kills_nobody(dead_owners_lab: Path) -> None:
    with subprocess.Popen(["sleep", "622"]) as bystander:
        (dead_owners_lab / "run" / f"stale.{bystander.pid}").write_text(f"{bystander.pid} 1\n")
        sweep.sweep()
        assert bystander.poll() is None
        bystander.send_signal(signal.SIGKILL)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a directory that belongs to somebody else")
def test_a_directory_that_another_user_made_is_never_swept() -> None:
    bait = sweep.LABS / f"{sweep.LAB_PREFIX}999999999-1"
    bait.mkdir()
    try:
        (bait / "run").mkdir()
        os.chown(bait, 65534, 65534)
        assert "999999999-1" not in sweep.sweep()
        assert bait.exists()
    finally:
        (bait / "run").rmdir()
        bait.rmdir()
