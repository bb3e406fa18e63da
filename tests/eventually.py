"""Waiting for what will be true soon, without guessing how long it takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def eventually(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    """Returns as soon as the condition holds. Raises AssertionError where it does not within the time."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.01)
