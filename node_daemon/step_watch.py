"""Follows the steps of all local ranks from frame to frame (`diagnosis.evidence.steps`).

A frame keeps the newest 32 recorded rounds of each communicator, which at one look a second are all that were recorded.
Together with the newest round's own number and operation they are what steps are inferred from. Nothing here is
trusted: numbers are taken modulo, and both readings of a frame must agree. Learning takes milliseconds, so only a few
communicators do it at one look.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from diagnosis.contracts.probeframe import COUNT_UNKNOWN, SIGNATURE_UNKNOWN, SLOT_COUNT, Untold
from diagnosis.evidence.periods import POINT_DTYPE, Points
from diagnosis.evidence.steps import Beat, Look, step_of
from node_daemon.collectors.frames import FrameSample, JobFrames, Slots
from node_daemon.summarise import ProcessKey, Steps, newest_signature

LEARN_PER_LOOK_MAX: Final = 2
COMMUNICATORS_PER_PROCESS_MAX: Final = 2 * SLOT_COUNT
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
        for key, frame in frames.items():
            self._observe(self._beats[key], frame)
        due = [beat for beats in self._beats.values() for beat in beats.values() if beat.due]
        for beat in sorted(due, key=lambda beat: beat.tries)[:LEARN_PER_LOOK_MAX]:
            beat.learn()
        steps = {key: step_of(beats.values()) for key, beats in self._beats.items()}
        return {key: step for key, step in steps.items() if step is not None}

    def _observe(self, beats: dict[int, Beat], frame: FrameSample) -> None:
        slots, again = frame.slots, frame.again
        entered = slots["enqueued"].astype(np.int64)
        steady = np.ones(len(slots), bool)
        for name in ("enqueued", "t_enqueued_ns", "op", "dtype", "count", "root"):
            steady &= slots[name] == again[name]
        whole, sound = recorded_rounds(slots, again)
        newest = newest_signature(slots)
        present = slots["comm_id"].tolist()
        if len(beats) > COMMUNICATORS_PER_PROCESS_MAX - SLOT_COUNT:  # those without a slot make room
            for comm_id in set(beats) - set(present):
                del beats[comm_id]
        for row, comm_id in enumerate(present):
            seq = int(entered[row])
            beat = beats.get(comm_id)
            if beat is None or seq < beat.seen:
                beat = beats[comm_id] = Beat()
            if seq <= beat.seen:
                continue
            points = _points(slots[row], whole[row], sound[row] & (whole[row] > beat.seen))
            if steady[row] and newest[row] != SIGNATURE_UNKNOWN and (not len(points) or points[-1]["seq"] < seq):
                points = np.append(points, np.array([(seq, newest[row], np.nan)], POINT_DTYPE))
            count = int(slots["count"][row])
            timed = not int(slots["unknown"][row]) & Untold.TIMES
            beat.observe(
                Look(
                    at_ns=frame.read_ns,
                    seq=seq,
                    entered_ns=int(slots["t_enqueued_ns"][row]) if steady[row] else 0,
                    points=points,
                    stride=max(1, int(slots["stride"][row])),
                    gap_sum_us=int(slots["gap_sum_ns"][row]) / 1000 if timed else np.nan,
                    elements=None if count == COUNT_UNKNOWN else count,
                )
            )


def recorded_rounds(slots: Slots, again: Slots) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Numbers of the recorded rounds, (slots, 32), and which of them both readings show alike. Open ones count."""
    first, second = slots["rounds"], again["rounds"]
    entered = slots["enqueued"].astype(np.int64)[:, None]
    age = (entered - first["seq"].astype(np.int64)) & _LOW
    sound = (first["seq"] != 0) & (first["signature"] != SIGNATURE_UNKNOWN) & (age < _HALF)
    for name in ("seq", "signature", "gap_us"):
        sound &= first[name] == second[name]
    whole = entered - age
    return whole, sound & (whole > 0)


def _points(slot: np.void, whole: NDArray[np.int64], chosen: NDArray[np.bool_]) -> Points:
    points = np.empty(int(chosen.sum()), POINT_DTYPE)
    points["seq"], points["signature"] = whole[chosen], slot["rounds"]["signature"][chosen]
    untold = int(slot["unknown"]) & Untold.TIMES
    points["gap_us"] = np.nan if untold else slot["rounds"]["gap_us"][chosen]
    return points[np.argsort(points["seq"], kind="stable")]
