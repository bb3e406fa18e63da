"""The period of a communicator's operations: how many rounds make one step of training, from what they are alone.

Known of a round are its number, a signature (operation, type, count, root as a hash) and often the own time before it
(`gap`). A training program repeats a sequence, but not for ever: an evaluation, a logged loss, a checkpoint's barrier
stand between two steps and shift all that follows. So a period is not asked of the whole record, as an autocorrelation
would (Greyhound, ATC'25), nor of identical repetitions in a row (EROICA, NSDI'26). A window of p rounds that slides
over a stretch of period p always holds the same operations, wherever it begins: the sum of their hashes stays the same,
before and after a shift alike. The period is the shortest that makes stretches of one such window, and of no other.

* Rounds that carry next to nothing (barriers, a loss, a norm) come and go; where a communicator has larger ones, these
  alone are searched, and the small ones counted in afterwards. Which are small follows from the signature, for there
  are few such operations.
* A large operation that comes regularly belongs to the step even when it is rare (one gradient after many activations).
* Layers and other loops inside a step make stretches of several windows, or of a window that repeats a shorter one.
* A busy probe records every s-th round only, s a power of two. What is found among them is a multiple of s, and the
  power of two in it is open. It is settled by rounds in between that were seen by chance; until then it is unknown.
* All rounds alike say nothing. Then the own times decide: a period in them (the first peak of their autocorrelation),
  or hardly any difference (a step is one round). Else it is unknown.

Everything is bounded: `POINTS_MAX` rounds, periods up to `PERIOD_MAX` recorded rounds. Pure.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from diagnosis.contracts.probeframe import Dtype, Op, signatures

POINTS_MAX: Final = 1024
PERIOD_MAX: Final = POINTS_MAX // 3
"""In recorded rounds: a period must have been seen three times."""
ROUNDS_MIN: Final = 12
COVERAGE_MIN: Final = 0.4
"""Part of the record that must be stretches of the commonest window: shifts between steps may break the rest."""
COVERAGE_YOUNG_MIN: Final = 0.9
ROUNDS_MANY: Final = 96
"""With fewer rounds than this, less may be broken."""
AGREED_MIN: Final = 0.95
"""Of all stretches, the part that must be of that window: layers and other loops inside a step are of several kinds."""
REGULAR_MIN: Final = 1 / 128
"""A large operation that is no part of the window, and comes more often than this, is a part of a longer one. Several
in a row are one coming: an evaluation."""
BETWEEN_MIN: Final = 8
"""Pairs of rounds that must tell two periods apart where only every s-th round is recorded."""
BETWEEN_MAX: Final = 24
ALIKE_MIN: Final = 0.9
"""Part of such pairs that must be alike for the shorter of the two."""
FITS_MIN: Final = 0.95
"""Part of the newest rounds that a pattern must explain."""
UNSEEN: Final = 0
"""In a pattern: a round that the probe has not shown yet."""
LIGHT_ELEMENTS: Final = 32
"""An operation on fewer elements says something about a step (its loss, its norm) and carries nothing of it."""
PEAK_MIN: Final = 0.7
"""Of the autocorrelation of own times: what Greyhound's code takes for a period."""
EVEN_MAX: Final = 0.4
"""Own times that are as near to their median as this part of it are taken for equal, """
EVEN_SHARE_MIN: Final = 31 / 32
"""if so many are: a pause that is rarer than this belongs to no step."""

ROOTS_MAX: Final = 8
_ROOTED: Final = (Op.BROADCAST, Op.REDUCE, Op.GATHER, Op.SCATTER)
POINT_DTYPE: Final = np.dtype([("seq", "<i8"), ("signature", "<u4"), ("gap_us", "<f4")])
"""One round: its number from 1, its signature, its own time (NaN: not told)."""
Points = NDArray[np.void]
Bools = NDArray[np.bool_]
Longs = NDArray[np.int64]
Words = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class Period:
    """`pattern` (p,): signature of each round of a step, beginning with any; UNSEEN where none was seen.
    `gap_us` (p,): the median own time before each, NaN where it is not told."""

    pattern: NDArray[np.uint32]
    gap_us: NDArray[np.float32]

    @property
    def rounds(self) -> int:
        """Rounds of a step."""
        return len(self.pattern)

    @property
    def uniform(self) -> bool:
        """Whether signatures cannot tell its rounds apart."""
        seen = self.pattern[self.pattern != UNSEEN]
        return bool((seen == seen[0]).all()) if len(seen) else True


