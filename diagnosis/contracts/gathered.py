"""What a node daemon gathers on suspicion, by itself or asked: NCCL's RAS, flight recorders, processes, pings.

It travels at the end of a report, each part as msgpack `[version, part]` of its own, so that a controller which does
not understand a part passes over it and still takes the report. Additions keep the version, a change of meaning raises
it. None is "not told", which is never zero. Ranks of a communicator are its own; `world_rank` is the job's.

The job answers for its RAS threads and its flight recorder: they are hostile input and the job's own word. What /proc
and the cgroup say of a process is the kernel's; pings are answered by kernels and networks alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

VERSION: Final = 1
PARTS_MAX: Final = 16
PART_BYTES_MAX: Final = 128 << 10
PARTS_BYTES_MAX: Final = 512 << 10
"""Of one report: far within what a report may hold, whatever its tables take."""
COMMS_MAX: Final = 64
LISTED_MAX: Final = 64
VALUES_MAX: Final = 16
PROCESSES_MAX: Final = 256
GROUPS_MAX: Final = 32
PINGS_MAX: Final = 16
PINGS_SENT_MAX: Final = 100
NOTES_MAX: Final = 32
TEXT_CHARS_MAX: Final = 256
NOBODY_LISTENS: Final = "no process of the job on this node listens for RAS"
"""Alone, the note of a job that does not use NCCL, or of one with a release before RAS."""


class RasRank(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rank as RAS names it: its number in the communicator, and its process. `gpu`: NVML's index where RAS tells
    it. `world_rank`: who that is in the job, as far as the frames or the process say so."""

    rank: int
    host: str | None = None
    pid: int | None = None
    gpu: int | None = None
    unresponsive: bool | None = None
    dead: bool | None = None
    world_rank: int | None = None


class RasProcess(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A process that gave RAS no data. `dead`: RAS has given it up."""

    pid: int
    host: str | None = None
    dead: bool = False
    world_rank: int | None = None


class RasValue(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`ranks` members of a communicator say `value`: a count of launched operations, or a word. `listed`: who they
    are; empty where RAS or this side's bound does not list them."""

    value: int | str
    ranks: int
    listed: list[RasRank] = []


class RasDifference(msgspec.Struct, frozen=True, kw_only=True):
    """Members differ in `what`: an operation by NCCL's name ("AllReduce"), "collective" or "status". Most first."""

    what: str
    values: list[RasValue]


class RasComm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One communicator. `hash`: hexadecimal, as frames name it. `heard`: members that gave data. `missing`: those that
    did not and are named. `alike`: all that were heard have launched the same. `launched`: the greatest number of
    launches, all operations of a member together. `moved`: whether launches went on between two answers."""

    hash: str
    size: int | None = None
    heard: int | None = None
    missing: list[RasRank] = []
    missing_count: int | None = None
    differs: list[RasDifference] = []
    alike: bool | None = None
    launched: int | None = None
    moved: bool | None = None


class RasFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """RAS on a whole job. `answers` 2: asked twice, `apart_s` seconds apart, and only what both say is left.

    `comms`: all of them in JSON, those that something is wrong with in text; `comms_told`: how many there are.
    `state` "ok" (there is an answer), "absent" (nobody listens), "silent" (no answer in time) or "garbage".
    """

    state: str
    form: str = ""
    nccl_version: str | None = None
    answers: int = 1
    apart_s: float | None = None
    comms_told: int | None = None
    comms: list[RasComm] = []
    processes: list[RasProcess] = []
    timeouts: int | None = None
    took_s: float | None = None
    notes: list[str] = []


class FlightGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a rank stands in one process group. `ended`: number of its newest collective that has ended; `stands_at`,
    `operation`: the oldest that has not."""

    group: str
    kind: str = ""
    size: int | None = None
    ended: int | None = None
    stands_at: int | None = None
    operation: str | None = None


class FlightFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rank's flight recorder. `source`: "json" or "pickle" of the worker server, "file" for a dump; "" none."""

    world_rank: int
    source: str = ""
    groups: list[FlightGroup] = []
    notes: list[str] = []


class ProcessFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rank's process. `state`: a letter of the kernel, "X" gone. `pid_reused`: another process has its number now.

    `exit_code`, `signal`: how it ended, where the kernel still tells (a zombie). `oom_kills`: processes that the memory
    limit of its cgroup has ended since the daemon first saw it; `cgroup`: of which that is told.
    """

    world_rank: int
    pid: int
    state: str | None = None
    wchan: str | None = None
    pid_reused: bool = False
    exit_code: int | None = None
    signal: int | None = None
    oom_kills: int | None = None
    cgroup: str | None = None
    notes: list[str] = []


class PingFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """ICMP echoes from an address of this node to the far end of a connection. `heard` of `sent` were answered in time;
    `rtt_us`: their median round trip. `note`: why none was sent, or what the kernel said of those that were lost."""

    local: str
    remote: str
    sent: int = 0
    heard: int = 0
    rtt_us: float | None = None
    note: str = ""


class Gathered(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One part of what a node gathered on one suspicion. `suspicion` counts within the daemon's life; `age_ms`: how old
    the part is when its report is made; `quiet_ms`: how long nothing had moved when the suspicion rose, None where the
    controller asked; `incident`: the number that it asked with."""

    job_id: int
    restart: int
    uid: int
    suspicion: int
    age_ms: int = 0
    quiet_ms: int | None = None
    incident: str | None = None
    ras: RasFacts | None = None
    flights: list[FlightFacts] = []
    processes: list[ProcessFacts] = []
    pings: list[PingFacts] = []


_DECODER: Final = msgspec.msgpack.Decoder(Gathered)
_ENVELOPE: Final = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])


