"""What every answer of the page carries, and which Host names it answers to.

A page in the reader's browser must not be able to reach this one under a name of its own (DNS rebinding), so a Host
that is neither a loopback address nor configured is refused. The headers forbid inline code, framing and anything
from elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from ipaddress import ip_address
from typing import Any, Final

from controller.ingest.body import Receive, Scope, Send, header

HEADERS: Final = [
    (
        b"content-security-policy",
        b"default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(?::\d{1,5})?", re.ASCII)


class Guard:
    """ASGI middleware; see the module."""

    def __init__(self, app: App, hosts: Iterable[str]) -> None:
        self._app = app
        self._hosts = {"localhost", *(host.lower() for host in hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *HEADERS]
            await send(message)

        if not self._answers_to(header(scope, b"host")):
            await guarded({"type": "http.response.start", "status": 421, "headers": [(b"content-length", b"0")]})
            await guarded({"type": "http.response.body", "body": b""})
        else:
            await self._app(scope, receive, guarded)

    def _answers_to(self, host: str) -> bool:
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = found[1].strip("[]").lower()
        try:
            return ip_address(name).is_loopback
        except ValueError:
            return name in self._hosts
