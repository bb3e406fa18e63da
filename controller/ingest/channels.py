"""Control events to the node daemons: one stream of server-sent events a node, the newest connection of a node wins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

import msgspec

from diagnosis.contracts.control import EVENT_KINDS, ControlEvent, HelloEvent

QUEUE_EVENTS_MAX: Final = 64
HEARTBEAT_S: Final = 15.0
_HEARTBEAT: Final = b":\n\n"
_KIND_OF: Final = {event: kind for kind, event in EVENT_KINDS.items()}


class Channel:
    """The stream of one connection. Bounded; an event that finds it full is not taken."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue(QUEUE_EVENTS_MAX)
        self._closed = False

    def put(self, event: ControlEvent) -> bool:
        """False: the daemon has not read the events before this one, or the stream has ended."""
        if self._closed or self._queue.full():
            return False
        kind = _KIND_OF[type(event)]
        self._queue.put_nowait(b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode(event)))
        return True

    def close(self) -> None:
        """End the stream, without what is still queued."""
        self._closed = True
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(None)

    async def chunks(self) -> AsyncIterator[bytes]:
        """Events as they travel, and a comment now and then so that both sides notice a dead connection."""
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT_S):  # wait_for may swallow a cancellation (Python 3.11)
                    chunk = await self._queue.get()
            except TimeoutError:
                chunk = _HEARTBEAT
            if chunk is None:
                return
            yield chunk


class ControlChannels:
    """The open streams by node."""

    def __init__(self, report_period_ms: int) -> None:
        self._report_period_ms = report_period_ms
        self._channels: dict[str, Channel] = {}

    def open(self, node: str) -> Channel:
        """A new stream, greeted; the node's former one ends."""
        former = self._channels.get(node)
        if former is not None:
            former.close()
        channel = self._channels[node] = Channel()
        channel.put(HelloEvent(period_ms=self._report_period_ms))
        return channel

    def leave(self, node: str, channel: Channel) -> None:
        """The connection of `channel` has ended."""
        if self._channels.get(node) is channel:
            del self._channels[node]

    def send(self, node: str, event: ControlEvent) -> bool:
        """False: the node's daemon does not listen now; send it again later or go on without."""
        channel = self._channels.get(node)
        return channel is not None and channel.put(event)

    def nodes(self) -> set[str]:
        """Nodes whose daemon listens."""
        return set(self._channels)

    def set_report_period(self, period_ms: int) -> None:
        """Tell all daemons how often to report from now on."""
        self._report_period_ms = period_ms
        for node in self._channels:
            self.send(node, HelloEvent(period_ms=period_ms))

    def close(self) -> None:
        """End all streams."""
        for channel in self._channels.values():
            channel.close()
