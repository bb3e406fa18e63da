"""The kernel's proc connector: how processes ended, with the moment, on kernels whose pidfds do not tell.

A netlink socket that hears every process of the node start and end (Documentation/driver-api/connector.rst,
linux/cn_proc.h). A filter in the kernel passes only the ends of the processes that are watched, so this daemon is not
woken for others. It needs CAP_NET_ADMIN, the first network namespace and CONFIG_PROC_EVENTS.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

WATCHED_MAX: Final = 1024
_NETLINK_CONNECTOR: Final = 11
_SO_ATTACH_FILTER: Final = 26
_CN_IDX_PROC, _CN_VAL_PROC, _MCAST_LISTEN, _MCAST_IGNORE = 1, 1, 1, 2
_NLMSG_DONE: Final = 3
_EXIT: Final = 0x8000_0000
_ANSWER: Final = 0
"""PROC_EVENT_NONE: what the kernel says to a request, an error number at first."""
_HEADER: Final = struct.Struct("=IHHII")
_MESSAGE: Final = struct.Struct("=IIIIHH")
_EVENT: Final = struct.Struct("=IIQIIII")
"""what, cpu, timestamp_ns, and of an exit: process_pid, process_tgid, exit_code, exit_signal."""
_EVENT_AT: Final = _HEADER.size + _MESSAGE.size
_LOAD_WORD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_READS_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class Ended:
    """`status` as wait(2) has it; `at_ns`: CLOCK_MONOTONIC."""

    pid: int
    status: int
    at_ns: int


class ProcEvents:
    """See the module. Raises OSError where the kernel or this process's rights do not allow it."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK, _NETLINK_CONNECTOR)
        try:
            self.watch(())
            self._socket.bind((0, _CN_IDX_PROC))
            self._ask(_MCAST_LISTEN)
        except OSError:
            self._socket.close()
            raise

    def fileno(self) -> int:
        """To be waited for."""
        return self._socket.fileno()

    def watch(self, pids: Collection[int]) -> None:
        """Hear of these processes from now on, and of no others; at most WATCHED_MAX."""
        program = b"".join(struct.pack("=HBBI", *line) for line in _filter(sorted(pids)[:WATCHED_MAX]))
        held = ctypes.create_string_buffer(program, len(program))
        lines = struct.pack("@HP", len(program) // 8, ctypes.addressof(held))
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, lines)

    def ended(self) -> Iterator[Ended]:
        """Those that have ended since the last call. What the kernel had no room for is lost."""
        for _ in range(_READS_MAX):
            try:
                data = self._socket.recv(4096)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                continue
            if len(data) < _EVENT_AT + _EVENT.size:
                continue
            what, _, at_ns, pid, group, status, _ = _EVENT.unpack_from(data, _EVENT_AT)
            if what == _EXIT and pid == group:
                yield Ended(pid, status, at_ns)

    def close(self) -> None:
        """Listen no more. Before 6.6 the kernel goes on making events for a listener that only hangs up."""
        with contextlib.suppress(OSError):
            self._ask(_MCAST_IGNORE)
        self._socket.close()

    def _ask(self, operation: int) -> None:
        body = struct.pack("=I", operation)
        message = _MESSAGE.pack(_CN_IDX_PROC, _CN_VAL_PROC, 0, 0, len(body), 0)
        length = _HEADER.size + len(message) + len(body)
        self._socket.send(_HEADER.pack(length, _NLMSG_DONE, 0, 0, os.getpid()) + message + body)


def _filter(pids: Collection[int]) -> list[tuple[int, int, int, int]]:
    """Classic BPF: pass whole what tells of the end of one of `pids`, drop the rest. It loads big-endian words."""

    def network(value: int) -> int:
        return int(struct.unpack(">I", struct.pack("=I", value))[0])

    what_at, group_at = _EVENT_AT, _EVENT_AT + 20
    lines = [(_LOAD_WORD, 0, 0, what_at), (_IF_EQUAL, 1, 0, network(_EXIT)), (_RETURN, 0, 0, 0)]
    lines.append((_LOAD_WORD, 0, 0, group_at))
    for pid in pids:
        lines += [(_IF_EQUAL, 0, 1, network(pid)), (_RETURN, 0, 0, 0xFFFF_FFFF)]
    return [*lines, (_RETURN, 0, 0, 0)]
