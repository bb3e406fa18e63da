"""Where the processes of a job can be asked: sockets that they themselves listen on.

A process's environment names an address, and a job may write anything there: the daemon is root and would knock at
whatever door it is told. So an address is only asked where the kernel says that a socket listens there that belongs to
a process of the job, which was identified by its start time and owner (`process`), in the daemon's own network
namespace. A path is opened as the job's user, must be a socket that this user owns, and is reached through the open
descriptor, so that nothing can be exchanged in between. Everything here blocks and belongs on a thread.
"""

from __future__ import annotations

import os
import re
import socket
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from node_daemon.collectors.owner import acting_as
from node_daemon.collectors.process import STATE_GONE, STATE_UNKNOWN, Processes

ENVIRONMENT_BYTES_MAX: Final = 1 << 20
DESCRIPTORS_MAX: Final = 8192
SOCKET_TABLE_BYTES_MAX: Final = 16 << 20
PATH_CHARS_MAX: Final = 4096
_LISTENS: Final = "0A"
_SOCKET_LINK: Final = re.compile(r"socket:\[(\d{1,20})\]")
_OPEN_PATH: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Process:
    """A process of a job as its frame and the kernel name it. `rank`: in the job; `uid`, `gid`: the job's owner."""

    rank: int
    pid: int
    start_ticks: int
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Door:
    """An address at which a process of the job listens."""

    host: str
    port: int
    pid: int


def still_there(process: Process, processes: Processes) -> bool:
    """Whether the pid is still that process of that owner."""
    state = processes.state(process.pid, process.start_ticks, process.uid)
    return state not in (STATE_GONE, STATE_UNKNOWN)


def environment(process: Process, names: Iterable[str], root: Path = Path("/proc")) -> dict[str, str]:
    """Those of the variables with which the process was started; what it has set since is not among them.

    Raises OSError where it cannot be read.
    """
    with acting_as(process.uid, process.gid), (root / str(process.pid) / "environ").open("rb") as file:
        entries = file.read(ENVIRONMENT_BYTES_MAX).split(b"\0")
    told = dict(entry.decode(errors="replace").split("=", 1) for entry in entries if b"=" in entry)
    return {name: told[name] for name in names if name in told}


def doors(process: Process, port: int, root: Path = Path("/proc")) -> list[Door]:
    """Where the process listens on a TCP port of that number, as far as the daemon can reach it.

    Raises OSError where its sockets cannot be read, or it lives in another network namespace.
    """
    own = root / str(process.pid)
    with acting_as(process.uid, process.gid):
        if _namespace(own) != _namespace(root / "self"):
            raise OSError("the process is in another network namespace")
        inodes = _sockets(own / "fd")
    found = []
    for table in ("tcp", "tcp6"):
        for host, at, inode in listeners(_read(own / "net" / table)):
            if at == port and inode in inodes:
                found.append(Door(host, at, process.pid))
    return found


def _namespace(process: Path) -> int:
    return (process / "ns" / "net").stat().st_ino


def _sockets(directory: Path) -> set[int]:
    inodes = set()
    for number, name in enumerate(os.listdir(directory)):  # noqa: PTH208 - names alone, there may be many
        if number >= DESCRIPTORS_MAX:
            break
        try:
            found = _SOCKET_LINK.fullmatch(str((directory / name).readlink()))
        except OSError:
            continue  # closed meanwhile
        if found:
            inodes.add(int(found[1]))
    return inodes


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(SOCKET_TABLE_BYTES_MAX).decode(errors="replace")
    except FileNotFoundError:
        return ""  # a kernel without IPv6


def listeners(table: str) -> list[tuple[str, int, int]]:
    """(address to ask, port, inode) of the listening sockets in /proc/net/tcp or tcp6 (proc(5)).

    A socket that listens everywhere is asked at the loopback address.
    """
    found = []
    for line in table.splitlines():
        words = line.split()
        if len(words) < 10 or words[3] != _LISTENS or not words[9].isdigit():
            continue
        address, _, port = words[1].partition(":")
        try:
            found.append((_host_of(address), int(port, 16), int(words[9])))
        except (ValueError, OSError):
            continue
    return found


def _host_of(digits: str) -> str:
    """Four-byte words in the order of the machine (little-endian here), as /proc/net/tcp has them."""
    raw = bytes.fromhex(digits)
    raw = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
    if not any(raw):
        return "127.0.0.1" if len(raw) == 4 else "::1"
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)


def open_socket_path(process: Process, path: str, root: Path = Path("/proc")) -> int:
    """A descriptor (O_PATH) of the Unix socket at `path` as the process sees it; connect to `/proc/self/fd/<fd>`.

    The caller closes it. Raises OSError where there is none, or none that the job's user owns.
    """
    if not path.startswith("/") or len(path) > PATH_CHARS_MAX or "\0" in path:
        raise OSError("the path of the socket is not absolute")
    with acting_as(process.uid, process.gid):
        fd = os.open(f"{root}/{process.pid}/root{path}", _OPEN_PATH)
    about = os.fstat(fd)
    if not stat.S_ISSOCK(about.st_mode) or about.st_uid != process.uid:
        os.close(fd)
        raise OSError("what stands at the path is no socket of the job's user")
    return fd
