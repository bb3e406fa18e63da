"""What the kernel says of a process: its state letter, and whether it is still the one that wrote the frame.

A frame names a pid, and a job may lie. The word of /proc counts only when the process belongs to the owner of the
frame's directory and began at the tick that the header names (field 22 of /proc/PID/stat, see proc(5)).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from diagnosis.contracts.columns import null_of
from diagnosis.contracts.report import RANK_DTYPE

STATE_UNKNOWN: Final = null_of(RANK_DTYPE["process_state"])
STATE_GONE: Final = ord("X")
_STAT_BYTES_MAX: Final = 1024
_STATUS_BYTES_MAX: Final = 4096


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


class Processes:
    """Looks at processes by pid. Remembers which it has identified, so that a tick reads one small file each."""

    def __init__(self, root: Path = Path("/proc")) -> None:
        self._root = root
        self._known: dict[tuple[int, int], int] = {}

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

    def keep(self, wanted: set[tuple[int, int]]) -> None:
        """Forget all but these (pid, start_ticks)."""
        self._known = {key: uid for key, uid in self._known.items() if key in wanted}

    def _owner(self, pid: int) -> int | None:
        """Real uid. The owner of /proc/PID will not do: it is root for a process that may not be dumped."""
        data = self._read(pid, "status", _STATUS_BYTES_MAX) or b""
        for line in data.splitlines():
            if line.startswith(b"Uid:"):
                words = line.split()
                return int(words[1]) if len(words) > 1 and words[1].isdigit() else None
        return None

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
