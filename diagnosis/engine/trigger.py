"""When a job should be profiled: its steps became slower for good, or one of them does not end.

Input are windows of steps as each rank tells them (single steps, or what passed between two looks), and what each rank
last did. Time is the controller's clock in seconds; durations were measured on the node.

* *Slower*: a rank's steps become slower and stay so (`engine.pace`, at two scales). That is EROICA's first rule and the
  robust z of its relatives in one: a factor over the recent best, and deviations of this job's own.
* *Stalled*: EROICA's second rule. Inside a step, where somebody waits in an operation, five steps without an event are
  too many. Between two steps there are evaluations and checkpoints, of a length that nobody knows beforehand: there it
  takes many steps, and longer than the longest pause that ended by itself so far. What a program says of itself
  (evaluation, checkpoint, compilation) keeps silence, until the bound for hangs.

Ranks of one job step together, so they say the same within a few steps: that is one event, and who says it later joins
it. A rank alone among many says something of its own clock. After an event the new pace is the usual one: a change is
told once, and for a while only a greater one is told again.

A job can write all this; it can call for a window of itself, which costs its own budget (`engine.windows`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from diagnosis.engine.pace import Bools, Change, Floats, Longs, Pace
from diagnosis.engine.profiling_rules import TriggerRules

RANKS_MAX: Final = 1 << 20
STEPS_MAX: Final = 1_000_000
"""Of one window."""
STEP_MS_MAX: Final = 86_400_000.0
PAUSE_STEPS_MIN: Final = 2.0
"""So many steps more than its steps take make a window with a pause."""
CREEP_S: Final = 1.0
"""A standstill that seems to have begun so little later is the same one: clocks drift."""
Table = NDArray[np.void]

WINDOW_DTYPE: Final = np.dtype(
    [
        ("rank", "<i4"),
        ("first_step", "<i8"),  # number of the window's first step, as the rank's node counts
        ("steps", "<i4"),
        ("ms_per_step", "<f8"),
        ("ended_at", "<f8"),
    ]
)
STANDING_DTYPE: Final = np.dtype(
    [
        ("rank", "<i4"),
        ("told_at", "<f8"),  # when this was so
        ("moved_at", "<f8"),  # when the rank last began or ended any operation; NaN: not known
        ("place", "u1"),  # Place
        ("doing", "u1"),  # Doing
    ]
)


class Place(IntEnum):
    """Where a rank stands in its step."""

    UNKNOWN = 0
    BETWEEN = 1  # it has done all operations of a step and begun none of the next
    WITHIN = 2  # between two operations of a step
    WAITS = 3  # in an operation


class Doing(IntEnum):
    """What a program says of itself."""

    UNKNOWN = 0
    TRAINING = 1
    EVALUATION = 2
    CHECKPOINT = 3
    COMPILATION = 4


class Cause(StrEnum):
    """Why a job should be profiled."""

    SLOWER = "slower"
    STALLED = "stalled"


@dataclass(frozen=True, slots=True)
class Event:
    """One reason to profile a job, told by `ranks` (of a stall: all that stand).

    `usual_ms`: a step before, `now_ms`: a step now, of a stall: how long nothing has moved. `began_at`, `first_step`:
    about when, and with which step (by the count of those who told it).
    """

    number: int
    causes: tuple[Cause, ...]
    at: float
    began_at: float
    first_step: int
    ranks: tuple[int, ...]
    usual_ms: float
    now_ms: float

    @property
    def text(self) -> str:
        """A sentence for people."""
        who = f"{len(self.ranks)} ranks" if len(self.ranks) > 1 else f"rank {self.ranks[0]}"
        if self.causes[0] is Cause.STALLED:
            return f"nothing has moved on {who} for {self.now_ms:,.0f} ms, where a step takes {self.usual_ms:,.0f} ms"
        times = self.now_ms / self.usual_ms
        return f"steps take {times:.2f} times as long as before: {self.now_ms:,.0f} for {self.usual_ms:,.0f} ms ({who})"


class JobTrigger:
    """Of one attempt of a job. `observe` and `stand` take in words in any order of nodes; `look` says what follows.

    `rules` may be replaced at any time. Words about ranks beyond `ranks_max` and senseless numbers are `refused`.
    """

    def __init__(self, rules: TriggerRules | None = None, ranks_max: int = RANKS_MAX) -> None:
        self.rules = rules or TriggerRules()
        self.refused = 0
        self.repeats = 0
        """Changes that were no event of their own, since the last one was much the same and not long ago."""
        self.event: Event | None = None
        """The newest; ranks that say the same later are added."""
        self._ranks_max = ranks_max
        self._short = Pace(self.rules.block_steps, aside=False)
        self._long = Pace(self.rules.long_block_steps, aside=True)
        self._seen = np.empty(0)  # steps of each rank
        self._ended_at = np.empty(0)
        self._next_step = np.empty(0)
        self._said = np.empty((0, 5))  # of a change that is no event yet: when told, when begun, first step, ms, new ms
        self._standing = np.empty(0, STANDING_DTYPE)
        self._pause_s = 0.0
        self._stall_moved_at = -np.inf

    @property
    def usual_ms(self) -> float | None:
        """A step of this job as it should be now; None: not known yet."""
        told = self._short.level_ms[np.isfinite(self._short.level_ms)]
        return float(np.median(told)) if len(told) else None

    @property
    def steps_seen(self) -> int:
        """Steps that the job was seen to make: the middle of its ranks."""
        told = self._seen[self._seen > 0]
        return int(np.median(told)) if len(told) else 0

    # -- words -------------------------------------------------------------------------------------------------------

    def observe(self, windows: Table) -> None:
        """Windows of steps (WINDOW_DTYPE). Of each rank they are taken in the order of their ends, once each."""
        self._renew_scales()
        sound = (windows["steps"] > 0) & (windows["steps"] <= STEPS_MAX) & self._are_ranks(windows)
        sound &= (windows["ms_per_step"] > 0) & (windows["ms_per_step"] <= STEP_MS_MAX)
        sound &= np.isfinite(windows["ended_at"])
        self.refused += int((~sound).sum())
        left = windows[sound]
        left = left[np.argsort(left["ended_at"], kind="stable")]
        self._grow(left)
        while len(left):
            _, first = np.unique(left["rank"], return_index=True)
            self._take(left[first])
            left = np.delete(left, first)

    def stand(self, standing: Table) -> None:
        """What ranks last did (STANDING_DTYPE); older words than those that are known are passed over."""
        sound = np.isfinite(standing["told_at"]) & self._are_ranks(standing)
        self.refused += int((~sound).sum())
        told = standing[sound]
        self._grow(told)
        told = told[np.argsort(told["told_at"], kind="stable")]
        told = told[told["told_at"] > self._standing["told_at"][told["rank"]]]
        self._standing[told["rank"]] = told

    def _are_ranks(self, table: Table) -> Bools:
        sound: Bools = (table["rank"] >= 0) & (table["rank"] < self._ranks_max)
        return sound

    def _grow(self, table: Table) -> None:
        rows = int(table["rank"].max(initial=-1)) + 1
        more = rows - len(self._seen)
        if more <= 0:
            return
        self._seen = np.append(self._seen, np.zeros(more))
        self._ended_at = np.append(self._ended_at, np.full(more, -np.inf))
        self._next_step = np.append(self._next_step, np.zeros(more))
        self._said = np.vstack([self._said, np.full((more, 5), -np.inf)])
        nobody = np.zeros(more, STANDING_DTYPE)
        nobody["told_at"], nobody["moved_at"] = -np.inf, np.nan
        self._standing = np.append(self._standing, nobody)
        for scale in (self._short, self._long):
            scale.grow(rows)

    def _renew_scales(self) -> None:
        """Blocks of another size are learnt anew."""
        for name, steps, aside in (
            ("_short", self.rules.block_steps, False),
            ("_long", self.rules.long_block_steps, True),
        ):
            if getattr(self, name).block_steps != max(1, steps):
                scale = Pace(steps, aside=aside)
                scale.grow(len(self._seen))
                setattr(self, name, scale)

    def _take(self, windows: Table) -> None:
        """One window of each of some ranks."""
        windows = windows[windows["ended_at"] > self._ended_at[windows["rank"]]]  # the others came twice, or too late
        rows = windows["rank"].astype(np.int64)
        steps, ms = windows["steps"].astype(np.float64), windows["ms_per_step"].astype(np.float64)
        self._ended_at[rows], self._next_step[rows] = windows["ended_at"], windows["first_step"] + steps
        warm = self._seen[rows] >= self.rules.warmup_steps
        self._seen[rows] += steps
        self._learn_pause(rows, steps, ms)
        rows, steps, ms = rows[warm], steps[warm], ms[warm]
        if not len(rows):
            return
        short, long = (self._short, self.rules.soon_ratio), (self._long, self.rules.slower_ratio)
        for (scale, ratio), (other, _) in ((short, long), (long, short)):
            change, anew = scale.take(rows, steps, ms, self.rules, ratio)
            if len(anew):
                other.forget(anew)
            self._say(change)

    def _learn_pause(self, rows: Longs, steps: Floats, ms: Floats) -> None:
        """A pause that ended by itself, and was not told as a stall, may come again."""
        usual_ms = self._short.level_ms[rows]
        more_ms = (ms - usual_ms) * steps
        began_at = self._ended_at[rows] - steps * ms / 1e3
        pauses = more_ms[(more_ms > PAUSE_STEPS_MIN * usual_ms) & (began_at > self._stall_moved_at + CREEP_S)]
        self._pause_s = max(self._pause_s, float(pauses.max(initial=0.0)) / 1e3)

    def _say(self, change: Change) -> None:
        at = self._ended_at[change.rows]
        began_at = at - change.steps * change.now_ms / 1e3
        first = self._next_step[change.rows] - change.steps
        self._said[change.rows] = np.stack([at, began_at, first, change.usual_ms, change.now_ms], axis=1)

    # -- what follows ------------------------------------------------------------------------------------------------

    def look(self, now: float) -> Event | None:
        """An event that is new at this moment."""
        gather_s = max(self.rules.gather_s, self.rules.long_block_steps * (self.usual_ms or 0.0) / 1e3)
        return self._slower(now, gather_s) or self._stalled(now, gather_s)

    def _slower(self, now: float, gather_s: float) -> Event | None:
        rows = np.flatnonzero(self._said[:, 0] >= now - gather_s)
        if not len(rows):
            return None
        told = int((self._ended_at >= now - 2 * gather_s).sum())
        if not self._joins(now, gather_s) and len(rows) < max(1.0, self.rules.share_min * told):
            return None
        _, began_at, first_step, usual_ms, now_ms = np.median(self._said[rows], axis=0).tolist()
        self._said[rows] = -np.inf
        event = Event(0, (Cause.SLOWER,), now, began_at, int(first_step), tuple(rows.tolist()), usual_ms, now_ms)
        return self._tell(event, gather_s)

    def _stalled(self, now: float, gather_s: float) -> Event | None:
        table = self._standing
        rows = np.flatnonzero((table["told_at"] >= now - self.rules.stale_s) & np.isfinite(table["moved_at"]))
        usual_ms = self.usual_ms
        if not len(rows) or usual_ms is None:
            return None
        fresh = table[rows]
        if np.isin(fresh["doing"], (Doing.EVALUATION, Doing.CHECKPOINT, Doing.COMPILATION)).any():
            return None
        moved_at, still_s = float(fresh["moved_at"].max()), float((fresh["told_at"] - fresh["moved_at"]).min())
        if moved_at <= self._stall_moved_at + CREEP_S:
            self._stall_moved_at = max(moved_at, self._stall_moved_at)
            return None
        if still_s < self._stall_bound_s(fresh["place"], usual_ms / 1e3):
            return None
        self._stall_moved_at = moved_at
        first_step = int(np.median(self._next_step[rows]))
        causes, ranks = (Cause.STALLED,), tuple(rows.tolist())
        return self._tell(Event(0, causes, now, moved_at, first_step, ranks, usual_ms, still_s * 1e3), gather_s)

    def _stall_bound_s(self, places: NDArray[np.uint8], step_s: float) -> float:
        rules = self.rules
        inside = np.isin(places, (Place.WITHIN, Place.WAITS)).all() and (places == Place.WAITS).any()
        if inside:
            return max(rules.stall_floor_s, rules.stall_ratio * step_s)
        return max(rules.stall_floor_s, rules.pause_steps * step_s, rules.pause_factor * self._pause_s)

    def _joins(self, now: float, gather_s: float) -> bool:
        return self.event is not None and now - self.event.at <= gather_s

    def _tell(self, event: Event, gather_s: float) -> Event | None:
        """The event where it is one of its own; else it joins the last one, or is a repeat of it."""
        last = self.event
        if last is None:
            self.event = replace(event, number=1)
            return self.event
        if self._joins(event.at, gather_s):
            ranks = tuple(sorted({*last.ranks, *event.ranks}))
            self.event = replace(last, ranks=ranks, causes=tuple(dict.fromkeys((*last.causes, *event.causes))))
            return None
        alike = last.causes[0] is event.causes[0] and event.now_ms < self.rules.again_ratio * last.now_ms
        if alike and event.at - last.at < self.rules.again_s:
            self.repeats += 1
            return None
        self.event = replace(event, number=last.number + 1)
        return self.event
