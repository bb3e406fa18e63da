"""Whatever people have, as evidence: each input is recognised by its content, read by its reader, or listed as unseen.

A bundle's files go by their names, or by the fields of their first line. Raw evidence goes by content alone. Nothing
here opens anything: inputs are names and bytes in chunks, and each is read before the next one is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final

import msgspec

from diagnosis.contracts.errors import AgentFault, OperatorFault
from diagnosis.contracts.incident import Incident
from diagnosis.contracts.verdict import EvidenceItem, Verdict
from diagnosis.evidence import operation_times, traces
from diagnosis.evidence.bundle import files
from diagnosis.evidence.bundle.reader import BundleReader
from diagnosis.evidence.flight_dump import Dump, read_dump
from diagnosis.evidence.flight_recorder import incident_of_dumps
from diagnosis.evidence.limits import DEFAULT, Allowance, Limits
from diagnosis.evidence.lines import document
from diagnosis.evidence.notes import Notes
from diagnosis.evidence.parquet import MAGIC, read_columns
from diagnosis.evidence.pickles import load_plain
from diagnosis.evidence.topology import offline
from diagnosis.evidence.values import loose

HEAD_BYTES: Final = 1 << 16
PARQUET: Final = "parquet"
PICKLE: Final = "pickle"
FLIGHT_DUMP: Final = "flight-recorder dump"
DUMP_ENTRIES_MAX: Final = 4_000_000
_OF_DUMPS: Final = (b'"comm_lib_version"', b'"nccl_version"', b'"pg_config"', b'"pg_status"', b'"collective_seq_id"')
_FIRST_LINES: Final = (
    (files.FRAMES, {"rank", "comms"}),
    (files.COMMUNICATORS, {"comm", "ranks"}),
    (files.SUMMARIES, {"worker_rank"}),
    (files.HEALTH, {"node", "source"}),
)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was read. `incident`: for the engine, None where there is none; `verdicts`: of inputs that are judged where
    they are read; `unseen`: what was not read, for people; `readable`: whether anything was."""

    incident: Incident | None
    verdicts: tuple[Verdict, ...]
    unseen: tuple[str, ...]
    readable: bool


def recognise(name: str, head: bytes) -> str | None:
    """What an input is, from its name and its first bytes: a name of a bundle's file, `PARQUET`, `PICKLE`,
    `FLIGHT_DUMP`, `traces.KIND`, one of `topology.offline.KINDS`, or None."""
    base = name.rsplit("/", 1)[-1]
    if base in files.NAMES:
        return base
    if head.startswith(MAGIC):
        return PARQUET
    if len(head) > 1 and head[0] == 0x80 and head[1] <= 5:
        return PICKLE
    topology = offline.recognise(head)
    if topology is not None or not head.lstrip().startswith(b"{"):
        return topology
    if (trace := traces.recognise(head)) is not None:
        return trace
    if any(mark in head for mark in _OF_DUMPS):
        return FLIGHT_DUMP
    keys = _first_keys(head)
    for kind, needed in _FIRST_LINES:
        if needed <= keys:
            return kind
    if f'"{files.SCHEMA}"'.encode() in head:
        return files.JOB
    return files.FABRIC if b'"links"' in head and b'"gbps"' in head else None


def _first_keys(head: bytes) -> set[str]:
    line = head.lstrip().split(b"\n", 1)[0]
    try:
        first = loose(line)
    except ValueError:
        return set()
    return set(first) if isinstance(first, dict) else set()


