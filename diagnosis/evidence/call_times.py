"""Own time and duration of rounds from the moments of their calls alone.

In a library that works on the host, a round cannot end before its last member has called it. If the transfer itself is
short, it ends then. So from the calls of all members, by clocks that agree, follow each member's duration (from its
call to the last one's) and its own time (from the end of its previous round to its call).

Clocks of different nodes need not agree. Causality tells: nobody whose previous round is over can have called the next
one before the last member called the previous one. Where that is broken more than now and then, the calls are no
measure of anything and nothing is told.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from diagnosis.contracts.incident import Floats, Ints

ROUNDS_MIN: Final = 16
TOLERANCE_MS: Final = 1.0
BROKEN_SHARE_MAX: Final = 0.05
Longs = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Calls:
    """Calls of rounds that have ended (N,), each rank's in the order of its program: who, of which communicator, which
    round, when in ms. `members` (C,): how many ranks must call a round of each communicator."""

    rank: Ints
    comm: Ints
    round: Longs
    called_ms: Floats
    members: Longs


@dataclass(frozen=True, slots=True, eq=False)
class OwnTimes:
    """Per call (N,): `gap_ms` own time before it, `dur_ms` from the call to the round's end; NaN: not told."""

    gap_ms: Floats
    dur_ms: Floats


def own_times(calls: Calls) -> OwnTimes | str:
    """The times, or why they cannot be told."""
    if not len(calls.rank):
        return "no round has ended"
    key = np.stack([calls.comm.astype(np.int64), calls.round])
    _, at, callers = np.unique(key, axis=1, return_inverse=True, return_counts=True)
    at = at.reshape(-1)
    last = np.full(len(callers), -np.inf)
    np.maximum.at(last, at, calls.called_ms)
    complete = callers[at] == calls.members[calls.comm]
    ends = np.where(complete, last[at], np.nan)
    if np.bincount(calls.rank[complete], minlength=1).max(initial=0) < ROUNDS_MIN:
        return f"fewer than {ROUNDS_MIN} rounds have been called by all members"
    gap = np.full(len(ends), np.nan)
    same = calls.rank[1:] == calls.rank[:-1]
    gap[1:][same] = (calls.called_ms[1:] - ends[:-1])[same]
    told = ~np.isnan(gap)
    if np.count_nonzero(gap[told] < -TOLERANCE_MS) > BROKEN_SHARE_MAX * np.count_nonzero(told):
        return "the clocks of the ranks do not agree, or operations overlap"
    return OwnTimes(np.fmax(gap, np.where(told, 0.0, np.nan)), ends - calls.called_ms)
