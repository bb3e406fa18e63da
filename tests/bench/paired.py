"""What an A/B of paired measurements shows: the difference, how sure it is, and what it could not have seen.

A round holds one measurement of each arm, taken close together in time; a launch is one life of the processes, whose
memory lies as it happens to lie. So rounds of one launch are no independent samples, and the bootstrap draws launches
first and then rounds within them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

RESAMPLES: Final = 4000
TRIMMED: Final = 0.2
"""Of the rounds at either end: where other work came in between, a round says nothing."""
Z_TWO_SIDED_5_PCT, Z_POWER_80_PCT = 1.960, 0.842


@dataclass(frozen=True, slots=True)
class Difference:
    """Of one arm to another in percent: mean over the middle rounds; 95 % interval and standard error by bootstrap."""

    pct: float
    low_pct: float
    high_pct: float
    error_pct: float

    @property
    def smallest_seen_pct(self) -> float:
        """A true difference of this size is told from none (two-sided, 5 %) in four of five such measurements."""
        return (Z_TWO_SIDED_5_PCT + Z_POWER_80_PCT) * self.error_pct


def difference(launches: Sequence[Sequence[tuple[float, float]]], seed: int = 0) -> Difference:
    """Of pairs (without, with) by launch. The mean is of logarithms of the ratios, so that no direction is favoured.

    Raises ValueError where a launch has fewer than two pairs, which tell nothing of noise.
    """
    if not launches or min(map(len, launches)) < 2:
        raise ValueError("a launch has fewer than two pairs")
    ratios = [np.log(np.array(pairs)[:, 1] / np.array(pairs)[:, 0]) for pairs in launches]
    generator = np.random.default_rng(seed)
    means = np.empty(RESAMPLES)
    for sample in range(RESAMPLES):
        drawn = (ratios[launch] for launch in generator.integers(0, len(ratios), len(ratios)))
        means[sample] = _middle(np.concatenate([generator.choice(each, len(each)) for each in drawn]))
    low, high = np.percentile(means, (2.5, 97.5))
    pct, low_pct, high_pct = (float(100 * np.expm1(value)) for value in (_middle(np.concatenate(ratios)), low, high))
    return Difference(pct, low_pct, high_pct, error_pct=float(100 * means.std(ddof=1)))


def _middle(values: NDArray[np.float64]) -> float:
    cut = int(TRIMMED * len(values))
    return float(np.sort(values)[cut : len(values) - cut].mean())