def find_period(points: Points, stride: int, mean_gap_us: float) -> Period | None:
    """The step in a record, None where it cannot be told.

    `points`: ascending by number, POINT_DTYPE, at most `POINTS_MAX` count. `stride`: the probe records multiples of it
    at present; rounds in between that were seen otherwise may stand among the points. `mean_gap_us`: own time before a
    round over all rounds, recorded or not; NaN where it is not told.
    """
    points = points[-POINTS_MAX:]
    heavy = points[~is_light(points["signature"])]
    told = heavy if len(heavy) >= ROUNDS_MIN and 4 * len(heavy) >= len(points) else points
    grid = told[told["seq"] % stride == 0]
    if len(grid) < ROUNDS_MIN:
        return None
    found = _in_grid(grid)
    distance = _usual_distance(grid["seq"], found) if found is not None else None
    if found is None or distance is None:
        return None
    stretches = _stretches(grid, found, distance)
    rounds = _settled(points, stretches, stride if found == 1 else distance, stride)
    if rounds is None:
        return None
    if rounds == 1:
        return _by_own_times(points[points["signature"] == _commonest(points["signature"])], mean_gap_us)
    first, last = max(stretches, key=lambda ends: (ends[1] - ends[0], ends[1]))
    return _period(points[(points["seq"] >= first) & (points["seq"] <= last)], rounds)


def is_light(signature: NDArray[np.uint32]) -> Bools:
    """Which of the signatures are of operations on fewer than `LIGHT_ELEMENTS` elements."""
    table = _light_signatures()
    found: Bools = table[np.searchsorted(table[:-1], signature)] == signature
    return found


@cache
def _light_signatures() -> NDArray[np.uint32]:
    tables = []
    for op, dtype in itertools.product(Op, Dtype):
        roots = np.arange(-1, ROOTS_MAX if op in _ROOTED else 1, dtype=np.int32)
        count, root = np.meshgrid(np.arange(LIGHT_ELEMENTS, dtype=np.uint64), roots)
        ones = np.ones(count.shape, np.uint8)
        if op not in (Op.UNKNOWN, Op.ALL_TO_ALL):
            tables.append(signatures(ones * op, ones * dtype, count, root).ravel())
    return _different(np.concatenate(tables))


def _different(values: NDArray[Any]) -> NDArray[Any]:
    """Ascending. Asked without counts numpy loads `numpy.ma`, as for its median: 3 MB that the daemon never uses."""
    return np.unique(values, return_counts=True)[0]


