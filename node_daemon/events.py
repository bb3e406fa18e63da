"""Control events from the controller: a stream of server-sent events that is opened again whenever it ends.

The parser is plain bytes in, events out (WHATWG HTML, "server-sent events", section 9.2.6) with every length bounded:
an event that is too long is skipped up to its end, and the stream lives on. Kinds that this daemon does not know are
passed over, so that a newer controller may say more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import aiohttp
import msgspec

from diagnosis.contracts.control import EVENT_KINDS, ControlEvent
from node_daemon.backoff import Backoff
from node_daemon.client import Answer, Client
from node_daemon.log import EventLog

PATH: Final = "/v1/control"
EVENT_BYTES_MAX: Final = 64 << 10
IDLE_S: Final = 45.0
"""The controller sends a comment every 15 seconds; three missing ones mean a dead connection."""
_CHUNK_BYTES: Final = 16 << 10
_log = EventLog("node_daemon.events")


class EventParser:
    """Cuts a byte stream into (kind, data) pairs. Lines end in LF, CRLF or CR; `data:` lines are joined by LF."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._line_too_long = False
        self._after_cr = False
        self._reset()

    def _reset(self) -> None:
        self._kind, self._data, self._size, self._too_long = "message", list[str](), 0, False

    def feed(self, chunk: bytes) -> list[tuple[str, str]]:
        """The events that end within this chunk, which is not empty."""
        events: list[tuple[str, str]] = []
        ends_in_cr = chunk.endswith(b"\r")
        if self._after_cr:
            chunk = chunk.removeprefix(b"\n")
        self._after_cr = ends_in_cr
        lines = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for number, part in enumerate(lines):
            self._extend(part)
            if number < len(lines) - 1:
                events += self._end_line()
        return events

    def _extend(self, part: bytes) -> None:
        if len(self._line) + len(part) > EVENT_BYTES_MAX:
            self._line_too_long = True
            self._line.clear()
        if not self._line_too_long:
            self._line += part

    def _end_line(self) -> list[tuple[str, str]]:
        line, too_long = bytes(self._line), self._line_too_long
        self._line.clear()
        self._line_too_long = False
        if not line and not too_long:
            event = (self._kind, "\n".join(self._data))
            sound = bool(self._data) and not self._too_long
            self._reset()
            return [event] if sound else []
        self._size += len(line)
        self._too_long |= too_long or self._size > EVENT_BYTES_MAX
        if self._too_long:
            self._data.clear()
            return []
        name, _, value = line.decode(errors="replace").partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            self._kind = value
        elif name == "data":
            self._data.append(value)
        return []


def read_event(kind: str, data: str) -> ControlEvent | None:
    """The event, None for a kind that is unknown or data that do not fit it."""
    if kind not in EVENT_KINDS:
        return None
    try:
        return msgspec.json.decode(data, type=EVENT_KINDS[kind])
    except (msgspec.DecodeError, RecursionError) as error:
        _log.sparsely(f"event {kind}", "event not understood", kind=kind, error=str(error))
        return None


async def listen(client: Client, handle: Callable[[ControlEvent], None], backoff: Backoff | None = None) -> None:
    """Hand every event to `handle`, for ever. A lost stream is opened again after a jittered wait."""
    backoff = backoff or Backoff()
    while True:
        try:
            async with client.stream(PATH, idle_s=IDLE_S) as stream:
                if isinstance(stream, Answer):
                    reason, detail = stream.reason, stream.detail
                else:
                    await _follow(stream, handle, backoff)
                    reason, detail = "ended", "the controller closed the stream"
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            reason, detail = "connection", str(error) or type(error).__name__
        _log.sparsely(f"stream {reason}", "control stream lost", reason=reason, detail=detail)
        await asyncio.sleep(backoff.failed())


async def _follow(stream: aiohttp.StreamReader, handle: Callable[[ControlEvent], None], backoff: Backoff) -> None:
    parser = EventParser()
    while chunk := await stream.read(_CHUNK_BYTES):
        for kind, data in parser.feed(chunk):
            event = read_event(kind, data)
            if event is not None:
                backoff.succeeded()
                handle(event)
