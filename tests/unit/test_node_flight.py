"""Flight recorders of real processes' worker servers: sound ones, hostile ones, and dump files."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from diagnosis.contracts.gathered import FlightFacts
from node_daemon.collectors import flight
from node_daemon.collectors.doors import Process
from node_daemon.collectors.flight import FlightCollector
from tests.nodeframes import start_ticks

Handler = Callable[[str, asyncio.StreamWriter], Awaitable[None]]
NAMES = [*flight.JSON_HANDLERS, "ping", "dump_nccl_trace_pickle"]


def entry(number: int, ended: bool, group: str = "0") -> dict[str, Any]:
    return {
        "record_id": number,
        "pg_id": int(group),
        "process_group": [group, "default_pg"],
        "collective_seq_id": number,
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[4, 8]],
        "input_dtypes": ["Float"],
        "state": "completed" if ended else "scheduled",
        "time_created_ns": 1,
    }


DUMP = {
    "version": "2.10",
    "nccl_version": "2.30.7",
    "pg_config": {"0": {"desc": "default_pg", "ranks": "[0, 1, 2, 3]"}, "1": {"desc": "tp", "ranks": "[2, 3]"}},
    "pg_status": {"0": {"last_completed_collective": 8}, "1": {"last_completed_collective": -1}},
    "entries": [entry(7, True), entry(8, True), entry(9, False), entry(10, False)],
}


@contextmanager
def trainee(**environment: str) -> Iterator[Process]:
    with subprocess.Popen(["sleep", "600"], env={"PATH": os.environ["PATH"], **environment}) as child:
        try:
            yield Process(2, child.pid, start_ticks(child.pid), os.getuid(), os.getgid())
        finally:
            child.kill()


def reply(body: bytes, status: int = 200, **headers: str) -> bytes:
    lines = [
        f"HTTP/1.1 {status} X",
        f"Content-Length: {len(body)}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@asynccontextmanager
async def worker_server(handler: Handler, names: object = NAMES) -> AsyncIterator[tuple[Process, list[str]]]:
    """A trainee whose worker server lists `names` and answers all else by `handler`; what it was asked."""
    asked: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                what = head.split()[1].removeprefix("/handler/")
                asked.append(what)
                if what:
                    await handler(what, writer)
                else:
                    writer.write(reply(json.dumps(names).encode()))
                await writer.drain()
        writer.close()

    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/worker"
        server = await asyncio.start_unix_server(serve, path)
        with trainee(TORCH_WORKER_SERVER_SOCKET=path) as process:
            try:
                yield process, asked
            finally:
                server.close()


def answers(**bodies: bytes) -> Handler:
    async def handler(what: str, writer: asyncio.StreamWriter) -> None:
        body = bodies.get(what.partition("?")[0])
        writer.write(reply(b"no such handler", 404) if body is None else reply(body))

    return handler


async def collect(*members: Process) -> list[FlightFacts]:
    collector = FlightCollector()
    try:
        async with asyncio.timeout(60):
            return await collector.collect(members)
    finally:
        collector.close()


async def test_the_json_is_asked_for_and_folded_to_where_the_rank_stands() -> None:
    async with worker_server(answers(fr_trace_json=json.dumps(DUMP).encode())) as (process, asked):
        (facts,) = await collect(process)
    assert (facts.world_rank, facts.source) == (2, "json")
    stands, other = facts.groups
    assert (stands.group, stands.kind, stands.size, stands.ended, stands.stands_at) == ("0", "default_pg", 4, 8, 9)
    assert stands.operation is not None
    assert "all_reduce" in stands.operation.lower()
    assert (other.group, other.kind, other.ended, other.stands_at) == ("1", "tp", None, None)
    assert asked == ["", "dump_nccl_trace_json", "fr_trace_json"]


async def test_a_pickle_is_asked_for_without_stacks_where_there_is_no_json() -> None:
    handler = answers(dump_nccl_trace_pickle=pickle.dumps(DUMP))
    async with worker_server(handler, ["dump_nccl_trace_pickle"]) as (process, asked):
        (facts,) = await collect(process)
    assert (facts.source, facts.groups[0].stands_at) == ("pickle", 9)
    assert asked == ["", "dump_nccl_trace_pickle?includestacktraces=false"]


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/owned",)


async def test_a_pickle_that_would_run_something_is_refused() -> None:
    async with worker_server(answers(dump_nccl_trace_pickle=pickle.dumps(Evil()))) as (process, _):
        (facts,) = await collect(process)
    assert (facts.source, facts.groups) == ("", [])
    assert any("pickle" in note for note in facts.notes)


async def _endless(what: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"10000\r\n" + b"[" * 65536 + b"\r\n")
        await writer.drain()


async def _endless_head(what: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"X-Y: " + b"z" * 4000 + b"\r\n")
        await writer.drain()


async def _dribbles(what: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 900000\r\n\r\n")
    while True:
        writer.write(b"[")
        await writer.drain()
        await asyncio.sleep(0.01)


async def _silent(what: str, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(600)


async def _hangs_up(what: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 900000\r\n\r\n[")
    writer.transport.abort()


async def _redirects(what: str, writer: asyncio.StreamWriter) -> None:
    writer.write(reply(b"", 302, Location="http://192.0.2.1/"))


@pytest.mark.parametrize(
    "handler",
    [
        _endless,
        _endless_head,
        _dribbles,
        _silent,
        _hangs_up,
        _redirects,
        answers(),
        answers(fr_trace_json=b"", dump_nccl_trace_json=b"\xff\xfe", dump_nccl_trace_pickle=b"\x80\x04."),
        answers(
            fr_trace_json=b"[" * 100_000,
            dump_nccl_trace_json=b'{"a": 1e999999}',
            dump_nccl_trace_pickle=b"cos\nsystem\n.",
        ),
        answers(fr_trace_json=b"[]", dump_nccl_trace_json=b'{"entries": {"a": [1]}, "pg_status": 7, "pg_config": [1]}'),
    ],
)
async def test_a_hostile_server_costs_its_deadlines_and_gives_nothing(
    handler: Handler, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LIST_DEADLINE_S", "JSON_DEADLINE_S", "PICKLE_DEADLINE_S"):
        monkeypatch.setattr(flight, name, 0.4)
    async with worker_server(handler) as (process, _):
        (facts,) = await collect(process)
    assert facts.groups == []
    assert facts.notes
    assert all(len(note) <= 256 for note in facts.notes)


@pytest.mark.parametrize("names", [{}, 7, ["ping"], [], "x"])
async def test_a_server_that_has_no_recorder_is_not_asked_for_one(names: object) -> None:
    async with worker_server(answers(), names) as (process, asked):
        (facts,) = await collect(process)
    assert (facts.groups, asked) == ([], [""])


async def test_without_a_server_that_is_told() -> None:
    with trainee() as plain, trainee(TORCH_WORKER_SERVER_SOCKET="/nowhere/at/all") as wrong:
        told = await collect(plain, wrong)
    assert [facts.source for facts in told] == ["", ""]
    assert "is not set" in told[0].notes[0]
    assert "No such file" in told[1].notes[0]


async def test_a_process_number_that_was_given_away_is_not_asked() -> None:
    async with worker_server(answers(fr_trace_json=json.dumps(DUMP).encode())) as (process, asked):
        stranger = Process(process.rank, process.pid, process.start_ticks + 1, process.uid, process.gid)
        (facts,) = await collect(stranger)
    assert (facts.groups, asked) == ([], [])


@pytest.mark.parametrize("text", [b"File x, line 3 in wait", b"\xff" * 50])
async def test_stacks_are_asked_for_in_one_request(text: bytes) -> None:
    collector = FlightCollector()
    async with worker_server(answers(dump_traceback=text)) as (process, asked):
        told, why = await collector.traceback(process, 5.0, 1000)
    collector.close()
    assert (told, why, asked) == (text.decode(errors="replace"), None, ["dump_traceback"])


@pytest.mark.parametrize("handler", [_endless, _silent, _hangs_up, answers(), answers(dump_traceback=b"")])
async def test_stacks_that_do_not_come_are_a_note(handler: Handler) -> None:
    collector = FlightCollector()
    async with worker_server(handler) as (process, _):
        told, why = await collector.traceback(process, 0.4, 100_000)
    with trainee() as plain:
        assert "is not set" in ((await collector.traceback(plain, 5.0, 1000))[1] or "")
    collector.close()
    assert told is None
    assert why


# -- dump files --------------------------------------------------------------------------------------------------------


async def test_the_watchdog_s_file_is_read_where_there_is_no_server() -> None:
    with tempfile.TemporaryDirectory() as directory, trainee(TORCH_FR_DUMP_TEMP_FILE=f"{directory}/dump_") as process:
        Path(directory, "dump_2").write_bytes(pickle.dumps(DUMP))
        (facts,) = await collect(process)
    assert (facts.source, facts.groups[0].stands_at) == ("file", 9)


@pytest.mark.parametrize("fault", ["absent", "older", "link", "fifo", "code", "long", "relative"])
async def test_a_file_that_cannot_be_the_watchdog_s_is_not_believed(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight, "PICKLE_BYTES_MAX", 100_000)
    with tempfile.TemporaryDirectory() as directory:
        path, prefix = Path(directory, "dump_2"), f"{directory}/dump_"
        with trainee(TORCH_NCCL_DEBUG_INFO_TEMP_FILE="dump_" if fault == "relative" else prefix) as process:
            content = pickle.dumps(Evil() if fault == "code" else DUMP)
            if fault == "fifo":
                os.mkfifo(path)
            elif fault == "link":
                Path(directory, "real").write_bytes(content)
                path.symlink_to(Path(directory, "real"))
            elif fault != "absent":
                path.write_bytes(content + b"x" * (100_000 if fault == "long" else 0))
            if fault == "older":
                os.utime(path, (1, 1))
            (facts,) = await collect(process)
    assert (facts.source, facts.groups) == ("", [])
    assert facts.notes