def _in_grid(grid: Points) -> int | None:
    """The shortest period among recorded rounds, in recorded rounds."""
    kinds, place = np.unique(grid["signature"], return_inverse=True)
    if len(kinds) == 1:
        return 1
    mixed = (kinds.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E37_79B9_7F4A_7C15)
    mixed ^= mixed >> np.uint64(31)
    total = np.concatenate([[np.uint64(0)], np.cumsum(mixed[place], dtype=np.uint64)])
    visits = place[np.concatenate([[True], place[1:] != place[:-1]])]
    often = np.bincount(visits, minlength=len(kinds)) >= max(3, REGULAR_MIN * len(grid))
    for period in range(1, min(PERIOD_MAX, len(grid) // 3) + 1):
        same = place[period:] == place[:-period]
        if same.mean() < COVERAGE_MIN:
            continue
        at = _commonest_stretch(total[period:] - total[:-period], period)
        if at is None:
            continue
        inside = np.zeros(len(kinds), bool)
        inside[place[at : at + period]] = True
        if not (often & ~inside).any() and not _repeats(place[at : at + period]):
            return period
    return None


def _repeats(word: Longs) -> bool:
    """Whether a word is a shorter one several times: then its stretches are those of a loop inside the step."""
    shorter = [part for part in range(1, len(word) // 2 + 1) if len(word) % part == 0]
    return any((word[part:] == word[:-part]).all() for part in shorter)


def _commonest_stretch(windows: Words, period: int) -> int | None:
    """Where a stretch begins in which nothing but the commonest window is found, None where there is no such window.

    A stretch is more than a period of equal windows: two whole periods, and a round.
    """
    begins = np.flatnonzero(np.concatenate([[True], windows[1:] != windows[:-1]]))
    lengths = np.diff(np.append(begins, len(windows)))
    long = lengths > period
    if not long.any():
        return None
    begins, lengths = begins[long], lengths[long]
    kind = np.unique(windows[begins], return_inverse=True)[1]
    covered = np.bincount(kind, weights=lengths)
    best = int(covered.argmax())
    wanted = COVERAGE_MIN if len(windows) >= ROUNDS_MANY else COVERAGE_YOUNG_MIN
    if covered[best] < wanted * len(windows) or covered[best] < AGREED_MIN * covered.sum():
        return None
    return int(begins[kind == best][0])


def _usual_distance(seq: Longs, period: int) -> int | None:
    """In rounds, from one recorded round to the one a period later: small rounds of the step are counted in."""
    distances, counts = np.unique(seq[period:] - seq[:-period], return_counts=True)
    best = int(counts.argmax())
    return int(distances[best]) if 2 * counts[best] > counts.sum() else None


def _stretches(grid: Points, period: int, distance: int) -> list[tuple[int, int]]:
    """Numbers of the first and last round of every stretch without a shift, oldest first."""
    seq, signature = grid["seq"], grid["signature"]
    sound = (seq[period:] - seq[:-period] == distance) & (signature[period:] == signature[:-period])
    edges = np.flatnonzero(np.diff(np.concatenate([[False], sound, [False]]).astype(np.int8)))
    pairs = zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
    return [(int(seq[begin]), int(seq[end - 1 + period])) for begin, end in pairs]


def _settled(points: Points, stretches: list[tuple[int, int]], rounds: int, stride: int) -> int | None:
    """Of the periods that look alike where only every `stride`-th round is seen, the one that rounds in between agree
    with; None where too few of them were seen. What has no period of 2 p has none of p: the longest are asked first."""
    ratio = 1
    stretch = np.searchsorted([first for first, _ in stretches], points["seq"], "right") - 1
    stretch[points["seq"] > np.array([last for _, last in stretches])[stretch]] = -1
    inside = points[stretch >= 0]
    while rounds % 2 == 0 and ratio < stride:
        share = _alike(inside, stretch[stretch >= 0], rounds // 2)
        if share is None:
            return None
        if share < ALIKE_MIN:
            break
        rounds, ratio = rounds // 2, 2 * ratio
    return rounds


def _alike(points: Points, stretch: Longs, period: int) -> float | None:
    """Of the rounds of one stretch an odd number of periods apart, the share that are alike; None where there are too
    few. Near ones are asked first, and the newest."""
    seq, signature = points["seq"], points["signature"]
    alike = np.empty(0, bool)
    for distance in (period, 3 * period, 5 * period, 7 * period):
        at = np.searchsorted(seq, seq + distance)
        both = at < len(seq)
        both[both] = (seq[at[both]] == seq[both] + distance) & (stretch[at[both]] == stretch[both])
        alike = np.append(alike, (signature[both] == signature[at[both]])[-BETWEEN_MAX:])
        if len(alike) >= BETWEEN_MIN:
            return float(alike.mean())
    return None


def _period(stretch: Points, rounds: int) -> Period | None:
    """The pattern of a stretch without a shift; None where it is not one."""
    pattern, gap = np.full(rounds, UNSEEN, np.uint32), np.full(rounds, np.nan, np.float32)
    place = stretch["seq"] % rounds
    pattern[place] = stretch["signature"]
    if (pattern[place] != stretch["signature"]).mean() > 1 - FITS_MIN:
        return None
    told = ~np.isnan(stretch["gap_us"])
    for one in _different(place[told]):
        gap[one] = median(stretch["gap_us"][told & (place == one)].tolist())
    return Period(pattern, gap)


def _commonest(signature: NDArray[np.uint32]) -> np.uint32:
    values, counts = np.unique(signature, return_counts=True)
    kind: np.uint32 = values[counts.argmax()]
    return kind


def _by_own_times(points: Points, mean_gap_us: float) -> Period | None:
    """The step where all rounds are alike but for the own times before them."""
    told = points[~np.isnan(points["gap_us"]) & (points["seq"] > 1)]  # nobody knows what went before the first
    if len(told) < ROUNDS_MIN:
        return None
    gap = told["gap_us"].astype(np.float64)
    middle = median(gap.tolist())
    even = float((np.abs(gap - middle) <= EVEN_MAX * middle).mean()) >= EVEN_SHARE_MIN
    if even and abs(mean_gap_us - middle) <= EVEN_MAX * middle:
        return Period(told["signature"][-1:].astype(np.uint32), np.array([middle], np.float32))
    stretches = np.split(told, np.flatnonzero(np.diff(told["seq"]) != 1) + 1)
    longest = max(stretches, key=len)
    if len(longest) < ROUNDS_MIN:
        return None
    rounds = _first_peak(np.log1p(longest["gap_us"].astype(np.float64)))
    if rounds is None:
        return None
    return _period(longest, rounds)


def _first_peak(values: NDArray[np.float64]) -> int | None:
    """The lag of the first peak of the autocorrelation, 2 at least."""
    values = values - values.mean()
    lags = np.arange(min(PERIOD_MAX, len(values) // 3) + 2)
    products = np.array([(values[lag:] * values[: len(values) - lag]).sum() for lag in lags])
    if products[0] <= 0:
        return None
    acf = products / products[0] * len(values) / (len(values) - lags)
    for lag in range(2, len(acf) - 1):
        if acf[lag] >= PEAK_MIN and acf[lag] >= acf[lag - 1] and acf[lag] >= acf[lag + 1]:
            return lag
    return None
