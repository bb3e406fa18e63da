"""When a node's own frames look like a hang: nothing has moved on any of a job's ranks here for too long.

The controller knows better (it sees all nodes and the job's whole past), but it may be away, and evidence is only
there until somebody ends the job. So each node also judges by itself, generously: a job stands still when no counter of
any of its frames here has moved for the floor, or for three times the longest pause that ended by itself, whichever is
longer. It raises a suspicion only if a rank still lives, and one stands in a round or its probe cannot tell whether it
does. One suspicion per standstill: the next needs a movement first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from diagnosis.contracts.probeframe import Untold
from node_daemon.collectors.doors import Process
from node_daemon.collectors.frames import JobFrames, Slots
from node_daemon.collectors.process import STATE_GONE, STATE_UNKNOWN

PAUSE_FACTOR: Final = 3.0
Attempt = tuple[int, int]


@dataclass(slots=True)
class _Watch:
    """`progress`: all counters together, by process; `longest_s`: the longest standstill that ended."""

    progress: frozenset[tuple[int, int, int]]
    since: float
    longest_s: float = 0.0
    suspected: bool = False


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A job attempt that stands still here, for `quiet_s` seconds."""

    job_id: int
    restart: int
    quiet_s: float


class SuspicionWatch:
    """See the module. `floor_s` 0: never. Forgets jobs that have no frames any more."""

    def __init__(self, floor_s: float) -> None:
        self._floor_s = floor_s
        self._watched: dict[Attempt, _Watch] = {}

    def look(self, jobs: Iterable[JobFrames], now: float) -> tuple[list[Suspicion], set[Attempt]]:
        """New suspicions, and the attempts that have moved since the last look. `now` in seconds, monotonic."""
        suspicions: list[Suspicion] = []
        moved: set[Attempt] = set()
        kept: dict[Attempt, _Watch] = {}
        for job in jobs:
            attempt = (job.job_id, job.restart)
            progress = _progress(job)
            watch = self._watched.get(attempt)
            if watch is None:
                watch = _Watch(progress, now)
            elif watch.progress != progress:
                watch = _Watch(progress, now, max(watch.longest_s, now - watch.since))
                moved.add(attempt)
            kept[attempt] = watch
            quiet_s = now - watch.since
            bound_s = max(self._floor_s, PAUSE_FACTOR * watch.longest_s)
            if self._floor_s > 0 and not watch.suspected and quiet_s >= bound_s and _may_wait(job):
                watch.suspected = True
                suspicions.append(Suspicion(job.job_id, job.restart, quiet_s))
        self._watched = kept
        return suspicions, moved


def _progress(job: JobFrames) -> frozenset[tuple[int, int, int]]:
    return frozenset(
        (
            frame.pid,
            int(frame.header["last_leave_ns"]),
            sum(int(frame.slots[name].sum()) for name in ("enqueued", "started", "done")),
        )
        for frame in job.frames
    )


def _may_wait(job: JobFrames) -> bool:
    """Whether a rank lives, and any stands in a round as far as the frames tell."""
    if all(frame.state == STATE_GONE for frame in job.frames):
        return False
    return any(_stands_in_a_round(frame.slots) for frame in job.frames if frame.state != STATE_GONE)


def _stands_in_a_round(slots: Slots) -> bool:
    untold = (slots["unknown"] & Untold.DONE) != 0
    return bool(((slots["enqueued"] > 0) & (untold | (slots["done"] < slots["enqueued"]))).any())


def members_of(job: JobFrames) -> list[Process]:
    """The processes of a job that the kernel confirms, or that have ended; by rank."""
    members = [
        Process(int(frame.header["rank"]), frame.pid, frame.start_ticks, job.uid, job.gid)
        for frame in job.frames
        if frame.state != STATE_UNKNOWN
    ]
    return sorted(members, key=lambda member: member.rank)


def comm_ranks_of(jobs: Sequence[JobFrames]) -> dict[str, dict[int, int]]:
    """By a communicator's hash, rank there to rank in the job, as far as the frames here tell."""
    found: dict[str, dict[int, int]] = {}
    for job in jobs:
        for frame in job.frames:
            for slot in frame.slots:
                comm = found.setdefault(f"{int(slot['comm_id']):#x}", {})
                comm[int(slot["comm_rank"])] = int(frame.header["rank"])
    return found
