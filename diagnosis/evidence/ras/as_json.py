"""RAS's answer as JSON (NCCL 2.28.7 and newer): every rank of every communicator, folded to who differs in what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import islice
from typing import Final

import msgspec

from diagnosis.contracts.gathered import (
    LISTED_MAX,
    NOTES_MAX,
    TEXT_CHARS_MAX,
    VALUES_MAX,
    RasComm,
    RasDifference,
    RasFacts,
    RasProcess,
    RasRank,
    RasValue,
)
from diagnosis.contracts.incident import WORLD_MAX

IN_PROGRESS: Final = 7
"""`ncclInProgress` of ncclResult_t (nccl.h)."""
_COUNT_MAX: Final = 1 << 53


class _Status(msgspec.Struct):
    init_state: int | None = None
    async_error: int | None = None
    finalize_called: bool | None = None
    destroy_flag: bool | None = None
    abort_flag: bool | None = None
    unresponsive: bool | None = None
    considered_dead: bool | None = None


class _Rank(msgspec.Struct):
    rank: int
    host: str | None = None
    pid: int | None = None
    nvml_dev: int | None = None
    status: _Status | None = None
    collective_counts: dict[str, int] = {}


class _Comm(msgspec.Struct):
    hash: str
    size: int
    ranks_count: int | None = None
    missing_ranks_count: int | None = None
    ranks: list[_Rank] = []
    missing_ranks: list[_Rank] = []


class _Ras(msgspec.Struct):
    collection_time_sec: float | None = None
    timeouts_count: int | None = None


class _Report(msgspec.Struct):
    communicators: list[_Comm]
    nccl_version: str | None = None
    communicators_count: int | None = None
    ras: _Ras = msgspec.field(default_factory=_Ras)


_DECODER: Final = msgspec.json.Decoder(_Report)
Counts = dict[str, Mapping[int, int]]


def read_json(content: bytes) -> tuple[RasFacts, Counts]:
    """Facts, and launches by communicator and rank. State "garbage" where it is no report or none that is whole."""
    try:
        report = _DECODER.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        note = f"the answer is no report of RAS: {error}"[:TEXT_CHARS_MAX]
        return RasFacts(state="garbage", form="json", notes=[note]), {}
    comms: list[RasComm] = []
    counts: Counts = {}
    notes: list[str] = []
    processes: dict[tuple[str | None, int], RasProcess] = {}
    for told in report.communicators:
        name, fault = hash_of(told.hash), _fault_of(told)
        if name is None or fault is not None:
            notes.append(f"communicator {told.hash[:20]} is left out: {fault or 'its hash is none'}")
            continue
        launched = {rank.rank: _launches(rank) for rank in told.ranks}
        counts[name] = launched
        comms.append(_comm(name, told, launched))
        for rank in told.missing_ranks:
            if rank.pid is not None and len(processes) < LISTED_MAX:
                dead = bool(rank.status and rank.status.considered_dead)
                processes[rank.host, rank.pid] = RasProcess(pid=rank.pid, host=_short(rank.host), dead=dead)
    facts = RasFacts(
        state="ok",
        form="json",
        nccl_version=_short(report.nccl_version),
        comms_told=report.communicators_count,
        comms=comms,
        processes=list(processes.values()),
        timeouts=report.ras.timeouts_count,
        took_s=report.ras.collection_time_sec,
        notes=notes[:NOTES_MAX],
    )
    return facts, counts


def hash_of(text: str) -> str | None:
    """A communicator's hash as frames write it: `0x` and no zeros before it."""
    digits = text.removeprefix("0x")
    try:
        value = int(digits, 16) if 0 < len(digits) <= 16 else -1
    except ValueError:
        return None
    return f"{value:#x}" if value >= 0 else None


def _fault_of(told: _Comm) -> str | None:
    """Why a communicator cannot be believed."""
    if not 0 < told.size <= WORLD_MAX:
        return "its size is impossible"
    everybody = [rank.rank for rank in (*told.ranks, *told.missing_ranks)]
    if any(not 0 <= rank < told.size for rank in everybody):
        return "it has ranks beyond its size"
    if len(set(everybody)) != len(everybody):
        return "it has a rank twice"
    if any(not 0 <= count < _COUNT_MAX for rank in told.ranks for count in rank.collective_counts.values()):
        return "its counts are impossible"
    return None


def _comm(name: str, told: _Comm, launched: Mapping[int, int]) -> RasComm:
    heard = len(told.ranks)
    named = {rank.rank for rank in told.missing_ranks}
    missing = [_missing(rank) for rank in told.missing_ranks[:LISTED_MAX]]
    spoke = set(launched)
    # Who does not answer is often just absent from both lists (seen with 2.28.9 and 2.32.3).
    gap = (rank for rank in range(told.size) if rank not in spoke and rank not in named)
    missing += [RasRank(rank=rank) for rank in islice(gap, LISTED_MAX - len(missing))]
    differs = _differences(told.ranks)
    return RasComm(
        hash=name,
        size=told.size,
        heard=heard,
        missing=missing,
        missing_count=told.size - heard,
        differs=differs,
        alike=not any(one.what != "status" for one in differs) if heard > 1 else None,
        launched=max(launched.values(), default=None),
    )


def _launches(rank: _Rank) -> int:
    return sum(rank.collective_counts.values())


def _differences(ranks: list[_Rank]) -> list[RasDifference]:
    said: defaultdict[str, defaultdict[int | str, list[_Rank]]] = defaultdict(lambda: defaultdict(list))
    for rank in ranks:
        for operation, count in rank.collective_counts.items():
            said[operation[:TEXT_CHARS_MAX]][count].append(rank)
        said["status"][_state(rank.status)].append(rank)
    different = {what: values for what, values in said.items() if len(values) > 1}
    return [RasDifference(what=what, values=_values(values)) for what, values in list(different.items())[:VALUES_MAX]]


def _values(values: Mapping[int | str, list[_Rank]]) -> list[RasValue]:
    most_first = sorted(values.items(), key=lambda item: (-len(item[1]), str(item[0])))
    return [
        RasValue(
            value=value,
            ranks=len(members),
            listed=[_named(rank) for rank in members] if len(members) <= LISTED_MAX else [],
        )
        for value, members in most_first[:VALUES_MAX]
    ]


def _state(status: _Status | None) -> str:
    """One word for a rank's state, the gravest first."""
    if status is None:
        return "UNKNOWN"
    if status.abort_flag:
        return "ABORT"
    if status.async_error not in (None, 0, IN_PROGRESS):
        return f"ERROR {status.async_error}"
    if status.destroy_flag:
        return "DESTROY"
    if status.finalize_called:
        return "FINALIZE"
    return {0: "RUNNING", IN_PROGRESS: "INIT", None: "UNKNOWN"}.get(status.init_state, f"ERROR {status.init_state}")


def _named(rank: _Rank) -> RasRank:
    return RasRank(rank=rank.rank, host=_short(rank.host), pid=rank.pid, gpu=rank.nvml_dev)


def _missing(rank: _Rank) -> RasRank:
    status = rank.status or _Status()
    return msgspec.structs.replace(_named(rank), unresponsive=status.unresponsive, dead=status.considered_dead)


def _short(text: str | None) -> str | None:
    return None if text is None else text[:TEXT_CHARS_MAX]
