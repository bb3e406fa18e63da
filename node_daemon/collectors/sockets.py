"""The kernel's table of TCP connections: round trip, retransmissions and what waits to be acknowledged, per socket.

Asked by netlink (`sock_diag(7)`, `INET_DIAG_INFO`): one dump a look, no process is touched and nothing is traced. The
answer holds `struct tcp_info` (linux/tcp.h), which grew over the years; a field that an old kernel does not send is
null. Where the kernel has no `inet_diag`, `/proc/net/tcp` tells the same sockets with their queues and their timer's
doublings; the rest is null.

Whose socket it is: its inode is a link in `/proc/PID/fd`. That is looked up only for sockets of the wanted users whose
inode is not known yet, and not more often than once in `REFRESH_S`, so that in the long run a look costs one dump.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

REFRESH_S: Final = 2.0
SOCKETS_MAX: Final = 65_536
FDS_MAX: Final = 65_536
ADDRESSES_KEPT: Final = 1024
_PROC_BYTES_MAX: Final = 16 << 20
_SOCK_DIAG: Final = 4  # NETLINK_SOCK_DIAG
_BY_FAMILY: Final = 20  # SOCK_DIAG_BY_FAMILY
_DUMP_REQUEST: Final = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_ERROR, _DONE = 2, 3
_INFO: Final = 2  # INET_DIAG_INFO
_STATES: Final = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 8  # ESTABLISHED, FIN_WAIT1, FIN_WAIT2, CLOSE_WAIT
_MESSAGE: Final = struct.Struct("=BBBB2s2s16s16sI8sIIIII")  # struct inet_diag_msg
_TIMEOUT_S: Final = 2.0

Endpoint = tuple[str, int]
"""Address and port."""


@dataclass(frozen=True, slots=True)
class TcpSocket:
    """One connection. Counters run since it was made. None: this kernel does not tell.

    `probes`: questions to a receiver whose window is closed, unanswered so far; one that merely does not read answers.
    """

    local: Endpoint
    remote: Endpoint
    inode: int
    uid: int
    queued_bytes: int
    backoff: int
    probes: int
    rtt_us: int | None = None
    unacked: int | None = None
    ack_age_ms: int | None = None
    acked_bytes: int | None = None
    received_bytes: int | None = None
    segments: int | None = None
    resent: int | None = None
    busy_us: int | None = None


def read_sockets(root: Path = Path("/proc")) -> list[TcpSocket]:
    """All connections of this network namespace, at most SOCKETS_MAX. Raises OSError where neither source answers."""
    try:
        found = [one for family in (socket.AF_INET, socket.AF_INET6) for one in _dump(family)]
    except OSError:
        found = [one for name in ("tcp", "tcp6") for one in parse_proc(_read(root / "net" / name))]
    return found[:SOCKETS_MAX]


def _dump(family: int) -> Iterator[TcpSocket]:
    request = struct.pack("=BBBxI48x", family, socket.IPPROTO_TCP, 1 << (_INFO - 1), _STATES)
    header = struct.pack("=IHHII", 16 + len(request), _BY_FAMILY, _DUMP_REQUEST, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as link:
        link.settimeout(_TIMEOUT_S)
        link.send(header + request)
        while True:
            data = link.recv(1 << 18)
            if not data:
                return
            over = yield from parse_dump(data)
            if over:
                return


def parse_dump(data: bytes) -> Generator[TcpSocket, None, bool]:
    """The sockets of one netlink datagram; the generator's value says whether it was the last. Raises OSError."""
    at = 0
    while at + 16 <= len(data):
        length, kind = struct.unpack_from("=IH", data, at)
        if length < 16 or at + length > len(data) or kind == _DONE:
            return True
        if kind == _ERROR:
            number = struct.unpack_from("=i", data, at + 16)[0] if length >= 20 else 0
            raise OSError(-number, "inet_diag")
        if length >= 16 + _MESSAGE.size:
            yield _socket_of(data[at + 16 : at + length])
        at += (length + 3) & ~3
    return False


