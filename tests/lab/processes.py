"""The lab's own processes: started in their own sessions, written down with pid and start time, ended by pid."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.lab import system

STOP_GRACE_S = 5.0


class Processes:
    """What a lab started. Each has a pid file `run/<name>.<pid>`, so a later run can end what a dead owner left."""

    def __init__(self, run: Path, log: Path) -> None:
        self._run = run
        self._log = log
        self._started: list[subprocess.Popen[bytes]] = []

    def spawn(
        self, name: str, argv: Sequence[str], env: Mapping[str, str], *, pipes: bool = False
    ) -> subprocess.Popen[bytes]:
        """Start a process. Errors go to `log/<name>.out`, its output too unless the caller wants `pipes`."""
        with (self._log / f"{name}.out").open("ab") as log:
            process = subprocess.Popen(
                argv,
                env=dict(env),
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else log,
                stderr=log,
                start_new_session=True,
            )
        found = system.stat(process.pid)
        ticks = found.start_ticks if found else 0
        (self._run / f"{name}.{process.pid}").write_text(f"{process.pid} {ticks}\n")
        self._started.append(process)
        return process

    def running(self) -> list[subprocess.Popen[bytes]]:
        """Those that have not ended, the newest first."""
        return [process for process in reversed(self._started) if process.poll() is None]


def end(processes: Iterable[subprocess.Popen[bytes]], grace_s: float = STOP_GRACE_S) -> None:
    """SIGTERM to all, SIGKILL after `grace_s` to those that stay, and wait for each. Stopped ones are continued."""
    waiting = [process for process in processes if process.poll() is None]
    for process in waiting:
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + grace_s
    for process in waiting:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def kill(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """SIGKILL, and wait for each."""
    waiting = list(processes)
    for process in waiting:
        process.kill()
    for process in waiting:
        process.wait(10)


def recorded(run: Path) -> list[tuple[int, int]]:
    """(pid, start ticks) of every pid file of a lab; unreadable files are left out."""
    found = []
    for path in run.glob("*.*"):
        words = path.read_text(errors="replace").split()
        if len(words) == 2 and all(word.isdigit() for word in words):
            found.append((int(words[0]), int(words[1])))
    return found


def members(directory: Path, namespace_files: Iterable[Path]) -> list[system.Stat]:
    """All live processes of a lab: those in its namespaces and those that carry its mark. Never this process."""
    inodes = {system.namespace_of(path) for path in namespace_files} - {None}
    found = []
    for process in system.all_processes():
        if process.pid == os.getpid() or process.state in "ZX":
            continue
        inside = system.namespace_of(Path(f"/proc/{process.pid}/ns/net")) in inodes
        if inside or system.works_for(process, directory):
            found.append(process)
    return found


def kill_members(directory: Path, namespace_files: Sequence[Path], timeout_s: float = 10.0) -> None:
    """SIGKILL to everything that belongs to a lab until nothing is left. LabError naming what will not die."""

    def gone() -> bool:
        left = members(directory, namespace_files)
        for process in left:
            if system.alive(process.pid, process.start_ticks):
                try:
                    os.kill(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        system.reap_adopted()
        return not left

    system.eventually(gone, timeout_s, f"all processes of {directory} gone")
