"""What the kernel says of a process: its state letter, and whether it is still the one that wrote the frame.

A frame names a pid, and a job may lie. The word of /proc counts only when the process belongs to the owner of the
frame's directory and began at the tick that the header names (field 22 of /proc/PID/stat, see proc(5)).

In a container with a pid namespace of its own the frame names the number in there, and its file the namespace. Which
process that is here, the kernel tells: NSpid of /proc/PID/status ends with that number, /proc/PID/ns/pid is that
namespace. It is looked for among all processes, once for each frame, and ever more seldom where it is not found.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from diagnosis.contracts.columns import null_of
from diagnosis.contracts.report import RANK_DTYPE

STATE_UNKNOWN: Final = null_of(RANK_DTYPE["process_state"])
STATE_GONE: Final = ord("X")
_STAT_BYTES_MAX: Final = 1024
_STATUS_BYTES_MAX: Final = 16384
_SEARCHED_MAX: Final = 1 << 17
"""Processes that are looked through for one in a namespace."""
_PAUSE_TICKS_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """State letter as a byte, and start time in clock ticks since boot."""

    state: int
    start_ticks: int


def parse_stat(data: bytes) -> ProcessStat | None:
    """Fields of /proc/PID/stat, None where it is none. The command name may hold anything, brackets included."""
    fields = data[data.rfind(b")") + 1 :].split()
    if len(fields) < 20 or len(fields[0]) != 1 or not fields[19].isdigit():
        return None
    return ProcessStat(fields[0][0], int(fields[19]))


Inner = tuple[int, int, int]
"""(pid namespace, number in it, start ticks)."""


@dataclass(slots=True)
class _Search:
    """For one process in a namespace: its number here (None: not found), when to look again, how long to wait then."""

    pid: int | None = None
    due_tick: int = 0
    pause_ticks: int = 1
    wanted: bool = True


class Processes:
    """Looks at processes by pid. Remembers which it has identified, so that a tick reads one small file each."""

    def __init__(self, root: Path = Path("/proc")) -> None:
        self._root = root
        self._known: dict[tuple[int, int], int] = {}
        self._own_namespace = self._namespace("self")
        self._searches: dict[Inner, _Search] = {}
        self._tick = 0
        self._by_start: dict[int, list[int]] | None = None

    def stat(self, pid: int) -> ProcessStat | None:
        """None: there is no such process (or this side cannot see it)."""
        data = self._read(pid, "stat", _STAT_BYTES_MAX)
        return parse_stat(data) if data is not None else None

    def state(self, pid: int, start_ticks: int, uid: int) -> int:
        """State letter of the process that (pid, start_ticks) names.

        STATE_GONE: it has ended. STATE_UNKNOWN: the process with these numbers does not belong to `uid`.
        """
        stat = self.stat(pid) if pid > 0 else None
        if stat is None or stat.start_ticks != start_ticks:
            self._known.pop((pid, start_ticks), None)
            return STATE_GONE
        owner = self._known.get((pid, start_ticks))
        if owner is None:
            owner = self._owner(pid)
            if owner is None:
                return STATE_UNKNOWN
            self._known[(pid, start_ticks)] = owner
        return stat.state if owner == uid else STATE_UNKNOWN

    def here(self, pid: int, namespace: int, start_ticks: int, uid: int) -> int:
        """The number here of the process that has `pid` in that pid namespace (0: the node's own).

        `pid` itself, with which `state` finds nothing, where there is none that belongs to `uid`, or one cannot see it.
        """
        if namespace in (0, self._own_namespace):
            return pid
        search = self._searches.setdefault((namespace, pid, start_ticks), _Search())
        search.wanted = True
        if search.pid is None and self._tick >= search.due_tick:
            search.pid = self._search(pid, namespace, start_ticks, uid)
            search.due_tick = self._tick + search.pause_ticks
            search.pause_ticks = min(2 * search.pause_ticks, _PAUSE_TICKS_MAX)
        return pid if search.pid is None else search.pid

    def keep(self, wanted: set[tuple[int, int]]) -> None:
        """The end of a look at all frames: forget all but these (pid, start_ticks), and who was not asked for."""
        self._known = {key: uid for key, uid in self._known.items() if key in wanted}
        self._searches = {key: search for key, search in self._searches.items() if search.wanted}
        for search in self._searches.values():
            search.wanted = False
        self._tick, self._by_start = self._tick + 1, None

    def _search(self, pid: int, namespace: int, start_ticks: int, uid: int) -> int | None:
        if self._by_start is None:
            self._by_start = defaultdict(list)
            everybody = (int(path.name) for path in self._root.iterdir() if path.name.isdigit())
            for number in islice(everybody, _SEARCHED_MAX):
                stat = self.stat(number)
                if stat is not None:
                    self._by_start[stat.start_ticks].append(number)
        for candidate in self._by_start.get(start_ticks, ()):
            numbers = self._of_status(candidate, b"NSpid:")
            if (
                len(numbers) > 1
                and numbers[-1] == pid
                and self._owner(candidate) == uid
                and self._namespace(str(candidate)) == namespace
            ):
                return candidate
        return None

    def _namespace(self, process: str) -> int | None:
        try:
            return (self._root / process / "ns" / "pid").stat().st_ino
        except OSError:
            return None

    def _owner(self, pid: int) -> int | None:
        """Real uid. The owner of /proc/PID will not do: it is root for a process that may not be dumped."""
        return next(iter(self._of_status(pid, b"Uid:")), None)

    def _of_status(self, pid: int, name: bytes) -> list[int]:
        """The numbers of a line of /proc/PID/status."""
        for line in (self._read(pid, "status", _STATUS_BYTES_MAX) or b"").splitlines():
            if line.startswith(name):
                return [int(word) for word in line.split()[1:] if word.isdigit()]
        return []

    def _read(self, pid: int, name: str, bytes_max: int) -> bytes | None:
        try:
            fd = os.open(self._root / str(pid) / name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            return os.read(fd, bytes_max)
        except OSError:  # ESRCH: it ended after the open
            return None
        finally:
            os.close(fd)
