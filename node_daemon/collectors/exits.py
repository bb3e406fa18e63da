"""When and how the ranks' processes ended, as the kernel says: one thread that sleeps until one does.

A pidfd becomes readable the moment its process ends. How it ended, the first of these that tells:

* the process itself, as a zombie: until its parent has waited for it. A parent that waits is faster nearly always.
* the pidfd, once it hangs up because somebody has waited (PIDFD_GET_INFO, Linux 6.15).
* the proc connector (`proc_events`), on kernels before that.

What none tells stays unknown. Kills for want of memory are counted at that moment, before the cgroup goes away. A
process that had ended before it was first seen is not watched.
"""

from __future__ import annotations

import os
import platform
import re
import select
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fcntl import ioctl
from typing import Final

from diagnosis.contracts.report import RANKS_MAX
from node_daemon.collectors.doors import Process
from node_daemon.collectors.liveness import Liveness
from node_daemon.collectors.proc_events import ProcEvents
from node_daemon.collectors.process import Processes
from node_daemon.log import EventLog

ProcessKey = tuple[int, int]
"""(pid, start ticks)."""
PIDFDS_TELL_SINCE: Final = (6, 15)
_INFO_BYTES: Final = 64
_GET_INFO: Final = (3 << 30) | (_INFO_BYTES << 16) | (0xFF << 8) | 11
_EXIT_ASKED: Final = 1 << 3
_EXIT_CODE_AT: Final = 60
"""linux/pidfd.h: the ioctl, PIDFD_INFO_EXIT in the mask that a struct pidfd_info begins with, and its exit_code."""
_CLOSING: Final = 0
_log = EventLog("node_daemon.exits")


@dataclass(frozen=True, slots=True)
class End:
    """How a process ended. `at_ns`: CLOCK_MONOTONIC. None: not told; of `exit_code` and `signal` one at most is.

    `oom_kills`: processes of its cgroup that were ended for want of memory since it was first seen.
    """

    at_ns: int
    exit_code: int | None = None
    signal: int | None = None
    oom_kills: int | None = None

    def with_status(self, status: int) -> End:
        """The same, with how it ended as wait(2) has it."""
        signal = status & 0x7F
        return replace(self, signal=signal) if signal else replace(self, exit_code=(status >> 8) & 0xFF)


@dataclass(slots=True)
class _Watched:
    process: Process
    pidfd: int
    end: End | None = None

    @property
    def key(self) -> ProcessKey:
        return self.process.pid, self.process.start_ticks


def pidfds_tell(release: str) -> bool:
    """Whether a kernel of that release tells by a pidfd how its process ended."""
    found = re.match(r"(\d+)\.(\d+)", release)
    return found is not None and (int(found[1]), int(found[2])) >= PIDFDS_TELL_SINCE


