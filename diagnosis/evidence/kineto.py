"""Traces of torch.profiler (Kineto, in Chrome's trace format) as the events of one rank's window.

A trace of a GPU job has kernels and copies of the device, and the host's functions; one of a CPU job has only the
latter, and then PyTorch's operators are the computation. Times are microseconds of the process. A kernel belongs to the
phase in which it was launched: `correlation` names the call. The window is cut by the marks `ProfilerStep#N` that
`profiler.step()` leaves, else by the ends of the optimizer's steps, else it is all there is.

A trace is written by the job: hostile input. What no event can be is left out and noted. The quick way decodes the
document straight into typed events; a document with a value of another type takes the slow way, event by event.
"""

from __future__ import annotations

import math
import re
import zlib
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from diagnosis.contracts.errors import AgentFault
from diagnosis.contracts.incident import WORLD_MAX
from diagnosis.contracts.summary import COMM, COMPUTE, HOST, MEMCPY
from diagnosis.evidence import kineto_names as names
from diagnosis.evidence.condense import Condensed, Events, Phase, Window, condense
from diagnosis.evidence.critical_path import laid_out
from diagnosis.evidence.functions import fitted
from diagnosis.evidence.notes import Notes
from diagnosis.evidence.values import integer, loose, mend, number, text

EVENTS_MAX: Final = 4_000_000
SLOW_BYTES_MAX: Final = 64 << 20
LENGTH_US_MAX: Final = 86_400e6
_GZIP: Final = b"\x1f\x8b"
_DEVICE: Final = {"kernel": COMPUTE, "gpu_memcpy": MEMCPY, "memcpy": MEMCPY, "gpu_memset": MEMCPY, "memset": MEMCPY}
_LAUNCH: Final = frozenset({"cuda_runtime", "cuda_driver", "runtime"})
_PYTHON: Final = frozenset({"python_function"})
_ANNOTATION: Final = frozenset({"user_annotation"})
_OPERATOR: Final = frozenset({"cpu_op", "operator"})
_HOST: Final = _LAUNCH | _PYTHON | _ANNOTATION | _OPERATOR | {"python_gc"}
_RANK_IN_NAME: Final = re.compile(r"rank[-_]?(\d{1,7})", re.IGNORECASE)


class Args(msgspec.Struct, gc=False):
    """What is read of an event's `args`."""

    correlation: int | None = None
    bytes: float | None = None
    python_id: int | None = msgspec.field(default=None, name="Python id")
    python_parent: int | None = msgspec.field(default=None, name="Python parent id")
    collective: str | None = msgspec.field(default=None, name="Collective name")
    elements: int | None = msgspec.field(default=None, name="In msg nelems")
    group: int | None = msgspec.field(default=None, name="Group size")
    dtype: str | None = None


class Event(msgspec.Struct, gc=False):
    """One event of `traceEvents`."""

    ph: str | None = None
    cat: str | None = None
    name: str | None = None
    pid: int | str | None = None
    tid: int | str | None = None
    ts: float | None = None
    dur: float | None = None
    args: Args | None = None


class Distributed(msgspec.Struct):
    """`distributedInfo`, where the exporter knew it."""

    rank: int | None = None
    world_size: int | None = None


class Document(msgspec.Struct):
    """A trace file."""

    traceEvents: list[Event]
    distributedInfo: Distributed | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """One rank's events and its window. None: the trace does not say."""

    events: Events
    window: Window
    rank: int | None
    world_size: int | None
    unseen: tuple[str, ...]

    def condensed(self, rank: int) -> Condensed:
        """The summary of this trace as that of `rank`."""
        return condense(self.events, self.window, rank, sources=("kineto",), unseen=self.unseen)


_DECODER: Final = msgspec.json.Decoder(Document)


def unpacked(content: bytes, bytes_max: int) -> bytes:
    """The document of a trace file, which may be packed with gzip.

    Raises: AgentFault (reason `oversized` or `garbage`).
    """
    if not content.startswith(_GZIP):
        return content
    unpacker = zlib.decompressobj(wbits=31)
    try:
        document = unpacker.decompress(content, bytes_max)
    except zlib.error as error:
        raise AgentFault(f"the trace cannot be unpacked: {error}", reason="garbage") from error
    if not unpacker.eof:
        reason = "oversized" if unpacker.unconsumed_tail else "garbage"
        raise AgentFault(f"the trace unpacks to more than {bytes_max} bytes or breaks off", reason=reason)
    return document