def pack(part: Gathered) -> bytes:
    """A part as it travels."""
    return msgspec.msgpack.encode((VERSION, part))


def unpack(raw: bytes) -> Gathered | str:
    """The part; or the reason why it is passed over: "version", "garbage" or "limits"."""
    if len(raw) > PART_BYTES_MAX:
        return "limits"
    try:
        version, body = _ENVELOPE.decode(raw)
        if version != VERSION:
            return "version" if version > VERSION else "garbage"
        part = _DECODER.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return "garbage"
    return part if _within_limits(part) else "limits"


def unpack_all(raws: Iterable[bytes]) -> Iterator[Gathered | str]:
    """At most PARTS_MAX of them."""
    for number, raw in enumerate(raws):
        if number >= PARTS_MAX:
            yield "limits"
            return
        yield unpack(raw)


def _within_limits(part: Gathered) -> bool:
    """Bytes bound it all; this bounds what is shown and compared."""
    if part.age_ms < 0 or len(part.processes) > PROCESSES_MAX or len(part.flights) > PROCESSES_MAX:
        return False
    if any(len(flight.groups) > GROUPS_MAX for flight in part.flights):
        return False
    if len(part.pings) > PINGS_MAX or not all(_is_sound(ping) for ping in part.pings):
        return False
    return part.ras is None or ras_within_limits(part.ras)


def _is_sound(ping: PingFacts) -> bool:
    timed = ping.rtt_us is None or (ping.heard > 0 and 0 <= ping.rtt_us < 1e9)
    short = all(len(text) <= TEXT_CHARS_MAX for text in (ping.local, ping.remote, ping.note))
    return 0 <= ping.heard <= ping.sent <= PINGS_SENT_MAX and timed and short


def ras_within_limits(ras: RasFacts) -> bool:
    """Whether the facts are as few as they are made."""
    if len(ras.comms) > COMMS_MAX or len(ras.processes) > LISTED_MAX or len(ras.notes) > NOTES_MAX:
        return False
    return all(
        len(comm.missing) <= LISTED_MAX
        and len(comm.differs) <= VALUES_MAX
        and all(len(one.values) <= VALUES_MAX for one in comm.differs)
        and all(len(value.listed) <= LISTED_MAX for one in comm.differs for value in one.values)
        for comm in ras.comms
    )
