"""Behaviour patterns of functions across workers: EROICA's (NSDI'26) two distances.

Each function f on worker w has a pattern (beta, mu, sigma): its share of the critical path, and mean and deviation
of the use of the resource that belongs to its kind (compute, memory, collective, host). Two questions per function:

* *Distance from expectation*: how far beta lies outside what is right for its kind on every worker. Finds what is wrong
  with all workers alike. Compute kernels have no expectation: any share of them is accepted.
* *Differential distance*: the share of the other workers whose pattern differs by at least DELTA (Manhattan distance
  of patterns normalised by their greatest value). Finds what is wrong with some workers, as EROICA does: a worker is
  unusual where it exceeds the median by K deviations.

Only workers of one role are compared (the paper compares all; last pipeline stages would then be named, see `roles`).
The expected shares are not published in full: those of host functions (1 %) and collectives (30 %) are told
second-hand, that of copies is ours. Functions below BETA_MIN of the critical path are not worth a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from diagnosis.contracts.incident import Floats, Ints, Summaries
from diagnosis.engine.lanes import Longs, by_kind

DELTA: Final = 0.4
K: Final = 5.0
BETA_MIN: Final = 0.01
EXPECTED_BETA_MAX: Final[Mapping[str, float]] = {"host": 0.01, "memcpy": 0.1, "comm": 0.3}
PEERS_MAX: Final = 128
FOUND_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class Unusual:
    """One function that behaves unusually. `rank` None: on all workers alike. `distance`: how far."""

    function: str
    kind: str
    rank: int | None
    beta: float
    distance: float


def unusual(summaries: Summaries, role: Longs) -> list[Unusual]:
    """Functions that behave unusually, farthest first; empty where no patterns were gathered."""
    stats = summaries.stats
    if any(name not in stats for name in ("beta", "mu", "sigma")):
        return []
    pattern = np.stack([stats["beta"], stats["mu"], stats["sigma"]], axis=1)
    found: list[Unusual] = []
    for function in range(len(summaries.operator_names)):
        rows = np.flatnonzero((summaries.operator == function) & np.isfinite(pattern[:, 0]))
        if len(rows):
            found += _of_function(summaries, role, function, rows, pattern)
    found.sort(key=lambda one: (-one.distance, one.function, -1 if one.rank is None else one.rank))
    return found[:FOUND_MAX]


def _of_function(s: Summaries, role: Longs, function: int, rows: Ints | Longs, pattern: Floats) -> list[Unusual]:
    name, kind = s.operator_names[function], s.kind[function]
    beta = pattern[rows, 0]
    found = []
    expected = EXPECTED_BETA_MAX.get(kind)
    if expected is not None and float(np.median(beta)) > max(expected, BETA_MIN):
        found.append(Unusual(name, kind, None, float(np.median(beta)), float(np.median(beta)) - expected))
    ranks = s.rank[s.worker[rows]]
    known = (ranks >= 0) & (ranks < len(role))
    for members in by_kind(np.flatnonzero(known), role[ranks[known]]):
        distance = _differential(pattern[rows[members]])
        usual = float(np.median(distance))
        spread = float(np.median(np.abs(distance - usual)))
        for member in members[(distance > usual + K * spread) & (beta[members] > BETA_MIN)]:
            at = float(distance[np.flatnonzero(members == member)[0]])
            found.append(Unusual(name, kind, int(ranks[member]), float(beta[member]), at))
    return found


def _differential(pattern: Floats) -> Floats:
    """For each worker the share of (at most PEERS_MAX) peers whose pattern is at least DELTA away."""
    greatest = np.nanmax(np.abs(np.nan_to_num(pattern)), axis=0)
    normal = np.nan_to_num(pattern) / np.where(greatest > 0, greatest, 1.0)
    peers = normal[np.linspace(0, len(normal) - 1, min(len(normal), PEERS_MAX)).astype(np.int64)]
    apart = np.abs(normal[:, None, :] - peers[None, :, :]).sum(axis=2)
    return np.asarray((apart >= DELTA).mean(axis=1), np.float64)