def read_trace(file: str, document: bytes, notes: Notes) -> Trace:
    """The events of a document. `file` may tell the rank ("rank3_...") where the document does not.

    Raises: AgentFault (reason `garbage`: it is no trace, or has no events).
    """
    told = _decoded(file, document, notes)
    if len(told.traceEvents) > EVENTS_MAX:
        notes.add(file, "events beyond the reader's limit are left out", count=len(told.traceEvents) - EVENTS_MAX)
        del told.traceEvents[EVENTS_MAX:]
    spans = [one for one in told.traceEvents if one.ph == "X" and _possible(one)]
    if not spans:
        raise AgentFault("the trace has no events with a duration", reason="garbage")
    base = min(one.ts for one in spans if one.ts is not None)
    near = [one for one in spans if one.ts is not None and one.ts - base <= LENGTH_US_MAX]
    notes.add(file, "events a day after the others are left out", count=len(spans) - len(near))
    events, unseen = _Builder(near, base).build()
    window, how = _window(near, base, events)
    unseen = tuple(line for line in (*unseen, how) if line)
    about = told.distributedInfo or Distributed()
    in_name = _RANK_IN_NAME.search(file.rsplit("/", 1)[-1])
    rank = about.rank if about.rank is not None else int(in_name[1]) if in_name else None
    if rank is not None and not 0 <= rank < WORLD_MAX:
        notes.add(file, "an impossible rank is taken as unknown")
        rank = None
    world = about.world_size if about.world_size is not None and 0 < about.world_size <= WORLD_MAX else None
    return Trace(events, window, rank, world, unseen)


def _decoded(file: str, document: bytes, notes: Notes) -> Document:
    try:
        return _DECODER.decode(document)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass
    if len(document) > SLOW_BYTES_MAX:
        raise AgentFault("a large trace with values of the wrong kind is not read", reason="garbage")
    try:
        raw = loose(document)
    except ValueError as error:
        raise AgentFault(f"the trace is no JSON: {error}"[:200], reason="garbage") from None
    listed = raw.get("traceEvents") if isinstance(raw, dict) else None
    if not isinstance(raw, dict) or not isinstance(listed, list):
        raise AgentFault("the document has no list of events", reason="garbage")
    notes.add(file, "a value of the wrong kind is taken as unknown")
    about = raw.get("distributedInfo")
    events = [mend(one, Event, _SPECIAL) for one in listed if isinstance(one, dict)]
    notes.add(file, "what is no event is left out", count=len(listed) - len(events))
    return Document(events, mend(about, Distributed) if isinstance(about, dict) else None)


def _place(value: object) -> int | str | None:
    return value if isinstance(value, str) else integer(value)


_SPECIAL: Final = {
    "pid": _place,
    "tid": _place,
    "ts": number,
    "name": text,
    "args": lambda value: mend(value, Args) if isinstance(value, dict) else None,
}


def _possible(one: Event) -> bool:
    return (
        one.name is not None
        and one.ts is not None
        and one.dur is not None
        and math.isfinite(one.ts)
        and abs(one.ts) < 1 << 53
        and 0 <= one.dur < LENGTH_US_MAX
    )


def _ns(us: float, base: float) -> int:
    return round((us - base) * 1000)


