"""Asks a process's NCCL probe for more events for a while: the one word that the daemon writes into a frame.

The frame is the job's own file, so the word asks and does not command. The probe turns on no more than is safe with its
NCCL, and by itself returns to its standing events when the time is over, also when this daemon is gone. What it has
turned on stands in its frame (`event_mask`) from the next collective on.
"""

from __future__ import annotations

import os
import stat
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from diagnosis.contracts import probeframe
from diagnosis.contracts.errors import AgentFault
from diagnosis.contracts.probeframe import CONTROL_OFFSET, FILE_BYTES, WIDEN_S_MAX, Transport, control_word
from node_daemon.collectors.frame_root import open_node_directory
from node_daemon.collectors.merge import frame_name
from node_daemon.collectors.owner import acting_as
from node_daemon.native.nccl.masks import Event, masks_for

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


def ask_for_events(
    root: Path,
    node: str,
    job: str,
    pid: int,
    events: Event,
    seconds: float,
    *,
    clock_s: Callable[[], float] = time.monotonic,
) -> Event:
    """Ask the NCCL probe of process `pid` of `job` (`<job_id>.<restart>`) for `events` for so many seconds.

    Returns those that its release allows; it may allow fewer (a user's own mask counts for more). Raises ValueError for
    a time that no probe would follow, OSError where the frame cannot be opened as its owner, and AgentFault (reason
    `owner`, `unreadable`, `version`, ...) where it is not one that can be asked.
    """
    if not 0 < seconds <= WIDEN_S_MAX:
        raise ValueError(f"{seconds} s: at most {WIDEN_S_MAX} s can be asked for")
    node_fd = open_node_directory(root, node)
    try:
        about = os.stat(job, dir_fd=node_fd, follow_symlinks=False)
        with acting_as(about.st_uid, about.st_gid):
            return _write(node_fd, job, about.st_uid, pid, events, int(clock_s() + seconds))
    finally:
        os.close(node_fd)


def _write(node_fd: int, job: str, uid: int, pid: int, events: Event, until_s: int) -> Event:
    job_fd = os.open(job, _DIRECTORY, dir_fd=node_fd)
    try:
        fd = os.open(frame_name(pid, Transport.NCCL), _FILE, dir_fd=job_fd)
    finally:
        os.close(job_fd)
    try:
        about = os.fstat(fd)
        if about.st_uid != uid:
            raise AgentFault(f"belongs to {about.st_uid}, its directory to {uid}", reason="owner")
        if not stat.S_ISREG(about.st_mode):
            raise AgentFault("no regular file", reason="unreadable")
        header = probeframe.parse(os.pread(fd, FILE_BYTES, 0)).header
        if int(header["version"]) < 2 or int(header["transport"]) != Transport.NCCL:
            raise AgentFault("a probe that cannot be asked for events", reason="version")
        row = masks_for(int(header["library_version"]))
        allowed = events & row.widest if row is not None else events
        os.pwrite(fd, struct.pack("<Q", control_word(int(allowed), until_s)), CONTROL_OFFSET)
        return allowed
    finally:
        os.close(fd)
