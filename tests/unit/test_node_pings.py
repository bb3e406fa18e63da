"""Pings from the daemon: real ones over loopback, what comes back that is none, and for whom it pings at all."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from collections.abc import Collection
from dataclasses import replace

import pytest

from diagnosis.contracts.control import PAIRS_MAX, PingEvent
from diagnosis.contracts.gathered import PINGS_MAX, PINGS_SENT_MAX, Gathered, PingFacts, pack, unpack
from node_daemon.collectors import ping as collector
from node_daemon.collectors.ping import COUNT, checksum, ping
from node_daemon.pinger import Paths, Pinger
from tests.eventually import eventually

HERE = "10.0.0.1"
PAIRS = [(HERE, f"10.0.0.{number}") for number in range(2, 20)]


def _may_ping() -> bool:
    try:
        low, high = map(int, open("/proc/sys/net/ipv4/ping_group_range").read().split())  # noqa: PTH123, SIM115
    except OSError:
        low, high = 1, 0
    return os.geteuid() == 0 or low <= os.getegid() <= high


def test_our_own_kernel_answers_on_both_families_within_milliseconds_and_others_do_not() -> None:
    one, six, absent = ping([("127.0.0.1", "127.0.0.2"), ("::1", "::1"), ("192.0.2.77", "192.0.2.78")])
    assert (absent.sent, absent.heard, absent.rtt_us, bool(absent.note)) == (0, 0, None, True)
    for told in (one, six):
        assert (told.sent, told.heard) == ((COUNT, COUNT) if _may_ping() else (0, 0)), told
        assert (told.rtt_us is not None) == _may_ping() == (told.note == "")


@pytest.mark.parametrize("pair", [("localhost", "127.0.0.1"), ("127.0.0.1", "example.invalid"), ("127.0.0.1", "::1")])
def test_a_name_is_no_address_and_is_asked_of_nobody(pair: tuple[str, str]) -> None:
    (told,) = ping([pair])
    assert told.sent == 0 and told.note


class Wire:
    """A socket whose answers the test makes."""

    def __init__(self, *answers: bytes, kind: socket.SocketKind = socket.SOCK_DGRAM) -> None:
        self.type = kind
        self.answers = list(answers)

    def recvmsg(self, *_: int) -> tuple[bytes, list[tuple[int, int, bytes]], int, None]:
        if not self.answers:
            raise BlockingIOError
        return self.answers.pop(0), [], 0, None


def _path(*answers: bytes, kind: socket.SocketKind = socket.SOCK_DGRAM) -> collector._Path:
    path = collector._Path("a", "b", socket.AF_INET, Wire(*answers, kind=kind), word=b"w" * 16)  # type: ignore[arg-type]
    path.sent_at = dict.fromkeys(range(3), (time.monotonic_ns(), time.time_ns()))
    return path


def _answer(number: int, *, kind: int = 0, word: bytes = b"w" * 16) -> bytes:
    return struct.pack("!BBHHH", kind, 0, 0, 0, number) + word + b"\0" * 40


def test_only_an_answer_with_our_word_to_a_ping_that_was_sent_counts_and_once() -> None:
    strange = [b"", b"\0", b"\x45" + b"\0" * 30, _answer(0, word=b"x" * 16), _answer(1, kind=8), _answer(7)]
    path = _path(*strange, _answer(2), _answer(2))
    path.receive()
    assert list(path.rtts_ns) == [2]
    assert (path.facts().sent, path.facts().heard) == (3, 1)


def test_a_raw_socket_s_answer_has_its_ip_header_before_it() -> None:
    header = bytes([0x46]) + b"\0" * 23  # with an option: six words
    path = _path(header + _answer(1), b"\x4f", kind=socket.SOCK_RAW)
    path.receive()
    assert list(path.rtts_ns) == [1]


def test_the_kernel_s_time_of_arrival_counts_unless_the_wall_clock_was_set() -> None:
    now, wall = time.monotonic_ns(), time.time_ns()

    def told(at_ns: int) -> list[tuple[int, int, bytes]]:
        return [(socket.SOL_SOCKET, 35, struct.pack("@qq", *divmod(at_ns, 10**9)))]

    sent_at = (now - 50_000_000, wall - 50_000_000)
    assert collector._round_trip_ns(sent_at, told(wall - 49_900_000)) == 100_000
    for odd in ([], told(wall - 3_600 * 10**9), told(wall + 3_600 * 10**9)):
        assert collector._round_trip_ns(sent_at, odd) >= 50_000_000


def test_the_checksum_is_that_of_the_internet() -> None:
    packet = bytearray(_answer(3, kind=8) + b"\x01")
    struct.pack_into("!H", packet, 2, checksum(packet))
    assert checksum(packet) == 0


@pytest.mark.parametrize(
    "facts",
    [
        [PingFacts(local="a", remote="b", sent=3, heard=4)],
        [PingFacts(local="a", remote="b", sent=PINGS_SENT_MAX + 1)],
        [PingFacts(local="a", remote="b", sent=5, heard=0, rtt_us=3.0)],
        [PingFacts(local="a", remote="b", sent=5, heard=5, rtt_us=-1.0)],
        [PingFacts(local="a", remote="b", sent=5, heard=5, rtt_us=float("nan"))],
        [PingFacts(local="a" * 300, remote="b")],
        [PingFacts(local="a", remote="b")] * (PINGS_MAX + 1),
    ],
)
def test_made_up_pings_are_passed_over(facts: list[PingFacts]) -> None:
    assert unpack(pack(Gathered(job_id=1, restart=0, uid=1, suspicion=1, pings=facts))) == "limits"


# -- for whom --------------------------------------------------------------------------------------------------------


class Site:
    """A pinger, what it was made to ping, and what it holds for the next report."""

    def __init__(self, *, per_minute_max: int = 6) -> None:
        self.pinged: list[list[tuple[str, str]]] = []
        self.held: list[Gathered] = []
        self.error: OSError | None = None
        self.pinger = Pinger(
            lambda job_id, restart: Paths(1000, set(PAIRS)) if (job_id, restart) == (7, 0) else None,
            self.held.append,
            per_minute_max=per_minute_max,
            ping=self.ping,
        )

    def ping(self, pairs: Collection[tuple[str, str]]) -> list[PingFacts]:
        self.pinged.append(list(pairs))
        if self.error is not None:
            raise self.error
        return [PingFacts(local=local, remote=remote, sent=10, heard=9, rtt_us=80.0) for local, remote in pairs]

    async def ask(self, *events: PingEvent, parts: int) -> None:
        task = asyncio.create_task(self.pinger.run())
        for event in events:
            self.pinger.ask(event)
        await eventually(lambda: len(self.held) >= parts and self.pinger._requests.empty())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _event(pairs: list[tuple[str, str]], job_id: int = 7) -> PingEvent:
    return PingEvent(incident="abc123", job_id=job_id, restart=0, pairs=pairs)


async def test_only_where_a_connection_of_that_job_leads_and_no_more_than_a_request_may_hold() -> None:
    site = Site()
    stranger = (HERE, "203.0.113.9")
    await site.ask(_event([stranger]), _event(PAIRS, job_id=8), _event([stranger, *PAIRS]), parts=1)
    assert site.pinged == [PAIRS[: PAIRS_MAX - 1]]
    (part,) = site.held
    assert (part.job_id, part.uid, part.incident, len(part.pings)) == (7, 1000, "abc123", PAIRS_MAX - 1)
    assert unpack(pack(part)) == part


async def test_pings_that_fail_as_a_whole_are_told_as_not_sent() -> None:
    site = Site()
    site.error = OSError(1, "Operation not permitted")
    await site.ask(_event(PAIRS[:1]), parts=1)
    assert [(one.sent, "not permitted" in one.note) for one in site.held[0].pings] == [(0, True)]


async def test_no_more_a_minute_than_was_set_and_no_queue_without_end() -> None:
    site = Site(per_minute_max=2)
    task = asyncio.create_task(site.pinger.run())
    for _ in range(50):
        site.pinger.ask(_event(PAIRS[:1]))
    await eventually(lambda: len(site.held) == 2)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(site.pinged) == 2
    assert site.pinger._requests.qsize() <= 8


def test_facts_of_a_path_are_rounded_and_have_a_note_only_where_something_was_lost() -> None:
    path = _path(*(_answer(number) for number in range(3)))
    path.note = "No route to host"
    assert path.facts().note == "No route to host"
    path.receive()
    assert path.facts().note == ""
    assert replace(path).done is False
