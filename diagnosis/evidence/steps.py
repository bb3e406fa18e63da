"""Steps of training without a word from the program: their time, their spread and where in a step a rank is.

`Beat` follows one communicator of one process from look to look. It learns the period of its rounds (`periods`), then
only checks that new rounds fit, at a constant cost each: what is no part of the pattern (a logged loss, an evaluation)
shifts the pattern by itself; where rounds of the pattern come out of turn, the place is found anew from the next ones;
a pattern that fits no longer is forgotten, and learnt again.

Time comes from the looks. Each tells when the newest round was entered. Two looks that see the same round of the step
are a whole number of steps apart; nearly the same round is as good over many steps. A step is the median over the
newest such windows, so neither a checkpoint nor a compilation moves it. Its jitter is their spread times the root of
the steps in each: the deviation of a single step, if steps are independent of each other.

A rank has several communicators, and each its own beat: hundreds of activations per step in one, a few gradients in
another. `step_of` takes the slowest that carries something. While a slower one may still be learnt, the step is
unknown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import gcd, isnan, nan, sqrt
from statistics import median
from typing import Final

import numpy as np

from diagnosis.evidence.periods import (
    LIGHT_ELEMENTS,
    POINT_DTYPE,
    POINTS_MAX,
    UNSEEN,
    Period,
    Points,
    find_period,
    is_light,
)

LOOKS_KEPT: Final = 32
WINDOWS_KEPT: Final = 15
WINDOWS_MIN: Final = 3
"""Before a step is told: one of them may hold a pause."""
WINDOWS_FOR_JITTER: Final = 5
DEVIATION: Final = 1.4826
"""From the median of absolute deviations to the standard deviation, of a normal distribution."""
PLACE_ERROR_MAX: Final = 0.02
"""How far the two ends of a window may be from the same place in the step, as a part of the window."""
FOUND_AGAIN_MIN: Final = 4
"""Rounds in a row that must fit one place of the pattern, and no other."""
LOST_MAX: Final = 200
"""Rounds without a place in the pattern after which it is forgotten (EROICA learns anew after 200 events)."""
JUDGED_EVERY: Final = 64
STRANGERS_MAX: Final = 1 / 8
"""Of so many rounds, the part that large ones which are not in the pattern may be."""
PLACES_MAX: Final = 4096
TRY_AFTER: Final = 12
TRY_AFTER_MAX: Final = 256
CONFIRM_AFTER_MAX: Final = 8192
"""In recorded rounds: a pattern that stands is asked for more and more rarely."""
HEAD_MIN: Final = 1.5
"""The own time before a step's first round is greater than the usual one by this factor, or nobody knows the first."""
TRIES_ENOUGH: Final = 8
"""A communicator in which no pattern was found so often has none to tell."""
SLOWER_MIN: Final = 0.95
"""A communicator whose rounds are so far apart, by the step, may have a longer one."""
QUIET_MAX: Final = 3.0
"""A communicator that pauses longer than this times its longest pause is no longer in use."""
PAUSE_LEAST_NS: Final = 5_000_000_000


@dataclass(frozen=True, slots=True, eq=False)
class Look:
    """One look at a communicator. `seq`: rounds entered; `entered_ns`: when the newest was, 0 where that is not known.

    `points`: rounds with numbers above those of the last look, ascending. `stride`: which are recorded. `gap_sum_us`:
    own time before all rounds so far, NaN where it is not told. `elements`: of the newest round, None: not told.
    """

    at_ns: int
    seq: int
    entered_ns: int
    points: Points
    stride: int
    gap_sum_us: float
    elements: int | None


@dataclass(frozen=True, slots=True)
class Step:
    """A rank's steps: their time, the deviation of a single one, the rounds in one, and which of them was entered last
    (from 1). None: not known (yet)."""

    step_ns: int
    jitter_ns: int | None
    rounds: int
    round: int | None


