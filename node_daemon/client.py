"""Signed requests to the controller, over connections that stay open.

Each request carries the node's proof (`diagnosis.contracts.credential`): the counter rises with every request of this
daemon's life, retries included, so the controller can refuse whatever it has seen before.
"""

from __future__ import annotations

import itertools
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import aiohttp
import msgspec

from diagnosis.contracts.credential import authorization
from diagnosis.contracts.report import Refusal

ANSWER_BYTES_MAX: Final = 64 << 10
RETRY_AFTER_S_MAX: Final = 60.0
_RETRIED_4XX: Final = (408, 429)


@dataclass(frozen=True, slots=True)
class Answer:
    """How a request ended. `taken`: 200. `refused`: 4xx, sending it again would not help. Neither: try again later.

    `reason` is the controller's word, or what failed; `retry_after_s` is how long the controller asks to be left alone.
    """

    taken: bool = False
    refused: bool = False
    reason: str = ""
    detail: str = ""
    retry_after_s: float = 0.0
    body: bytes = b""


class Client:
    """A node's connections to its controller. Use as an asynchronous context manager."""

    def __init__(self, url: str, node: str, key: bytes, epoch: int, *, timeout_s: float) -> None:
        self._url, self._node, self._key, self._epoch = url, node, key, epoch
        self._timeout_s = timeout_s
        self._counter = itertools.count(1)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=4, keepalive_timeout=600, ssl=self._certificates()),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s, connect=self._timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def post(self, path: str, body: bytes, *, kind: str, age_ms: int = 0) -> Answer:
        """Send a body of content type `kind`; never raises for what the network or the controller does."""
        session = self._open_session()
        headers = {"Authorization": self._sign("POST", path, age_ms, body), "Content-Type": kind}
        try:
            async with session.post(self._url + path, data=body, headers=headers, allow_redirects=False) as response:
                return _answer_of(response, await _read(response.content, ANSWER_BYTES_MAX))
        except TimeoutError:
            return Answer(reason="timeout", detail=f"no answer within {self._timeout_s:g} s")
        except (aiohttp.ClientError, OSError) as error:
            return Answer(reason="connection", detail=str(error) or type(error).__name__)

    @asynccontextmanager
    async def stream(self, path: str, *, idle_s: float) -> AsyncIterator[aiohttp.StreamReader | Answer]:
        """Open a stream that may last for ever but never be silent for `idle_s`; an Answer where it is not given.

        Reading raises TimeoutError, aiohttp.ClientError or OSError when the stream breaks.
        """
        session = self._open_session()
        headers = {"Authorization": self._sign("GET", path, 0, b""), "Accept": "text/event-stream"}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._timeout_s, sock_read=idle_s)
        async with session.get(self._url + path, headers=headers, timeout=timeout, allow_redirects=False) as response:
            if response.status == 200 and response.content_type == "text/event-stream":
                yield response.content
            else:
                yield _answer_of(response, await _read(response.content, ANSWER_BYTES_MAX))

    def _certificates(self) -> ssl.SSLContext | bool:
        """The system's, or those that SSL_CERT_FILE names; aiohttp's own are not there (`light`)."""
        return ssl.create_default_context() if self._url.startswith("https:") else True

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("the client is used outside its context")
        return self._session

    def _sign(self, method: str, path: str, age_ms: int, body: bytes) -> str:
        counter = next(self._counter)
        return authorization(
            self._key, method, path, node=self._node, epoch=self._epoch, counter=counter, age_ms=age_ms, body=body
        )


async def _read(content: aiohttp.StreamReader, bytes_max: int) -> bytes:
    parts = bytearray()
    while len(parts) < bytes_max and (part := await content.read(bytes_max - len(parts))):
        parts += part
    return bytes(parts)


def _answer_of(response: aiohttp.ClientResponse, body: bytes) -> Answer:
    if response.status == 200:
        return Answer(taken=True, body=body)
    try:
        refusal = msgspec.json.decode(body, type=Refusal)
    except msgspec.DecodeError:
        refusal = Refusal(reason=f"http_{response.status}", detail=response.reason or "")
    refused = 400 <= response.status < 500 and response.status not in _RETRIED_4XX
    wait = response.headers.get("Retry-After", "")
    wait_s = min(float(wait), RETRY_AFTER_S_MAX) if wait.isascii() and wait.isdecimal() and len(wait) < 10 else 0.0
    return Answer(refused=refused, reason=refusal.reason, detail=refusal.detail, retry_after_s=wait_s)
