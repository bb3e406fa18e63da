"""The daemon's network witnesses: the kernel's socket table, ports, and how they travel in a report."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator

import pytest

from diagnosis.contracts import probeframe
from diagnosis.contracts import report as wire
from diagnosis.contracts.columns import empty, null_of, pack, unpack
from diagnosis.contracts.errors import AgentFault
from diagnosis.contracts.report import JobSample, NetworkFacts, NicFacts, Report, decode, encode
from node_daemon.collectors.frames import FrameSample, JobFrames
from node_daemon.collectors.network import Flow, Look, NetworkMonitor, NetworkSource
from node_daemon.collectors.nics import local_addresses, read_nics
from node_daemon.collectors.sockets import SocketOwners, TcpSocket, parse_dump, parse_proc, read_sockets
from tests.nodeframes import FrameImage

ME = {os.getpid(): os.getuid()}


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of one connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as one:
        other, _ = listener.accept()
        with other:
            yield one, other


def _find(sockets: list[TcpSocket], one: socket.socket) -> TcpSocket:
    (found,) = [each for each in sockets if each.local == one.getsockname() and each.remote == one.getpeername()]
    return found


def test_the_kernel_tells_what_a_connection_sent_and_that_it_was_acknowledged(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    one, other = pair
    one.sendall(b"x" * 5000)
    other.recv(5000, socket.MSG_WAITALL)
    sender, receiver = (_find(read_sockets(), end) for end in pair)
    assert sender.acked_bytes is not None and sender.acked_bytes >= 5000
    assert receiver.received_bytes == 5000
    assert sender.rtt_us is not None and sender.rtt_us > 0
    assert (sender.unacked, sender.backoff, sender.resent) == (0, 0, 0)
    assert SocketOwners().find([sender, receiver], ME).keys() == {sender.inode, receiver.inode}


def test_what_the_peer_does_not_read_stays_queued(pair: tuple[socket.socket, socket.socket]) -> None:
    one, _ = pair
    one.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            one.send(b"x" * 65536)
    assert _find(read_sockets(), one).queued_bytes > 0


def test_proc_tells_the_same_ends_and_owners(pair: tuple[socket.socket, socket.socket]) -> None:
    with open("/proc/net/tcp", "rb") as file:  # noqa: PTH123 - a file of the kernel, as the daemon reads it
        by_proc = _find(list(parse_proc(file.read())), pair[0])
    by_netlink = _find(read_sockets(), pair[0])
    assert (by_proc.inode, by_proc.uid) == (by_netlink.inode, by_netlink.uid)
    assert by_proc.rtt_us is None, "what this source does not tell is null"


def test_sockets_of_other_processes_are_nobodys(pair: tuple[socket.socket, socket.socket]) -> None:
    owners = SocketOwners()
    assert owners.find(read_sockets(), {1: os.getuid() + 1}) == {}


def test_a_torn_netlink_answer_gives_what_is_whole() -> None:
    assert list(parse_dump(b"")) == []
    assert list(parse_dump(struct.pack("=IHHII", 4096, 20, 2, 1, 0))) == []
    with pytest.raises(OSError):
        list(parse_dump(struct.pack("=IHHIIi", 20, 2, 0, 1, 0, -2)))


def test_loopback_has_its_address_and_is_a_port_only_when_asked_for() -> None:
    assert local_addresses()["127.0.0.1"] == "lo"
    assert "lo" not in [nic.name for nic in read_nics()]
    (lo,) = [nic for nic in read_nics({"lo"}) if nic.name == "lo"]
    assert lo.up is True and lo.speed_gbps is None


def _socket(**about: int | None) -> TcpSocket:
    values = {"queued_bytes": 0, "backoff": 0, "probes": 0, "acked_bytes": 100, "received_bytes": 0, "segments": 2}
    values |= {"resent": 0, "busy_us": 30}
    return TcpSocket(("10.0.0.1", 1000), ("10.0.0.2", 2000), 7, 5, **(values | about))  # type: ignore[arg-type]


class _Owners(SocketOwners):
    def find(self, *_: object) -> dict[int, int]:
        return {7: 42}


def test_counters_are_told_as_what_was_added_and_null_at_first_and_where_they_ran_backwards() -> None:
    answers = [[_socket()], [_socket(acked_bytes=350)], [_socket(acked_bytes=10)]]
    source = NetworkSource(
        _Owners(), lambda: answers.pop(0), lambda: {"10.0.0.1": "ib0"}, iter([1.0, 3.0, 5.0]).__next__
    )
    first, second, third = (source.read({42: 5}) for _ in range(3))
    assert first.flows[42][0].added == (None,) * 5
    assert (second.flows[42][0].added, second.window_ms) == ((250, 0, 0, 0, 0), 2000)
    assert third.flows[42][0].added[0] is None


def test_a_source_that_fails_is_its_own_fault_and_says_nothing_of_the_network() -> None:
    def refused() -> list[TcpSocket]:
        raise OSError(1, "Operation not permitted")

    look = NetworkSource(sockets=refused).read({42: 5})
    assert (look.flows, look.nics, look.fault) == ({}, [], "Operation not permitted")


def test_flows_travel_with_their_rank_and_come_back_as_they_were() -> None:
    monitor = NetworkMonitor(NetworkSource(), period_s=1, deadline_s=1)
    flow = Flow(_socket(rtt_us=120, unacked=3, ack_age_ms=40), (250, None, 2, 0, 9))
    monitor._newest = Look({42: [flow]}, [NicFacts("ib0", True, 100.0)], {"10.0.0.1": "ib0"}, 1000)
    told = probeframe.parse(FrameImage(42, 1).tobytes())
    frame = FrameSample(42, 1, ord("S"), 0, told.header, told.slots, told.slots)
    sample = JobSample(1, 0, 5, {}, {}, {})
    samples, network = monitor.told([JobFrames(1, 0, 5, 5, [frame])], [sample])
    report = decode(encode(Report("n", "b", 1, 1, 0, 0, 0, jobs=samples, network=network)))
    assert report.network is not None
    assert (report.network.addresses, report.network.nic_of) == (["10.0.0.1", "10.0.0.2"], ["ib0", ""])
    (row,) = unpack(report.jobs[0].flows, wire.FLOW_DTYPE, 1)
    assert [int(row[name]) for name in ("rank_row", "local_port", "remote_port", "rtt_us")] == [0, 1000, 2000, 120]
    assert [int(row[name]) for name in ("acked_bytes", "unacked", "ack_age_ms")] == [250, 3, 40]
    assert int(row["received_bytes"]) == null_of(wire.FLOW_DTYPE["received_bytes"]), "null, not zero"


@pytest.mark.parametrize(
    "facts",
    [
        NetworkFacts("ok", addresses=["a"] * (wire.ADDRESSES_MAX + 1), nic_of=[""] * (wire.ADDRESSES_MAX + 1)),
        NetworkFacts("ok", addresses=["a"], nic_of=[]),
        NetworkFacts("ok", nics=[NicFacts("x")] * (wire.NICS_MAX + 1)),
        NetworkFacts("ok", addresses=["a" * (wire.TEXT_CHARS_MAX + 1)], nic_of=[""]),
    ],
)
def test_a_report_beyond_the_limits_is_refused(facts: NetworkFacts) -> None:
    with pytest.raises(AgentFault):
        decode(encode(Report("n", "b", 1, 1, 0, 0, 0, network=facts)))


def test_more_flows_than_a_report_holds_are_refused() -> None:
    flows = pack(empty(wire.FLOW_DTYPE, wire.FLOW_ROWS_MAX + 1))
    with pytest.raises(AgentFault):
        decode(encode(Report("n", "b", 1, 1, 0, 0, 0, jobs=[JobSample(1, 0, 5, {}, {}, {}, flows)])))
