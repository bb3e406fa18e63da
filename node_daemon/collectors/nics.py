"""What the kernel tells of the node's network ports: speed, carrier, errors. What it does not tell is null.

InfiniBand and RoCE ports come from `/sys/class/infiniband/*/ports/1` (Documentation/ABI/stable/sysfs-class-infiniband),
all others that sit on a device, or that the job's own addresses lie on, by rtnetlink(7) and the ethtool ioctl: these
speak of the daemon's network namespace, where sysfs speaks of whoever mounted it. The pause frames of a RoCE port are
told by the Ethernet port that it shares its wire with. Only counters of real trouble are taken: `rx_dropped` also
counts what nobody listened for.
"""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from diagnosis.contracts.report import NICS_MAX, NicFacts
from node_daemon.collectors.ethtool import PortStatistics, speed_gbps

_VALUE_BYTES_MAX: Final = 128
_RATE: Final = re.compile(r"([0-9.]+) Gb/sec")
_NEW_LINK, _GET_LINK, _NEW_ADDRESS, _GET_ADDRESS = 16, 18, 20, 22
_ERROR, _DONE = 2, 3
_ADDRESS, _LOCAL = 1, 2  # IFA_ADDRESS, IFA_LOCAL
_NAME, _STATS64, _CARRIER, _CARRIER_DOWNS, _PARENT_DEVICE = 3, 23, 33, 48, 56  # IFLA_...
_CRC, _FRAME, _FIFO, _MISSED = 12, 13, 14, 15  # places in struct rtnl_link_stats64
_TIMEOUT_S: Final = 2.0
HW_COUNTERS: Final[dict[str, tuple[str, ...]]] = {
    "rx_discards": ("out_of_buffer",),
    "out_of_sequence": ("out_of_sequence", "oos_drop_count"),
    "retransmits": (
        *("packet_seq_err", "local_ack_timeout_err", "implied_nak_seq_err"),  # mlx5, mlx4
        *("seq_err_naks_rcvd", "to_retransmits"),  # bnxt_re
        *("retrans_pkts", "retrans_timeout_events"),  # efa
    ),
    "cnp_handled": ("rp_cnp_handled", "rx_cnp_pkts", "cnpHandled"),  # mlx5, bnxt_re, irdma
}
"""Counter of NicFacts to the names in `hw_counters` that are added up. "Receiver not ready" is not among them: in an
all-to-all it is normal."""

Attributes = dict[int, bytes]


def read_nics(
    addressed: Collection[str] = (), statistics: PortStatistics | None = None, root: Path = Path("/sys/class")
) -> list[NicFacts]:
    """All ports, by name, at most NICS_MAX. `addressed`: names that the job's own addresses lie on. Raises OSError."""
    statistics = statistics or PortStatistics()
    infiniband = _entries(root / "infiniband")
    wires = {device.name: [path.name for path in _entries(device / "device" / "net")] for device in infiniband}
    behind = {name for names in wires.values() for name in names}
    nets = []
    for _, attributes in _dump(_GET_LINK, _NEW_LINK, 16):
        name = attributes.get(_NAME, b"").rstrip(b"\0").decode(errors="replace")
        if name not in behind and (name in addressed or _PARENT_DEVICE in attributes):
            nets.append(_of_link(name, attributes))
    nets.sort(key=lambda nic: nic.name)
    wired = [
        *((_of_infiniband(device), wires[device.name]) for device in infiniband),
        *((nic, [nic.name]) for nic in nets),
    ]
    return [_with_statistics(nic, names, statistics) for nic, names in wired[:NICS_MAX]]


def _with_statistics(nic: NicFacts, wires: list[str], statistics: PortStatistics) -> NicFacts:
    """The port with what the driver of its wire tells beside; of several wires (a bond) nothing, as of none."""
    told = statistics.read(wires[0]) if len(wires) == 1 else {}
    return msgspec.structs.replace(nic, **told) if told else nic


def _sum(values: list[int | None]) -> int | None:
    """Of those that are told; None where none is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def local_addresses() -> dict[str, str]:
    """Address to the port that has it; loopback too. Raises OSError."""
    names = dict(socket.if_nameindex())
    found: dict[str, str] = {}
    for message, attributes in _dump(_GET_ADDRESS, _NEW_ADDRESS, 8):
        family, _, _, _, index = struct.unpack_from("=BBBBI", message)
        packed = attributes.get(_LOCAL, attributes.get(_ADDRESS, b""))
        if index in names and len(packed) == (4 if family == socket.AF_INET else 16):
            found[socket.inet_ntop(family, packed)] = names[index]
    return found


def _dump(ask: int, wanted: int, head_bytes: int) -> Iterator[tuple[bytes, Attributes]]:
    """The messages of one rtnetlink dump: the fixed head of each, and its attributes."""
    request = struct.pack("=IHHII", 16 + head_bytes, ask, 0x301, 1, 0) + b"\0" * head_bytes
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE) as link:
        link.settimeout(_TIMEOUT_S)
        link.send(request)
        while data := link.recv(1 << 18):
            at = 0
            while at + 16 <= len(data):
                length, kind = struct.unpack_from("=IH", data, at)
                if kind == _DONE or length < 16:
                    return
                if kind == _ERROR:
                    raise OSError(-struct.unpack_from("=i", data, at + 16)[0], "rtnetlink")
                if kind == wanted and length >= 16 + head_bytes:
                    message = data[at + 16 : at + length]
                    yield message[:head_bytes], _attributes(message[head_bytes:])
                at += (length + 3) & ~3


def _attributes(data: bytes) -> Attributes:
    found: Attributes = {}
    at = 0
    while at + 4 <= len(data):
        length, kind = struct.unpack_from("=HH", data, at)
        if length < 4:
            break
        found[kind & 0x3FFF] = data[at + 4 : at + length]
        at += (length + 3) & ~3
    return found


def _of_link(name: str, told: Attributes) -> NicFacts:
    stats = told.get(_STATS64, b"")

    def counter(*places: int) -> int | None:
        if len(stats) < 8 * (max(places) + 1):
            return None
        return sum(int(struct.unpack_from("=Q", stats, 8 * place)[0]) for place in places)

    carrier, downs = told.get(_CARRIER, b""), told.get(_CARRIER_DOWNS, b"")
    return NicFacts(
        name=name,
        up=carrier[0] > 0 if carrier else None,
        speed_gbps=speed_gbps(name),
        symbol_errors=counter(_CRC, _FRAME),
        link_downed=int(struct.unpack("=I", downs)[0]) if len(downs) == 4 else None,
        rx_discards=counter(_FIFO, _MISSED),
    )


def _of_infiniband(path: Path) -> NicFacts:
    port = path / "ports" / "1"
    state, rate = _text(port / "state"), _RATE.match(_text(port / "rate") or "")
    more: Mapping[str, int | None] = {
        fact: _sum([_number(port / "hw_counters" / name) for name in names]) for fact, names in HW_COUNTERS.items()
    }
    return NicFacts(
        name=path.name,
        up=None if state is None else "ACTIVE" in state,
        speed_gbps=float(rate[1]) if rate else None,
        symbol_errors=_number(port / "counters" / "symbol_error"),
        link_downed=_number(port / "counters" / "link_downed"),
        **more,
    )


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())[: 4 * NICS_MAX]
    except OSError:
        return []


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text is not None and text.isdigit() else None


def _text(path: Path) -> str | None:
    """The first words of a small file; None where there is none, or where the port is down and the kernel refuses."""
    try:
        with path.open("rb") as file:
            return file.read(_VALUE_BYTES_MAX).decode(errors="replace").strip()
    except OSError:
        return None