def _socket_of(message: bytes) -> TcpSocket:
    family, _, _, _, sport, dport, src, dst, _, _, _, _, queued, uid, inode = _MESSAGE.unpack_from(message)
    info = _info_of(message[_MESSAGE.size :])
    return TcpSocket(
        local=(_address(family, src), int.from_bytes(sport)),
        remote=(_address(family, dst), int.from_bytes(dport)),
        inode=inode,
        uid=uid,
        queued_bytes=queued,
        backoff=info[4] if len(info) > 4 else 0,
        probes=info[3] if len(info) > 3 else 0,
        rtt_us=_field(info, 68, 4),
        unacked=_field(info, 24, 4),
        ack_age_ms=_field(info, 56, 4),
        acked_bytes=_field(info, 120, 8),
        received_bytes=_field(info, 128, 8),
        segments=_field(info, 156, 4),
        resent=_field(info, 100, 4),
        busy_us=_field(info, 168, 8),
    )


def _info_of(attributes: bytes) -> bytes:
    at = 0
    while at + 4 <= len(attributes):
        length, kind = struct.unpack_from("=HH", attributes, at)
        if length < 4:
            break
        if kind == _INFO:
            return attributes[at + 4 : at + length]
        at += (length + 3) & ~3
    return b""


def _field(info: bytes, at: int, size: int) -> int | None:
    """A field of tcp_info at its offset, in this machine's byte order; None where this kernel's ends before it."""
    return int.from_bytes(info[at : at + size], sys.byteorder) if len(info) >= at + size else None


@lru_cache(ADDRESSES_KEPT)
def _address(family: int, raw: bytes) -> str:
    if family == socket.AF_INET:
        return str(ipaddress.IPv4Address(raw[:4]))
    address = ipaddress.IPv6Address(raw)
    return str(address.ipv4_mapped or address)


def parse_proc(data: bytes) -> Iterator[TcpSocket]:
    """The connections of /proc/net/tcp or tcp6 (proc(5)); lines that are none are passed over."""
    for line in data.splitlines()[1 : SOCKETS_MAX + 1]:
        words = line.split()
        if len(words) < 10 or words[3] not in (b"01", b"04", b"05", b"08"):
            continue
        try:
            local, remote = _proc_endpoint(words[1]), _proc_endpoint(words[2])
            queued, doublings = int(words[4].split(b":")[0], 16), int(words[6], 16)
            uid, probes, inode = int(words[7]), int(words[8]), int(words[9])
        except (ValueError, IndexError):
            continue
        yield TcpSocket(local, remote, inode, uid, queued, doublings, probes)


def _proc_endpoint(word: bytes) -> Endpoint:
    """Address words are printed as numbers of this machine's byte order."""
    text, _, port = word.partition(b":")
    raw = bytes.fromhex(text.decode())
    packed = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
    return _address(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed.ljust(16, b"\0")), int(port, 16)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_PROC_BYTES_MAX)
    except FileNotFoundError:  # a kernel without IPv6
        return b""


class SocketOwners:
    """Which of some processes holds a socket, by inode."""

    def __init__(self, root: Path = Path("/proc"), clock: Callable[[], float] = time.monotonic) -> None:
        self._root, self._clock = root, clock
        self._pid_of: dict[int, int] = {}
        self._looked_at = -REFRESH_S

    def find(self, sockets: Iterable[TcpSocket], pids: Mapping[int, int]) -> dict[int, int]:
        """Inode to pid, for the sockets that one of `pids` (pid to uid) holds."""
        users, wanted = set(pids.values()), set()
        for one in sockets:
            if one.uid in users and one.inode:
                wanted.add(one.inode)
        self._pid_of = {inode: pid for inode, pid in self._pid_of.items() if inode in wanted and pid in pids}
        now = self._clock()
        if wanted - self._pid_of.keys() and now - self._looked_at >= REFRESH_S:
            self._looked_at = now
            for pid in pids:
                self._pid_of |= dict.fromkeys(wanted & self._inodes(pid), pid)
        return self._pid_of

    def _inodes(self, pid: int) -> set[int]:
        """Sockets among the descriptors of a process; none where it has ended or may not be looked at."""
        found: set[int] = set()
        try:
            with os.scandir(self._root / str(pid) / "fd") as entries:
                for number, entry in enumerate(entries):
                    if number >= FDS_MAX:
                        break
                    try:
                        target = os.readlink(entry.path)  # noqa: PTH115 (a path object costs more than the call)
                    except OSError:
                        continue  # closed since it was listed
                    if target.startswith("socket:[") and target[8:-1].isdigit():
                        found.add(int(target[8:-1]))
        except OSError:
            return found
        return found
