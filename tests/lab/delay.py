"""A longer wire: everything that passes takes so many milliseconds more, each way. What netem does where there is one.

    python3 delay.py PORT TAP MS

A relay between a node's port of the switch, which the caller takes off the bridge, and a TAP device, which the caller
puts there in its place; "ready" is printed when both are open. A frame waits in one of two queues, one for each way,
and leaves when it is due; the order stays. A full queue drops what comes, as a switch would.

Frames pass as the kernel has them, segments of up to 64 KiB with unfinished checksums: both ends speak the header of
virtio_net, which says so. A job's traffic is then some hundred frames a second, and Python is fast enough.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable

FRAME_MAX = 10 + 18 + 65_536
"""Bytes: the header of virtio_net, that of Ethernet with a tag, and the greatest segment."""
FRAMES_MAX = 4096
BATCH = 64

_TUNSETIFF = 0x4004_54CA
_TUNSETOFFLOAD = 0x4004_54D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4, _TUN_F_TSO6, _TUN_F_TSO_ECN = 0x01, 0x02, 0x04, 0x08
_ETH_P_ALL = 0x0003
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23


class Way:
    """One direction: what `read` gives goes to `write` after `delay_s`."""

    def __init__(self, read: Callable[[], bytes], write: Callable[[bytes], int], delay_s: float) -> None:
        self._read = read
        self._write = write
        self._delay_s = delay_s
        self._waiting: deque[tuple[float, bytes]] = deque()

    def take(self) -> None:
        """Take in what has come, at most a batch."""
        due = time.monotonic() + self._delay_s
        for _ in range(BATCH):
            try:
                frame = self._read()
            except BlockingIOError:
                return
            except OSError:
                return  # the device is down for a moment
            if len(self._waiting) < FRAMES_MAX:
                self._waiting.append((due, frame))

    def give(self) -> float | None:
        """Send on what is due; returns the seconds until the next frame is, None when none waits."""
        while self._waiting:
            left_s = self._waiting[0][0] - time.monotonic()
            if left_s > 0:
                return left_s
            _, frame = self._waiting.popleft()
            try:
                self._write(frame)
            except OSError:
                continue  # no room, or the device is down: a frame is lost, as frames are
        return None


def open_tap(name: str) -> int:
    """A TAP device of that name that goes with its file; frames of 64 KiB may come out of it."""
    handle = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(handle, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(handle, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4 | _TUN_F_TSO6 | _TUN_F_TSO_ECN)
    return handle


def open_port(name: str) -> socket.socket:
    """All that comes in at a network device, and what is sent here goes out of it."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK, 0)
    port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    port.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    port.bind((name, _ETH_P_ALL))
    return port


def relay(port: socket.socket, tap: int, delay_s: float) -> None:
    """Carry frames both ways for ever."""
    inward = Way(lambda: port.recv(FRAME_MAX), lambda frame: os.write(tap, frame), delay_s)
    outward = Way(lambda: os.read(tap, FRAME_MAX), port.send, delay_s)
    readers = {port.fileno(): inward, tap: outward}
    while True:
        pauses = [left_s for one in readers.values() if (left_s := one.give()) is not None]
        ready, _, _ = select.select(list(readers), [], [], min(pauses, default=None))
        for one in ready:
            readers[one].take()


def main(port: str, tap: str, delay_ms: str) -> None:
    """See the module."""
    ends = open_port(port), open_tap(tap)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    relay(*ends, float(delay_ms) / 1000)


if __name__ == "__main__":
    main(*sys.argv[1:])
