"""How often inferred steps are right, beside the two published ways, on simulated programs at one look a second.

EROICA's: ten identical sequences in a row. Greyhound's: the first peak of the autocorrelation at 0.95 or more. All
three find the period of a communicator's record; which communicator tells the step, and its time, is worked out alike.
A telling is wrong when it is more than a tenth off the median of the steps that the simulation took.
`python -m tests.bench.bench_steps [SEEDS]`
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from unittest.mock import patch

import numpy as np

from diagnosis.evidence import steps
from diagnosis.evidence.periods import PERIOD_MAX, Period, Points, find_period
from node_daemon.step_watch import StepWatch
from tests.stepframes import Played

SEEDS = 14
IDENTICAL = 10
PEAK_MIN = 0.95
CONDITIONS: dict[str, dict[str, float]] = {
    "plain": {},
    "evaluations": {"evaluate_every": 20},
    "checkpoints": {"pause_every": 30},
    "lengths vary": {"lengths": 0.15},
    "joined late": {"skip": 30},
}
Finder = Callable[[Points, int, float], Period | None]


def _taken(points: Points, period: int, stride: int) -> Period:
    rounds = period * stride
    pattern, gap = np.zeros(rounds, np.uint32), np.full(rounds, np.nan, np.float32)
    tail = points[-2 * period :]
    pattern[tail["seq"] % rounds] = tail["signature"]
    return Period(pattern, gap)


def eroica(points: Points, stride: int, mean_gap_us: float) -> Period | None:
    """The shortest sequence that the record ends with ten times."""
    del mean_gap_us
    marks = points[points["seq"] % stride == 0]["signature"]
    for period in range(1, len(marks) // IDENTICAL + 1):
        tail = marks[-IDENTICAL * period :]
        if (tail[period:] == tail[:-period]).all():
            return _taken(points[points["seq"] % stride == 0], period, stride)
    return None


def greyhound(points: Points, stride: int, mean_gap_us: float) -> Period | None:
    """The first peak of the autocorrelation of what is done."""
    del mean_gap_us
    grid = points[points["seq"] % stride == 0]
    marks = grid["signature"]
    if len(marks) < 3 * IDENTICAL:
        return None
    alike = [
        1.0,
        *((marks[lag:] == marks[:-lag]).mean() for lag in range(1, min(PERIOD_MAX, len(marks) // 3) + 1)),
        0.0,
    ]
    for lag in range(1, len(alike) - 1):
        if alike[lag] >= PEAK_MIN and alike[lag] >= alike[lag + 1] and (lag == 1 or alike[lag] >= alike[lag - 1]):
            return _taken(grid, lag, stride)
    return None


def measure(finder: Finder, conditions: dict[str, float], seeds: int) -> tuple[int, int, int, int, list[float]]:
    """(jobs, looks, told, wrong, steps until the first telling that is right)."""
    looks = told = wrong = 0
    first: list[float] = []
    for seed in range(seeds):
        options = {name: value for name, value in conditions.items() if name != "skip"}
        played = Played(seed, **options)  # type: ignore[arg-type]
        true_ms = float(np.median(played.steps_ms))
        watch = StepWatch()
        with patch.object(steps, "find_period", finder):
            began = None
            for at_ms, job in played.looks(0, skip_ms=conditions.get("skip", 0) * true_ms):
                began = at_ms if began is None else began
                looks += 1
                for step in watch.look([job]).values():
                    told += 1
                    right = abs(step.step_ns / 1e6 / true_ms - 1) < 0.1
                    wrong += not right
                    if right and len(first) <= seed:
                        first.append((at_ms - began) / true_ms)
        if len(first) <= seed:
            first.append(np.inf)
    return seeds, looks, told, wrong, first


def main() -> None:
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else SEEDS
    for name, conditions in CONDITIONS.items():
        for who, finder in (("tocsin", find_period), ("ten identical", eroica), ("autocorrelation", greyhound)):
            jobs, looks, told, wrong, first = measure(finder, conditions, seeds)
            never = sum(not np.isfinite(steps) for steps in first)
            share, bad = 100 * told / looks, 100 * wrong / max(told, 1)
            sys.stdout.write(f"{name:<14} {who:<16} told at {share:3.0f} % of looks, wrong {bad:5.1f} % of them; ")
            sys.stdout.write(f"right after {np.median(first):4.0f} steps, never in {never} of {jobs} jobs\n")


if __name__ == "__main__":
    main()
