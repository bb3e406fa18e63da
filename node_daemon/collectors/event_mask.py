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
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Final

import numpy as np

from diagnosis.contracts import probeframe
from diagnosis.contracts.errors import AgentFault
from diagnosis.contracts.probeframe import CONTROL_OFFSET, FILE_BYTES, WIDEN_S_MAX, Transport, control_word
from node_daemon.collectors.frame_root import open_node_directory
from node_daemon.collectors.merge import frame_name
from node_daemon.collectors.owner import acting_as
from node_daemon.native.nccl.masks import TABLE, Event, masks_for

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
    namespace: int = 0,
    clock_s: Callable[[], float] = time.monotonic,
) -> Event:
    """Ask the NCCL probe of process `pid` of `job` (`<job_id>.<restart>`) for `events` for so many seconds.

    `pid` and `namespace` are those of the frame's name.
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
            name = frame_name(pid, Transport.NCCL, namespace)
            return _write(node_fd, job, about.st_uid, name, events, int(clock_s() + seconds))
    finally:
        os.close(node_fd)


def _write(node_fd: int, job: str, uid: int, name: str, events: Event, until_s: int) -> Event:
    job_fd = os.open(job, _DIRECTORY, dir_fd=node_fd)
    try:
        fd = os.open(name, _FILE, dir_fd=job_fd)
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


def to_be_asked(header: np.void, events: Event) -> Event:
    """Those of `events` that the frame's probe may be asked for and that are not on; NONE where it is not NCCL's."""
    version = int(header["library_version"])
    row = masks_for(version)
    if not version and not int(header["event_mask"]):
        return Event.NONE
    return (events & row.widest if row is not None else events) & ~Event(int(header["event_mask"]))


def asked_until_s(header: np.void, now_s: float) -> float:
    """Until which second of CLOCK_MONOTONIC the frame's probe was asked for more. Of what no probe would have followed
    nothing is believed: the process may have written it itself."""
    until_s = float(int(header["control"]) >> 32)
    return until_s if until_s <= now_s + WIDEN_S_MAX else 0.0


def armed_since(header: np.void, since_ns: int) -> bool:
    """Whether events that were asked for were on at any time since then (CLOCK_MONOTONIC): the time that was asked for
    is not over, or the program has called nothing since that would have turned them off."""
    control = int(header["control"])
    row = masks_for(int(header["library_version"]))
    standing = row.standing if row is not None else reduce(or_, (row.standing for row in TABLE))
    extra = (control & 0xFFFF_FFFF) & ~int(standing)
    return extra != 0 and ((control >> 32) * 1_000_000_000 > since_ns or extra & int(header["event_mask"]) != 0)