class ExitWatch:
    """See the module. `watch` with each look at the frames; `ends` for a report; `close` in the end."""

    def __init__(
        self,
        liveness: Liveness | None = None,
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        release: str | None = None,
    ) -> None:
        self._processes = Processes()
        self._liveness = liveness or Liveness(self._processes)
        self._clock_ns = clock_ns
        self._lock = threading.Lock()  # of the two below, and of `_liveness`
        self._watched: dict[ProcessKey, _Watched] = {}
        self._of_pidfd: dict[int, _Watched] = {}
        self._poll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll.register(self._wake, select.EPOLLIN)
        self._events = None if pidfds_tell(release or platform.release()) else _proc_events()
        if self._events is not None:
            self._poll.register(self._events.fileno(), select.EPOLLIN)
        self._thread: threading.Thread | None = None

    def watch(self, processes: Iterable[Process]) -> None:
        """Watch these and forget all others, at most RANKS_MAX. Blocks for as long as /proc does."""
        wanted = {(one.pid, one.start_ticks): one for one in list(processes)[:RANKS_MAX]}
        with self._lock:
            if wanted.keys() == self._watched.keys():
                return
            for key in self._watched.keys() - wanted.keys():
                self._let_go(self._watched.pop(key))
            self._liveness.remember(wanted.values())
            for key in wanted.keys() - self._watched.keys():
                self._watched[key] = self._begin(wanted[key])
            if self._events is not None:
                self._events.watch([one.process.pid for one in self._watched.values() if one.pidfd >= 0])
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="exits", daemon=True)
            self._thread.start()

    def ends(self) -> Mapping[ProcessKey, End]:
        """Of those that are watched, the ones that have ended."""
        return {key: one.end for key, one in list(self._watched.items()) if one.end is not None}

    def close(self) -> None:
        """End the thread and let go of everything."""
        os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            for one in self._watched.values():
                self._let_go(one)
            self._watched.clear()
        if self._events is not None:
            self._events.close()
        self._poll.close()
        os.close(self._wake)

    def _begin(self, process: Process) -> _Watched:
        watched = _Watched(process, -1)
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError as error:
            if not isinstance(error, ProcessLookupError):
                _log.sparsely("pidfd", "end of a rank will not be seen", pid=process.pid, error=error.strerror)
            return watched
        stat = self._processes.stat(process.pid)
        # Another process has the number now; or it ended some time ago, nobody knows when.
        if stat is None or stat.start_ticks != process.start_ticks or stat.state in b"ZX":
            os.close(pidfd)
            return watched
        watched.pidfd = pidfd
        self._of_pidfd[pidfd] = watched
        self._poll.register(pidfd, select.EPOLLIN)
        return watched

    def _let_go(self, one: _Watched) -> None:
        if one.pidfd >= 0:
            self._poll.unregister(one.pidfd)
            del self._of_pidfd[one.pidfd]
            os.close(one.pidfd)
            one.pidfd = -1

    def _run(self) -> None:
        while True:
            ready = self._poll.poll()
            now_ns = self._clock_ns()
            with self._lock:
                for fd, what in ready:
                    if fd == self._wake:
                        return
                    if self._events is not None and fd == self._events.fileno():
                        self._hear(self._events)
                    elif fd in self._of_pidfd:
                        self._see(self._of_pidfd[fd], what, now_ns)

    def _see(self, one: _Watched, what: int, now_ns: int) -> None:
        if one.end is None or one.end.oom_kills is None:
            one.end = self._look(one, one.end or End(now_ns))
        if what & select.EPOLLHUP:
            status = _status(one.pidfd)
            if status is not None:
                one.end = replace(one.end, exit_code=None, signal=None).with_status(status)
            self._let_go(one)
        else:
            self._poll.modify(one.pidfd, 0)  # a hang-up is told all the same

    def _look(self, one: _Watched, end: End) -> End:
        told = self._liveness.facts(one.process)
        known = end.exit_code is not None or end.signal is not None
        return replace(
            end,
            exit_code=end.exit_code if known else told.exit_code,
            signal=end.signal if known else told.signal,
            oom_kills=told.oom_kills,
        )

    def _hear(self, events: ProcEvents) -> None:
        by_pid = {one.process.pid: one for one in self._watched.values()}
        for ended in events.ended():
            one = by_pid.get(ended.pid)
            if one is not None and (one.pidfd >= 0 or one.end is not None):
                kills = one.end.oom_kills if one.end is not None else None
                one.end = End(ended.at_ns, oom_kills=kills).with_status(ended.status)


def _proc_events() -> ProcEvents | None:
    try:
        return ProcEvents()
    except OSError as error:
        _log.info("how ranks end is told by their zombies alone", error=error.strerror or str(error))
        return None


def _status(pidfd: int) -> int | None:
    """How the process of a pidfd ended, as wait(2) has it; None while nobody has waited, or where it does not tell."""
    told = bytearray(_INFO_BYTES)
    struct.pack_into("=Q", told, 0, _EXIT_ASKED)
    try:
        ioctl(pidfd, _GET_INFO, told)
    except OSError:
        return None
    (mask,) = struct.unpack_from("=Q", told, 0)
    return int(struct.unpack_from("=i", told, _EXIT_CODE_AT)[0]) if mask & _EXIT_ASKED else None