class Beat:
    """See the module. `observe` every look; `learn` when `due`, which takes milliseconds."""

    def __init__(self) -> None:
        self.heavy = False
        self.moved_ns = 0
        self.moves = 0
        self.tries = 0
        self.longest_pause_ns = 0
        self._points: Points = np.empty(0, POINT_DTYPE)
        self._stride = 1
        self._seq = 0
        self._period: Period | None = None
        self._pattern: list[int] = []  # of the period, completed by what is seen later
        self._kinds: set[int] = set()
        self._uniform = False
        self._head: int | None = None
        self._shift = 0
        self._lost = self._followed = self._strangers = 0
        self._looks: deque[tuple[int, int]] = deque(maxlen=LOOKS_KEPT)  # (place, when), places counted on over steps
        self._windows: deque[tuple[float, float]] = deque(maxlen=WINDOWS_KEPT)  # (ns a step, steps)
        self._gap_sum_us = nan
        self._mean_gaps: deque[float] = deque(maxlen=WINDOWS_KEPT)  # us before a round, a value a look
        self._timed: tuple[int, int | None] | None = None  # of the windows
        self._rate: deque[tuple[int, int]] = deque(maxlen=LOOKS_KEPT)  # (round, when)
        self._untried = 0
        self._try_after = TRY_AFTER

    @property
    def seen(self) -> int:
        """The newest round that is known of."""
        return self._seq

    @property
    def due(self) -> bool:
        """Whether `learn` may have something new to say."""
        return self._untried >= self._try_after

    @property
    def learnt(self) -> bool:
        """Whether the rounds of a step are known."""
        return self._period is not None

    @property
    def round_ns(self) -> float | None:
        """From round to round on average; None before two looks that differ."""
        (first, began), (last, ended) = (self._rate[0], self._rate[-1]) if len(self._rate) > 1 else ((0, 0), (0, 0))
        return (ended - began) / (last - first) if last > first else None

    @property
    def step(self) -> Step | None:
        """What is known now, None before a step was timed."""
        if self._period is None or self._timed is None:
            return None
        rounds, at = self._period.rounds, None
        if self._head is not None and not self._lost:
            at = (self._seq - self._shift - self._head) % rounds + 1
        return Step(*self._timed, rounds, at)

    def observe(self, look: Look) -> None:
        """Take in a look. One that shows fewer rounds than were seen is another communicator's: begin a new `Beat`."""
        if look.seq <= self._seq:
            return
        if self.moves:
            self.longest_pause_ns = max(self.longest_pause_ns, look.at_ns - self.moved_ns)
        self.moved_ns, self.moves = look.at_ns, self.moves + 1
        self.heavy = self.heavy or look.elements is None or look.elements >= LIGHT_ELEMENTS
        grown_us, self._gap_sum_us = look.gap_sum_us - self._gap_sum_us, look.gap_sum_us
        if not isnan(grown_us):
            self._mean_gaps.append(grown_us / (look.seq - self._seq))
        self._seq, self._stride = look.seq, look.stride
        self._points = np.concatenate([self._points, look.points])[-POINTS_MAX:]
        self._untried += len(look.points)
        if look.entered_ns:
            self._rate.append((look.seq, look.entered_ns))
        if self._period is not None:
            self._follow(self._period, look)

    def learn(self) -> None:
        """Look for the pattern in what was seen so far; one that is known is confirmed, or replaced by another."""
        self._untried, self.tries = 0, self.tries + 1
        mean_gap_us = median(self._mean_gaps) if self._mean_gaps else nan
        found = find_period(self._points, self._stride, mean_gap_us)
        self._try_after = min(TRY_AFTER_MAX, self._try_after + self._try_after // 4)
        if found is None or (self._period is not None and self._period.rounds == found.rounds):
            if self._period is not None:
                self._try_after = min(CONFIRM_AFTER_MAX, 2 * self._try_after)
            return
        self._period = found
        self._pattern = found.pattern.tolist()
        self._kinds = set(self._pattern) - {UNSEEN}
        self._uniform = found.uniform and found.rounds > 1
        self._head = _head(found)
        self._shift = self._followed = self._strangers = 0
        # Where rounds differ by their own times alone, only the record itself tells which is which.
        self._lost = 0 if found.uniform or self._find_place(found) else 1
        self._looks.clear()
        self._windows.clear()
        self._timed = None

    def _follow(self, period: Period, look: Look) -> None:
        """Check new rounds against the pattern, and time the steps while they fit."""
        marks = look.points["signature"].tolist()
        if (self._lost or not self._fit(look.points["seq"].tolist(), marks)) and not self._find_place(period):
            self._looks.clear()
            self._lost += len(marks)
            if self._lost > LOST_MAX:
                self._forget()
            return
        self._lost = 0
        strange = [mark not in self._kinds for mark in marks]
        if self._too_strange(look.points, strange):
            self._forget()
        elif look.entered_ns and not (strange and strange[-1] and int(look.points["seq"][-1]) == look.seq):
            self._time(look.seq - self._shift, look.entered_ns, period.rounds)

    def _forget(self) -> None:
        """What comes next is another program: what went before would only hide it."""
        self._period = None
        self._windows.clear()
        self._timed = None
        self._points = self._points[-max(self._lost, JUDGED_EVERY) :]
        self._untried, self._try_after = 0, TRY_AFTER

    def _too_strange(self, points: Points, strange: list[bool]) -> bool:
        """Whether large rounds that the pattern lacks have become too many for something in between."""
        self._followed += len(strange)
        if any(strange):
            self._strangers += int((~is_light(points["signature"]) & strange).sum())
        if self._followed < JUDGED_EVERY:
            return False
        too_many = self._strangers > STRANGERS_MAX * self._followed
        self._followed = self._strangers = 0
        return too_many

    def _fit(self, numbers: list[int], marks: list[int]) -> bool:
        """Whether all rounds stand where they should; strangers shift the pattern, what was never seen completes it."""
        rounds, shift, completed = len(self._pattern), self._shift, []
        for seq, mark in zip(numbers, marks, strict=True):
            place = (seq - shift) % rounds
            wanted = self._pattern[place]
            if wanted == mark:
                continue
            if wanted == UNSEEN:
                completed.append((place, mark))
            elif mark not in self._kinds:
                shift += 1
            else:
                return False
        if shift != self._shift and self._uniform:
            self._head = None
        self._shift = shift
        for place, mark in completed:
            self._pattern[place] = mark
            self._kinds.add(mark)
        return True

    def _find_place(self, period: Period) -> bool:
        """Where in the pattern the newest rounds stand: as few strangers as possible have come in between."""
        rounds = period.rounds
        if rounds > PLACES_MAX or not len(self._points) or int(self._points["signature"][-1]) not in self._kinds:
            return False
        shifts = self._shift + np.arange(rounds)
        known = np.array(self._pattern, np.uint32)
        for wanted in (FOUND_AGAIN_MIN, max(2 * FOUND_AGAIN_MIN, rounds // gcd(rounds, self._stride))):
            told = self._points[-wanted:]
            pattern = known[(told["seq"][None, :] - shifts[:, None]) % rounds]
            matches = (pattern == told["signature"]).sum(axis=1)
            fits = (matches == matches.max()) & ((pattern == told["signature"]) | (pattern == UNSEEN)).all(axis=1)
            if len(told) == wanted and (fits.sum() == 1 or fits[0]):  # the first: where it was
                self._shift = int(shifts[fits.argmax()])
                return True
        return False

    def _time(self, place: int, at_ns: int, rounds: int) -> None:
        best: tuple[float, int, int] | None = None
        for former, then_ns in self._looks:
            passed = place - former
            if passed >= rounds:
                error = abs((passed + rounds // 2) % rounds - rounds // 2) / passed
                if best is None or error <= best[0]:
                    best = (error, passed, at_ns - then_ns)
        if best is not None and best[0] <= PLACE_ERROR_MAX and best[2] > 0:
            steps = best[1] / rounds
            self._windows.append((best[2] / steps, steps))
            self._timed = _times(self._windows)
            self._looks.clear()
        self._looks.append((place, at_ns))


def _times(windows: Collection[tuple[float, float]]) -> tuple[int, int | None] | None:
    """Step and jitter in ns."""
    if len(windows) < WINDOWS_MIN:
        return None
    step_ns = median(time for time, _ in windows)
    if len(windows) < WINDOWS_FOR_JITTER:
        return round(step_ns), None
    return round(step_ns), round(DEVIATION * median(abs(time - step_ns) * sqrt(steps) for time, steps in windows))


def _head(period: Period) -> int | None:
    """The first round of a step: the one before which a rank is longest by itself (data, forward pass, optimizer)."""
    if period.rounds == 1:
        return 0
    gap = period.gap_us
    if np.isnan(gap).all():
        return None
    head = int(np.nanargmax(gap))
    return head if gap[head] >= HEAD_MIN * median(gap[~np.isnan(gap)].tolist()) else None


def step_of(beats: Iterable[Beat]) -> Step | None:
    """The step of the process whose communicators these are, None where it is not known.

    A process that stands still keeps what was known: only communicators that others leave behind are out of use.
    """
    beats = [beat for beat in beats if beat.moves]
    now_ns = max((beat.moved_ns for beat in beats), default=0)
    used = [b for b in beats if now_ns - b.moved_ns <= QUIET_MAX * max(b.longest_pause_ns, PAUSE_LEAST_NS)]
    used = [beat for beat in used if beat.heavy] or used
    steps = [(beat, beat.step) for beat in used]
    slowest = max((step for _, step in steps if step is not None), key=lambda step: step.step_ns, default=None)
    if slowest is None:
        return None
    open_still = [beat for beat, step in steps if step is None]
    if any(beat.round_ns is not None and beat.round_ns > SLOWER_MIN * slowest.step_ns for beat in open_still):
        return None
    if slowest.rounds == 1 and any(beat.learnt or beat.tries < TRIES_ENOUGH for beat in open_still):
        return None  # rounds that are all alike may be several to a step, and the others would tell
    return slowest
