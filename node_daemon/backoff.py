"""Jittered exponential back-off, so that 10,000 daemons do not return to a restarted controller in the same second."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Final

BASE_S: Final = 0.5
MOST_S: Final = 30.0


@dataclass(slots=True)
class Backoff:
    """How long to wait after each failure in a row; `random` is an argument so that a test may fix it."""

    base_s: float = BASE_S
    most_s: float = MOST_S
    random: random.Random = field(default_factory=random.Random)
    _failures: int = 0

    def failed(self) -> float:
        """The wait after one more failure: between half and all of a span that doubles up to `most_s`."""
        span_s = min(self.most_s, self.base_s * float(1 << min(self._failures, 16)))
        self._failures += 1
        return span_s * self.random.uniform(0.5, 1.0)

    def succeeded(self) -> None:
        """Start again from the shortest wait."""
        self._failures = 0
