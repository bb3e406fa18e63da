"""Round trips to the far ends of a job's connections, by ICMP echo (RFC 792, RFC 4443): some pings within a second.

The far end's kernel answers, so no listener is needed there, and a dead daemon is told apart from a dead path. A ping
leaves from the address that the connection has on this node, and so takes the same route as its packets; of several
parallel paths it may take another one, since those are chosen by ports as well.

A ping socket (`SOCK_DGRAM`, icmp(7)) needs `net.ipv4.ping_group_range` to hold our group, as systemd sets it; else a
raw socket does, with CAP_NET_RAW. Answers are matched by a random word that nobody off the path can know. The time of
an answer is taken by the kernel (SO_TIMESTAMPNS): this process may be kept from the CPU by the job.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import statistics
import struct
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Final

from diagnosis.contracts.gathered import PINGS_MAX, PingFacts

COUNT: Final = 10
EVERY_S: Final = 0.1
WAIT_S: Final = 1.0
"""How long the last ping may take."""
DATA_BYTES: Final = 56
_ANSWERS_BYTES_MAX: Final = 2048
_TIMESTAMP: Final = 35  # SO_TIMESTAMPNS and SCM_TIMESTAMPNS on Linux, where time_t has 64 bits
_FILTER_LEVEL, _FILTER_NAME = 255, 1  # SOL_RAW, ICMP_FILTER
_REQUEST: Final = {socket.AF_INET: 8, socket.AF_INET6: 128}
_ANSWER: Final = {socket.AF_INET: 0, socket.AF_INET6: 129}
_PROTOCOL: Final = {socket.AF_INET: socket.IPPROTO_ICMP, socket.AF_INET6: socket.IPPROTO_ICMPV6}


@dataclass(slots=True)
class _Path:
    """Pings from one address to another. `sent_at`: by number, in ns of the monotonic clock and of the wall clock."""

    local: str
    remote: str
    family: socket.AddressFamily
    socket: socket.socket
    word: bytes = field(default_factory=lambda: os.urandom(16))
    sent_at: dict[int, tuple[int, int]] = field(default_factory=dict)
    rtts_ns: dict[int, int] = field(default_factory=dict)
    note: str = ""

    @property
    def done(self) -> bool:
        return len(self.rtts_ns) == COUNT

    def send(self, number: int) -> None:
        """One more ping; one that does not leave the node is lost."""
        data = (self.word + b"\0" * DATA_BYTES)[:DATA_BYTES]
        packet = bytearray(struct.pack("!BBHHH", _REQUEST[self.family], 0, 0, os.getpid() & 0xFFFF, number) + data)
        if self.family == socket.AF_INET:
            struct.pack_into("!H", packet, 2, checksum(packet))
        self.sent_at[number] = (time.monotonic_ns(), time.time_ns())
        try:
            self.socket.send(packet)
        except OSError as error:
            self.note = error.strerror or str(error)

    def receive(self) -> None:
        """Take in what has come, at most as many packets as a round of pings may bring."""
        for _ in range(4 * COUNT):
            try:
                data, told, _, _ = self.socket.recvmsg(_ANSWERS_BYTES_MAX, 64)
            except BlockingIOError:
                return
            except OSError as error:  # what a router or our own kernel says of a ping that was sent
                self.note = error.strerror or str(error)
                return
            number = self._number_of(data)
            sent_at = self.sent_at.get(number) if number is not None else None
            if number is not None and sent_at is not None and number not in self.rtts_ns:
                self.rtts_ns[number] = _round_trip_ns(sent_at, told)

    def _number_of(self, data: bytes) -> int | None:
        """Which of our pings a packet answers; None where it is something else."""
        if self.family == socket.AF_INET and self.socket.type == socket.SOCK_RAW and data:
            data = data[(data[0] & 15) * 4 :]
        if len(data) < 8 + len(self.word) or data[0] != _ANSWER[self.family] or data[8:24] != self.word:
            return None
        return int(struct.unpack_from("!H", data, 6)[0])

    def facts(self) -> PingFacts:
        """What was found out."""
        heard = len(self.rtts_ns)
        return PingFacts(
            local=self.local,
            remote=self.remote,
            sent=len(self.sent_at),
            heard=heard,
            rtt_us=round(statistics.median(self.rtts_ns.values()) / 1000, 1) if heard else None,
            note=self.note if heard < len(self.sent_at) else "",
        )


def _round_trip_ns(sent_at: tuple[int, int], told: list[tuple[int, int, bytes]]) -> int:
    """By the kernel's time of arrival; by ours where there is none, or where the wall clock was set meanwhile."""
    ours = time.monotonic_ns() - sent_at[0]
    for level, kind, data in told:
        if (level, kind) == (socket.SOL_SOCKET, _TIMESTAMP) and len(data) >= 16:
            seconds, nanoseconds = struct.unpack_from("@qq", data)
            by_kernel = int(seconds * 1_000_000_000 + nanoseconds - sent_at[1])
            if 0 < by_kernel <= ours:
                return by_kernel
    return ours


