"""The agents' listener as a real server on loopback, with well-behaved and hostile peers."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
import zstandard

from controller.servers import HEAD_BYTES_MAX
from controller.settings import Server
from diagnosis.contracts.control import EVIDENCE_BYTES_MAX, Evidence, ProcessEvidence
from diagnosis.contracts.report import WIRE_BYTES_MAX, Report, encode
from tests.eventually import eventually
from tests.integration.controller_site import IngestSite, Reply


def make_report(node: str = "gpu001", sample: int = 1) -> Report:
    return Report(node=node, boot_id="b", epoch=1, sample=sample, mono_ms=1, wall_ms=1, window_ms=1000)


@pytest_asyncio.fixture
async def site(tmp_path: Path) -> AsyncIterator[IngestSite]:
    started = await IngestSite(tmp_path, Server(body_deadline_s=1.0)).start()
    yield started
    await started.stop()


async def read_answer(reader: asyncio.StreamReader) -> Reply:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.split("content-length: ")[1].split("\r\n")[0])
    return int(head.split()[1]), json.loads(await reader.readexactly(length))


async def test_a_report_is_taken_with_its_age_and_acknowledged(site: IngestSite) -> None:
    body = encode(make_report())
    assert await site.post(body, site.claim("POST", "/v1/report", body, age_ms=700)) == (200, {"duplicate": False})
    assert site.reports == [(make_report(), 700)]
    assert site.app.counts == {"taken": 1}


async def test_one_connection_carries_many_reports(site: IngestSite) -> None:
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
async def test_garbage_is_refused_with_a_reason(site: IngestSite, body: bytes) -> None:
    status, refusal = await site.post(body)
    assert (status, refusal["reason"]) == (400, "garbage") and refusal["detail"]
    assert site.reports == []


async def test_a_version_of_the_future_is_refused(site: IngestSite) -> None:
    status, refusal = await site.post(zstandard.compress(msgspec.msgpack.encode((2, {"anything": 1}))))
    assert (status, refusal["reason"]) == (422, "version") and "upgrade" in refusal["detail"]


async def test_a_bomb_is_refused_whether_or_not_it_tells_its_size(site: IngestSite) -> None:
    plain = b"\0" * (200 << 20)
    open_ended = zstandard.ZstdCompressor(write_content_size=False).compress(plain)
    for bomb in (zstandard.compress(plain), open_ended):
        status, refusal = await site.post(bomb)
        assert (status, refusal["reason"]) in ((413, "oversized"), (400, "garbage"))
    assert site.app.admission.bytes_now == 0


async def test_an_oversized_body_is_refused_by_its_header(site: IngestSite) -> None:
    body = b"\0" * (WIRE_BYTES_MAX + 1)
    status, refusal = await site.post(body)
    assert (status, refusal["reason"]) == (413, "oversized")


async def test_an_oversized_body_is_refused_while_it_streams(site: IngestSite) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"\0" * (64 << 10)

    headers = {"Authorization": site.claim("POST", "/v1/report", b"")}
    async with site.session.post("/v1/report", data=endless(), headers=headers) as answer:
        assert (answer.status, json.loads(await answer.read())["reason"]) == (413, "oversized")
    assert site.app.admission.bytes_now == 0


async def test_an_absurd_length_is_refused_at_once(site: IngestSite) -> None:
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


async def test_the_same_request_is_not_taken_twice(site: IngestSite) -> None:
    body = encode(make_report())
    header = site.claim("POST", "/v1/report", body)
    assert (await site.post(body, header))[0] == 200
    status, refusal = await site.post(body, header)
    assert (status, refusal["reason"]) == (409, "replayed")
    assert len(site.reports) == 1


async def test_a_recorded_request_is_refused_after_a_restart_of_the_controller(tmp_path: Path) -> None:
    site = await IngestSite(tmp_path, Server()).start()
    body = encode(make_report())
    header = site.claim("POST", "/v1/report", body)
    assert (await site.post(body, header))[0] == 200
    await site.stop()
    site = await IngestSite(tmp_path, Server()).start()
    status, refusal = await site.post(body, header)
    later, _ = await site.post(body, site.claim("POST", "/v1/report", body, counter=2))
    await site.stop()
    assert (status, refusal["reason"]) == (409, "replayed")
    assert later == 200


async def test_requests_may_overtake_each_other_but_an_ended_life_may_not_speak(site: IngestSite) -> None:
    body = encode(make_report())
    statuses = [
        (await site.post(body, site.claim("POST", "/v1/report", body, epoch=epoch, counter=counter)))[0]
        for epoch, counter in [(1, 9), (1, 7), (1, 8), (1, 7), (2, 1), (1, 10), (2, 100), (2, 2), (2, 99)]
    ]
    assert statuses == [200, 200, 200, 409, 200, 409, 200, 409, 200]


async def test_numbers_beyond_what_the_state_can_hold_are_refused(site: IngestSite) -> None:
    body = encode(make_report())
    status, refusal = await site.post(body, site.claim("POST", "/v1/report", body, epoch=10**19 - 1))
    assert (status, refusal["reason"]) == (401, "credential")


async def test_a_node_speaks_only_for_itself(site: IngestSite) -> None:
    body = encode(make_report("gpu002"))
    status, refusal = await site.post(body)
    assert (status, refusal["reason"]) == (403, "node")
    assert site.reports == []


async def test_a_wrong_key_a_missing_header_and_a_changed_body_are_refused(site: IngestSite) -> None:
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


async def test_a_forged_request_does_not_use_up_the_number_of_a_true_one(site: IngestSite) -> None:
    body = encode(make_report())
    await site.post(body, site.claim("POST", "/v1/report", body, node="gpu001", key_of="gpu002", counter=5, epoch=9))
    status, _ = await site.post(body, site.claim("POST", "/v1/report", body, counter=1))
    assert status == 200


async def test_unknown_paths_and_methods_are_refused(site: IngestSite) -> None:
    async with site.session.get("/nothing") as answer:
        assert (answer.status, (await answer.json())["reason"]) == (404, "path")
    async with site.session.get("/v1/report") as answer:
        assert (answer.status, (await answer.json())["reason"], answer.headers["Allow"]) == (405, "method", "POST")


async def test_a_body_that_trickles_is_given_up(site: IngestSite) -> None:
    reader, writer = await site.connect()
    claim = site.claim("POST", "/v1/report", b"")
    writer.write(f"POST /v1/report HTTP/1.1\r\nAuthorization: {claim}\r\nContent-Length: 5000\r\n\r\nx".encode())
    assert (await read_answer(reader))[0] == 408
    assert await reader.read() == b""  # and the connection ends
    writer.close()
    assert site.app.admission.bytes_now == 0


async def test_a_head_that_never_ends_is_cut_off(site: IngestSite) -> None:
    reader, writer = await site.connect()
    writer.write(b"POST /v1/report HTTP/1.1\r\n")
    with pytest.raises(ConnectionError):  # noqa: PT012
        for _ in range(HEAD_BYTES_MAX):
            writer.write(b"X: " + b"y" * 1000 + b"\r\n")
            await writer.drain()
            await asyncio.sleep(0)
        await reader.readexactly(1)
    writer.close()


async def test_a_head_that_trickles_is_cut_off(site: IngestSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.servers.HEAD_DEADLINE_S", 0.2)
    reader, writer = await site.connect()
    writer.write(b"POST /v1/re")
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
    writer.close()


async def test_connections_are_bounded_in_number(tmp_path: Path) -> None:
    site = await IngestSite(tmp_path, Server(), connections_max=4).start()
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


async def test_one_address_has_its_share_of_the_connections(tmp_path: Path) -> None:
    site = await IngestSite(tmp_path, Server(), connections_max=64, connections_per_peer_max=4).start()
    held = [await site.connect("127.0.0.2") for _ in range(8)]
    await eventually(lambda: len(site.server.server_state.connections) == 4)
    reader, writer = await site.connect("127.0.0.3")
    writer.write(b"GET /nothing HTTP/1.1\r\n\r\n")
    assert (await read_answer(reader))[0] == 404
    for _, one in [*held, (reader, writer)]:
        one.close()
    await eventually(lambda: not site.server.server_state.connections)
    reader, writer = await site.connect("127.0.0.2")  # what was closed counts no longer
    writer.write(b"GET /nothing HTTP/1.1\r\n\r\n")
    assert (await read_answer(reader))[0] == 404
    writer.close()
    await site.stop()


async def _announce(site: IngestSite, address: str, length: int, sent: int) -> asyncio.StreamWriter:
    """A body of `length` bytes, announced by a stranger who sends only the first `sent` of it."""
    _, writer = await site.connect(address)
    claim = site.claim("POST", "/v1/report", b"", key_of="gpu999")
    head = f"POST /v1/report HTTP/1.1\r\nAuthorization: {claim}\r\nContent-Length: {length}\r\n\r\n"
    writer.write(head.encode() + b"x" * sent)
    return writer


async def test_bodies_that_are_announced_and_do_not_come_keep_nobody_out(tmp_path: Path) -> None:
    site = await IngestSite(tmp_path, Server(bytes_in_flight_max=16 << 20)).start()
    slow = [await _announce(site, f"127.0.1.{number}", WIRE_BYTES_MAX, 1000) for number in range(1, 41)]
    await eventually(lambda: site.app.admission.bytes_now == 40_000)
    assert (await site.post(encode(make_report())))[0] == 200
    for writer in slow:
        writer.close()
    await eventually(lambda: site.app.admission.bytes_now == 0)
    await site.stop()


async def test_bodies_beyond_the_room_of_their_address_are_told_to_come_back(tmp_path: Path) -> None:
    site = await IngestSite(tmp_path, Server(bytes_in_flight_max=16 << 20)).start()
    slow = [await _announce(site, "127.0.0.1", (1 << 20) + 1, 1 << 20) for _ in range(3)]
    await eventually(lambda: site.app.admission.bytes_now == 3 << 20)
    body = b"x" * ((1 << 20) + 1)  # the greatest share of one address is 4 MiB
    headers = {"Authorization": site.claim("POST", "/v1/report", body)}
    async with site.session.post("/v1/report", data=body, headers=headers) as answer:
        assert (answer.status, answer.headers["Retry-After"]) == (503, "2")
    assert site.app.admission.bytes_now == 3 << 20
    slow += [await _announce(site, "127.0.0.2", WIRE_BYTES_MAX, 1 << 20)]  # another address has room
    await eventually(lambda: site.app.admission.bytes_now == 4 << 20)
    for writer in slow:
        writer.close()
    await eventually(lambda: site.app.admission.bytes_now == 0)
    assert (await site.post(encode(make_report())))[0] == 200
    await site.stop()


async def test_evidence_reaches_the_loop_and_is_bounded(site: IngestSite) -> None:
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
