"""Whether the processes of a job live, and how they ended: state, wait channel, exit, and kills for want of memory.

/proc tells the state for as long as the process exists; a zombie (nobody has waited for it yet) also shows how it
ended. After that only what was remembered helps: a pid that now belongs to a process of another start time was given
away, and the one that was meant has ended. Which one the kernel killed for memory it tells in its log alone, but the
cgroup counts: `memory.events` (cgroup v2) or `memory.oom_control` (v1, Linux 4.13 and newer) of the process's own
group and of those above it up to the job's. What counts is how far the count has grown since the daemon first saw the
process, for groups outlive jobs. Everything here blocks and belongs on a thread.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from diagnosis.contracts.gathered import TEXT_CHARS_MAX, ProcessFacts
from node_daemon.collectors.doors import Process
from node_daemon.collectors.owner import acting_as
from node_daemon.collectors.process import STATE_GONE, STATE_UNKNOWN, Processes

GROUPS_ABOVE_MAX: Final = 16
REMEMBERED_MAX: Final = 1024
_FILE_BYTES_MAX: Final = 4096
_JOB: Final = re.compile(r"job_\d{1,10}")
_OF_THE_STEP: Final = ("memory.events", "memory.oom_control")
_KILLS: Final = re.compile(r"^oom_kill (\d{1,18})$", re.MULTILINE)
_EXIT_CODE_FIELD: Final = 52 - 3
"""Of /proc/PID/stat, counted from the state, which is field 3 (proc(5))."""


@dataclass(frozen=True, slots=True)
class _Remembered:
    """The cgroup of a process and those above it, with their kills when it was first seen."""

    kills: tuple[tuple[Path, int], ...]


class Liveness:
    """See the module. `remember` each process early; `facts` when it matters. One thread at a time."""

    def __init__(
        self,
        processes: Processes | None = None,
        proc: Path = Path("/proc"),
        cgroups: Path = Path("/sys/fs/cgroup"),
    ) -> None:
        self._processes = processes or Processes(proc)
        self._proc, self._cgroups = proc, cgroups
        self._known: dict[tuple[int, int], _Remembered] = {}

    def remember(self, members: Iterable[Process]) -> None:
        """Note the cgroups of processes that are new; forget all others."""
        known: dict[tuple[int, int], _Remembered] = {}
        for member in members:
            key = (member.pid, member.start_ticks)
            if len(known) >= REMEMBERED_MAX:
                break
            former = self._known.get(key)
            known[key] = former if former is not None else self._look(member)
        self._known = known

    def facts(self, member: Process) -> ProcessFacts:
        """What can be told of one process."""
        state = self._processes.state(member.pid, member.start_ticks, member.uid)
        told = ProcessFacts(world_rank=member.rank, pid=member.pid)
        if state == STATE_UNKNOWN:
            return msgspec.structs.replace(told, notes=["the process does not belong to the job's user"])
        told = self._with_kills(member, told)
        if state == STATE_GONE:
            reused = self._processes.stat(member.pid) is not None
            return msgspec.structs.replace(told, state="X", pid_reused=reused)
        told = msgspec.structs.replace(told, state=chr(state))
        return self._ended(member, told) if chr(state) == "Z" else self._waiting(member, told)

    def _waiting(self, member: Process, told: ProcessFacts) -> ProcessFacts:
        try:
            with acting_as(member.uid, member.gid):
                wchan = self._text(member, "wchan").strip()
        except OSError as error:
            return msgspec.structs.replace(told, notes=[f"wchan: {error.strerror}"])
        return msgspec.structs.replace(told, wchan=wchan[:TEXT_CHARS_MAX] if wchan not in ("", "0") else None)

    def _ended(self, member: Process, told: ProcessFacts) -> ProcessFacts:
        """How a zombie ended. The kernel shows 0 to those who may not trace it, so 0 alone is not believed."""
        try:
            fields = self._text(member, "stat").rpartition(")")[2].split()
            status = int(fields[_EXIT_CODE_FIELD])
        except (OSError, ValueError, IndexError):
            return told
        signal, code = status & 0x7F, (status >> 8) & 0xFF
        if signal:
            return msgspec.structs.replace(told, signal=signal)
        if code:
            return msgspec.structs.replace(told, exit_code=code)
        return msgspec.structs.replace(told, notes=["it ended with 0, or the kernel does not tell"])

    def _text(self, member: Process, name: str) -> str:
        with (self._proc / str(member.pid) / name).open("rb") as file:
            return file.read(_FILE_BYTES_MAX).decode(errors="replace")

    def _look(self, member: Process) -> _Remembered:
        if self._processes.state(member.pid, member.start_ticks, member.uid) in (STATE_GONE, STATE_UNKNOWN):
            return _Remembered(())
        try:
            told = self._text(member, "cgroup")
        except OSError:
            return _Remembered(())
        kills = []
        for directory in self._groups_of(told):
            count = _kills_of(directory)
            if count is not None:
                kills.append((directory, count))
        return _Remembered(tuple(kills))

    def _groups_of(self, told: str) -> list[Path]:
        """The directories that count the kills of a process's group, its own first, the job's last."""
        for line in told.splitlines():
            number, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if "memory" in controllers.split(","):
                return _chain(self._cgroups / "memory", path)
            if number == "0" and not controllers and _chain(self._cgroups, path):
                unified = _chain(self._cgroups, path)
                if any((directory / _OF_THE_STEP[0]).exists() for directory in unified):
                    return unified
        return []

    def _with_kills(self, member: Process, told: ProcessFacts) -> ProcessFacts:
        known = self._known.get((member.pid, member.start_ticks))
        grown: list[tuple[int, Path]] = []
        for directory, before in known.kills if known is not None else ():
            now = _kills_of(directory)
            if now is not None:
                grown.append((max(0, now - before), directory))
        if not grown:
            return told
        most, where = max(grown, key=lambda one: one[0])
        name = str(where.relative_to(self._cgroups))[-TEXT_CHARS_MAX:]
        return msgspec.structs.replace(told, oom_kills=most, cgroup=name)


def _chain(root: Path, path: str) -> list[Path]:
    """A group's directory and those above it, up to the one of a Slurm job; only its own where there is none."""
    parts = [part for part in path.strip().split("/") if part]
    if ".." in parts or len(parts) > GROUPS_ABOVE_MAX:
        return []
    job = next((at for at, part in enumerate(parts) if _JOB.fullmatch(part)), len(parts) - 1)
    return [root.joinpath(*parts[:depth]) for depth in range(len(parts), job, -1)] or [root]


def _kills_of(directory: Path) -> int | None:
    """Processes that the memory limit of a group has ended; None where that is not counted, or the group is gone."""
    for name in _OF_THE_STEP:
        try:
            with (directory / name).open("rb") as file:
                found = _KILLS.search(file.read(_FILE_BYTES_MAX).decode(errors="replace"))
        except OSError:
            continue
        return int(found[1]) if found else None
    return None
