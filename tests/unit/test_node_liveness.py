"""Liveness of real processes, and kills for memory in cgroups of either version laid out in a directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from node_daemon.collectors.doors import Process
from node_daemon.collectors.liveness import REMEMBERED_MAX, Liveness
from node_daemon.collectors.process import Processes
from tests.nodeframes import idle_process, start_ticks

V2 = "0::/system.slice/slurmstepd.scope/job_42/step_0/user/task_1\n"
V1 = "9:cpuset:/slurm\n5:memory:/slurm/uid_1000/job_42/step_0/task_1\n0::/\n"
GROUPS = {
    V2: ("system.slice/slurmstepd.scope/job_42", "memory.events", "low 0\nhigh 0\nmax 9\noom 3\noom_kill {}\n"),
    V1: ("memory/slurm/uid_1000/job_42", "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"),
}


def member(pid: int, ticks: int | None = None, uid: int | None = None) -> Process:
    uid = os.getuid() if uid is None else uid
    return Process(5, pid, start_ticks(pid) if ticks is None else ticks, uid, os.getgid())


def wait_for_state(pid: int, letter: str) -> None:
    ends_at = time.monotonic() + 30
    while Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != letter:
        assert time.monotonic() < ends_at


def test_a_sleeping_and_a_stopped_process_are_told() -> None:
    with idle_process() as child:
        wait_for_state(child.pid, "S")
        sleeping = Liveness().facts(member(child.pid))
        child.send_signal(signal.SIGSTOP)
        wait_for_state(child.pid, "T")
        stopped = Liveness().facts(member(child.pid))
    assert (sleeping.world_rank, sleeping.state, stopped.state) == (5, "S", "T")
    assert sleeping.exit_code is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only who may trace a process sees how it ended")
@pytest.mark.parametrize(
    ("program", "code", "number"), [("exit 7", 7, None), ("kill -9 $$", None, 9), ("exit 0", None, None)]
)
def test_a_zombie_tells_how_it_ended(program: str, code: int | None, number: int | None) -> None:
    with subprocess.Popen(["sh", "-c", f"read line; {program}"], stdin=subprocess.PIPE) as child:
        who = member(child.pid)
        assert child.stdin
        child.stdin.close()
        wait_for_state(child.pid, "Z")
        told = Liveness().facts(who)
    assert (told.state, told.exit_code, told.signal) == ("Z", code, number)
    assert bool(told.notes) == (program == "exit 0")


def test_an_ended_process_and_a_reused_number_are_told_apart() -> None:
    with idle_process() as child:
        who = member(child.pid)
        reused = Liveness().facts(member(child.pid, who.start_ticks - 1))
    gone = Liveness().facts(who)
    assert (gone.state, gone.pid_reused) == ("X", False)
    assert (reused.state, reused.pid_reused) == ("X", True)


def test_nothing_is_told_of_another_user_s_process() -> None:
    with idle_process() as child:
        told = Liveness().facts(member(child.pid, uid=os.getuid() + 1))
    assert (told.state, told.wchan, told.oom_kills) == (None, None, None)
    assert told.notes


# -- memory ------------------------------------------------------------------------------------------------------------


class Machine:
    """A /proc with one process, and cgroups, in a directory."""

    def __init__(self, root: Path, cgroup: str) -> None:
        self.proc, self.cgroups = root / "proc", root / "cgroup"
        self.own = self.proc / "77"
        self.own.mkdir(parents=True)
        self.live()
        (self.own / "status").write_text(f"Uid:\t{os.getuid()}\t0\t0\t0\n")
        (self.own / "cgroup").write_text(cgroup)
        (self.own / "wchan").write_text("futex_wait")
        where, self.file, self.form = GROUPS[cgroup]
        self.job = self.cgroups / where
        for directory in ("step_0/user/task_1" if cgroup == V2 else "step_0/task_1", "step_0", "."):
            (self.job / directory).mkdir(parents=True, exist_ok=True)
            (self.job / directory / self.file).write_text(self.form.format(3))
        self.liveness = Liveness(Processes(self.proc), self.proc, self.cgroups)
        self.who = Process(5, 77, 123, os.getuid(), os.getgid())

    def live(self) -> None:
        (self.own / "stat").write_text("77 (python) S " + " ".join(["0"] * 18) + " 123 0 0\n")

    def kill(self, count: int) -> None:
        (self.job / self.file).write_text(self.form.format(count))


@pytest.fixture(params=[V2, V1], ids=["v2", "v1"])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Machine:
    return Machine(tmp_path, request.param)


def test_kills_since_the_process_was_first_seen_are_counted_also_after_its_end(machine: Machine) -> None:
    machine.liveness.remember([machine.who])
    assert machine.liveness.facts(machine.who).oom_kills == 0
    machine.kill(5)
    machine.liveness.remember([machine.who])
    (machine.own / "stat").unlink()
    told = machine.liveness.facts(machine.who)
    assert (told.state, told.oom_kills) == ("X", 2)
    assert told.cgroup is not None
    assert told.cgroup.endswith("job_42")


def test_where_nothing_counts_or_the_groups_are_gone_that_is_unknown_and_not_zero(machine: Machine) -> None:
    assert machine.liveness.facts(machine.who).oom_kills is None  # never remembered
    machine.liveness.remember([machine.who])
    for path in machine.job.rglob(machine.file):
        path.unlink()
    assert machine.liveness.facts(machine.who).oom_kills is None


@pytest.mark.parametrize(
    "cgroup", ["", "0::/../../etc\n", "garbage", "::::", "0::/" + "a/" * 40 + "\n", "5:memory:\n", "\xff\xfe"]
)
def test_a_cgroup_that_leads_nowhere_is_unknown(tmp_path: Path, cgroup: str) -> None:
    machine = Machine(tmp_path, V2)
    (machine.own / "cgroup").write_text(cgroup)
    machine.liveness.remember([machine.who])
    assert machine.liveness.facts(machine.who).oom_kills is None


def test_what_is_remembered_is_bounded_and_forgotten() -> None:
    with idle_process() as child:
        one = member(child.pid)
        liveness = Liveness()
        liveness.remember(Process(rank, child.pid, rank, one.uid, one.gid) for rank in range(REMEMBERED_MAX + 50))
        assert len(liveness._known) == REMEMBERED_MAX
        liveness.remember([one])
        assert len(liveness._known) == 1


MEMORY = Path("/sys/fs/cgroup/memory")


@contextmanager
def limited_group(bytes_max: int) -> Iterator[Path]:
    """A memory cgroup of our own, named as Slurm names a job's."""
    group = MEMORY / f"job_{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(bytes_max))
        yield group
    finally:
        group.rmdir()


@pytest.mark.skipif(
    not (os.geteuid() == 0 and os.access(MEMORY / "cgroup.procs", os.W_OK)),
    reason="a process is only killed for memory in a cgroup that we may make (v1, as root)",
)
def test_a_process_that_the_kernel_kills_for_memory_is_told_so() -> None:
    program = "input(); hoard = bytearray(256 << 20)"
    with limited_group(24 << 20) as group:
        with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as child:
            (group / "cgroup.procs").write_text(str(child.pid))
            who, liveness = member(child.pid), Liveness()
            liveness.remember([who])
            assert child.stdin
            child.stdin.write(b"\n")
            child.stdin.close()
            wait_for_state(child.pid, "Z")
            told = liveness.facts(who)
            child.wait()
    assert (told.state, told.signal, told.oom_kills, told.cgroup) == ("Z", 9, 1, f"memory/{group.name}")
