"""Asks NCCL's RAS what it knows of a job: over TCP on the node, twice, some seconds apart.

Each process with NCCL 2.24 or newer runs a RAS thread, and the first on a node (of whichever job) listens on
localhost:28028 or NCCL_RAS_ADDR. One connection is one question: a few lines of commands, then RAS collects from all
processes of the job and closes. JSON is asked for; a release that has none (before 2.28.7) says so and answers in text
by itself. A process that is stopped still has its port open but never answers, hence the deadlines; and as the answer
comes out of the job, its length is bounded. Which ranks an answer is about is checked by the caller.

The command `timeout` bounds RAS's own wait for processes that do not answer. Nothing else is ever sent: `control` and
`diagnostics` change or disturb a job.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from diagnosis.contracts.gathered import NOBODY_LISTENS, RasFacts, RasRank
from diagnosis.evidence.ras.answer import ANSWER_BYTES_MAX, Answer, map_ranks, read_answer, standing
from node_daemon.collectors.doors import Door, Process, doors, environment, still_there
from node_daemon.collectors.process import Processes

DEFAULT_PORT: Final = 28028
PAUSE_S: Final = 5.0
COLLECT_S: Final = 5
"""RAS's own timeout, in whole seconds as its command takes it."""
DEADLINE_S: Final = 9.0
"""Of one question: RAS may wait out its timeout for who is silent, and has then still to write."""
DOORS_MAX: Final = 3
_ADDRESS: Final = "NCCL_RAS_ADDR"
_ENABLED: Final = "NCCL_RAS_ENABLE"
_CHUNK_BYTES: Final = 64 << 10


def find_doors(members: Sequence[Process], processes: Processes) -> tuple[list[Door], list[str]]:
    """Where RAS listens among these processes of one job, and notes on why not where it does not. Blocking."""
    found: list[Door] = []
    notes: list[str] = []
    for member in members:
        if not still_there(member, processes):
            continue
        try:
            told = environment(member, (_ADDRESS, _ENABLED))
            if told.get(_ENABLED, "1") == "0":
                notes.append(f"rank {member.rank}: {_ENABLED}=0")
                continue
            found += doors(member, _port_of(told.get(_ADDRESS, "")))
        except OSError as error:
            notes.append(f"rank {member.rank}: {error.strerror or error}")
        if len(found) >= DOORS_MAX:
            break
    return found, list(dict.fromkeys(notes))


def _port_of(address: str) -> int:
    port = address.rpartition(":")[2]
    return int(port) if port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 65536 else DEFAULT_PORT


async def ask_once(door: Door, *, deadline_s: float = DEADLINE_S, as_json: bool = True) -> Answer:
    """One answer. State "silent" where there is none in time, "absent" where nobody takes the connection."""
    form = ["set format json"] if as_json else []
    commands = ["client protocol 2", f"timeout {COLLECT_S}", *form, "verbose status" if as_json else "status"]
    try:
        async with asyncio.timeout(deadline_s):
            content, whole = await _exchange(door, commands)
    except TimeoutError:
        return _failed("silent", f"no answer within {deadline_s:g} s")
    except OSError as error:
        return _failed("absent", f"{door.host} port {door.port}: {error.strerror or error}")
    if not whole:
        return _failed("garbage", f"the answer is longer than {ANSWER_BYTES_MAX} bytes")
    return await asyncio.to_thread(read_answer, content)


def _failed(state: str, note: str) -> Answer:
    return Answer(RasFacts(state=state, notes=[note]), {}, ())


async def _exchange(door: Door, commands: list[str]) -> tuple[bytes, bool]:
    """All that is sent until the other side closes, and whether that was all within the bound."""
    reader, writer = await asyncio.open_connection(door.host, door.port, limit=_CHUNK_BYTES)
    try:
        writer.write("".join(f"{command}\n" for command in commands).encode())
        await writer.drain()
        content = bytearray()
        while part := await reader.read(_CHUNK_BYTES):
            content += part
            if len(content) > ANSWER_BYTES_MAX:
                return bytes(content), False
        return bytes(content), True
    finally:
        writer.transport.abort()  # a peer that never reads must not keep the connection


async def ask_twice(found: Sequence[Door], *, pause_s: float = PAUSE_S, deadline_s: float = DEADLINE_S) -> RasFacts:
    """What stands in two answers. The first door that answers is asked again; the others are then left alone."""
    facts = RasFacts(state="absent", notes=[NOBODY_LISTENS])
    for door in found[:DOORS_MAX]:
        as_json, began = True, time.monotonic()
        first = await ask_once(door, deadline_s=deadline_s)
        if first.facts.state == "garbage":  # too long as JSON, or cut: the text form lists only who differs
            as_json, began = False, time.monotonic()
            first = await ask_once(door, deadline_s=deadline_s, as_json=False)
        if first.facts.state != "ok":
            facts = first.facts
            continue
        await asyncio.sleep(pause_s)
        apart_s = time.monotonic() - began
        return standing(first, await ask_once(door, deadline_s=deadline_s, as_json=as_json), apart_s)
    return facts


def placed(facts: RasFacts, members: Sequence[Process], comm_ranks: Mapping[str, Mapping[int, int]]) -> RasFacts:
    """The facts with `world_rank` where this node knows it. Blocking, but for moments.

    `comm_ranks`: by a communicator's hash, rank there to rank in the job, from this node's frames. A process of this
    node is known by its number; where both tell and differ, it is left unknown.
    """
    of_pid = {member.pid: member.rank for member in members}
    here: dict[str, bool] = {}

    def by_process(host: str | None, pid: int | None) -> int | None:
        if host is None or pid not in of_pid:
            return None
        if host not in here:
            here[host] = _is_here(host)
        return of_pid[pid] if here[host] else None

    def place(comm: str, rank: RasRank) -> RasRank:
        by_frame, by_pid = comm_ranks.get(comm, {}).get(rank.rank), by_process(rank.host, rank.pid)
        if by_frame is not None and by_pid is not None and by_frame != by_pid:
            return rank
        return msgspec.structs.replace(rank, world_rank=by_pid if by_frame is None else by_frame)

    return map_ranks(facts, place, lambda process: by_process(process.host, process.pid))


def _is_here(host: str) -> bool:
    """Whether an address is one of this machine's: only then can a socket be bound to it."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except (OSError, UnicodeError):
        return False
    return True
