"""How much of a job may be profiled without a person's word: its first windows, then a share of the steps it makes.

Kept by the hour. Only what is certain to lie within the time counts as made, and all that may lie within it as taken,
so the share is never exceeded, whenever one looks. One budget goes with a job through all its attempts; `saved` and
`restored` carry it through the controller's own restarts. Times are seconds of any clock that outlives these.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from diagnosis.engine.profiling_rules import WindowRules

HOUR_S: Final = 3600.0
HOURS_MAX: Final = 24 * 31
TAKEN_MAX: Final = 1024
Saved = tuple[int, list[tuple[float, int]], list[tuple[float, int]]]


@dataclass(slots=True)
class Budget:
    """See the module. `windows`: taken so far without a person's word."""

    windows: int = 0
    _made: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=HOURS_MAX))  # (begin of hour, steps)
    _taken: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=TAKEN_MAX))  # (when, steps)

    def made(self, steps: int, now: float) -> None:
        """The job has made so many more steps."""
        hour = now - now % HOUR_S
        if steps <= 0:
            return
        if self._made and self._made[-1][0] >= hour:  # a clock that was set back changes nothing
            self._made[-1] = (self._made[-1][0], self._made[-1][1] + steps)
        else:
            self._made.append((hour, steps))

    def left(self, now: float, rules: WindowRules) -> float:
        """Steps that may be profiled now; infinite while a window is free."""
        if self.windows < rules.free_windows:
            return float("inf")
        since = now - rules.budget_s
        made = sum(steps for hour, steps in self._made if hour >= since)
        taken = sum(steps for at, steps in self._taken if at >= since)
        if len(self._taken) == TAKEN_MAX and self._taken[0][0] >= since:
            return 0.0  # more than can be remembered
        return max(0.0, rules.budget_share * made - taken)

    def take(self, steps: int, now: float, rules: WindowRules) -> None:
        """A window of so many steps is planned."""
        self.windows += 1
        if self.windows > rules.free_windows:
            self._taken.append((now, steps))

    def give_back(self, steps: int, at: float) -> None:
        """The window that was planned last, at this time, has not taken place."""
        self.windows = max(0, self.windows - 1)
        if self._taken and self._taken[-1] == (at, steps):
            self._taken.pop()

    def saved(self) -> Saved:
        """What `restored` needs."""
        return self.windows, list(self._made), list(self._taken)

    @classmethod
    def restored(cls, saved: Saved) -> Budget:
        """The budget that was saved."""
        windows, made, taken = saved
        return cls(windows, deque(made, HOURS_MAX), deque(taken, TAKEN_MAX))