class _Gathering:
    def __init__(self, limits: Limits, notes: Notes) -> None:
        self.notes = notes
        self.limits = limits
        self.bundle = BundleReader(notes, limits)
        self.dumps: list[Dump] = []
        self.entries = 0
        self.verdicts: list[Verdict] = []
        self.topology = offline.ToldTopology(notes)
        self.traces = traces.Traces(limits, notes)

    def take(self, name: str, kind: str | None, chunks: Iterable[bytes]) -> None:
        if kind is None:
            self.notes.add(name, "not recognised")
        elif kind in files.NAMES:
            self.bundle.feed(kind, name, chunks)
        else:
            content = document(name, chunks, self.limits, self.notes)
            if content is not None:
                try:
                    self._take_document(name, kind, content)
                except (AgentFault, OperatorFault) as fault:
                    self.notes.add(name, f"the {kind} cannot be read: {fault}")

    def _take_document(self, name: str, kind: str, content: bytes) -> None:
        if kind == PARQUET:
            columns = read_columns(content, (*operation_times.NEEDED, *operation_times.OPTIONAL), ("optype",))
            self.verdicts.append(operation_times.judge(operation_times.tensor(columns)))
            return
        if kind in offline.KINDS:
            self.topology.take(name, kind, content)
            return
        if kind == traces.KIND:
            self.traces.take(name, content)
            return
        raw = load_plain(content) if kind == PICKLE else _json(content)
        dump = read_dump(name, raw, kind == FLIGHT_DUMP, self.notes)
        if dump is None:
            return
        self.entries += len(dump.entries)
        if self.entries > DUMP_ENTRIES_MAX:
            raise AgentFault("all dumps together are larger than the reader's limit")
        self.dumps.append(dump)

    def incident(self) -> Incident | None:
        """Of the bundle and the dumps, with the summaries of traces."""
        return self.traces.added_to(self._without_traces())

    def _without_traces(self) -> Incident | None:
        """Of the bundle, of the dumps, or of both: then the bundle's frames count, if it has any."""
        of_bundle = self.topology.lay_out(self.bundle.incident()) if self.bundle.read else None
        if of_bundle is not None and len(of_bundle.frames.rank):
            self.notes.add("flight recorder", "the bundle has frames: dumps are not used", count=len(self.dumps))
            return of_bundle
        of_dumps = incident_of_dumps(self.dumps, self.notes)
        if of_bundle is None or of_dumps is None:
            return of_bundle or of_dumps
        world = max(of_bundle.job.world_size, of_dumps.job.world_size)
        job = replace(traces.padded(of_bundle.job, world), fidelity=of_dumps.job.fidelity)
        return replace(of_bundle, job=job, communicators=of_dumps.communicators, frames=of_dumps.frames, fabric=None)


def gather(inputs: Iterable[tuple[str, Iterable[bytes]]], limits: Limits = DEFAULT) -> Evidence:
    """All evidence of inputs: name (with `/` between folders) and content in chunks of any size."""
    gathering = _Gathering(limits, Notes())
    allowance = Allowance(limits.total_bytes_max)
    for name, chunks in inputs:
        metered = allowance.meter(name, chunks, gathering.notes)
        head, whole = _peek(metered)
        if head:
            gathering.take(name, recognise(name, head), whole)
        else:
            gathering.notes.add(name, "empty")
    incident = gathering.incident()
    unseen = gathering.notes.lines()
    return Evidence(
        incident=incident and replace(incident, unseen=unseen),
        verdicts=tuple(gathering.verdicts),
        unseen=unseen,
        readable=incident is not None or bool(gathering.verdicts),
    )


def lead(verdicts: Iterable[Verdict], unseen: tuple[str, ...]) -> Verdict:
    """One verdict of several: the first that found something, with what the others say as evidence.

    Raises: ValueError (there is none).
    """
    all_of_them = list(verdicts)
    if not all_of_them:
        raise ValueError("no verdict")
    first = next((verdict for verdict in all_of_them if verdict.anomaly != "none"), all_of_them[0])
    others = [EvidenceItem(kind="other_input", text=other.summary) for other in all_of_them if other is not first]
    told = list(dict.fromkeys([*unseen, *first.unseen]))
    return msgspec.structs.replace(first, evidence=[*first.evidence, *others], unseen=told)


def _peek(chunks: Iterator[bytes]) -> tuple[bytes, Iterator[bytes]]:
    """The first bytes, and all bytes again."""
    held: list[bytes] = []
    size = 0
    for chunk in chunks:
        held.append(chunk)
        size += len(chunk)
        if size >= HEAD_BYTES:
            break
    return b"".join(held)[:HEAD_BYTES], chain(held, chunks)


def _json(content: bytes) -> object:
    try:
        return msgspec.json.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass
    try:
        return loose(content)
    except ValueError as error:
        raise AgentFault(f"it is no JSON: {error}"[:200]) from None