class _Builder:
    """The columns of Events, from events that are possible."""

    def __init__(self, spans: list[Event], base: float) -> None:
        self._base = base
        self._told = sorted(
            (one for one in spans if (one.cat or "").lower() in _HOST or (one.cat or "").lower() in _DEVICE),
            key=lambda one: (one.ts or 0.0, -(one.dur or 0.0)),
        )
        self._on_gpu = any((one.cat or "").lower() == "kernel" for one in self._told)
        self._index: dict[str, int] = {}
        self._rows: list[tuple[int, int, int, int, int, bool]] = []
        self._sizes: list[tuple[float, float]] = []
        self._lanes: dict[tuple[object, object, bool], int] = {}
        self._stacks = names.Stacks()
        self._marks: list[tuple[int, Phase]] = []
        self._launched: dict[int, int] = {}
        self._waits_for: list[tuple[int, int]] = []

    def build(self) -> tuple[Events, tuple[str, ...]]:
        """The events in the order of their starts, and what cannot be seen."""
        for one in self._told:
            self._take(one, (one.cat or "").lower(), one.args or Args())
        table = np.array(self._rows, np.int64).reshape(-1, 6)
        sizes = np.array(self._sizes, np.float64).reshape(-1, 2)
        events = Events(
            names=tuple(self._index),
            name=table[:, 0],
            kind=table[:, 1],
            start=table[:, 2],
            end=table[:, 3],
            lane=table[:, 4],
            nests=table[:, 5].astype(np.bool_),
            phase=np.zeros(len(table), np.int64),
            bytes=sizes[:, 0],
            members=sizes[:, 1],
        )
        self._set_phases(events)
        stacks = any((one.cat or "").lower() in _PYTHON for one in self._told)
        return events, () if stacks else ("the trace has no Python functions: time between operators is idle",)

    def _take(self, one: Event, category: str, args: Args) -> None:
        name = one.name or ""
        device = category in _DEVICE
        if category in _ANNOTATION and names.STEP.match(name):
            return
        at = len(self._rows)
        size, members = args.bytes, None
        if device:
            kind = names.kernel_kind(name) if category == "kernel" else _DEVICE[category]
            if kind == COMM:
                width = names.item_bytes(args.dtype)
                size = args.elements * width if args.elements is not None and width else None
                members = args.group
                name = names.collective_name(name, args.collective, args.dtype, args.elements, args.group)
            if args.correlation is not None:
                self._waits_for.append((at, args.correlation))
        else:
            kind = self._host_kind(name, category)
            if category in _PYTHON:
                name = self._stacks.name(name, args.python_id, args.python_parent)
            if category in _LAUNCH and args.correlation is not None:
                self._launched[args.correlation] = at
            phase = names.phase_of(name)
            if phase is not None:
                self._marks.append((at, phase))
        lane = self._lanes.setdefault((one.pid, one.tid, device), len(self._lanes))
        word = self._index.setdefault(fitted(names.plain(name)), len(self._index))
        start = _ns(one.ts or 0.0, self._base)
        end = start + round((one.dur or 0.0) * 1000)
        self._rows.append((word, kind, start, end, lane, not device and kind != COMM))
        self._sizes.append((_size(size), _size(members)))

    def _host_kind(self, name: str, category: str) -> int:
        if category in _ANNOTATION and names.HOST_COLLECTIVES.match(name):
            return COMM
        operator = category in _OPERATOR and not names.LAUNCHES.match(name)
        return COMPUTE if operator and not self._on_gpu else HOST

    def _set_phases(self, events: Events) -> None:
        """Of the host's executions by the mark that is open in their thread, of the device's by their launch."""
        marks = np.array([at for at, _ in self._marks], np.int64)
        phases = np.zeros(len(events), np.int64)
        phases[marks] = [phase for _, phase in self._marks]
        for lane in np.unique(events.lane[marks]).tolist():
            pieces = laid_out(marks[events.lane[marks] == lane], events.start, events.end)
            here = np.flatnonzero(events.lane == lane)
            if not len(pieces.owner):
                continue
            place = np.searchsorted(pieces.start, events.start[here], side="right") - 1
            inside = (place >= 0) & (events.start[here] < pieces.end[place])
            events.phase[here[inside]] = phases[pieces.owner[place[inside]]]
        launched = [(at, self._launched[by]) for at, by in self._waits_for if by in self._launched]
        pairs = np.array(launched, np.int64).reshape(-1, 2)
        events.phase[pairs[:, 0]] = events.phase[pairs[:, 1]]


def _size(value: float | None) -> float:
    return float(value) if value is not None and 0 <= value < 1 << 53 else math.nan


def _window(spans: list[Event], base: float, events: Events) -> tuple[Window, str]:
    """The window, and what to say of it."""
    marks = [one for one in spans if (one.cat or "").lower() in _ANNOTATION]
    steps: dict[int, Event] = {}
    for one in marks:
        if (step := names.STEP.match(one.name or "")) is not None:
            steps.setdefault(int(step[1]), one)
    if steps:
        first, last = min(one.ts or 0.0 for one in steps.values()), max(map(_end, steps.values()))
        return Window(_ns(first, base), _ns(last, base), len(steps), min(steps), max(steps)), ""
    ends = _optimizer_ends(marks)
    if len(ends) > 1:
        return Window(_ns(ends[0], base), _ns(ends[-1], base), len(ends) - 1), ""
    return Window(*_extent(events)), "the trace has no marks of steps: times are of the whole trace"


def _end(one: Event) -> float:
    return (one.ts or 0.0) + (one.dur or 0.0)


def _optimizer_ends(marks: list[Event]) -> list[float]:
    """Ends of the steps of the optimizer that steps least often: of several, each may step once a training step."""
    by_name: dict[str, list[float]] = {}
    for one in marks:
        if names.OPTIMIZER_STEP.match(one.name or ""):
            by_name.setdefault(one.name or "", []).append(_end(one))
    return min(map(sorted, by_name.values()), key=lambda ends: len(ends), default=[])


def _extent(events: Events) -> tuple[int, int]:
    return (int(events.start.min()), int(events.end.max())) if len(events) else (0, 0)
