"""A request's body from an untrusted peer: bounded in bytes and time, one by one and all together.

Who sends is known only when the whole body has been read, so until then anybody who reaches the port is a sender. Hence
room is taken for the bytes that have come and not for those that were promised, and one address has a share of it: a
peer that announces much and sends little, or much from one machine, does not keep the reports of other nodes out.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from types import TracebackType
from typing import Any, Final

from diagnosis.contracts.errors import AgentFault

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
PEER_SHARE: Final = 0.25
"""Part of the room that the bodies of one address may take together."""
_DISCARD_BYTES_MAX: Final = 16 << 20


class Disconnected(Exception):
    """The peer went away before its body was complete; there is nobody to answer."""


class Admission:
    """Counts the bytes of all bodies in memory. Work that finds no room is refused and comes again later."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes_now = 0
        self._of_peer: Counter[str] = Counter()

    def check(self, peer: str, size_bytes: int) -> None:
        """Raises AgentFault (reason `busy`) where so many more bytes of this address find no room."""
        share = self.bytes_max * PEER_SHARE
        if self.bytes_now + size_bytes > self.bytes_max or self._of_peer[peer] + size_bytes > share:
            raise AgentFault("too many reports at once, come back", reason="busy")

    def take(self, peer: str, size_bytes: int) -> None:
        """Count bytes that have come, until `give_back`. Raises as `check`."""
        self.check(peer, size_bytes)
        self.bytes_now += size_bytes
        self._of_peer[peer] += size_bytes

    def give_back(self, peer: str, size_bytes: int) -> None:
        """What `take` counted is no longer in memory."""
        self.bytes_now -= size_bytes
        self._of_peer[peer] -= size_bytes
        if not self._of_peer[peer]:
            del self._of_peer[peer]


class Room:
    """The room of one body: `with Room(...) as room`, and `room.grow` for each part of it."""

    def __init__(self, admission: Admission, peer: str) -> None:
        self._admission = admission
        self._peer = peer
        self._bytes = 0

    def __enter__(self) -> Room:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._admission.give_back(self._peer, self._bytes)

    def grow(self, size_bytes: int) -> None:
        """So many more bytes are in memory. Raises AgentFault (reason `busy`)."""
        self._admission.take(self._peer, size_bytes)
        self._bytes += size_bytes


def header(scope: Scope, name: bytes) -> str:
    """The value of a header, "" when it is absent. Of several the first counts."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


def claimed_bytes(scope: Scope, bytes_max: int) -> int:
    """How long the body says it is; `bytes_max` where it does not say. Raises AgentFault (reason `oversized`)."""
    length = header(scope, b"content-length")
    if not length.isdecimal():
        return bytes_max
    if len(length) > 12 or int(length) > bytes_max:
        raise AgentFault(f"body of {length[:20]} bytes, at most {bytes_max} are taken", reason="oversized")
    return int(length)


def peer_of(scope: Scope) -> str:
    """The address at the other end, without its port; "" where there is none (a Unix socket)."""
    client = scope.get("client")
    return str(client[0]) if client else ""


async def read_body(receive: Receive, bytes_max: int, deadline_s: float, room: Room | None = None) -> bytes:
    """The whole body. Raises AgentFault (reason `oversized`, `slow` or `busy`) or Disconnected."""
    body = bytearray()
    try:
        async with asyncio.timeout(deadline_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Disconnected
                part = message.get("body", b"")
                if room is not None:
                    room.grow(len(part))
                body += part
                if len(body) > bytes_max:
                    raise AgentFault(f"body of more than {bytes_max} bytes", reason="oversized")
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError as error:
        raise AgentFault(f"body not complete after {deadline_s:g} s", reason="slow") from error


async def discard_body(receive: Receive, deadline_s: float) -> None:
    """Read on and forget, within limits: a peer that is still sending would not see the answer otherwise."""
    discarded = 0
    try:
        async with asyncio.timeout(deadline_s):
            while discarded <= _DISCARD_BYTES_MAX:
                message = await receive()
                discarded += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return
