"""Where a rank's flight recorder says that it stands: asked of torch's worker server, else read from a dump file.

A process that runs torch's worker server (`torch.distributed.elastic.control_plane.worker_main`) listens on the Unix
socket that TORCH_WORKER_SERVER_SOCKET names and answers HTTP from a thread of its own, also while its main thread is
blocked. The JSON is asked for first: it needs no stacks and came within milliseconds even while another thread held
Python's lock, whereas the pickle takes seconds. A pickle goes through our own loader, which can make nothing but plain
data. Where there is no server, the file is read that torch's watchdog writes when it gives up. All of that is the job's
word and hostile: socket and file must be the job user's own, sizes and times are bounded, and what is kept of an answer
is one line per process group.
"""

from __future__ import annotations

import asyncio
import os
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import quote

import aiohttp
import msgspec

from diagnosis.contracts.errors import AgentFault
from diagnosis.contracts.gathered import GROUPS_MAX, NOTES_MAX, TEXT_CHARS_MAX, FlightFacts, FlightGroup
from diagnosis.evidence.flight_dump import Dump, read_dump
from diagnosis.evidence.notes import Notes
from diagnosis.evidence.pickles import load_plain
from node_daemon.collectors.doors import Process, environment, open_socket_path, still_there
from node_daemon.collectors.owner import acting_as
from node_daemon.collectors.process import Processes
from node_daemon.threads import OwnThread

LIST_DEADLINE_S: Final = 1.0
JSON_DEADLINE_S: Final = 3.0
PICKLE_DEADLINE_S: Final = 8.0
FILES_DEADLINE_S: Final = 3.0
JSON_BYTES_MAX: Final = 8 << 20
PICKLE_BYTES_MAX: Final = 4 << 20
NAMES_BYTES_MAX: Final = 64 << 10
AT_ONCE: Final = 4
SOCKET_VARIABLE: Final = "TORCH_WORKER_SERVER_SOCKET"
FILE_VARIABLES: Final = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
JSON_HANDLERS: Final = ("dump_nccl_trace_json", "fr_trace_json")
STACKS_HANDLER: Final = "dump_traceback"
PICKLE_HANDLERS: Final = ("dump_nccl_trace_pickle?includestacktraces=false",)
_OPEN_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_NAMES: Final = msgspec.json.Decoder(list[str])


class FlightCollector:
    """Asks many ranks, a few at a time. `files` on its own thread: a user's file system may hang."""

    def __init__(self, processes: Processes | None = None) -> None:
        self._processes = processes or Processes()
        self._files = OwnThread("flight")

    def close(self) -> None:
        """Let go of the thread."""
        self._files.close()

    async def collect(self, members: Sequence[Process]) -> list[FlightFacts]:
        """One word per rank, in order. Never raises for what a job does."""
        turns = asyncio.Semaphore(AT_ONCE)

        async def one(member: Process) -> FlightFacts:
            async with turns:
                return await self._of(member)

        return list(await asyncio.gather(*(one(member) for member in members)))

    async def _of(self, member: Process) -> FlightFacts:
        notes: list[str] = []
        fd: int | None = None
        try:
            told, fd = await self._files.run(lambda: self._open(member, notes), FILES_DEADLINE_S)
            if fd is not None and (facts := await _ask(member, fd, notes)) is not None:
                return facts
            return await self._files.run(lambda: _of_file(member, told, notes), FILES_DEADLINE_S)
        except TimeoutError:
            notes.append("its files did not answer in time")
        except OSError as error:
            notes.append(f"not looked at: {error.strerror or error}")
        finally:
            if fd is not None:
                os.close(fd)
        return FlightFacts(world_rank=member.rank, notes=_short(notes))

    async def traceback(self, member: Process, deadline_s: float, bytes_max: int) -> tuple[str | None, str | None]:
        """(text, note): Python stacks of all threads as the worker server tells them; exactly one of the two is None.

        For want of something better: it waits for Python's lock, which a process that hangs may hold for ever.
        """
        notes: list[str] = []
        try:
            async with asyncio.timeout(deadline_s):
                _, fd = await self._files.run(lambda: self._open(member, notes), FILES_DEADLINE_S)
                if fd is None:
                    return None, _short(notes)[0]
                try:
                    async with _session(fd) as session:
                        content = await _fetch(session, "POST", STACKS_HANDLER, bytes_max, deadline_s, notes)
                finally:
                    os.close(fd)
        except TimeoutError:
            return None, f"the worker server gave no stacks within {deadline_s:.1f} s"
        except OSError as error:
            return None, f"the worker server was not asked: {error.strerror or error}"
        return (content.decode(errors="replace"), None) if content else (None, (_short(notes) or ["no stacks"])[0])

    def _open(self, member: Process, notes: list[str]) -> tuple[dict[str, str], int | None]:
        """What it was started with, and its worker server's socket."""
        if not still_there(member, self._processes):
            raise OSError("the process has ended, or is another's")
        told = environment(member, (SOCKET_VARIABLE, *FILE_VARIABLES))
        if SOCKET_VARIABLE not in told:
            notes.append(f"no worker server: {SOCKET_VARIABLE} is not set")
            return told, None
        try:
            return told, open_socket_path(member, told[SOCKET_VARIABLE])
        except OSError as error:
            notes.append(f"no worker server: {error.strerror or error}")
            return told, None


def _short(notes: list[str]) -> list[str]:
    return [note[:TEXT_CHARS_MAX] for note in notes[:NOTES_MAX]]


