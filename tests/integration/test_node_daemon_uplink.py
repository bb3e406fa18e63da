"""Uplink, client and control stream against a real HTTP server on loopback that answers as each test says."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from diagnosis.contracts import credential, report
from diagnosis.contracts.control import CollectEvent, ControlEvent, HelloEvent
from node_daemon.backoff import Backoff
from node_daemon.client import Client
from node_daemon.events import listen
from node_daemon.spool import Spool, Spooled
from node_daemon.uplink import Uplink
from tests import eventually as waiting

SECRET = b"s" * 32
NODE = "gpu001"
eventually = partial(waiting.eventually, within_s=60.0)
"""Patient: a machine that runs other tests beside this one may need seconds to start a Python process."""
BOOT = "boot-a"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Received:
    sample: int
    age_ms: int
    counter: int
    epoch: int


@dataclass
class Controller:
    """A controller's listener. `answers`: what it says to the next reports, in turn; then it acknowledges."""

    answers: list[Handler] = field(default_factory=list)
    received: list[Received] = field(default_factory=list)
    streams: list[Handler] = field(default_factory=list)
    port: int = 0
    _runner: web.AppRunner | None = None

    @property
    def samples(self) -> list[int]:
        return [item.sample for item in self.received]

    async def start(self) -> None:
        app = web.Application(client_max_size=8 << 20)
        app.router.add_post("/v1/report", self._report)
        app.router.add_get("/v1/control", self._control)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        assert site._server is not None
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _report(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        claim = credential.read_claim(request.headers["Authorization"])
        credential.verify(SECRET, request.method, request.path, claim, body)
        told = report.decode(body)
        self.received.append(Received(told.sample, claim.age_ms, claim.counter, claim.epoch))
        handler = self.answers.pop(0) if self.answers else acknowledge
        return await handler(request)

    async def _control(self, request: web.Request) -> web.StreamResponse:
        claim = credential.read_claim(request.headers["Authorization"])
        credential.verify(SECRET, request.method, request.path, claim)
        return await (self.streams.pop(0) if self.streams else silence)(request)


async def acknowledge(request: web.Request) -> web.StreamResponse:
    return web.Response(body=msgspec.json.encode(report.Acknowledgement()), content_type="application/json")


def answer(status: int, reason: str = "", **headers: str) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        body = msgspec.json.encode(report.Refusal(reason, "detail")) if reason else b"<html>"
        return web.Response(status=status, body=body, headers={k.replace("_", "-"): v for k, v in headers.items()})

    return handler


async def cut(request: web.Request) -> web.StreamResponse:
    """The report was taken in, but its acknowledgement is lost."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def silence(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(600)
    return web.Response()


def stream(*chunks: bytes, end: bool = True) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
        if not end:
            await asyncio.sleep(600)
        return response

    return handler


def spooled(sample: int, age_ms: int = 0) -> Spooled:
    now = time.monotonic_ns() - age_ms * 1_000_000
    body = report.encode(report.Report(NODE, BOOT, 1000, sample, 0, 0, 1000))
    return Spooled(1000, sample, BOOT, now, time.time_ns() - age_ms * 1_000_000, body)


@dataclass
class Node:
    """A daemon's side of the wire."""

    client: Client
    uplink: Uplink
    spool: Spool


@pytest.fixture
async def controller() -> AsyncIterator[Controller]:
    one = Controller()
    await one.start()
    yield one
    await one.stop()


@contextlib.asynccontextmanager
async def running(controller: Controller, state: Path, *, timeout_s: float = 5.0) -> AsyncIterator[Node]:
    spool = Spool(state / "spool", reports_max=100, bytes_max=1 << 20)
    key = credential.node_key(SECRET, NODE)
    async with Client(f"http://127.0.0.1:{controller.port}", NODE, key, 1000, timeout_s=timeout_s) as client:
        uplink = Uplink(client, spool, BOOT, drain_per_s=500, backoff=Backoff(base_s=0.02, most_s=0.05))
        task = asyncio.create_task(uplink.run())
        try:
            yield Node(client, uplink, spool)
        finally:
            task.cancel()
            await asyncio.wait([task], timeout=5)
            assert task.cancelled()


async def test_a_report_is_acknowledged_and_leaves_no_trace(controller: Controller, tmp_path: Path) -> None:
    async with running(controller, tmp_path) as node:
        for sample in range(1, 4):
            node.uplink.offer(spooled(sample))
            await eventually(lambda: len(controller.samples) == sample)  # noqa: B023 - awaited within the turn
    assert controller.samples == [1, 2, 3]
    assert [item.counter for item in controller.received] == [1, 2, 3]
    assert list((tmp_path / "spool").iterdir()) == []


async def test_a_lost_acknowledgement_brings_the_report_again_with_a_new_number(
    controller: Controller, tmp_path: Path
) -> None:
    controller.answers = [cut]
    async with running(controller, tmp_path) as node:
        node.uplink.offer(spooled(1))
        await eventually(lambda: len(controller.received) == 2)
        await eventually(lambda: len(node.spool) == 0)
    assert controller.samples == [1, 1]
    assert controller.received[0].counter < controller.received[1].counter


async def test_no_answer_within_the_deadline_is_no_acknowledgement(controller: Controller, tmp_path: Path) -> None:
    controller.answers = [silence]
    async with running(controller, tmp_path, timeout_s=0.2) as node:
        node.uplink.offer(spooled(1))
        await eventually(lambda: controller.samples == [1, 1])


@pytest.mark.parametrize(
    ("status", "reason"),
    [(400, "garbage"), (401, "credential"), (409, "replayed"), (413, "oversized"), (422, "version")],
)
async def test_what_the_controller_will_never_take_is_sent_once(
    controller: Controller, tmp_path: Path, status: int, reason: str
) -> None:
    controller.answers = [answer(status, reason)]
    async with running(controller, tmp_path) as node:
        node.uplink.offer(spooled(1))
        await eventually(lambda: controller.samples == [1])
        node.uplink.offer(spooled(2))
        await eventually(lambda: 2 in controller.samples)
        assert (len(node.spool), node.uplink.dropped) == (0, 0)
    assert controller.samples == [1, 2]


async def test_a_spooled_report_that_is_refused_leaves_the_spool(controller: Controller, tmp_path: Path) -> None:
    controller.answers = [answer(500), answer(400, "garbage")]
    async with running(controller, tmp_path) as node:
        node.uplink.offer(spooled(1))
        await eventually(lambda: controller.samples == [1, 1])
        await eventually(lambda: len(node.spool) == 0)
        node.uplink.offer(spooled(2))
        await eventually(lambda: controller.samples == [1, 1, 2])


@pytest.mark.parametrize("strange", [answer(200), answer(204), answer(302, Location="/v1/elsewhere"), answer(502)])
async def test_an_answer_that_is_no_acknowledgement_keeps_the_report(
    controller: Controller, tmp_path: Path, strange: Handler
) -> None:
    controller.answers = [strange]
    async with running(controller, tmp_path) as node:
        node.uplink.offer(spooled(1))
        await eventually(lambda: controller.samples == [1, 1])


async def test_a_busy_controller_is_left_alone_for_as_long_as_it_asks(controller: Controller, tmp_path: Path) -> None:
    controller.answers = [answer(503, "busy", Retry_After="1")]
    async with running(controller, tmp_path) as node:
        began = time.monotonic()
        node.uplink.offer(spooled(1))
        await eventually(lambda: controller.samples == [1])
        node.uplink.offer(spooled(2))
        node.uplink.offer(spooled(3))
        await eventually(lambda: sorted(controller.samples) == [1, 1, 2, 3])
    assert time.monotonic() - began >= 1.0
    assert controller.samples[1] == 3


@pytest.mark.parametrize("wait", ["soon", "-1", "1e9", "Wed, 21 Oct 2099 07:28:00 GMT", "٣"])
async def test_a_retry_after_that_is_no_number_of_seconds_is_passed_over(
    controller: Controller, tmp_path: Path, wait: str
) -> None:
    controller.answers = [answer(503, "busy", Retry_After=wait)]
    async with running(controller, tmp_path) as node:
        node.uplink.offer(spooled(1))
        await eventually(lambda: controller.samples == [1, 1])


async def test_while_the_controller_is_away_reports_wait_and_then_arrive_newest_first_the_rest_in_order_with_true_ages(
    controller: Controller, tmp_path: Path
) -> None:
    await controller.stop()
    async with running(controller, tmp_path) as node:
        for sample in range(1, 6):
            node.uplink.offer(spooled(sample, age_ms=(10 - sample) * 1000))
            await eventually(lambda: len(node.spool) >= sample - 1)  # noqa: B023 - awaited within the turn
        await eventually(lambda: len(node.spool) == 5)
        node.uplink.offer(spooled(6))
        await controller.start()
        await eventually(lambda: len(controller.received) >= 6 and len(node.spool) == 0)
    assert controller.samples[0] == 6
    assert controller.samples[1:] == [1, 2, 3, 4, 5]
    for item in controller.received[1:]:
        assert (10 - item.sample) * 1000 <= item.age_ms < (10 - item.sample) * 1000 + 10_000
    assert controller.received[0].age_ms < 5_000


async def test_what_is_undelivered_at_the_end_is_found_by_the_next_life(controller: Controller, tmp_path: Path) -> None:
    controller.answers = [silence]
    async with running(controller, tmp_path) as node:
        node.uplink.offer(spooled(1))
        await eventually(lambda: controller.samples == [1])
        node.uplink.offer(spooled(2))
        node.uplink.offer(spooled(3))
    assert len(list((tmp_path / "spool").iterdir())) == 3
    async with running(controller, tmp_path):
        await eventually(lambda: controller.samples == [1, 1, 2, 3])
        await eventually(lambda: not list((tmp_path / "spool").iterdir()))


async def test_events_are_handed_over_and_a_lost_stream_is_opened_again(controller: Controller, tmp_path: Path) -> None:
    hello, collect = HelloEvent(period_ms=500), CollectEvent(incident="a1", job_id=7, restart=0, ranks=[1])
    first = b"event: hello\ndata: " + msgspec.json.encode(hello) + b"\n\nevent: unknown\ndata: {}\n\n"
    second = b":\n\nevent: collect\ndata: " + msgspec.json.encode(collect) + b"\n\n"
    huge = b"data: " + b"x" * 500_000
    controller.streams = [
        stream(first),
        answer(401, "credential"),
        answer(200),
        cut,
        stream(huge, b"\n\n", second, end=False),
    ]
    heard: list[ControlEvent] = []
    async with running(controller, tmp_path) as node:
        task = asyncio.create_task(listen(node.client, heard.append, Backoff(base_s=0.01, most_s=0.02)))
        await eventually(lambda: len(heard) == 2)
        task.cancel()
        await asyncio.wait([task])
    assert heard == [hello, collect]