def ping(pairs: Collection[tuple[str, str]]) -> list[PingFacts]:
    """COUNT pings on each of (local address, remote address), all side by side. Blocking, for two seconds at the most;
    of no more than PINGS_MAX pairs. What went wrong stands in the note of a pair."""
    facts: dict[tuple[str, str], PingFacts] = {}
    paths: list[_Path] = []
    with contextlib.ExitStack() as open_sockets:
        for pair in list(dict.fromkeys(pairs))[:PINGS_MAX]:
            try:
                path = _open(*pair)
            except (OSError, ValueError) as error:
                note = (error.strerror if isinstance(error, OSError) else None) or str(error)
                facts[pair] = PingFacts(local=pair[0], remote=pair[1], note=note)
            else:
                open_sockets.enter_context(path.socket)
                paths.append(path)
        _run(paths)
        facts |= {(path.local, path.remote): path.facts() for path in paths}
    return [facts[pair] for pair in dict.fromkeys(pairs) if pair in facts]


def _open(local: str, remote: str) -> _Path:
    for address in (local, remote):
        ip_address(address)  # never a name: nothing here may ask a name server
    family = socket.AF_INET6 if ":" in local else socket.AF_INET
    try:
        one = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, _PROTOCOL[family])
    except OSError:
        one = socket.socket(family, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _PROTOCOL[family])
    try:
        one.setblocking(False)
        one.setsockopt(socket.SOL_SOCKET, _TIMESTAMP, 1)
        if one.type == socket.SOCK_RAW and family == socket.AF_INET:
            one.setsockopt(_FILTER_LEVEL, _FILTER_NAME, struct.pack("=I", 0xFFFF_FFFF ^ 1 << _ANSWER[family]))
        one.bind((local, 0))
        one.connect((remote, 0))
    except (OSError, ValueError):
        one.close()
        raise
    return _Path(local, remote, family, one)


def _run(paths: list[_Path]) -> None:
    """Send in step, and listen until all have answered or the last may not answer any more."""
    poll = select.poll()
    by_number = {path.socket.fileno(): path for path in paths}
    for number in by_number:
        poll.register(number, select.POLLIN)
    began = time.monotonic()
    ends_at = began + (COUNT - 1) * EVERY_S + WAIT_S
    sent = 0
    while not all(path.done for path in paths) and (now := time.monotonic()) < ends_at:
        if sent < COUNT and now >= began + sent * EVERY_S:
            for path in paths:
                path.send(sent)
            sent += 1
        until = began + sent * EVERY_S if sent < COUNT else ends_at
        for number, _ in poll.poll(max(0.0, 1000 * (until - time.monotonic()))):
            by_number[number].receive()


def checksum(packet: bytes | bytearray) -> int:
    """The Internet checksum (RFC 1071)."""
    padded = bytes(packet) + b"\0" * (len(packet) % 2)
    total = sum(struct.unpack(f"!{len(padded) // 2}H", padded))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return int(~total & 0xFFFF)
