"""One thread for one kind of blocking call, with a deadline.

A driver call, a file system or a process's /proc entry may block for ever in the kernel, and nothing can end such a
call. What can be done is to stop waiting for it: the caller gets TimeoutError, and until the thread comes back every
further call fails the same way at once instead of piling up. `main` leaves by `os._exit`, so that such a thread cannot
hold up the end of the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")


class OwnThread:
    """Runs one call at a time on a thread of its own, which the first call starts."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._late: Future[Any] | None = None

    @property
    def hung(self) -> bool:
        """Whether a call that ran past its deadline has still not come back."""
        return self._late is not None and not self._late.done()

    async def run(self, call: Callable[[], Result], deadline_s: float) -> Result:
        """The call's result or exception. Raises TimeoutError where it, or the call before it, takes too long."""
        if self.hung:
            raise TimeoutError(f"{self._name} is still busy with an earlier call")
        future = self._pool.submit(call)
        try:
            async with asyncio.timeout(deadline_s):
                return await asyncio.shield(asyncio.wrap_future(future))
        except TimeoutError:
            if not future.done():  # else the call itself raised it
                self._late = future
            raise

    def close(self) -> None:
        """Let the thread end when its present call does; does not wait for it."""
        self._pool.shutdown(wait=False)
