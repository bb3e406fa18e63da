"""A request's body from an untrusted peer: bounded in bytes and time, one by one and all together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from diagnosis.contracts.errors import AgentFault

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_DISCARD_BYTES_MAX: Final = 16 << 20


class Disconnected(Exception):
    """The peer went away before its body was complete; there is nobody to answer."""


class Admission:
    """Counts the bytes of all bodies in memory. Work that finds no room is refused and comes again later."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes_now = 0

    def enter(self, size_bytes: int) -> bool:
        """True: the bytes are yours until `leave`."""
        if self.bytes_now + size_bytes > self.bytes_max:
            return False
        self.bytes_now += size_bytes
        return True

    def leave(self, size_bytes: int) -> None:
        """Give back what `enter` gave."""
        self.bytes_now -= size_bytes


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


async def read_body(receive: Receive, bytes_max: int, deadline_s: float) -> bytes:
    """The whole body. Raises AgentFault (reason `oversized` or `slow`) or Disconnected."""
    body = bytearray()
    try:
        async with asyncio.timeout(deadline_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Disconnected
                body += message.get("body", b"")
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
