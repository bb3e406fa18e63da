"""Simulated step times of jobs, healthy and not, and how they are told: in windows, as looks or a module would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from diagnosis.engine.pace import Floats
from diagnosis.engine.trigger import WINDOW_DTYPE, Table

STEP_MS = 1000.0


def _noise(rng: np.random.Generator, count: int, cv: float) -> Floats:
    sigma = np.sqrt(np.log1p(cv * cv))
    return np.asarray(rng.lognormal(-sigma * sigma / 2, sigma, count), np.float64)


def steady(rng: np.random.Generator, count: int) -> Floats:
    """Steps that differ by a hundredth."""
    return STEP_MS * _noise(rng, count, 0.01)


def noisy(rng: np.random.Generator, count: int) -> Floats:
    """Steps that differ by a twelfth."""
    return STEP_MS * _noise(rng, count, 0.08)


def uneven(rng: np.random.Generator, count: int) -> Floats:
    """Sequences of all lengths in a step."""
    return STEP_MS * _noise(rng, count, 0.25)


def shared(rng: np.random.Generator, count: int) -> Floats:
    """A network that others use too: its pace wanders, slowly."""
    wander, draws = np.zeros(count), rng.normal(0, 0.01, count)
    for at in range(1, count):
        wander[at] = 0.9 * wander[at - 1] + draws[at]
    return steady(rng, count) * np.exp(wander)


def collected(rng: np.random.Generator, count: int) -> Floats:
    """A garbage collection at every 25th step, as ever."""
    steps = steady(rng, count)
    steps[24::25] += 0.6 * STEP_MS
    return steps


def logged(rng: np.random.Generator, count: int) -> Floats:
    """Every tenth step writes what it has learnt, and takes nearly twice as long."""
    steps = steady(rng, count)
    steps[9::10] += 0.8 * STEP_MS
    return steps


def evaluated(rng: np.random.Generator, count: int) -> Floats:
    """From step 150 on an evaluation after every 100 steps."""
    steps = steady(rng, count)
    steps[150::100] += STEP_MS * rng.uniform(15, 25)
    return steps


def saved(rng: np.random.Generator, count: int) -> Floats:
    """A checkpoint at every 200th step, and one that is written in the background: ten steps are slower."""
    steps = steady(rng, count)
    steps[199::200] += 12 * STEP_MS
    for at in range(299, count, 200):
        steps[at : at + 10] *= 1.15
    return steps


def compiled(rng: np.random.Generator, count: int) -> Floats:
    """Three steps that compile, twenty of warm-up, and a graph compiled again when the learning rate changes."""
    steps = steady(rng, count)
    steps[:3] += STEP_MS * np.array([40.0, 20.0, 5.0])
    steps[3:23] *= 1.3
    steps[300:302] += STEP_MS * np.array([18.0, 6.0])
    return steps


def everything(rng: np.random.Generator, count: int) -> Floats:
    """All of it in one job."""
    steps = noisy(rng, count)
    for other in (collected, evaluated, saved, compiled):
        steps += other(rng, count) - STEP_MS
    return steps


HEALTHY: dict[str, Callable[[np.random.Generator, int], Floats]] = {
    one.__name__: one
    for one in (steady, noisy, uneven, shared, collected, logged, evaluated, saved, compiled, everything)
}


def slower(steps: Floats, begin: int, factor: float) -> Floats:
    """The same job with a fault from a step on."""
    return np.where(np.arange(len(steps)) >= begin, steps * factor, steps)


@dataclass(frozen=True, slots=True)
class Teller:
    """How a job's steps are told: by `ranks`, in windows of `size` steps, each rank's a little off the others'."""

    ranks: int = 8
    size: int = 10
    blur: float = 0.002

    def tell(self, steps: Floats, rng: np.random.Generator) -> Iterator[tuple[float, Table]]:
        """(when, windows of all ranks), window by window."""
        ended_at = np.cumsum(steps) / 1e3
        for first in range(0, len(steps) - self.size + 1, self.size):
            table = np.zeros(self.ranks, WINDOW_DTYPE)
            table["rank"], table["first_step"], table["steps"] = np.arange(self.ranks), first, self.size
            mean_ms = steps[first : first + self.size].mean()
            table["ms_per_step"] = mean_ms * (1 + rng.normal(0, self.blur, self.ranks))
            table["ended_at"] = ended_at[first + self.size - 1]
            yield float(ended_at[first + self.size - 1]), table
