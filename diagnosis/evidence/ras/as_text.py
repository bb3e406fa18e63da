"""RAS's answer as text: the only form before NCCL 2.28.7. It names who differs from the most, not everybody.

The table of groups bounds what the sections below may claim: `#2-0` is a communicator of group 2, whose size the table
tells, and a rank beyond that size discredits the whole section. Lines that are none of RAS's (torch's warnings before
it) are passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from diagnosis.contracts.gathered import (
    COMMS_MAX,
    LISTED_MAX,
    NOTES_MAX,
    VALUES_MAX,
    RasComm,
    RasDifference,
    RasFacts,
    RasProcess,
    RasRank,
    RasValue,
)
from diagnosis.contracts.incident import WORLD_MAX
from diagnosis.evidence.ras.as_json import hash_of

LINES_MAX: Final = 200_000
LINE_CHARS_MAX: Final = 4096
_NUMBER: Final = r"(\d{1,15})"
_WHO: Final = r" -- GPU (?P<gpu>[^\n]{1,64}?) managed by process (?P<pid>\d{1,10}) on node (?P<host>\S{1,256})"
_VERSION: Final = re.compile(r"NCCL version (\d[\w.+-]{0,40})")
_TOOK: Final = re.compile(r"Communicators\.\.\. \((\d{1,6}\.\d{1,6})s\)")
_GROUP: Final = re.compile(rf"\s*{_NUMBER}\s+{_NUMBER}\s+\S+\s+\S+\s+{_NUMBER}\s+{_NUMBER}\s+([A-Z]\S*)\s+([A-Z,]+)\s*")
_SECTION: Final = re.compile(r"#(\d{1,9})-(\d{1,9}) \(([0-9a-fA-F]{1,16})\) ([A-Z,]+)\s*")
_LOOSE_SECTION: Final = re.compile(r"comm ([0-9a-fA-F]{1,16}) [A-Z]+ ([A-Z,]+)\s*")
_OF_PROCESSES: Final = re.compile(r"(INCOMPLETE|DEAD|TIMEOUT)\s*")
_HEADLINE: Final = re.compile(r"[A-Z][a-z]+[\w .]{0,40}(?:\(.{1,20}\))?\s*")
_PROCESS: Final = re.compile(r"\s+Process (\d{1,10}) on node (\S{1,256}) managing GPUs?\b.*")
_TIMEOUTS: Final = re.compile(rf"\s+Encountered {_NUMBER} communication timeouts?\b.*")
_MISSING: Final = re.compile(rf"\s+Missing communicator data from {_NUMBER} ranks?\b.*")
_MISSING_RANKS: Final = re.compile(r"\s+The missing ranks?: ([\d, -]{1,4000})")
_COUNTS: Final = re.compile(r"\s+Communicator ranks have different (\w{1,40}) operation counts\s*")
_STATUS: Final = re.compile(r"\s+Communicator ranks have different status\s*")
_SAYS: Final = (
    r"(?:has|have) (?:launched up to operation (?P<count>\d{1,15})|(?P<none>not launched any operations)"
    r"|status (?P<status>\w{1,40}))"
)
_MANY: Final = re.compile(rf"\s+(?P<ranks>\d{{1,9}}) ranks? {_SAYS}.*")
_ONE: Final = re.compile(rf"\s+Rank (?P<rank>\d{{1,15}}) {_SAYS}(?:{_WHO})?.*")
_LISTED: Final = re.compile(rf"\s+Rank (?P<rank>\d{{1,15}})(?:{_WHO}| --).*")
_NVML: Final = re.compile(r"(?:.*NVML )?(\d{1,3})")


@dataclass(slots=True)
class _Value:
    ranks: int
    listed: list[RasRank] = field(default_factory=list)


@dataclass(slots=True)
class _Comm:
    """One communicator while its sections are read. A communicator may have several."""

    hash: str
    size: int | None
    missing_count: int | None = None
    missing: list[RasRank] = field(default_factory=list)
    differs: dict[str, dict[int | str, _Value]] = field(default_factory=dict)
    mismatch: bool = False
    fault: str | None = None

    def rank_of(self, found: re.Match[str]) -> RasRank:
        return self.checked(int(found["rank"]), found)

    def checked(self, rank: int, found: re.Match[str] | None = None) -> RasRank:
        if rank >= (WORLD_MAX if self.size is None else self.size):
            self.fault = "it has ranks beyond its size"
        if found is None or found["pid"] is None:
            return RasRank(rank=rank)
        gpu = _NVML.match(found["gpu"])
        return RasRank(rank=rank, host=found["host"], pid=int(found["pid"]), gpu=int(gpu[1]) if gpu else None)

    def build(self) -> RasComm:
        differs = [
            RasDifference(
                what=what,
                values=[
                    RasValue(value=value, ranks=one.ranks, listed=one.listed if len(one.listed) == one.ranks else [])
                    for value, one in sorted(values.items(), key=lambda item: (-item[1].ranks, str(item[0])))
                ],
            )
            for what, values in self.differs.items()
            if len(values) > 1
        ]
        counts = [value for values in self.differs.values() for value in values if isinstance(value, int)]
        heard = self.size - self.missing_count if self.size is not None and self.missing_count is not None else None
        return RasComm(
            hash=self.hash,
            size=self.size,
            heard=heard,
            missing=self.missing,
            missing_count=self.missing_count,
            differs=differs,
            alike=False if any(one.what != "status" for one in differs) else None,
            launched=max(counts, default=None),
        )


class _Reader:
    """Line by line. `_comm` and `_values` are where the present lines belong."""

    def __init__(self) -> None:
        self.version: str | None = None
        self.took_s: float | None = None
        self.timeouts: int | None = None
        self.sizes: dict[int, int] = {}
        self.comms_told = 0
        self.comms: dict[str, _Comm] = {}
        self.processes: dict[tuple[str, int], RasProcess] = {}
        self.notes: list[str] = []
        self.table = False
        self._comm: _Comm | None = None
        self._what = "collective"
        self._value: _Value | None = None
        self._dead = False

    def take(self, line: str) -> None:
        if self._comm is not None and line[:1].isspace():
            self._take_of_comm(self._comm, line)
        elif found := _GROUP.fullmatch(line):
            self._take_group(found)
        elif found := _PROCESS.fullmatch(line):
            process = RasProcess(pid=int(found[1]), host=found[2], dead=self._dead)
            if len(self.processes) < LISTED_MAX:
                self.processes[found[2], int(found[1])] = process
        elif found := _TIMEOUTS.fullmatch(line):
            self.timeouts = int(found[1])
        else:
            self._take_headline(line)

    def _take_headline(self, line: str) -> None:
        if found := _SECTION.fullmatch(line):
            self._begin(found[3], self.sizes.get(int(found[1])) if self.table else None, found[4])
        elif found := _LOOSE_SECTION.fullmatch(line):
            self._begin(found[1], None, found[2])
        elif found := _OF_PROCESSES.fullmatch(line):
            self._comm, self._dead = None, found[1] == "DEAD"
        elif found := _TOOK.match(line):
            self.took_s = float(found[1])
        elif found := _VERSION.match(line):
            self.version = found[1]
        elif _HEADLINE.fullmatch(line):
            self._comm = None

    def _take_group(self, found: re.Match[str]) -> None:
        self.table = True
        size, count = int(found[3]), int(found[2])
        self.comms_told += count
        if not 0 < size <= WORLD_MAX:
            self._note(f"group {found[1]} has communicators of {size} ranks ({found[5]}): not trusted")
        else:
            self.sizes[int(found[1])] = size

    def _begin(self, digits: str, size: int | None, what: str) -> None:
        name = hash_of(digits)
        if name is None or (name not in self.comms and len(self.comms) >= COMMS_MAX):
            self._comm = None
            return
        self._comm = self.comms.setdefault(name, _Comm(name, size))
        self._what, self._value = "collective", None
        if self.table and size is None:
            self._comm.fault = "its group has no possible size"
        self._comm.mismatch |= "MISMATCH" in what

    def _take_of_comm(self, comm: _Comm, line: str) -> None:
        if found := _COUNTS.fullmatch(line):
            self._what, self._value = found[1], None
        elif _STATUS.fullmatch(line):
            self._what, self._value = "status", None
        elif found := _MISSING.fullmatch(line):
            comm.missing_count, self._value = int(found[1]), None
        elif found := _MISSING_RANKS.fullmatch(line):
            for rank in _ranks_of(found[1]):
                self._add_missing(comm, comm.checked(rank))
        elif found := _MANY.fullmatch(line):
            self._value = self._value_of(comm, found)
            self._value.ranks += int(found["ranks"])
        elif found := _ONE.fullmatch(line):
            value = self._value_of(comm, found)
            value.ranks += 1
            _list(value, comm.rank_of(found))
        elif found := _LISTED.fullmatch(line):
            if self._value is not None:
                _list(self._value, comm.rank_of(found))
            elif comm.missing_count is not None:
                self._add_missing(comm, comm.rank_of(found))

    def _add_missing(self, comm: _Comm, rank: RasRank) -> None:
        if len(comm.missing) < LISTED_MAX:
            comm.missing.append(rank)

    def _value_of(self, comm: _Comm, found: re.Match[str]) -> _Value:
        values = comm.differs.setdefault(self._what, {}) if len(comm.differs) < VALUES_MAX else {}
        said: int | str = found["status"] or int(found["count"] or 0)
        if said not in values and len(values) >= VALUES_MAX:
            return _Value(0)
        return values.setdefault(said, _Value(0))

    def _note(self, text: str) -> None:
        if len(self.notes) < NOTES_MAX:
            self.notes.append(text)


def _list(value: _Value, rank: RasRank) -> None:
    if len(value.listed) < LISTED_MAX:
        value.listed.append(rank)


def _ranks_of(text: str) -> Iterator[int]:
    """Of `1, 5-7`; at most as many as are listed."""
    told = 0
    for first, last in re.findall(r"(\d{1,15})(?:-(\d{1,15}))?", text):
        for rank in range(int(first), int(last or first) + 1):
            if told >= LISTED_MAX:
                return
            told += 1
            yield rank


def read_text(content: str) -> RasFacts:
    """The facts of a report as text. State "garbage" where nothing of RAS is in it, "silent" where it is empty."""
    if not content.strip():
        return RasFacts(state="silent", form="text", notes=["the connection was closed without an answer"])
    reader = _Reader()
    for number, line in enumerate(content.splitlines()):
        if number >= LINES_MAX:
            reader.notes.insert(0, "the report has more lines than are read")
            break
        reader.take(line[:LINE_CHARS_MAX])
    if not (reader.table or reader.comms or reader.processes):
        return RasFacts(state="garbage", form="text", notes=["the answer is no report of RAS"])
    for comm in reader.comms.values():
        if comm.fault is not None:
            reader.notes.append(f"communicator {comm.hash} is left out: {comm.fault}")
    return RasFacts(
        state="ok",
        form="text",
        nccl_version=reader.version,
        comms_told=reader.comms_told or None,
        comms=[comm.build() for comm in reader.comms.values() if comm.fault is None],
        processes=list(reader.processes.values()),
        timeouts=reader.timeouts,
        took_s=reader.took_s,
        notes=reader.notes[:NOTES_MAX],
    )
