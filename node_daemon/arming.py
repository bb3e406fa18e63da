"""Turns on more of NCCL's events for some seconds where a job looks ill.

Transfer steps, and with some releases the kernels' own times, cost a job too much to be on for good, and are what tells
whom a round waits for. So they are asked for on suspicion: nothing has moved on any of the job's ranks here for a
while; its steps take longer than they did; or the controller, which sees all nodes, suspects it. No more is asked for
than is safe with the job's NCCL (`native.nccl.masks`), and no job is armed for more than a twentieth of the time.

Nothing is kept here of when a job was armed last: it stands in the frames themselves (`control`), so a daemon that is
started again and again asks no more often. Nobody needs to close what was opened: the probe does so when the time is
over. What is asked for counts from the program's next call on, so a job that calls nothing any more tells no more.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

from diagnosis.contracts.errors import AgentFault
from node_daemon.collectors.event_mask import armed_since, ask_for_events, asked_until_s, to_be_asked
from node_daemon.collectors.frames import FrameSample, JobFrames
from node_daemon.collectors.process import STATE_GONE
from node_daemon.log import EventLog
from node_daemon.native.nccl.masks import Event
from node_daemon.summarise import Steps
from node_daemon.suspicion import Attempt, SuspicionWatch

ARMED_S: Final = 10
SHARE_MAX: Final = 1 / 20
STILL_S: Final = 5.0
"""How long nothing must have moved, or three times the longest pause so far. A pause that is none costs little here."""
SLOWER: Final = 1.2
SLOW_LOOKS: Final = 3
PACE_LOOKS: Final = 60
PACE_LOOKS_MIN: Final = 10
EVENTS: Final = Event.KERNEL_CH | Event.PROXY_OP | Event.PROXY_STEP
_log = EventLog("node_daemon.arming")


@dataclass(frozen=True, slots=True)
class Request:
    """One job to be armed: its directory's name, and its processes as their frames' names tell them: the number in the
    pid namespace, and that namespace (0: the node's own)."""

    job: str
    named: tuple[tuple[int, int], ...]
    why: str


@dataclass(slots=True)
class _Pace:
    """A job's step times of the last looks, newest last, in ns: the median over its ranks here."""

    steps_ns: deque[float] = field(default_factory=lambda: deque(maxlen=PACE_LOOKS))

    @property
    def slower(self) -> bool:
        """The newest looks each tell a longer step than the usual one before them."""
        newest, before = list(self.steps_ns)[-SLOW_LOOKS:], list(self.steps_ns)[:-SLOW_LOOKS]
        return len(before) >= PACE_LOOKS_MIN and min(newest) > SLOWER * median(before)


class Arming:
    """See the module. `due` with each sweep of the frames says what is to be asked; `arm` asks, and may block."""

    def __init__(self, root: Path, node: str, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._node = node
        self._clock_s = clock_s
        self._watch = SuspicionWatch(STILL_S)
        self._pace: dict[Attempt, _Pace] = {}
        self._asked: set[Attempt] = set()

    def ask(self, job_id: int, restart: int) -> None:
        """The controller suspects a job. Of no effect where this node does not have it."""
        if (job_id, restart) in self._pace:
            self._asked.add((job_id, restart))

    def due(self, jobs: Sequence[JobFrames], steps: Steps) -> list[Request]:
        """What is to be asked for now. A suspicion that comes too early for its job is dropped."""
        now_s = self._clock_s()
        still = {(one.job_id, one.restart) for one in self._watch.look(jobs, now_s)[0]}
        self._pace = {(job.job_id, job.restart): self._pace_of(job, steps, now_s) for job in jobs}
        requests: list[Request] = []
        for job in jobs:
            attempt = (job.job_id, job.restart)
            why = _reason(attempt in self._asked, attempt in still, self._pace[attempt].slower)
            frames = [frame for frame in job.frames if frame.state != STATE_GONE and to_be_asked(frame.header, EVENTS)]
            if why is not None and frames and self._may(job.frames, now_s):
                named = tuple((int(frame.header["pid"]), frame.namespace) for frame in frames)
                requests.append(Request(f"{job.job_id}.{job.restart}", named, why))
        self._asked.clear()
        return requests

    def _pace_of(self, job: JobFrames, steps: Steps, now_s: float) -> _Pace:
        pace = self._pace.get((job.job_id, job.restart)) or _Pace()
        told = [steps[key].step_ns for frame in job.frames if (key := (frame.pid, frame.start_ticks)) in steps]
        if told and not any(armed_since(frame.header, int(now_s * 1e9)) for frame in job.frames):
            pace.steps_ns.append(median(told))
        return pace

    @staticmethod
    def _may(frames: Iterable[FrameSample], now_s: float) -> bool:
        until_s = max(asked_until_s(frame.header, now_s) for frame in frames)
        return now_s >= until_s - ARMED_S + ARMED_S / SHARE_MAX

    def arm(self, requests: Iterable[Request]) -> int:
        """Ask the probes; how many heard. What cannot be asked is left as it is, and said once in a while."""
        heard = 0
        for request in requests:
            for pid, namespace in request.named:
                where = (self._root, self._node, request.job)
                try:
                    ask_for_events(*where, pid, EVENTS, ARMED_S, namespace=namespace, clock_s=self._clock_s)
                    heard += 1
                except (OSError, AgentFault) as error:
                    _log.sparsely("not armed", "a probe could not be asked", job=request.job, error=str(error))
            _log.info("armed", job=request.job, ranks=len(request.named), seconds=ARMED_S, why=request.why)
        return heard


def _reason(asked: bool, still: bool, slower: bool) -> str | None:
    if asked:
        return "the controller asks"
    return "nothing moves" if still else "slower than it was" if slower else None