async def _ask(member: Process, fd: int, notes: list[str]) -> FlightFacts | None:
    """From the worker server; None (noted) where it tells nothing that can be used."""
    async with _session(fd) as session:
        names = await _fetch(session, "GET", "", NAMES_BYTES_MAX, LIST_DEADLINE_S, notes)
        if names is None:
            return None
        try:
            known = set(_NAMES.decode(names))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            notes.append("the worker server does not list what it can be asked")
            return None
        for source, handlers, bytes_max, deadline_s, load in (
            ("json", JSON_HANDLERS, JSON_BYTES_MAX, JSON_DEADLINE_S, _load_json),
            ("pickle", PICKLE_HANDLERS, PICKLE_BYTES_MAX, PICKLE_DEADLINE_S, load_plain),
        ):
            for handler in handlers:
                if handler.partition("?")[0] not in known:
                    continue
                content = await _fetch(session, "POST", handler, bytes_max, deadline_s, notes)
                if content is None:
                    continue
                facts = await asyncio.to_thread(_read, member.rank, source, content, load, notes)
                if facts is not None:
                    return facts
    return None


def _session(fd: int) -> aiohttp.ClientSession:
    connector = aiohttp.UnixConnector(path=f"/proc/self/fd/{fd}", limit=1)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False)


async def _fetch(
    session: aiohttp.ClientSession, method: str, handler: str, bytes_max: int, deadline_s: float, notes: list[str]
) -> bytes | None:
    """The body of a 200; None (noted) otherwise."""
    url = "http://worker/handler/" + quote(handler, safe="?=&")
    try:
        async with asyncio.timeout(deadline_s), session.request(method, url, allow_redirects=False) as response:
            if response.status != 200:
                notes.append(f"{handler or 'handlers'}: HTTP status {response.status}")
                return None
            content = bytearray()
            async for part in response.content.iter_chunked(64 << 10):
                content += part
                if len(content) > bytes_max:
                    notes.append(f"{handler}: longer than {bytes_max} bytes")
                    return None
            return bytes(content)
    except TimeoutError:
        notes.append(f"{handler or 'handlers'}: no answer within {deadline_s:g} s")
    except (aiohttp.ClientError, OSError, ValueError) as error:
        notes.append(f"{handler or 'handlers'}: {type(error).__name__}: {error}")
    return None


def _load_json(content: bytes) -> object:
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AgentFault(f"it is no JSON: {error}") from None


def _read(
    rank: int, source: str, content: bytes, load: Callable[[bytes], object], notes: list[str]
) -> FlightFacts | None:
    found = Notes()
    try:
        dump = read_dump(f"rank_{rank}", load(content), source == "json", found)
    except AgentFault as fault:
        notes.append(f"{source}: {fault}")
        return None
    notes += [line.partition(": ")[2] for line in found.lines()]
    if dump is None:
        return None
    groups = groups_of(dump)
    if not groups:
        notes.append("the recorder is empty")
    return FlightFacts(world_rank=rank, source=source, groups=groups, notes=_short(notes))


def groups_of(dump: Dump) -> list[FlightGroup]:
    """A line per process group, those first in which the rank stands."""
    ended: dict[str, int] = {}
    stands: dict[str, FlightGroup] = {}
    for entry in dump.entries:
        if entry.ended:
            ended[entry.group] = max(ended.get(entry.group, 0), entry.number)
        elif entry.group not in stands:
            operation = entry.signature or ("send or receive" if entry.pair is not None else None)
            stands[entry.group] = FlightGroup(group=entry.group, stands_at=entry.number, operation=operation)
    groups = []
    for name in dict.fromkeys([*stands, *ended, *dump.own_number, *dump.members]):
        newest = max(dump.status.get(dump.own_number.get(name, -1), -1), ended.get(name, -1))
        members = dump.members.get(name)
        groups.append(
            msgspec.structs.replace(
                stands.get(name, FlightGroup(group=name)),
                group=name[:TEXT_CHARS_MAX],
                kind=dump.kind.get(name, ""),
                size=len(members) if members else None,
                ended=newest if newest >= 0 else None,
            )
        )
    return groups[:GROUPS_MAX]


def _of_file(member: Process, told: dict[str, str], notes: list[str]) -> FlightFacts:
    """From the file that torch's watchdog wrote during this process's life, if there is one. Blocking."""
    prefix = next((told[name] for name in FILE_VARIABLES if name in told), None)
    if prefix is None or not prefix.startswith("/") or "\0" in prefix:
        return FlightFacts(world_rank=member.rank, notes=_short([*notes, "no dump file is named"]))
    content = _dump_content(member, f"/proc/{member.pid}/root{prefix}{member.rank}", notes)
    facts = _read(member.rank, "file", content, load_plain, notes) if content is not None else None
    return facts or FlightFacts(world_rank=member.rank, notes=_short(notes))


def _dump_content(member: Process, path: str, notes: list[str]) -> bytes | None:
    try:
        with acting_as(member.uid, member.gid):
            fd = os.open(path, _OPEN_FILE)
    except OSError as error:
        notes.append(f"no dump file: {error.strerror}")
        return None
    with os.fdopen(fd, "rb") as file:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != member.uid:
            notes.append("the dump file is no file of the job's user")
        elif about.st_size > PICKLE_BYTES_MAX:
            notes.append(f"the dump file is longer than {PICKLE_BYTES_MAX} bytes")
        elif about.st_mtime < _began_at(member.start_ticks):
            notes.append("the dump file is older than the process")
        else:
            return file.read(PICKLE_BYTES_MAX)
    return None


def _began_at(start_ticks: int) -> float:
    """Wall clock of a moment that is told in ticks since boot; a second early, since both clocks are coarse."""
    up_s = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - up_s + start_ticks / os.sysconf("SC_CLK_TCK") - 1.0
