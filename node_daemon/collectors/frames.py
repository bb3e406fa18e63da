"""Reads the probe frames of all jobs on the node: `<frame_root>/<node>/<job_id>.<restart>/<pid>[.nccl].frame`.

Everything below the node's directory was made by users and is hostile. Hence:

* directories and files are opened one step at a time, following no link, and a user's files as that user (`owner`);
* only regular files of the exact size, owned by the directory's owner; a fifo or a lease cannot block (O_NONBLOCK);
* `pread`, never `mmap`: a job that truncates its file would kill a reader that maps it (SIGBUS);
* numbers of directories, files and frames are bounded, and no owner can crowd out another: known jobs come first,
  each owner has a share, and frames are taken from the owners in turn;
* what is refused is counted once by its reason, for as long as it stands there.

A frame is read twice. `enqueued_after` of `probeframe.rounds_of` comes from the second reading, and a round counts only
where both readings agree, so an entry caught while it was being written is never told. Between the two the kernel is
asked about the process: one that was gone before the second reading can have written nothing after it. A frame that
moves on all the same belongs to a process that this daemon cannot see (it runs in a container itself): its state is
unknown, and not gone.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from pathlib import Path
from typing import Final

import numpy as np

from diagnosis.contracts import probeframe
from diagnosis.contracts.errors import AgentFault
from diagnosis.contracts.report import JOBS_MAX, RANKS_MAX
from node_daemon.collectors.frame_root import open_node_directory
from node_daemon.collectors.merge import frame_name, namespace_of, one_per_process
from node_daemon.collectors.owner import acting_as
from node_daemon.collectors.process import STATE_GONE, STATE_UNKNOWN, Processes
from node_daemon.log import EventLog

Slots = np.ndarray[tuple[int], np.dtype[np.void]]

DIRECTORIES_SCANNED_MAX: Final = 4096
FILES_SCANNED_MAX: Final = 512
JOBS_PER_OWNER_MAX: Final = JOBS_MAX // 2
FRAMES_MAX: Final = RANKS_MAX
_JOB_NAME: Final = re.compile(r"[1-9]\d{0,9}\.(?:0|[1-9]\d{0,4})", re.ASCII)
"""As TaskProlog writes it and in no other way: `042.0` of another user must not stand beside `42.0` as the same job."""
_FRAME_NAME: Final = re.compile(r"\d{1,10}(?:-\d{1,10})?(?:\.nccl)?\.frame", re.ASCII)
_OPEN_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_OPEN_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_YOUNG: Final = frozenset(("short", "magic"))
"""A frame that is being made looks like this for a moment; it is counted only if it still does a tick later."""
_SETTLED_S: Final = 2.0
_log = EventLog("node_daemon.frames")


@dataclass(frozen=True, slots=True)
class FrameSample:
    """One process's frame, or what its two tell together.

    `slots` and `again` are two readings of the same communicators, row by row (SLOT_DTYPE).

    `read_ns`: CLOCK_MONOTONIC right after the first reading. `state`: letter of /proc/PID/stat, see `process`.
    `pid`: the process's number here; `namespace`: its pid namespace where the frame tells one, and then the number that
    the header tells is the one in there.
    """

    pid: int
    start_ticks: int
    state: int
    read_ns: int
    header: np.void
    slots: Slots
    again: Slots
    namespace: int = 0


@dataclass(frozen=True, slots=True)
class JobFrames:
    """All frames of one job attempt. `uid`, `gid`: the owner of its directory, as the kernel says."""

    job_id: int
    restart: int
    uid: int
    gid: int
    frames: list[FrameSample]


@dataclass(frozen=True, slots=True)
class Sweep:
    """What one look at all frames gave. `refused`: how many were refused since the start, by reason."""

    jobs: list[JobFrames]
    refused: dict[str, int]


@dataclass(slots=True)
class _Directory:
    name: str
    job_id: int
    restart: int
    uid: int
    gid: int
    fd: int
    files: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Watch:
    """What is remembered of a frame whose process is not seen: since when, how far it was, whether it moved since."""

    since_ns: int
    progress: tuple[int, int, int]
    moves: bool = False


class FrameReader:
    """See the module. One thread at a time may call it."""

    def __init__(
        self,
        root: Path,
        node: str,
        processes: Processes,
        *,
        gone_keep_s: float,
        idle_keep_s: float,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._root, self._node, self._processes = root, node, processes
        self._gone_keep_ns, self._idle_keep_s = int(gone_keep_s * 1e9), idle_keep_s
        self._clock_ns, self._wall_s = clock_ns, wall_s
        self._refused: Counter[str] = Counter()
        self._standing: dict[tuple[str, str, str], bool] = {}
        self._seen_now: set[tuple[str, str, str]] = set()
        self._watched: dict[tuple[str, str], _Watch] = {}
        self._active: set[str] = set()
        self._empty: dict[str, tuple[int, int]] = {}

    def collect(self) -> Sweep:
        """Read all frames of the node. Raises OperatorFault or OSError where the node's own directory fails."""
        self._seen_now = set()
        directories: list[_Directory] = []
        node_fd = open_node_directory(self._root, self._node)
        try:
            for name, about in self._candidates(node_fd):
                self._enter(node_fd, name, about, directories)
            self._active = {directory.name for directory in directories}
            wanted = self._share_out(directories)
            jobs = [self._read_job(directory, wanted) for directory in directories]
        finally:
            for fd in (node_fd, *(directory.fd for directory in directories)):
                os.close(fd)
        frames = {(frame.pid, frame.start_ticks) for job in jobs for frame in job.frames}
        self._processes.keep(frames)
        self._count_refusals()
        return Sweep([job for job in jobs if job.frames], dict(self._refused))

    # -- directories ---------------------------------------------------------------------------------------------

    def _candidates(self, node_fd: int) -> Iterator[tuple[str, os.stat_result]]:
        """Job directories that may hold frames, those that did a moment ago first. Empty ones end here."""
        names = _names(node_fd, DIRECTORIES_SCANNED_MAX)
        if len(names) > DIRECTORIES_SCANNED_MAX:
            self._refuse("", "", "too_many")
        self._empty = {name: self._empty[name] for name in names if name in self._empty}
        for name in dict.fromkeys([*sorted(self._active), *names[:DIRECTORIES_SCANNED_MAX]]):
            if not _JOB_NAME.fullmatch(name):
                self._refuse(name, "", "name")
                continue
            try:
                about = os.stat(name, dir_fd=node_fd, follow_symlinks=False)
            except OSError:
                continue  # removed since it was listed
            if stat.S_ISLNK(about.st_mode):
                self._refuse(name, "", "symlink")
            elif not stat.S_ISDIR(about.st_mode):
                self._refuse(name, "", "unreadable")
            elif self._empty.get(name) == (about.st_ino, about.st_mtime_ns):
                self._leave_empty(node_fd, name, about)
            else:
                yield name, about

    def _enter(self, node_fd: int, name: str, about: os.stat_result, entered: list[_Directory]) -> None:
        """Open a job directory as its owner, list it and add it to `entered`; or refuse it."""
        uid, gid = about.st_uid, about.st_gid
        owned = sum(directory.uid == uid for directory in entered)
        if os.geteuid() not in (0, uid):
            self._refuse(name, "", "owner")
        elif len(entered) >= JOBS_MAX or owned >= JOBS_PER_OWNER_MAX:
            self._refuse(name, "", "too_many")
        else:
            try:
                with acting_as(uid, gid), _opened(name, _OPEN_DIRECTORY, node_fd) as fd:
                    directory = self._list(name, fd, uid, gid)
            except OSError:
                self._refuse(name, "", "unreadable")
            else:
                entered += directory

    def _list(self, name: str, fd: int, uid: int, gid: int) -> Iterable[_Directory]:
        about = os.fstat(fd)
        names = _names(fd, FILES_SCANNED_MAX)
        if about.st_uid != uid:  # exchanged since it was looked at
            self._refuse(name, "", "owner")
            return ()
        if not names:
            self._note_empty(name, about)
            return ()
        files = self._frame_names(name, names)
        job_id, restart = map(int, name.split("."))
        return (_Directory(name, job_id, restart, uid, gid, os.dup(fd), files),)

    def _frame_names(self, directory: str, names: list[str]) -> list[str]:
        if len(names) > FILES_SCANNED_MAX:
            self._refuse(directory, "", "too_many")
        files = []
        for name in names[:FILES_SCANNED_MAX]:
            if _FRAME_NAME.fullmatch(name):
                files.append(name)
            else:
                self._refuse(directory, name, "name")
        return sorted(files)

    def _note_empty(self, name: str, about: os.stat_result) -> None:
        # Time stamps of files move in steps of some milliseconds: only one that has aged proves that nothing changed.
        if self._wall_s() - about.st_mtime > _SETTLED_S:
            self._empty[name] = (about.st_ino, about.st_mtime_ns)

    def _leave_empty(self, node_fd: int, name: str, about: os.stat_result) -> None:
        """An empty directory waits for its job's first collective; after a long while it is removed as its owner."""
        if self._wall_s() - about.st_mtime < self._idle_keep_s or os.geteuid() not in (0, about.st_uid):
            return
        try:
            with acting_as(about.st_uid, about.st_gid):
                os.rmdir(name, dir_fd=node_fd)
        except OSError as error:
            _log.sparsely("rmdir", "directory not removed", directory=name, error=error.strerror)

    def _share_out(self, directories: list[_Directory]) -> set[tuple[str, str]]:
        """Which frames are read when there are more than one report holds: the owners' in turn."""
        by_owner: defaultdict[int, list[tuple[str, str]]] = defaultdict(list)
        for directory in directories:
            by_owner[directory.uid] += [(directory.name, file) for file in directory.files]
        turns = (pair for group in zip_longest(*by_owner.values()) for pair in group if pair is not None)
        wanted = set(islice(turns, FRAMES_MAX))
        for directory in directories:
            if any((directory.name, file) not in wanted for file in directory.files):
                self._refuse(directory.name, "", "too_many")
        return wanted

    # -- frames --------------------------------------------------------------------------------------------------

    def _read_job(self, directory: _Directory, wanted: set[tuple[str, str]]) -> JobFrames:
        frames: list[FrameSample] = []
        try:
            with acting_as(directory.uid, directory.gid):
                for file in directory.files:
                    if (directory.name, file) in wanted:
                        frames += self._read_frame(directory, file)
        except PermissionError as error:
            _log.sparsely("owner", "frames not read", directory=directory.name, error=str(error))
            self._refuse(directory.name, "", "unreadable")
        return JobFrames(directory.job_id, directory.restart, directory.uid, directory.gid, one_per_process(frames))

    def _read_frame(self, directory: _Directory, file: str) -> Iterable[FrameSample]:
        """The frame, or nothing where it is refused, or was removed because its process ended long ago."""
        try:
            with _opened(file, _OPEN_FILE, directory.fd) as fd:
                _check_file(os.fstat(fd), directory.uid)
                sample = self._read_twice(fd, directory, file)
        except FileNotFoundError:
            return ()
        except AgentFault as fault:
            self._refuse(directory.name, file, fault.reason)
            return ()
        except OSError as error:
            self._refuse(directory.name, file, "symlink" if _is_link(file, directory.fd) else "unreadable")
            _log.sparsely("open", "frame not read", directory=directory.name, file=file, error=error.strerror)
            return ()
        if self._expired(directory, file, sample):
            self._remove(directory, file)
            return ()
        return (sample,)

    def _read_twice(self, fd: int, directory: _Directory, file: str) -> FrameSample:
        first = probeframe.parse(os.pread(fd, probeframe.FILE_BYTES, 0))
        read_ns = self._clock_ns()
        header = first.header
        pid, start_ticks, namespace = int(header["pid"]), int(header["pid_start_ticks"]), namespace_of(file)
        if frame_name(pid, int(header["transport"]), namespace) != file:
            raise AgentFault(f"{file} says that it is the frame of {pid}", reason="name")
        pid = self._processes.here(pid, namespace, start_ticks, directory.uid)
        state = self._processes.state(pid, start_ticks, directory.uid)
        second = probeframe.parse(os.pread(fd, probeframe.FILE_BYTES, 0))
        state = self._judge(directory, file, state, second)
        slots, again = _same_communicators(first.slots, second.slots)
        return FrameSample(pid, start_ticks, state, read_ns, header, slots, again, namespace)

    def _judge(self, directory: _Directory, file: str, state: int, frame: probeframe.Frame) -> int:
        """The state to tell; remembers how far the frame of an unseen process is."""
        key = (directory.name, file)
        if state not in (STATE_GONE, STATE_UNKNOWN):
            self._watched.pop(key, None)
            return state
        slots = frame.slots
        progress = (int(frame.header["last_leave_ns"]), int(slots["enqueued"].sum()), int(slots["done"].sum()))
        watch = self._watched.get(key)
        if watch is None:
            watch = self._watched[key] = _Watch(self._clock_ns(), progress)
        elif watch.progress != progress:
            watch.since_ns, watch.progress, watch.moves = self._clock_ns(), progress, True
        return STATE_UNKNOWN if watch.moves else state

    def _expired(self, directory: _Directory, file: str, sample: FrameSample) -> bool:
        watch = self._watched.get((directory.name, file))
        if watch is None:
            return False
        keep_ns = self._gone_keep_ns if sample.state == STATE_GONE else int(self._idle_keep_s * 1e9)
        return self._clock_ns() - watch.since_ns >= keep_ns

    def _remove(self, directory: _Directory, file: str) -> None:
        del self._watched[(directory.name, file)]
        try:
            os.unlink(file, dir_fd=directory.fd)
        except OSError as error:
            _log.sparsely("unlink", "frame not removed", directory=directory.name, file=file, error=error.strerror)

    # -- refusals ------------------------------------------------------------------------------------------------

    def _refuse(self, directory: str, file: str, reason: str) -> None:
        self._seen_now.add((directory, file, reason))

    def _count_refusals(self) -> None:
        """Count what is refused for the first time; what stands there since the last tick was counted then."""
        standing: dict[tuple[str, str, str], bool] = {}
        for key in self._seen_now:
            directory, file, reason = key
            counted = self._standing.get(key, False)
            if not counted and (key in self._standing or reason not in _YOUNG):
                self._refused[reason] += 1
                counted = True
                _log.sparsely(f"refused {reason}", "frame refused", reason=reason, directory=directory, file=file)
            standing[key] = counted
        self._standing = standing
        self._watched = {key: watch for key, watch in self._watched.items() if key[0] in self._active}


