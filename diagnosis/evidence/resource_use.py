"""How a function uses the resource of its kind: mu and sigma of EROICA's behaviour pattern (NSDI'26).

Taken over an execution's *critical duration* (its Algorithm 1): a collective that waits for others moves nothing at
its edges, and that wait says nothing of the network. Let runs of at most g idle samples be bridged; longer ones cut the
execution into parts. The critical duration is the heaviest part, for the least g with which one part holds WORK_MIN of
all the work. The part only gets heavier as g grows, so g is found by bisection.

Executions shorter than a few samples (most kernels) have no parts: the use at both ends, interpolated, stands for them.
A function's mu is the mean over its executions, weighted by their durations; sigma pools their variances alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Longs = NDArray[np.int64]
Floats = NDArray[np.float64]

WORK_MIN: Final = 0.8
SAMPLES_MIN: Final = 3


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """A resource's use, 0 to 1, at moments of the executions' clock in rising order. Shapes (S,)."""

    at_ns: Longs
    use: Floats


def critical_part(use: Floats) -> slice:
    """Which samples (S,) of an execution are its critical duration; all of them where there is no work."""
    busy = np.flatnonzero(use > 0)
    if not len(busy):
        return slice(0, len(use))
    idle = np.diff(busy) - 1
    bridged = np.unique(np.concatenate([[0], idle]))
    low, high = 0, len(bridged) - 1
    while low < high:
        middle = (low + high) // 2
        if _heaviest(use, busy, idle, int(bridged[middle]))[1] >= WORK_MIN * use.sum():
            high = middle
        else:
            low = middle + 1
    return _heaviest(use, busy, idle, int(bridged[low]))[0]


def _heaviest(use: Floats, busy: Longs, idle: Longs, bridged: int) -> tuple[slice, float]:
    """The part with most work where idle runs of at most `bridged` samples do not separate, and its work."""
    cuts = np.flatnonzero(idle > bridged)
    first, last = np.concatenate([busy[:1], busy[cuts + 1]]), np.concatenate([busy[cuts], busy[-1:]])
    sums = np.concatenate([[0.0], np.cumsum(use)])
    work = sums[last + 1] - sums[first]
    top = int(work.argmax())
    return slice(int(first[top]), int(last[top]) + 1), float(work[top])


def mean_and_deviation(samples: Samples, group: Longs, groups: int, start: Longs, end: Longs) -> tuple[Floats, Floats]:
    """mu and sigma of each group (G,) of executions; NaN where the resource was not sampled while one ran.

    `group`, `start`, `end`: of each execution (E,), ns.
    """
    mu, sigma = np.full(groups, np.nan), np.full(groups, np.nan)
    if not len(samples.at_ns) or not len(start):
        return mu, sigma
    first = np.searchsorted(samples.at_ns, start, side="left")
    last = np.searchsorted(samples.at_ns, end, side="right")
    ends = np.interp(np.stack([start, end]), samples.at_ns, samples.use)
    mean, variance = ends.mean(axis=0), ends.var(axis=0)
    for one in np.flatnonzero(last - first >= SAMPLES_MIN).tolist():
        use = samples.use[first[one] : last[one]]
        part = use[critical_part(use)]
        mean[one], variance[one] = part.mean(), part.var()
    told = (end >= samples.at_ns[0]) & (start <= samples.at_ns[-1])
    weight = np.where(told, np.maximum(end - start, 1), 0).astype(np.float64)
    weights = np.bincount(group, weight, groups)
    known = weights > 0
    mu[known] = np.bincount(group, weight * mean, groups)[known] / weights[known]
    sigma[known] = np.sqrt(np.bincount(group, weight * variance, groups)[known] / weights[known])
    return mu, sigma
