"""What nodes gathered on suspicion, as lines for people: on the page and in `tocsin show`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final

import msgspec

from diagnosis.contracts.gathered import FlightFacts, PingFacts, ProcessFacts, RasComm, RasFacts, RasValue
from diagnosis.engine import words

LINES_MAX: Final = 64
LINE_CHARS_MAX: Final = 400


class _Stored(msgspec.Struct):
    ras: RasFacts | None = None
    flights: list[FlightFacts] = []
    processes: list[ProcessFacts] = []
    pings: list[PingFacts] = []


_STORED: Final = msgspec.json.Decoder(_Stored)


def lines_of(payload: bytes) -> list[str]:
    """At most LINES_MAX; none where it is something else."""
    try:
        stored = _STORED.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return []
    return [line[:LINE_CHARS_MAX] for line in islice(_lines(stored), LINES_MAX)]


def _lines(stored: _Stored) -> Iterator[str]:
    if stored.ras is not None:
        yield from _of_ras(stored.ras)
    for process in stored.processes:
        yield _of_process(process)
    for flight in stored.flights:
        yield from _of_flight(flight)
    for ping in stored.pings:
        yield _of_ping(ping)


def _of_ras(ras: RasFacts) -> Iterator[str]:
    version = f"NCCL {ras.nccl_version}, " if ras.nccl_version else ""
    asked = f"asked twice, {ras.apart_s or 0:.0f} s apart" if ras.answers > 1 else "asked once"
    yield f"NCCL's RAS is {ras.state} ({version}{asked})"
    for process in ras.processes:
        who = f"rank {process.world_rank}" if process.world_rank is not None else f"on {process.host}"
        yield f"process {process.pid} ({who}) {'is considered dead' if process.dead else 'does not answer'}"
    for comm in ras.comms:
        yield _of_comm(comm)
        for difference in comm.differs:
            yield f"  {difference.what}: " + "; ".join(_of_value(value) for value in difference.values)
    yield from ras.notes


def _of_comm(comm: RasComm) -> str:
    heard = f"{comm.heard} of {comm.size} ranks answer" if comm.heard is not None else f"{comm.size or '?'} ranks"
    missing = [rank.world_rank for rank in comm.missing if rank.world_rank is not None]
    named = f", missing: {words.ranks(missing)}" if missing else ""
    launched = f", up to {comm.launched} launched" if comm.launched is not None else ""
    return f"communicator {comm.hash}: {heard}{named}{launched}{', and went on' if comm.moved else ''}"


def _of_value(value: RasValue) -> str:
    known = [rank.world_rank for rank in value.listed if rank.world_rank is not None]
    who = words.ranks(known) if known and len(known) == value.ranks else f"{value.ranks} ranks"
    return f"{value.value} by {who}"


def _of_process(process: ProcessFacts) -> str:
    told = [f"rank {process.world_rank}, pid {process.pid}, state {process.state or 'not known'}"]
    if process.wchan:
        told.append(f"waits in {process.wchan}")
    if process.pid_reused:
        told.append("its number belongs to another process now")
    if process.signal is not None:
        told.append(f"ended by signal {process.signal}")
    if process.exit_code is not None:
        told.append(f"ended with code {process.exit_code}")
    if process.oom_kills:
        told.append(f"the kernel has killed {process.oom_kills} processes of {process.cgroup} for memory")
    return "; ".join([*told, *process.notes])


def _of_ping(ping: PingFacts) -> str:
    told = f"ping {ping.local} to {ping.remote}: {ping.sent - ping.heard} of {ping.sent} lost"
    if ping.rtt_us is not None:
        told += f", {ping.rtt_us / 1000:.2f} ms"
    return f"{told} ({ping.note})" if ping.note else told


def _of_flight(flight: FlightFacts) -> Iterator[str]:
    if not flight.groups:
        yield f"rank {flight.world_rank}: no flight recorder ({'; '.join(flight.notes) or 'not known why'})"
    for group in flight.groups:
        where = "" if group.stands_at is None else f", stands at {group.stands_at} ({group.operation or 'not known'})"
        ended = "not known" if group.ended is None else str(group.ended)
        name = f"{group.group} {group.kind}".strip()
        yield f"rank {flight.world_rank}, group {name}: newest ended {ended}{where} ({flight.source})"
