"""The RAS client against peers of every kind, and the doors of real processes."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from diagnosis.contracts.gathered import RasComm, RasDifference, RasFacts, RasProcess, RasRank, RasValue
from node_daemon.collectors import doors, ras
from node_daemon.collectors.doors import Door, Process
from node_daemon.collectors.process import Processes
from tests.nodeframes import start_ticks

RECORDED = Path(__file__).parents[1] / "data" / "nccl_ras"
JSON = (RECORDED / "2.32.3-verbose.json").read_bytes()
TEXT = (RECORDED / "2.27.7-asked-for-json.txt").read_bytes()
Peer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def listening(peer: Peer) -> AsyncIterator[Door]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await peer(reader, writer)
        except ConnectionError:
            pass  # the client has gone, which is what some of these peers are there for
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield Door("127.0.0.1", server.sockets[0].getsockname()[1], os.getpid())
    finally:
        server.close()


def says(*answers: bytes, heard: list[bytes] | None = None) -> Peer:
    """Answers the first question with the first, and so on; the last one for ever."""
    left = list(answers)

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        commands = await reader.readuntil(b"status\n")
        if heard is not None:
            heard.append(commands)
        writer.write(left.pop(0) if len(left) > 1 else left[0])
        await writer.drain()

    return peer


@pytest.mark.parametrize(("answer", "form"), [(JSON, "json"), (TEXT, "text")])
async def test_a_server_is_asked_twice_in_the_protocol_s_words(answer: bytes, form: str) -> None:
    heard: list[bytes] = []
    async with listening(says(answer, heard=heard)) as door:
        facts = await ras.ask_twice([door], pause_s=0.01)
    assert (facts.state, facts.form, facts.answers) == ("ok", form, 2)
    assert heard == [b"client protocol 2\ntimeout 5\nset format json\nverbose status\n"] * 2
    (difference,) = facts.comms[0].differs
    assert [rank.rank for rank in difference.values[-1].listed] == [2]


async def test_what_is_gone_in_the_second_answer_is_no_fact() -> None:
    async with listening(says(JSON, JSON.replace(b"6649", b"6650"))) as door:
        (comm,) = (await ras.ask_twice([door], pause_s=0.01)).comms
    assert (comm.differs, comm.moved) == ([], True)


async def test_a_truncated_json_is_asked_for_as_text() -> None:
    heard: list[bytes] = []
    async with listening(says(JSON[:900], TEXT, heard=heard)) as door:
        facts = await ras.ask_twice([door], pause_s=0.01)
    assert (facts.state, facts.form, facts.answers, len(heard)) == ("ok", "text", 2, 3)
    assert heard[1] == b"client protocol 2\ntimeout 5\nstatus\n"


async def _endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"x" * 65536)
        await writer.drain()


async def _dribbles(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"{")
        await writer.drain()
        await asyncio.sleep(0.01)


async def _silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def _closes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"status\n")


async def _resets(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"status\n")
    writer.transport.abort()


@pytest.mark.parametrize(
    ("peer", "states"),
    [
        (_endless, {"garbage"}),
        (_dribbles, {"silent"}),
        (_silent, {"silent"}),
        (_closes, {"silent"}),
        (_resets, {"absent", "silent"}),
        (says(os.urandom(70_000)), {"garbage"}),
        (says(b"HTTP/1.1 400 Bad Request\r\n\r\n"), {"garbage"}),
        (says(b"SERVER PROTOCOL 2\nERROR: Unknown command verbose status\n"), {"silent", "garbage"}),
    ],
)
async def test_a_peer_that_is_none_costs_a_deadline_and_gives_no_facts(
    peer: Peer, states: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ras, "ANSWER_BYTES_MAX", 1 << 20)
    async with listening(peer) as door:
        async with asyncio.timeout(60):
            facts = await ras.ask_twice([door], pause_s=0.01, deadline_s=0.5)
    assert facts.state in states
    assert facts.notes
    assert not facts.comms


async def test_where_nobody_listens_that_is_a_fact() -> None:
    async with listening(_silent) as door:
        pass
    assert (await ras.ask_twice([door])).state == "absent"
    assert (await ras.ask_twice([])).state == "absent"


async def test_the_next_door_is_tried_where_the_first_does_not_answer() -> None:
    async with listening(_silent) as stopped, listening(says(JSON)) as door:
        facts = await ras.ask_twice([stopped, door], pause_s=0.01, deadline_s=0.5)
    assert (facts.state, facts.answers) == ("ok", 2)


# -- doors -------------------------------------------------------------------------------------------------------------

LISTENER = """
import socket, sys
one = socket.socket()
one.bind(("127.0.0.1", 0))
one.listen()
print(one.getsockname()[1], flush=True)
sys.stdin.read()
"""


@contextmanager
def listener(**environment: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    with subprocess.Popen(
        [sys.executable, "-c", LISTENER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"PATH": os.environ["PATH"], **environment},
    ) as child:
        try:
            assert child.stdout
            yield child, int(child.stdout.readline())
        finally:
            child.kill()


def member(pid: int, rank: int = 0, ticks: int | None = None) -> Process:
    return Process(rank, pid, start_ticks(pid) if ticks is None else ticks, os.getuid(), os.getgid())


def test_a_port_is_found_at_the_process_that_listens_and_at_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with listener() as (child, port), listener() as (other, other_port):
        monkeypatch.setattr(ras, "DEFAULT_PORT", port)
        found, notes = ras.find_doors([member(other.pid), member(child.pid, 1)], Processes())
        assert (found, notes) == ([Door("127.0.0.1", port, child.pid)], [])
        assert doors.doors(member(other.pid), port) == []
        assert other_port != port


def test_the_address_in_the_environment_is_only_believed_as_a_port_of_ones_own() -> None:
    with socket.socket() as ours:
        ours.bind(("127.0.0.1", 0))
        ours.listen()
        foreign = ours.getsockname()[1]
        with listener(NCCL_RAS_ADDR=f"localhost:{foreign}") as (child, _):
            assert ras.find_doors([member(child.pid)], Processes()) == ([], [])
    with listener(NCCL_RAS_ADDR="10.0.0.1:99999999999999999999") as (child, _):
        assert ras.find_doors([member(child.pid)], Processes()) == ([], [])


def test_ras_that_is_switched_off_is_told() -> None:
    with listener(NCCL_RAS_ENABLE="0") as (child, _):
        assert ras.find_doors([member(child.pid, 4)], Processes()) == ([], ["rank 4: NCCL_RAS_ENABLE=0"])


def test_a_process_number_that_was_given_away_has_no_door(monkeypatch: pytest.MonkeyPatch) -> None:
    with listener() as (child, port):
        monkeypatch.setattr(ras, "DEFAULT_PORT", port)
        stranger = member(child.pid, ticks=start_ticks(child.pid) + 1)
        assert ras.find_doors([stranger], Processes()) == ([], [])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make a network namespace")
def test_a_process_in_another_network_namespace_is_told_and_not_asked() -> None:
    with subprocess.Popen(["unshare", "--net", "sleep", "600"]) as child:
        try:
            own = Path("/proc/self/ns/net").stat().st_ino
            while Path(f"/proc/{child.pid}/ns/net").stat().st_ino == own:  # until it has left ours
                assert child.poll() is None
            found, notes = ras.find_doors([member(child.pid)], Processes())
        finally:
            child.kill()
    assert (found, notes) == ([], ["rank 0: the process is in another network namespace"])


def test_listening_sockets_of_both_tables_are_understood_and_junk_is_passed_over() -> None:
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    rest = "00000000:00000000 00:00000000 00000000  1000        0"
    table = head + "\n".join(
        (
            f"   0: 0100007F:6D7C 00000000:0000 0A {rest} 111 1",
            f"   1: 00000000:6D7C 00000000:0000 0A {rest} 222 1",
            f"   2: 0100007F:6D7C 0100007F:1234 01 {rest} 333 1",
            f"   3: 00000000000000000000000001000000:6D7C 0:0 0A {rest} 444 1",
            f"   4: XYZ:6D7C 0:0 0A {rest} 555 1",
            f"   5: 0100007F:6D7C 0:0 0A {rest} inode 1",
            "   6:",
        )
    )
    assert doors.listeners(table) == [("127.0.0.1", 28028, 111), ("127.0.0.1", 28028, 222), ("::1", 28028, 444)]


def test_a_unix_socket_is_opened_only_where_it_is_a_socket_of_the_job_s_user() -> None:
    with tempfile.TemporaryDirectory() as directory, listener() as (child, _), socket.socket(socket.AF_UNIX) as server:
        path = Path(directory, "worker")
        server.bind(str(path))
        link, file = Path(directory, "link"), Path(directory, "file")
        link.symlink_to(path)
        file.write_text("")
        os.close(doors.open_socket_path(member(child.pid), str(path)))
        for wrong in (str(link), str(file), str(path) + "x", "relative", "/" + "x" * 5000, "/a\0b"):
            with pytest.raises(OSError):
                doors.open_socket_path(member(child.pid), wrong)
        stranger = Process(0, child.pid, 0, os.getuid() + 1 if os.geteuid() else 65534, os.getgid())
        with pytest.raises(OSError):
            doors.open_socket_path(stranger, str(path))


# -- who that is in the job --------------------------------------------------------------------------------------------


def facts(*ranks: RasRank, processes: tuple[RasProcess, ...] = ()) -> RasFacts:
    value = RasValue(value=1, ranks=len(ranks), listed=list(ranks))
    comm = RasComm(hash="0xabc", differs=[RasDifference(what="AllReduce", values=[value])])
    return RasFacts(state="ok", comms=[comm], processes=list(processes))


@pytest.mark.parametrize(
    ("rank", "world_rank"),
    [
        (RasRank(rank=1, host="127.0.0.1", pid=500), 13),  # the process is known, its communicator is not
        (RasRank(rank=0, host="127.0.0.1", pid=499), 12),  # both, and they agree
        (RasRank(rank=0), 12),  # by its place in the communicator
        (RasRank(rank=0, host="127.0.0.1", pid=500), None),  # both, and they differ
        (RasRank(rank=1, host="192.0.2.9", pid=500), None),  # a process of another node has that number too
        (RasRank(rank=1, host="no address", pid=500), None),
        (RasRank(rank=7), None),
    ],
)
def test_ranks_are_placed_by_process_and_by_communicator(rank: RasRank, world_rank: int | None) -> None:
    members = [Process(12, 499, 1, 0, 0), Process(13, 500, 1, 0, 0)]
    told = ras.placed(facts(rank), members, {"0xabc": {0: 12}})
    assert told.comms[0].differs[0].values[0].listed[0].world_rank == world_rank


def test_silent_processes_are_placed_by_their_number() -> None:
    silent = (RasProcess(pid=500, host="127.0.0.1"), RasProcess(pid=500, host="192.0.2.9"))
    told = ras.placed(facts(processes=silent), [Process(13, 500, 1, 0, 0)], {})
    assert [process.world_rank for process in told.processes] == [13, None]
