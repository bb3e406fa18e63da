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
        self._call: Future[Any] | None = None

    @property
    def busy(self) -> bool:
        """Whether the last call has not come back; that is also so when its caller has given up on it."""
        return self._call is not None and not self._call.done()

    async def run(self, call: Callable[[], Result], deadline_s: float) -> Result:
        """The call's result or exception. Raises TimeoutError where it, or the call before it, takes too long."""
        if self.busy:
            raise TimeoutError(f"{self._name} is still busy with an earlier call")
        self._call = self._pool.submit(call)
        return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self._call)), deadline_s)

    def close(self) -> None:
        """Let the thread end when its present call does; does not wait for it."""
        self._pool.shutdown(wait=False, cancel_futures=True)
