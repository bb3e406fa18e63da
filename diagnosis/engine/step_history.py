"""Steps of a job's training as its nodes infer them: of each rank now, and the usual ones from before a slow-down.

A node knows a step by the order of a rank's operations (`diagnosis.evidence.steps`). Ranks of one job take the same
steps, so the job's step is the median over those that know theirs. The usual step is what was told first: like the
baseline of the rounds it is a healthy one as long as the job began healthy, and only if it was known before the
slow-down that is judged by it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Final

import numpy as np

from diagnosis.contracts.columns import null_of

USUAL_WORDS: Final = 8
"""Moments at which a step was known from which the usual one is taken."""
_NULL_U2: Final = null_of(np.dtype("u2"))
_NULL_U4: Final = null_of(np.dtype("u4"))


@dataclass(frozen=True, slots=True)
class StepNow:
    """Of one rank: time and deviation of a step in ms, rounds in one, and which was entered last. None: not known."""

    ms: float
    jitter_ms: float | None
    rounds: int | None
    round: int | None


def step_of_row(row: np.void) -> StepNow | None:
    """What a row of a report's rank table says; None where it says nothing."""
    step_us, jitter_us = int(row["step_us"]), int(row["step_jitter_us"])
    rounds, place = int(row["step_rounds"]), int(row["step_round"])
    if step_us in (0, _NULL_U4):
        return None
    return StepNow(
        ms=step_us / 1e3,
        jitter_ms=None if jitter_us == _NULL_U4 else jitter_us / 1e3,
        rounds=None if rounds in (0, _NULL_U2) else rounds,
        round=place if 0 < place <= rounds and rounds != _NULL_U2 else None,
    )


@dataclass(slots=True)
class StepHistory:
    """Of one attempt of a job."""

    now: StepNow | None = None
    _first_ms: list[float] = field(default_factory=list)
    _known_at: float = 0.0

    def observe(self, steps: Iterable[StepNow | None], at: float) -> None:
        """Take in the newest words of all ranks."""
        known = [step for step in steps if step is not None]
        if not known:
            return
        jitters = [step.jitter_ms for step in known if step.jitter_ms is not None]
        self.now = StepNow(median(step.ms for step in known), median(jitters) if jitters else None, None, None)
        if len(self._first_ms) < USUAL_WORDS:
            self._first_ms.append(self.now.ms)
            self._known_at = at

    def usual_ms(self, before: float) -> float | None:
        """How long a step took at first, where that was known before a moment."""
        known = len(self._first_ms) == USUAL_WORDS and self._known_at < before
        return median(self._first_ms) if known else None
