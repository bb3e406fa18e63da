"""The controller's clock: seconds since the epoch that no step of the system's clock moves.

Ages of reports, dwells and budgets are differences between two readings. Were the system's clock set back by an hour
between them, a job would go unwatched for that hour, since all news of it would be older than what is known. So the
wall clock is read once, at the start; after a step the times shown are wrong by that step until the next start.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class SteadyClock:
    """Call it for the time. `wall` and `running` tell seconds; `running` counts those of a suspended machine too."""

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        running: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
    ) -> None:
        self._running = running
        self._offset_s = wall() - running()

    def __call__(self) -> float:
        return self._running() + self._offset_s
