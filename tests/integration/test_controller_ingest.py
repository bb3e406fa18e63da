"""The agents' listener as a real server on loopback, with well-behaved and hostile peers."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio
import zstandard

from controller.ingest.app import IngestApp
from controller.ingest.channels import QUEUE_EVENTS_MAX, ControlChannels
from controller.servers import HEAD_BYTES_MAX, bind_tcp, tcp_server
from controller.settings import Address, Server
from controller.store.sqlite import SqliteStore
from diagnosis.contracts.control import EVIDENCE_BYTES_MAX, CollectEvent, Evidence, ProcessEvidence
from diagnosis.contracts.credential import authorization, node_key
from diagnosis.contracts.errors import AgentFault
from diagnosis.contracts.report import WIRE_BYTES_MAX, Acknowledgement, Report, encode
from tests.eventually import eventually

SECRET = b"s" * 32
Reply = tuple[int, dict[str, Any]]


def make_report(node: str = "gpu001", sample: int = 1) -> Report:
    return Report(node=node, boot_id="b", epoch=1, sample=sample, mono_ms=1, wall_ms=1, window_ms=1000)


class Site:
    """A controller's ingest and one node daemon's side of it."""

    def __init__(self, directory: Path, settings: Server, connections_max: int = 64) -> None:
        self.directory, self.settings, self.connections_max = directory, settings, connections_max
        self.reports: list[tuple[Report, int]] = []
        self.evidence: list[Evidence] = []
        self.channels = ControlChannels(1000)
        self.counter = 0

    async def start(self) -> Site:
        self.store = await SqliteStore.open(self.directory / "state.db")
        self.app = IngestApp(
            SECRET,
            self.settings,
            await self.store.nodes_seen(),
            self.store,
            self.channels,
            self._accept_report,
            self._accept_evidence,
        )
        self.server = tcp_server(self.app, self.connections_max)
        listener = bind_tcp(Address("127.0.0.1", 0), "server.listen")
        self.port: int = listener.getsockname()[1]
        self._serving = asyncio.create_task(self.server.serve(sockets=[listener]))
        self.session = aiohttp.ClientSession(f"http://127.0.0.1:{self.port}")
        return self

    async def stop(self) -> None:
        await self.session.close()
        self.channels.close()
        self.server.stop()
        await self._serving
        await self.store.close()

    def _accept_report(self, report: Report, /, *, received_at: float, age_ms: int) -> Acknowledgement:
        self.reports.append((report, age_ms))
        return Acknowledgement()

    async def _accept_evidence(self, evidence: Evidence) -> None:
        if evidence.incident == "ffffff":
            raise AgentFault("no such incident", reason="incident")
        self.evidence.append(evidence)

    def claim(self, method: str, path: str, body: bytes, *, node: str = "gpu001", key_of: str = "", **own: int) -> str:
        self.counter += 1
        numbers = {"epoch": 1, "counter": self.counter, "age_ms": 0} | own
        return authorization(
            node_key(SECRET, key_of or node),
            method,
            path,
            node=node,
            epoch=numbers["epoch"],
            counter=numbers["counter"],
            age_ms=numbers["age_ms"],
            body=body,
        )

    async def post(self, body: bytes, header: str | None = None, path: str = "/v1/report") -> Reply:
        headers = {"Authorization": self.claim("POST", path, body) if header is None else header}
        async with self.session.post(path, data=body, headers=headers) as answer:
            return answer.status, json.loads(await answer.read())

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)


@pytest_asyncio.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    started = await Site(tmp_path, Server(body_deadline_s=1.0)).start()
    yield started
    await started.stop()


async def read_answer(reader: asyncio.StreamReader) -> Reply:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.split("content-length: ")[1].split("\r\n")[0])
    return int(head.split()[1]), json.loads(await reader.readexactly(length))


async def test_a_report_is_taken_with_its_age_and_acknowledged(site: Site) -> None:
    body = encode(make_report())
    assert await site.post(body, site.claim("POST", "/v1/report", body, age_ms=700)) == (200, {"duplicate": False})
    assert site.reports == [(make_report(), 700)]
    assert site.app.counts == {"taken": 1}


async def test_one_connection_carries_many_reports(site: Site) -> None:
    for sample in range(50):
        status, _ = await site.post(encode(make_report(sample=sample)))
        assert status == 200
    assert len(site.server.server_state.connections) == 1


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"garbage",
        os.urandom(5000),
        encode(make_report())[:-3],
        zstandard.compress(b"\x93"),
        zstandard.compress(b""),
    ],
    ids=["empty", "text", "noise", "truncated", "not a pair", "no content"],
)
async def test_garbage_is_refused_with_a_reason(site: Site, body: bytes) -> None:
    status, refusal = await site.post(body)
    assert (status, refusal["reason"]) == (400, "garbage") and refusal["detail"]
    assert site.reports == []


async def test_a_version_of_the_future_is_refused(site: Site) -> None:
    status, refusal = await site.post(zstandard.compress(msgspec.msgpack.encode((2, {"anything": 1}))))
    assert (status, refusal["reason"]) == (422, "version") and "upgrade" in refusal["detail"]


async def test_a_bomb_is_refused_whether_or_not_it_tells_its_size(site: Site) -> None:
    plain = b"\0" * (200 << 20)
    open_ended = zstandard.ZstdCompressor(write_content_size=False).compress(plain)
    for bomb in (zstandard.compress(plain), open_ended):
        status, refusal = await site.post(bomb)
        assert (status, refusal["reason"]) in ((413, "oversized"), (400, "garbage"))
    assert site.app.admission.bytes_now == 0


async def test_an_oversized_body_is_refused_by_its_header(site: Site) -> None:
    body = b"\0" * (WIRE_BYTES_MAX + 1)
    status, refusal = await site.post(body)
    assert (status, refusal["reason"]) == (413, "oversized")


async def test_an_oversized_body_is_refused_while_it_streams(site: Site) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"\0" * (64 << 10)

    headers = {"Authorization": site.claim("POST", "/v1/report", b"")}
    async with site.session.post("/v1/report", data=endless(), headers=headers) as answer:
        assert (answer.status, json.loads(await answer.read())["reason"]) == (413, "oversized")
    assert site.app.admission.bytes_now == 0


async def test_an_absurd_length_is_refused_at_once(site: Site) -> None:
    reader, writer = await site.connect()
    claim = site.claim("POST", "/v1/report", b"")
    for length in ("99999999999", "9" * 300):
        writer.write(f"POST /v1/report HTTP/1.1\r\nAuthorization: {claim}\r\nContent-Length: {length}\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n")
        assert head.split()[1] in (b"413", b"400")
        writer.close()
        await writer.wait_closed()
        reader, writer = await site.connect()
    writer.close()
    await writer.wait_closed()


async def test_the_same_request_is_not_taken_twice(site: Site) -> None:
    body = encode(make_report())
    header = site.claim("POST", "/v1/report", body)
    assert (await site.post(body, header))[0] == 200
    status, refusal = await site.post(body, header)
    assert (status, refusal["reason"]) == (409, "replayed")
    assert len(site.reports) == 1


async def test_a_recorded_request_is_refused_after_a_restart_of_the_controller(tmp_path: Path) -> None:
    site = await Site(tmp_path, Server()).start()
    body = encode(make_report())
    header = site.claim("POST", "/v1/report", body)
    assert (await site.post(body, header))[0] == 200
    await site.stop()
    site = await Site(tmp_path, Server()).start()
    status, refusal = await site.post(body, header)
    later, _ = await site.post(body, site.claim("POST", "/v1/report", body, counter=2))
    await site.stop()
    assert (status, refusal["reason"]) == (409, "replayed")
    assert later == 200


async def test_requests_may_overtake_each_other_but_an_ended_life_may_not_speak(site: Site) -> None:
    body = encode(make_report())
    statuses = [
        (await site.post(body, site.claim("POST", "/v1/report", body, epoch=epoch, counter=counter)))[0]
        for epoch, counter in [(1, 9), (1, 7), (1, 8), (1, 7), (2, 1), (1, 10), (2, 100), (2, 2), (2, 99)]
    ]
    assert statuses == [200, 200, 200, 409, 200, 409, 200, 409, 200]


async def test_numbers_beyond_what_the_state_can_hold_are_refused(site: Site) -> None:
    body = encode(make_report())
    status, refusal = await site.post(body, site.claim("POST", "/v1/report", body, epoch=10**19 - 1))
    assert (status, refusal["reason"]) == (401, "credential")


async def test_a_node_speaks_only_for_itself(site: Site) -> None:
    body = encode(make_report("gpu002"))
    status, refusal = await site.post(body)
    assert (status, refusal["reason"]) == (403, "node")
    assert site.reports == []


async def test_a_wrong_key_a_missing_header_and_a_changed_body_are_refused(site: Site) -> None:
    body = encode(make_report())
    forged = site.claim("POST", "/v1/report", body, node="gpu001", key_of="gpu002")
    elsewhere = site.claim("POST", "/v1/evidence", body)
    for header, sent in [
        (forged, body),
        (elsewhere, body),
        ("", body),
        ("Bearer x", body),
        ("Tocsin " + "x" * 4000, body),
        (site.claim("POST", "/v1/report", body), encode(make_report(sample=2))),
    ]:
        status, refusal = await site.post(sent, header)
        assert (status, refusal["reason"]) == (401, "credential")
    assert site.reports == []


async def test_a_forged_request_does_not_use_up_the_number_of_a_true_one(site: Site) -> None:
    body = encode(make_report())
    await site.post(body, site.claim("POST", "/v1/report", body, node="gpu001", key_of="gpu002", counter=5, epoch=9))
    status, _ = await site.post(body, site.claim("POST", "/v1/report", body, counter=1))
    assert status == 200


async def test_unknown_paths_and_methods_are_refused(site: Site) -> None:
    async with site.session.get("/nothing") as answer:
        assert (answer.status, (await answer.json())["reason"]) == (404, "path")
    async with site.session.get("/v1/report") as answer:
        assert (answer.status, (await answer.json())["reason"], answer.headers["Allow"]) == (405, "method", "POST")


async def test_a_body_that_trickles_is_given_up(site: Site) -> None:
    reader, writer = await site.connect()
    claim = site.claim("POST", "/v1/report", b"")
    writer.write(f"POST /v1/report HTTP/1.1\r\nAuthorization: {claim}\r\nContent-Length: 5000\r\n\r\nx".encode())
    assert (await read_answer(reader))[0] == 408
    assert await reader.read() == b""  # and the connection ends
    writer.close()
    assert site.app.admission.bytes_now == 0


async def test_a_head_that_never_ends_is_cut_off(site: Site) -> None:
    reader, writer = await site.connect()
    writer.write(b"POST /v1/report HTTP/1.1\r\n")
    with pytest.raises(ConnectionError):  # noqa: PT012
        for _ in range(HEAD_BYTES_MAX):
            writer.write(b"X: " + b"y" * 1000 + b"\r\n")
            await writer.drain()
            await asyncio.sleep(0)
        await reader.readexactly(1)
    writer.close()


async def test_a_head_that_trickles_is_cut_off(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.servers.HEAD_DEADLINE_S", 0.2)
    reader, writer = await site.connect()
    writer.write(b"POST /v1/re")
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
    writer.close()


async def test_connections_are_bounded_in_number(tmp_path: Path) -> None:
    site = await Site(tmp_path, Server(), connections_max=4).start()
    held = [await site.connect() for _ in range(4)]
    for reader, writer in held:
        writer.write(b"GET /nothing HTTP/1.1\r\n\r\n")
        assert (await read_answer(reader))[0] == 404
    reader, writer = await site.connect()
    writer.write(b"GET /nothing HTTP/1.1\r\n\r\n")
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await read_answer(reader)
    for _, one in [*held, (reader, writer)]:
        one.close()
    await site.stop()


async def test_reports_beyond_the_room_for_them_are_told_to_come_back(tmp_path: Path) -> None:
    site = await Site(tmp_path, Server(bytes_in_flight_max=8 << 20)).start()
    slow = []
    for _ in range(2):  # two bodies that fill the room and do not arrive
        reader, writer = await site.connect()
        claim = site.claim("POST", "/v1/report", b"")
        writer.write(
            f"POST /v1/report HTTP/1.1\r\nAuthorization: {claim}\r\nContent-Length: {WIRE_BYTES_MAX}\r\n\r\n".encode()
        )
        slow.append((reader, writer))
    await eventually(lambda: site.app.admission.bytes_now == 2 * WIRE_BYTES_MAX)
    body = encode(make_report())
    headers = {"Authorization": site.claim("POST", "/v1/report", body)}
    async with site.session.post("/v1/report", data=body, headers=headers) as answer:
        assert (answer.status, answer.headers["Retry-After"]) == (503, "2")
    for _, writer in slow:
        writer.close()
    await eventually(lambda: site.app.admission.bytes_now == 0)
    assert (await site.post(body))[0] == 200
    await site.stop()


async def test_evidence_reaches_the_loop_and_is_bounded(site: Site) -> None:
    process = ProcessEvidence(rank=3, pid=7, state="T")
    told = Evidence(incident="a1b2c3", node="gpu001", job_id=1, restart=0, processes=[process])

    async def send(evidence: Evidence) -> Reply:
        return await site.post(msgspec.json.encode(evidence), path="/v1/evidence")

    assert (await send(told))[0] == 200
    assert site.evidence == [told]
    assert (await send(msgspec.structs.replace(told, node="gpu002")))[0] == 403
    assert (await send(msgspec.structs.replace(told, processes=[process] * 1000)))[1]["reason"] == "limits"
    assert (await send(msgspec.structs.replace(told, incident="ffffff")))[1]["reason"] == "incident"
    assert (await site.post(b"[" * 100_000, path="/v1/evidence"))[1]["reason"] == "garbage"
    assert (await site.post(b" " * (EVIDENCE_BYTES_MAX + 1), path="/v1/evidence"))[0] == 413


class Stream:
    """The daemon's end of the control stream."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self.answer = answer

    @classmethod
    async def open(cls, site: Site, node: str = "gpu001") -> Stream:
        header = site.claim("GET", "/v1/control", b"", node=node)
        return cls(await site.session.get("/v1/control", headers={"Authorization": header}))

    async def event(self) -> tuple[str, dict[str, object]]:
        kind = (await self.answer.content.readline()).decode().removeprefix("event: ").strip()
        data = (await self.answer.content.readline()).decode().removeprefix("data: ")
        await self.answer.content.readline()
        return kind, json.loads(data)


COLLECT = CollectEvent(incident="a1b2c3", job_id=1, restart=0, ranks=[3])


async def test_control_events_reach_the_node_they_are_for(site: Site) -> None:
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


async def test_the_newest_stream_of_a_node_replaces_the_older(site: Site) -> None:
    older = await Stream.open(site)
    await older.event()
    newer = await Stream.open(site)
    await newer.event()
    assert await older.answer.content.read() == b""  # ended in order
    assert site.channels.send("gpu001", COLLECT)
    assert (await newer.event())[0] == "collect"


async def test_a_stream_that_broke_is_forgotten(site: Site) -> None:
    stream = await Stream.open(site)
    await stream.event()
    stream.answer.close()
    await eventually(lambda: not site.channels.nodes())


async def test_a_stream_is_not_opened_without_proof(site: Site) -> None:
    header = site.claim("GET", "/v1/control", b"", key_of="gpu002")
    async with site.session.get("/v1/control", headers={"Authorization": header}) as answer:
        assert answer.status == 401
    assert site.channels.nodes() == set()


async def test_a_quiet_stream_beats(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
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
