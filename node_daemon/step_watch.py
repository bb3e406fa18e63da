"""Follows the steps of all local ranks from frame to frame (`diagnosis.evidence.steps`).

A frame keeps the newest 32 recorded rounds of each communicator, which at one look a second are all that were recorded.
Together with the newest round's own number and operation they are what steps are inferred from. Nothing here is
trusted: numbers are taken modulo, and both readings of a frame must agree. Learning takes milliseconds, so only a few
communicators do it at one look.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import numpy as np

from diagnosis.contracts.probeframe import COUNT_UNKNOWN, SIGNATURE_UNKNOWN, SLOT_COUNT, Untold
from diagnosis.evidence.periods import POINT_DTYPE, Points
from diagnosis.evidence.steps import Beat, Look, step_of
from node_daemon.collectors.frames import FrameSample, JobFrames, Slots
from node_daemon.summarise import ProcessKey, Steps, newest_signature, stack

LEARN_PER_LOOK_MAX: Final = 2
COMMUNICATORS_PER_PROCESS_MAX: Final = 2 * SLOT_COUNT
SEQ_MAX: Final = 1 << 62
_COLUMNS: Final = ("comm_id", "enqueued", "t_enqueued_ns", "stride", "gap_sum_ns", "count")
_LOW: Final = 0xFFFF_FFFF
_HALF: Final = 1 << 31


class StepWatch:
    """See the module. One `look` per report."""

    def __init__(self) -> None:
        self._beats: dict[ProcessKey, dict[int, Beat]] = {}

    @property
    def followed(self) -> int:
        """Communicators that are followed."""
        return sum(map(len, self._beats.values()))

    def look(self, jobs: Iterable[JobFrames]) -> Steps:
        """The steps of every process whose steps are known."""
        frames = {(frame.pid, frame.start_ticks): frame for job in jobs for frame in job.frames}
        self._beats = {key: self._beats.get(key, {}) for key in frames}
        if frames:
            self._observe(list(frames.values()), list(self._beats.values()))
        due = [beat for beats in self._beats.values() for beat in beats.values() if beat.due]
        for beat in sorted(due, key=lambda beat: beat.tries)[:LEARN_PER_LOOK_MAX]:
            beat.learn()
        steps = {key: step_of(beats.values()) for key, beats in self._beats.items()}
        return {key: step for key, step in steps.items() if step is not None}

    def _observe(self, frames: list[FrameSample], followed: list[dict[int, Beat]]) -> None:
        for frame, beats in zip(frames, followed, strict=True):
            if len(beats) > COMMUNICATORS_PER_PROCESS_MAX - SLOT_COUNT:  # those without a slot make room
                for comm_id in set(beats) - set(frame.slots["comm_id"].tolist()):
                    del beats[comm_id]
        slots, again, owner = stack(frames)
        steady = np.ones(len(slots), bool)
        for name in ("enqueued", "t_enqueued_ns", "op", "dtype", "count", "root"):
            steady &= slots[name] == again[name]
        recorded, newest = _Recorded(slots, again), newest_signature(slots).tolist()
        timed = (slots["unknown"] & Untold.TIMES) == 0
        columns = zip(
            owner.tolist(),
            *(slots[name].tolist() for name in _COLUMNS),
            steady.tolist(),
            timed.tolist(),
            newest,
            strict=True,
        )
        for row, (frame, comm_id, seq, entered_ns, stride, gap_ns, count, still, told, mark) in enumerate(columns):
            if seq > SEQ_MAX or entered_ns > SEQ_MAX:
                continue  # made up
            beat = followed[frame].get(comm_id)
            if beat is None or seq < beat.seen:
                beat = followed[frame][comm_id] = Beat()
            if seq <= beat.seen:
                continue
            look = Look(
                at_ns=frames[frame].read_ns,
                seq=seq,
                entered_ns=entered_ns if still else 0,
                points=recorded.points(row, beat.seen, (seq, mark) if still and mark != SIGNATURE_UNKNOWN else None),
                stride=max(1, stride),
                gap_sum_us=gap_ns / 1000 if told else math.nan,
                elements=None if count == COUNT_UNKNOWN else count,
            )
            beat.observe(look)


class _Recorded:
    """The recorded rounds of all slots that both readings show alike; those that are open count."""

    def __init__(self, slots: Slots, again: Slots) -> None:
        first, second = slots["rounds"], again["rounds"]
        entered = np.minimum(slots["enqueued"], SEQ_MAX).astype(np.int64)[:, None]
        age = (entered - first["seq"].astype(np.int64)) & _LOW
        sound = (first["seq"] != 0) & (first["signature"] != SIGNATURE_UNKNOWN) & (age < _HALF)
        for name in ("seq", "signature", "gap_us"):
            sound &= first[name] == second[name]
        self._points = np.empty(age.shape, POINT_DTYPE)
        self._points["seq"], self._points["signature"] = np.where(sound, entered - age, 0), first["signature"]
        timed = (slots["unknown"] & Untold.TIMES) == 0
        self._points["gap_us"] = np.where(timed[:, None], first["gap_us"], np.nan)

    def points(self, row: int, seen: int, newest: tuple[int, int] | None) -> Points:
        """Rounds of a slot above `seen`, ascending, and the newest one (number, signature) where it is not recorded."""
        points: Points = self._points[row]
        points = points[points["seq"] > max(0, seen)]
        points = points[np.argsort(points["seq"], kind="stable")]
        if newest is None or (len(points) and points["seq"][-1] >= newest[0]):
            return points
        return np.append(points, np.array([(*newest, np.nan)], POINT_DTYPE))
