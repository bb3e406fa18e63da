"""A port's own statistics by the ethtool ioctl, as far as they mean something to us: pause frames.

Each driver has names of its own (ETHTOOL_GSTRINGS, linux/ethtool.h), so which of them count is data: a pattern per
driver and fact, taken from the drivers' sources. All counters that match are added. A driver that is not in the table,
and a port that has none of the names, tells nothing, which is null and not zero: a virtual port knows no pause frames.

Pause frames are counted per priority (PFC) or for the whole link (802.3x), and a port does one of the two. Only the
frames that stop the other side count, where a driver tells them from those that let it go on (xoff, xon).
"""

from __future__ import annotations

import array
import fcntl
import re
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

EVERY_S: Final = 10.0
PORTS_MAX: Final = 1024
STATS_MAX: Final = 16_384
"""Names of one port: a driver that counts per queue has thousands."""
_SIOCETHTOOL: Final = 0x8946
_GSET, _GDRVINFO, _GSTRINGS, _GSTATS = 0x1, 0x3, 0x1B, 0x1D
_DRVINFO_BYTES: Final = 196
_N_STATS_AT: Final = 180
_STRING_BYTES: Final = 32
_SET_STATS: Final = 1  # ETH_SS_STATS
_SPEED_UNKNOWN: Final = (0, 0xFFFF, 0xFFFF_FFFF)

_INTEL: Final = {"rx_pause": r"rx_flow_control_xoff", "tx_pause": r"tx_flow_control_xoff"}
NAMES: Final[dict[str, dict[str, str]]] = {
    "mlx5_core": {"rx_pause": r"rx_(global|prio\d)_pause", "tx_pause": r"tx_(global|prio\d)_pause"},
    "mlx4_en": {"rx_pause": r"rx_pause_prio_\d", "tx_pause": r"tx_pause_prio_\d"},
    "bnxt_en": {"rx_pause": r"rx_(pause|pfc)_frames", "tx_pause": r"tx_(pause|pfc)_frames"},
    "ice": {
        "rx_pause": r"(link_xoff_rx|rx_priority_\d_xoff)\.nic",
        "tx_pause": r"(link_xoff_tx|tx_priority_\d_xoff)\.nic",
    },
    "i40e": {
        "rx_pause": r"port\.(link_xoff_rx|rx_priority_\d_xoff(_rx)?)",
        "tx_pause": r"port\.(link_xoff_tx|tx_priority_\d_xoff(_tx)?)",
    },
    "ixgbe": {
        "rx_pause": r"rx_flow_control_xoff|rx_pb_\d_pxoff",
        "tx_pause": r"tx_flow_control_xoff|tx_pb_\d_pxoff",
    },
    "igb": _INTEL,
    "e1000e": _INTEL,
    "hns3": {"rx_pause": r"mac_rx_(mac_pause_num|pfc_pkt_num)", "tx_pause": r"mac_tx_(mac_pause_num|pfc_pkt_num)"},
}
"""Driver to fact (a counter of NicFacts) to the names that are added up, as one pattern for the whole name."""


@dataclass(slots=True)
class _Chosen:
    """Of a port: which of its statistics count. `driver` and `count`: as long as these stay, so do the names."""

    driver: str
    count: int
    places: dict[str, list[int]]


class PortStatistics:
    """Reads ports by name. Names are asked for once, numbers every `every_s`: some drivers ask their firmware for them,
    and hold a lock meanwhile."""

    def __init__(self, *, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s, self._clock = every_s, clock
        self._chosen: dict[str, _Chosen] = {}
        self._newest: dict[str, tuple[float, dict[str, int]]] = {}

    def read(self, port: str) -> dict[str, int]:
        """Fact to counter, as far as the driver tells; empty where it tells nothing, or there is no such port."""
        now = self._clock()
        read_at, told = self._newest.get(port, (now - self._every_s, {}))
        if now - read_at < self._every_s:
            return told
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as any_socket:
                told = self._read(any_socket, port)
        except OSError:
            self._chosen.pop(port, None)
            told = {}
        if len(self._newest) >= PORTS_MAX:
            self._newest.clear()
        self._newest[port] = (now, told)
        return told

    def _read(self, any_socket: socket.socket, port: str) -> dict[str, int]:
        told = _ask(any_socket, port, struct.pack("=I", _GDRVINFO), _DRVINFO_BYTES)
        driver = told[4:36].split(b"\0")[0].decode(errors="replace")
        (count,) = struct.unpack_from("=I", told, _N_STATS_AT)
        if driver not in NAMES or not 0 < count <= STATS_MAX:
            return {}
        chosen = self._chosen.get(port)
        if chosen is None or (chosen.driver, chosen.count) != (driver, count):
            head = struct.pack("=III", _GSTRINGS, _SET_STATS, count)
            raw = _ask(any_socket, port, head, len(head) + STATS_MAX * _STRING_BYTES)
            names = names_of(raw[len(head) : len(head) + count * _STRING_BYTES])
            chosen = self._chosen[port] = _Chosen(driver, count, choose(driver, names))
        if not chosen.places:
            return {}
        raw = _ask(any_socket, port, struct.pack("=II", _GSTATS, count), 8 + 8 * STATS_MAX)
        if struct.unpack_from("=I", raw, 4)[0] != count:
            return {}  # the driver was set up anew in between, and its names are others
        values = struct.unpack_from(f"={count}Q", raw, 8)
        return {fact: sum(values[place] for place in places) for fact, places in chosen.places.items()}


def names_of(raw: bytes) -> list[str]:
    """The names of an answer to ETHTOOL_GSTRINGS, `_STRING_BYTES` each."""
    parts = (raw[at : at + _STRING_BYTES] for at in range(0, len(raw), _STRING_BYTES))
    return [part.split(b"\0")[0].decode(errors="replace").strip() for part in parts]


def choose(driver: str, names: list[str]) -> dict[str, list[int]]:
    """Fact to the places of the names that count; a fact that no name tells is left out."""
    found: dict[str, list[int]] = {}
    for fact, pattern in NAMES.get(driver, {}).items():
        whole = re.compile(pattern)
        places = [place for place, name in enumerate(names) if whole.fullmatch(name)]
        if places:
            found[fact] = places
    return found


def speed_gbps(port: str) -> float | None:
    """The speed by the driver's word (struct ethtool_cmd), None where it does not know."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as any_socket:
            told = _ask(any_socket, port, struct.pack("=I", _GSET), 44)
    except OSError:
        return None
    low, high = struct.unpack_from("=H", told, 12)[0], struct.unpack_from("=H", told, 28)[0]
    speed_mbps = high << 16 | low
    return None if speed_mbps in _SPEED_UNKNOWN else speed_mbps / 1000


def _ask(any_socket: socket.socket, port: str, head: bytes, size_bytes: int) -> bytes:
    """One ioctl: what stands in the buffer afterwards. Raises OSError.

    The kernel writes as many statistics as the driver has at that moment, whatever was asked for: hence room for all.
    """
    buffer = array.array("B", head + b"\0" * (size_bytes - len(head)))
    asked = struct.pack("@16sP16x", port.encode()[:15], buffer.buffer_info()[0])
    fcntl.ioctl(any_socket, _SIOCETHTOOL, asked)
    return buffer.tobytes()
