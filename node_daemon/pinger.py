"""Pings between nodes of a job, when the controller suspects the path between them.

Only where a connection of that very job leads, from the address that it has here: whoever can speak as the controller
can make a daemon ping the nodes of a job, a few packets of 84 bytes, and nothing else. One request at a time, so many a
minute and no more. Nothing touches the job: the kernels at both ends do all the work.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Final, NamedTuple

from diagnosis.contracts.control import PAIRS_MAX, PingEvent
from diagnosis.contracts.gathered import Gathered, PingFacts
from node_daemon.collectors.ping import ping
from node_daemon.log import EventLog
from node_daemon.threads import OwnThread

REQUESTS_MAX: Final = 8
DEADLINE_S: Final = 5.0
"""More than all pings of a request may take."""
_log = EventLog("node_daemon.pinger")


class Paths(NamedTuple):
    """Where connections of a job lead: (address here, address there). `uid`: the job's owner."""

    uid: int
    pairs: Collection[tuple[str, str]]


class Pinger:
    """See the module. `ask` never waits, `run` does the work. `paths`: of (job, restart), None where it is not here;
    `hold`: takes what is to go with the next report."""

    def __init__(
        self,
        paths: Callable[[int, int], Paths | None],
        hold: Callable[[Gathered], None],
        *,
        per_minute_max: int,
        clock: Callable[[], float] = time.monotonic,
        ping: Callable[[Collection[tuple[str, str]]], list[PingFacts]] = ping,
    ) -> None:
        self._paths, self._hold, self._clock, self._ping = paths, hold, clock, ping
        self._requests: asyncio.Queue[PingEvent] = asyncio.Queue(REQUESTS_MAX)
        self._began_at: deque[float] = deque(maxlen=per_minute_max)
        self._thread = OwnThread("ping")
        self._count = 0

    def ask(self, event: PingEvent) -> None:
        """Take up a request, unless too much is asked."""
        try:
            self._requests.put_nowait(event)
        except asyncio.QueueFull:
            _log.sparsely("full", "not pinged", job=event.job_id, why="too many requests")

    async def run(self) -> None:
        """Answer requests one after the other, for ever."""
        try:
            while True:
                event = await self._requests.get()
                if len(self._began_at) == self._began_at.maxlen:
                    await asyncio.sleep(max(0.0, self._began_at[0] + 60.0 - self._clock()))
                self._began_at.append(self._clock())
                await self._answer(event)
        finally:
            self._thread.close()

    async def _answer(self, event: PingEvent) -> None:
        paths = self._paths(event.job_id, event.restart)
        if paths is None:
            return
        known = set(paths.pairs)
        pairs = [pair for pair in event.pairs[:PAIRS_MAX] if pair in known]
        if not pairs:
            _log.sparsely("unknown", "not pinged", job=event.job_id, why="no connection of the job leads there")
            return
        try:
            pings = await self._thread.run(lambda: self._ping(pairs), DEADLINE_S)
        except OSError as error:  # TimeoutError is one
            note = f"not pinged to the end: {error or 'it took too long'}"
            pings = [PingFacts(local=local, remote=remote, note=note) for local, remote in pairs]
        self._count += 1
        _log.info("pinged", job=event.job_id, paths=len(pings), lost=sum(one.sent - one.heard for one in pings))
        self._hold(
            Gathered(
                job_id=event.job_id,
                restart=event.restart,
                uid=paths.uid,
                suspicion=self._count,
                incident=event.incident,
                pings=pings,
            )
        )
