"""The page as a browser would get it: escaped, guarded, complete without scripts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from pathlib import Path

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from controller.control.status import LoopStatus
from controller.servers import bind_tcp, tcp_server
from controller.settings import Address
from controller.web.app import VIEWERS_MAX, Page
from tests.integration.controller_view import HOSTILE, Reading
from tests.unit.test_store import make_incident


class Site:
    """A served page."""

    async def start(self, directory: Path) -> Site:
        self.reading = await Reading.open(directory)
        self.page = Page(self.reading.view, ["tocsin.example"])
        listener = bind_tcp(Address("127.0.0.1", 0), "server.page")
        self.port: int = listener.getsockname()[1]
        self.server = tcp_server(self.page.asgi, 256)
        self._serving = asyncio.create_task(self.server.serve(sockets=[listener]))
        self.session = aiohttp.ClientSession(f"http://127.0.0.1:{self.port}")
        return self

    async def stop(self) -> None:
        await self.session.close()
        self.page.close()
        self.server.stop()
        await self._serving
        await self.reading.store.close()

    async def get(self, path: str, **headers: str) -> tuple[int, str, dict[str, str]]:
        async with self.session.get(path, headers=headers) as answer:
            return answer.status, await answer.text(), {key.lower(): value for key, value in answer.headers.items()}


@pytest_asyncio.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    started = await Site().start(tmp_path)
    yield started
    await started.stop()


class Reader(HTMLParser):
    """Tags, attributes and text of a page, and whether every tag is closed in order."""

    VOID = frozenset({"meta", "link", "img", "meter", "br"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


async def test_an_empty_controller_has_a_whole_page(site: Site) -> None:
    site.reading.registry.jobs = []
    site.reading.loop.told = LoopStatus(mode="observe")
    status, html, _ = await site.get("/")
    page = Reader(html)
    assert status == 200
    assert "Not watching" in page.text and "No job with a probe is running." in page.text and "observe" in page.text


async def test_quiet_is_said_only_by_a_controller_that_sees(site: Site) -> None:
    told, nodes = site.reading.loop.told, site.reading.registry.nodes
    assert "All quiet" in (await site.get("/"))[1]
    site.reading.loop.told = LoopStatus(mode="act", world_at=told.world_at, fault="Slurm does not answer")
    assert "Not watching" in (await site.get("/"))[1]
    site.reading.loop.told, site.reading.registry.nodes = told, []
    html = (await site.get("/"))[1]
    assert "Not watching" in html and "No node daemon reports." in html
    site.reading.registry.nodes = [msgspec.structs.replace(nodes[0], silent=True, hardware="ok", refused={})]
    page = Reader((await site.get("/"))[1])
    assert "Not watching" in page.text and "0 of 2" in page.text and "gpu002" in page.text
    site.reading.registry.nodes = nodes
    assert "All quiet" in (await site.get("/"))[1]


async def test_the_overview_shows_jobs_incidents_and_troubled_nodes(site: Site) -> None:
    await site.reading.store.add_incident(make_incident())
    await site.reading.store.add_incident(make_incident("0000ff", phase="closed", closed_at=20.0, outcome="resolved"))
    page = Reader((await site.get("/"))[1])
    told = ("1 open incident", "42.5 ms", "412 ±9 ms", "8 of 8", "12,345", "symlink 3", "node gpu002", "resolved")
    for words in told:
        assert words in page.text
    links = {attributes.get("href") for tag, attributes in page.tags if tag == "a"}
    assert {"/incidents/a1b2c3", "/incidents/0000ff"} <= links


async def test_an_incident_shows_its_whole_story(site: Site) -> None:
    await site.reading.add_hostile_incident()
    status, html, _ = await site.get("/incidents/a1b2c3")
    page = Reader(html)
    assert status == 200
    for words in ("90 % sure", "Evidence against it", "Not seen", "Timeline", "drain", "rank 3, pid 7, state T"):
        assert words in page.text
    assert "gpu001 sent 9 bytes" not in page.text  # its length is told as it is
    assert "gpu001 sent 10 bytes" in page.text


async def test_hostile_text_stays_text(site: Site) -> None:
    await site.reading.add_hostile_incident()
    site.reading.pause.pause(HOSTILE, HOSTILE, 5.0)
    site.reading.loop.told = LoopStatus(mode=HOSTILE, sentence=HOSTILE, fault=HOSTILE)
    site.reading.view.config_fault = HOSTILE
    job = site.reading.registry.jobs[0]
    job.user, job.state, job.nodes = HOSTILE, HOSTILE, [HOSTILE]
    site.reading.registry.nodes[0].refused = {HOSTILE: 1}
    for path in ("/", "/incidents/a1b2c3", "/incidents/<script>", "/nothing?<script>"):
        html = (await site.get(path))[1]
        page = Reader(html)
        scripts = [attributes for tag, attributes in page.tags if tag == "script"]
        assert scripts == [{"src": "/static/live.js", "defer": None}]
        assert not [tag for tag, attributes in page.tags if any(name.startswith("on") for name in attributes)]
        assert "style" not in {name for _, attributes in page.tags for name in attributes}
        assert "<script>alert" not in html
    assert "<script>alert('x')</script>" in Reader((await site.get("/incidents/a1b2c3"))[1]).text


async def test_a_pause_and_a_fault_are_said_first(site: Site) -> None:
    site.reading.pause.pause("ada", "maintenance of the fabric", 5.0)
    site.reading.loop.told = LoopStatus(mode="act", fault="Slurm does not answer")
    text = Reader((await site.get("/"))[1]).text
    assert text.index("Paused.") < text.index("Not acting:") < text.index("Jobs")
    assert "maintenance of the fabric" in text and "By ada" in text


async def test_every_answer_carries_the_strict_headers(site: Site) -> None:
    for path in ("/", "/incidents/ffffff", "/static/page.css", "/static/nothing", "/nothing"):
        _, _, headers = await site.get(path)
        assert headers["content-security-policy"].startswith("default-src 'self'; base-uri 'none'")
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-frame-options"] == "DENY"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("127.0.0.1:8621", 200),
        ("127.8.9.1", 200),
        ("localhost:1", 200),
        ("LOCALHOST", 200),
        ("[::1]:8621", 200),
        ("tocsin.example", 200),
        ("evil.example", 421),
        ("localhost.evil.example", 421),
        ("192.0.2.1", 421),
        ("127.0.0.1.evil.example", 421),
        ("127.0.0.1@evil.example", 421),
        ("", 421),
    ],
)
async def test_the_page_answers_only_to_its_own_names(site: Site, host: str, status: int) -> None:
    found, html, headers = await site.get("/", Host=host)
    assert found == status
    assert (status == 200) == ("tocsin" in html)
    assert headers["x-frame-options"] == "DENY"


async def test_the_page_changes_nothing(site: Site) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        for path in ("/", "/incidents/a1b2c3", "/events", "/static/page.css", "/pause"):
            async with site.session.request(method, path) as answer:
                assert answer.status in (404, 405)


async def test_what_is_not_there_is_said_politely(site: Site) -> None:
    for path in ("/incidents/ffffff", "/nothing", "/static/../app.py", "/static/%2e%2e/app.py"):
        status, html, _ = await site.get(path)
        assert status == 404
        assert "Back to all incidents" in Reader(html).text


async def test_viewers_are_told_when_something_has_changed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.web.app.LIVE_PERIOD_S", 0.05)
    async with site.session.get("/events") as stream:
        assert stream.content_type == "text/event-stream"
        assert await stream.content.readuntil(b"\n\n") == b"event: changed\ndata:\n\n"
        assert await stream.content.readuntil(b"\n\n") == b":\n\n"
        await site.reading.store.add_incident(make_incident())
        async with asyncio.timeout(10):
            while await stream.content.readuntil(b"\n\n") != b"event: changed\ndata:\n\n":
                pass
        site.page.close()
        async with asyncio.timeout(10):
            await stream.content.read()


async def test_viewers_are_bounded_in_number_and_leave_their_place(site: Site) -> None:
    streams = [await site.session.get("/events") for _ in range(VIEWERS_MAX)]
    for stream in streams:
        await stream.content.readuntil(b"\n\n")
    assert (await site.get("/events"))[0] == 503
    for stream in streams:
        stream.close()
    async with asyncio.timeout(20):
        while True:
            stream = await site.session.get("/events")
            stream.close()
            if stream.status == 200:
                break