@contextmanager
def _opened(name: str, flags: int, dir_fd: int) -> Iterator[int]:
    fd = os.open(name, flags, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def _names(fd: int, names_max: int) -> list[str]:
    """Names in a directory, at most one more than `names_max`. `fd` was just opened: its offset is shared."""
    with os.scandir(fd) as entries:
        return [entry.name for entry in islice(entries, names_max + 1)]


def _is_link(name: str, dir_fd: int) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _check_file(about: os.stat_result, uid: int) -> None:
    if not stat.S_ISREG(about.st_mode):
        raise AgentFault("no regular file", reason="unreadable")
    if about.st_uid != uid:
        raise AgentFault(f"belongs to {about.st_uid}, its directory to {uid}", reason="owner")
    if about.st_size != probeframe.FILE_BYTES:
        reason = "short" if about.st_size < probeframe.FILE_BYTES else "sizes"
        raise AgentFault(f"{about.st_size} bytes, a frame has {probeframe.FILE_BYTES}", reason=reason)


def _same_communicators(first: Slots, second: Slots) -> tuple[Slots, Slots]:
    """Rows of both readings that speak of the same communicator; one that came or went in between waits a tick."""
    if len(first) == len(second) and (first["comm_id"] == second["comm_id"]).all():
        return first, second
    rows = {comm_id: row for row, comm_id in enumerate(second["comm_id"].tolist())}
    pairs = [(row, rows[comm_id]) for row, comm_id in enumerate(first["comm_id"].tolist()) if comm_id in rows]
    return first[[left for left, _ in pairs]], second[[right for _, right in pairs]]
