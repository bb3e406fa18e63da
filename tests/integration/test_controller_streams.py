"""The control stream of a node daemon: events reach the right node, bounded, the newest connection wins."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from controller.ingest.channels import QUEUE_EVENTS_MAX, ControlChannels
from controller.settings import Server
from diagnosis.contracts.control import CollectEvent
from tests.eventually import eventually
from tests.integration.controller_site import IngestSite


@pytest_asyncio.fixture
async def site(tmp_path: Path) -> AsyncIterator[IngestSite]:
    started = await IngestSite(tmp_path, Server()).start()
    yield started
    await started.stop()


class Stream:
    """The daemon's end of the control stream."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self.answer = answer

    @classmethod
    async def open(cls, site: IngestSite, node: str = "gpu001") -> Stream:
        header = site.claim("GET", "/v1/control", b"", node=node)
        return cls(await site.session.get("/v1/control", headers={"Authorization": header}))

    async def event(self) -> tuple[str, dict[str, object]]:
        kind = (await self.answer.content.readline()).decode().removeprefix("event: ").strip()
        data = (await self.answer.content.readline()).decode().removeprefix("data: ")
        await self.answer.content.readline()
        return kind, json.loads(data)


COLLECT = CollectEvent(incident="a1b2c3", job_id=1, restart=0, ranks=[3])


async def test_control_events_reach_the_node_they_are_for(site: IngestSite) -> None:
    assert not site.channels.send("gpu001", COLLECT)
    first, second = await Stream.open(site), await Stream.open(site, "gpu002")
    assert first.answer.content_type == "text/event-stream"
    assert await first.event() == await second.event() == ("hello", {"period_ms": 1000})
    assert site.channels.nodes() == {"gpu001", "gpu002"}
    assert site.channels.send("gpu001", COLLECT)
    kind, data = await first.event()
    assert (kind, data["incident"], data["ranks"]) == ("collect", "a1b2c3", [3])
    site.channels.set_report_period(250)
    assert await first.event() == await second.event() == ("hello", {"period_ms": 250})


async def test_the_newest_stream_of_a_node_replaces_the_older(site: IngestSite) -> None:
    older = await Stream.open(site)
    await older.event()
    newer = await Stream.open(site)
    await newer.event()
    assert await older.answer.content.read() == b""  # ended in order
    assert site.channels.send("gpu001", COLLECT)
    assert (await newer.event())[0] == "collect"


async def test_a_stream_that_broke_is_forgotten(site: IngestSite) -> None:
    stream = await Stream.open(site)
    await stream.event()
    stream.answer.close()
    await eventually(lambda: not site.channels.nodes())


async def test_a_stream_is_not_opened_without_proof(site: IngestSite) -> None:
    header = site.claim("GET", "/v1/control", b"", key_of="gpu002")
    async with site.session.get("/v1/control", headers={"Authorization": header}) as answer:
        assert answer.status == 401
    assert site.channels.nodes() == set()


async def test_a_quiet_stream_beats(site: IngestSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.ingest.channels.HEARTBEAT_S", 0.05)
    stream = await Stream.open(site)
    await stream.event()
    assert await stream.answer.content.readline() == b":\n"


async def test_a_daemon_that_does_not_read_fills_only_its_own_queue() -> None:
    channels = ControlChannels(1000)
    channels.open("gpu001")
    taken = [channels.send("gpu001", COLLECT) for _ in range(QUEUE_EVENTS_MAX + 10)]
    assert sum(taken) == QUEUE_EVENTS_MAX - 1  # one place holds the greeting
    channels.close()
    assert not channels.send("gpu001", COLLECT)
