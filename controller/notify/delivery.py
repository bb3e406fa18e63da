"""Ways out: a webhook by aiohttp, everything else by apprise.

A target's address is a secret (whoever has a hook's address may post there), so no error text here repeats one.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import aiohttp
import msgspec

from controller.notify.message import Notice, digest_text, text
from controller.settings import Target
from diagnosis.contracts.errors import OperatorFault

_RETRY_AFTER_S_MAX: Final = 3600


class DeliveryFailed(Exception):
    """The message did not get through; it is tried again. `retry_after_s`: as the receiver asked."""

    def __init__(self, text: str, retry_after_s: float = 0.0) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class Delivery(Protocol):
    """One way to one target."""

    async def send(self, notices: Sequence[Notice], deadline_s: float) -> None:
        """Deliver one message: a notice, or several as a digest. Raises DeliveryFailed."""

    async def close(self) -> None: ...


def make_delivery(target: Target) -> Delivery:
    """Raises OperatorFault where the target's address is none that can be used."""
    if target.webhook is not None:
        return WebhookDelivery(target.webhook.get_secret_value(), target.format)
    assert target.url is not None
    return AppriseDelivery(target.name, target.url.get_secret_value())


class WebhookDelivery:
    """POST of JSON. "slack": `{"text": ...}`, which Slack, Mattermost, Rocket.Chat and others take."""

    def __init__(self, address: str, shape: str) -> None:
        self._address = address
        self._shape = shape
        self._session: aiohttp.ClientSession | None = None

    async def send(self, notices: Sequence[Notice], deadline_s: float) -> None:
        if self._session is None:
            self._session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
        body = _slack_body(notices) if self._shape == "slack" else _json_body(notices)
        try:
            async with self._session.post(
                self._address,
                data=body,
                headers={"Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=deadline_s),
                allow_redirects=False,
            ) as answer:
                if not 200 <= answer.status < 300:
                    raise DeliveryFailed(f"answered {answer.status}", _retry_after_s(answer))
        except (aiohttp.ClientError, TimeoutError) as error:
            raise DeliveryFailed(_words(error)) from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


class AppriseDelivery:
    """Any of apprise's services. apprise blocks, so each message has a thread; one at a time."""

    def __init__(self, name: str, address: str) -> None:
        import apprise  # imported late: half a second, and only where such a target is configured

        logging.getLogger("apprise").setLevel(logging.CRITICAL)  # its warnings repeat addresses
        self._name = name
        self._service: Any = apprise.Apprise.instantiate(address)
        self._text_format = apprise.NotifyFormat.TEXT
        self._thread: threading.Thread | None = None
        if self._service is None:
            raise OperatorFault(f"notify target {name}: apprise knows no such service or its url is incomplete")

    async def send(self, notices: Sequence[Notice], deadline_s: float) -> None:
        if self._thread is not None and self._thread.is_alive():
            raise DeliveryFailed("the delivery before this one still hangs")
        title, _, body = _text(notices).partition("\n")
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._thread = _in_thread(
            done, lambda: bool(self._service.notify(body=body or title, title=title, body_format=self._text_format))
        )
        try:
            delivered = await asyncio.wait_for(done, deadline_s)
        except TimeoutError as error:
            raise DeliveryFailed("no answer in time") from error
        if not delivered:
            raise DeliveryFailed("the service refused it or cannot be reached")

    async def close(self) -> None:
        pass


def _in_thread(done: asyncio.Future[bool], work: Callable[[], bool]) -> threading.Thread:
    """Run `work` in a thread that does not keep the process alive, and tell `done` unless nobody waits any more."""
    loop = asyncio.get_running_loop()

    def tell(result: bool) -> None:
        if not done.done():
            done.set_result(result)

    def run() -> None:
        try:
            result = work()
        except (OSError, ValueError, TypeError, LookupError, AttributeError):  # a plugin's own failure
            result = False
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, result)

    thread = threading.Thread(target=run, name="apprise", daemon=True)
    thread.start()
    return thread


def _text(notices: Sequence[Notice]) -> str:
    return text(notices[0]) if len(notices) == 1 else digest_text(notices)


def _slack_body(notices: Sequence[Notice]) -> bytes:
    escaped = _text(notices).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return msgspec.json.encode({"text": escaped})


def _json_body(notices: Sequence[Notice]) -> bytes:
    if len(notices) == 1:
        return msgspec.json.encode(notices[0])
    return msgspec.json.encode({"schema": "tocsin.digest/1", "notices": list(notices)})


def _retry_after_s(answer: aiohttp.ClientResponse) -> float:
    asked = answer.headers.get("Retry-After", "")
    return min(float(asked), _RETRY_AFTER_S_MAX) if asked.isdecimal() and len(asked) < 8 else 0.0


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.strerror:
        return f"cannot connect: {error.os_error.strerror}"
    return f"failed: {type(error).__name__}"
