"""How fast ranks step, and changes of it that last.

Each rank's steps are gathered into blocks, whatever the size of the windows in which they are told. The blocks since
the last lasting change are the rank's *segment*. Its middle is the usual step, the spread around it is what is healthy
for this job: fixed bounds take uneven work (sequences of all lengths) for a fault. The newest few blocks are compared
with those before them:

* *slower*: their middle is above the usual step by a factor and by some deviations, and not one of them has fallen
  back more than half of the way. A pause (a checkpoint, an evaluation, a compilation) makes one block long, or two, and
  never all of several in a row. EROICA compares a plain mean of 50 steps with the shortest single one, which any pause
  and any spread exceeds.
* a pace that wanders (a shared network) stays away from its middle for a while, and comes back. So the newest blocks
  must also be above the worst run of as many that the segment has seen, by a deviation.
* *faster*, likewise: a new segment, silently. That is how a warm-up is forgotten.

A segment creeps along with a slow-down that comes little by little. So the best middle of many blocks that it ever had
counts as well (EROICA's "recent best"), and the newest many are compared with it. That is for long blocks alone: short
ones with and without a pause in them are of two kinds, and their middle is one or the other by chance.

Where blocks are long, the two longest windows of each are set aside: then rare pauses do not weigh on the mean, and
pauses that come every few steps (a data loader that falls behind) still do.

Rows are ranks; all ranks of a job are worked out at once, for a hundred thousand of them step alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from diagnosis.engine.profiling_rules import TriggerRules

Floats = NDArray[np.float64]
Longs = NDArray[np.int64]
Bools = NDArray[np.bool_]

BLOCKS_KEPT: Final = 64
NEWEST_MAX: Final = 16
SURE_BLOCKS: Final = 32
"""The middle of so many blocks is hardly a matter of chance."""
ASIDE: Final = 2
ASIDE_WINDOWS_MIN: Final = 5
DEVIATION: Final = 1.4826
"""From the median of absolute deviations to the standard deviation, of a normal distribution."""
FEW_BLOCKS: Final = 6.0
"""A spread told by few blocks may be too small by chance: it is taken for 1 + FEW_BLOCKS / blocks times as great."""


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """Ranks whose steps became slower (N,): the usual step, the step now, and how many steps ago that began."""

    rows: Longs
    usual_ms: Floats
    now_ms: Floats
    steps: Floats


class Pace:
    """See the module. `take` windows in their order, at most one per row and call."""

    def __init__(self, block_steps: int, *, aside: bool) -> None:
        self.block_steps = max(1, block_steps)
        self.level_ms = np.empty(0)
        """The usual step of each row; NaN: not known yet."""
        self._aside = aside
        self._blocks = np.empty((0, BLOCKS_KEPT), np.float32)  # ms per step, newest last, NaN: none
        self._best_ms = np.empty(0)
        self._length = np.empty(0)  # steps of the newest block
        self._steps, self._spent_ms, self._windows = np.empty(0), np.empty(0), np.empty(0)  # of the block that is open
        self._longest = np.empty((0, ASIDE, 2))  # its longest windows: ms per step, steps

    def grow(self, rows: int) -> None:
        """Make room for so many rows."""
        more = rows - len(self._blocks)
        if more <= 0:
            return
        self._blocks = np.vstack([self._blocks, np.full((more, BLOCKS_KEPT), np.nan, np.float32)])
        self._longest = np.concatenate([self._longest, np.zeros((more, ASIDE, 2))])
        for name in ("level_ms", "_best_ms"):
            setattr(self, name, np.append(getattr(self, name), np.full(more, np.nan)))
        for name in ("_length", "_steps", "_spent_ms", "_windows"):
            setattr(self, name, np.append(getattr(self, name), np.zeros(more)))

    def forget(self, rows: Longs) -> None:
        """Begin a new segment without any block: another scale has seen a change. The usual step stays known."""
        self._blocks[rows] = np.nan
        self._best_ms[rows] = np.nan
        self._open(rows)

    def take(self, rows: Longs, steps: Floats, ms: Floats, rules: TriggerRules, ratio: float) -> tuple[Change, Longs]:
        """Windows of different rows: (ranks that became slower, rows whose segment begins anew). `ratio` counts."""
        self._steps[rows] += steps
        self._spent_ms[rows] += steps * ms
        self._windows[rows] += 1
        if self._aside:
            longest = np.concatenate([self._longest[rows], np.stack([ms, steps], axis=1)[:, None, :]], axis=1)
            order = np.argsort(-longest[:, :, 0], axis=1, kind="stable")[:, :ASIDE]
            self._longest[rows] = np.take_along_axis(longest, order[:, :, None], axis=1)
        full = rows[self._steps[rows] >= self.block_steps]
        if not len(full):
            return _nothing(), full
        self._close(full)
        return self._judge(full, rules, ratio)

    def _close(self, rows: Longs) -> None:
        steps, spent_ms = self._steps[rows], self._spent_ms[rows]
        if self._aside:
            many = self._windows[rows] >= ASIDE_WINDOWS_MIN
            longest = self._longest[rows] * many[:, None, None]
            steps = steps - longest[:, :, 1].sum(axis=1)
            spent_ms = spent_ms - longest.prod(axis=2).sum(axis=1)
        self._length[rows] = self._steps[rows]
        self._blocks[rows, :-1] = self._blocks[rows, 1:]
        self._blocks[rows, -1] = spent_ms / steps
        self._open(rows)

    def _open(self, rows: Longs) -> None:
        for column in (self._steps, self._spent_ms, self._windows):
            column[rows] = 0.0
        self._longest[rows] = 0.0

    def _judge(self, rows: Longs, rules: TriggerRules, ratio: float) -> tuple[Change, Longs]:
        """Compare the newest blocks of each row with those before them."""
        needed = np.rint(rules.confirm_steps / np.maximum(self._length[rows], 1.0))
        newest = np.clip(needed, rules.confirm_blocks, NEWEST_MAX).astype(np.int64)
        found: list[Change] = []
        anew: list[Longs] = []
        for count in np.unique(newest).tolist():
            slower, begins = self._judge_newest(rows[newest == count], count, rules, ratio)
            found.append(slower)
            anew.append(begins)
        parts = [np.concatenate([getattr(one, name) for one in found]) for name in Change.__slots__]
        return Change(*parts), np.concatenate(anew)

    def _judge_newest(self, rows: Longs, count: int, rules: TriggerRules, ratio: float) -> tuple[Change, Longs]:
        table = self._blocks[rows].astype(np.float64)
        newest, before = table[:, -count:], table[:, :-count]
        told = np.isfinite(before).sum(axis=1)
        usual = np.where(told >= max(1, rules.learn_blocks), _middle(before), np.nan)
        apart = DEVIATION * _middle(np.abs(before - usual[:, None]))
        spread = np.maximum(apart * (1 + FEW_BLOCKS / np.maximum(told, 1)), rules.spread_min * usual)
        recent = _middle(table[:, -SURE_BLOCKS:]) if self._aside else np.full(len(rows), np.nan)
        recent[np.isnan(table[:, -SURE_BLOCKS])] = np.nan  # so many are not there yet
        self._best_ms[rows] = np.fmin(self._best_ms[rows], recent)
        best = np.fmin(self._best_ms[rows], usual)
        self.level_ms[rows] = np.where(np.isnan(usual), self.level_ms[rows], usual)
        now = _middle(newest)
        with np.errstate(invalid="ignore"):
            high = np.maximum(ratio * best, best + rules.z_min * spread)
            low = np.minimum(usual / ratio, usual - rules.z_min * spread)
            slower = (now > high) & (newest.min(axis=1) > (best + high) / 2)
            faster = (now < low) & (newest.max(axis=1) < (usual + low) / 2)
        slower[slower] = now[slower] > _worst_run(before[slower], count) + spread[slower]
        with np.errstate(invalid="ignore"):
            crept = ~slower & (recent > np.maximum(ratio * best, best + spread))
        blocks = np.where(crept, SURE_BLOCKS, count)
        slower |= crept
        change = Change(rows[slower], best[slower], now[slower], (blocks * self._length[rows])[slower])
        anew = slower | faster
        self._blocks[rows[anew], :-count] = np.nan
        self._best_ms[rows[anew]] = np.nan
        self.level_ms[rows[anew]] = now[anew]
        return change, rows[anew]


def _nothing() -> Change:
    return Change(np.empty(0, np.int64), np.empty(0), np.empty(0), np.empty(0))


def _worst_run(before: Floats, count: int) -> Floats:
    """The greatest middle of `count` blocks in a row (N,)."""
    if before.shape[1] < count or not len(before):
        return np.full(len(before), -np.inf)
    runs = np.median(np.lib.stride_tricks.sliding_window_view(before, count, axis=1), axis=2)
    return np.asarray(np.where(np.isnan(runs), -np.inf, runs).max(axis=1), np.float64)


def _middle(table: Floats) -> Floats:
    """The median of each row (N,) over what is told; NaN where nothing is."""
    told = np.isfinite(table).sum(axis=1)
    ordered = np.sort(table, axis=1)  # NaN last
    places = np.stack([np.maximum(told - 1, 0) // 2, np.minimum(told // 2, table.shape[1] - 1)], axis=1)
    middle = np.take_along_axis(ordered, places, axis=1).mean(axis=1)
    return np.where(told > 0, middle, np.nan)
