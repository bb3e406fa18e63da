"""The few things the lab asks of Linux: who is alive, who belongs to a lab, sockets inside a network namespace.

A process is named by (pid, start ticks): a pid alone may have been given to somebody else meanwhile.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
LAB_VARIABLE = "TOCSIN_LAB"
"""Set to the lab's directory in every process of a lab, jobs included."""
_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWNET = 0x4000_0000
_LIBC = ctypes.CDLL(None, use_errno=True)


class LabError(Exception):
    """The lab cannot do what was asked; the text says why and what to look at."""


@dataclass(frozen=True, slots=True)
class Stat:
    """The parts of /proc/PID/stat that the lab needs. `state` is one letter (Z: a zombie, T: stopped)."""

    pid: int
    comm: str
    state: str
    parent: int
    session: int
    start_ticks: int


def stat(pid: int) -> Stat | None:
    """What /proc says of a process, None when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    comm, rest = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
    return Stat(pid, comm, rest[0], int(rest[1]), int(rest[3]), int(rest[19]))


def alive(pid: int, start_ticks: int) -> bool:
    """True while that very process runs (a zombie does not)."""
    found = stat(pid)
    return found is not None and found.start_ticks == start_ticks and found.state not in "ZX"


def all_processes() -> Iterator[Stat]:
    """Every process there is, zombies too."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (found := stat(int(entry.name))) is not None:
            yield found


def descendants(pid: int) -> list[Stat]:
    """All processes below `pid`, zombies too."""
    by_parent: dict[int, list[Stat]] = {}
    for process in all_processes():
        by_parent.setdefault(process.parent, []).append(process)
    found, queue = [], [pid]
    while queue:
        children = by_parent.get(queue.pop(), [])
        found += children
        queue += [child.pid for child in children]
    return found


def command_line(pid: int) -> str:
    """The command line as one string, "" when it cannot be read."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def become_subreaper() -> None:
    """Orphans below this process become its own children, so that none of them can get out of sight."""
    if _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise LabError(f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(ctypes.get_errno())}")


def children() -> list[Stat]:
    """The children of this process, zombies too."""
    pids: list[int] = []
    for listing in Path("/proc/self/task").glob("*/children"):
        try:
            pids += [int(word) for word in listing.read_text().split()]
        except OSError:
            continue  # that thread has ended; its children are another thread's now
    return [found for pid in pids if (found := stat(pid)) is not None]


def reap_adopted() -> None:
    """Wait for dead children that this process adopted, as PID 1 would have done.

    Children that Python itself started must be left to their Popen objects. They are in our session or lead one of
    their own; an orphan of a job is in a session that somebody else leads. Only slurmstepd leads one and is adopted.
    """
    here = os.getsid(0)
    for process in children():
        adopted = process.session not in (here, process.pid) or process.comm.startswith("slurmstepd")
        if process.state == "Z" and adopted:
            try:
                os.waitpid(process.pid, os.WNOHANG)
            except ChildProcessError:
                continue  # another lab of this process was faster


class Reaper:
    """Calls `reap_adopted` twice a second, so that the dead of a job are gone as they would be on a real node."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="lab-reaper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        self._thread.join(5)

    def _work(self) -> None:
        while not self._over.wait(0.5):
            reap_adopted()


def works_for(process: Stat, directory: Path) -> bool:
    """True when a process belongs to the lab in `directory`: its environment says so.

    slurmstepd overwrites its arguments and its environment with a title; its log file gives it away.
    """
    proc = Path(f"/proc/{process.pid}")
    try:
        if f"{LAB_VARIABLE}={directory}".encode() in (proc / "environ").read_bytes().split(b"\0"):
            return True
        if not process.comm.startswith("slurmstepd"):
            return False
        return any(_target(link).startswith(f"{directory}/") for link in (proc / "fd").iterdir())
    except OSError:
        return False


def holds(pid: int, path: Path) -> bool:
    """True when a process has this file open or mapped; False also when we may not look."""
    proc = Path(f"/proc/{pid}")
    try:
        if any(_target(link) == str(path) for link in (proc / "fd").iterdir()):
            return True
        return any(line.endswith(f" {path}") for line in (proc / "maps").read_text(errors="replace").splitlines())
    except OSError:
        return False


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


def namespace_of(path: Path) -> int | None:
    """The inode number of a namespace file, which names the namespace; None when there is none."""
    try:
        return path.stat().st_ino
    except OSError:
        return None


def in_namespace(namespace: Path | None, work: Callable[[], T]) -> T:
    """Run `work` in a thread of its own inside a network namespace; what it opens stays usable out here."""
    if namespace is None:
        return work()
    outcome: list[T] = []
    trouble: list[OSError] = []

    def enter() -> None:
        try:
            with namespace.open("rb") as handle:
                if _LIBC.setns(handle.fileno(), _CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), f"setns {namespace}")
            outcome.append(work())
        except OSError as error:
            trouble.append(error)

    thread = threading.Thread(target=enter, name="lab-namespace")
    thread.start()
    thread.join()
    if trouble:
        raise trouble[0]
    return outcome[0]


def free_ports(count: int) -> list[int]:
    """Ports of the loopback address that were free a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


def eventually(condition: Callable[[], T | None], timeout_s: float, what: str, period_s: float = 0.05) -> T:
    """Wait until `condition` gives something true and return it; LabError naming `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        if value := condition():
            return value
        if time.monotonic() > deadline:
            raise LabError(f"after {timeout_s:g} s still not: {what}")
        time.sleep(period_s)
