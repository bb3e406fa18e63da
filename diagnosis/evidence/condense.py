"""Events of one rank's profiling window condensed into its summary: millions of events in, a few kilobytes out.

The window is cut to whole steps. Executions are clipped to it. Per function: own time and how it is spread, its share
of the critical path (`critical_path`), how it used the resource of its kind (`resource_use`). Every moment of the
window is also in one phase: in that of the function that owns it, or idle where nothing was seen to run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from diagnosis.contracts import histogram
from diagnosis.contracts.summary import COMM, COMPUTE, HOST, KINDS, Overlap, Range, RankSummary
from diagnosis.evidence.critical_path import Pieces, by_lane, critical_times, union
from diagnosis.evidence.functions import Functions, sums, with_functions
from diagnosis.evidence.resource_use import Samples, mean_and_deviation

Longs = NDArray[np.int64]
Floats = NDArray[np.float64]
NS_PER_MS: Final = 1e6


class Phase(IntEnum):
    """What part of a step an execution serves."""

    OTHER = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3
    DATA = 4
    CHECKPOINT = 5


_OF_DEVICE: Final = {
    Phase.OTHER: "forward_compute_ms",
    Phase.FORWARD: "forward_compute_ms",
    Phase.BACKWARD: "backward_compute_ms",
    Phase.OPTIMIZER: "optimizer_step_ms",
    Phase.DATA: "data_ms",
    Phase.CHECKPOINT: "checkpoint_ms",
}
_OF_HOST: Final = {Phase.DATA: "data_ms", Phase.CHECKPOINT: "checkpoint_ms"}


@dataclass(frozen=True, slots=True, eq=False)
class Events:
    """Executions, in any order. Shapes (E,); times in ns of one clock.

    `name`: index into `names`. `kind`: COMPUTE to HOST. `lane`: the thread or stream. `nests`: whether executions of
    its lane call each other, as functions of a thread do; kernels and collectives do not. `bytes`, `members`: NaN
    unknown.
    """

    names: tuple[str, ...]
    name: Longs
    kind: Longs
    start: Longs
    end: Longs
    lane: Longs
    nests: NDArray[np.bool_]
    phase: Longs
    bytes: Floats
    members: Floats

    def __len__(self) -> int:
        return len(self.name)


@dataclass(frozen=True, slots=True)
class Window:
    """From the beginning of the first whole step to the end of the last; `steps` None: no step was seen, the window is
    all there is."""

    start_ns: int
    end_ns: int
    steps: int | None = None
    first_step: int | None = None
    last_step: int | None = None


@dataclass(frozen=True, slots=True)
class Condensed:
    """A summary, and the names of its functions: (kind, text) by hash."""

    summary: RankSummary
    names: Mapping[int, tuple[int, str]] = field(default_factory=dict)


def condense(
    events: Events,
    window: Window,
    rank: int,
    *,
    samples: Mapping[int, Samples] | None = None,
    hardware: Mapping[str, Range] | None = None,
    sources: Sequence[str] = (),
    unseen: Sequence[str] = (),
) -> Condensed:
    """The summary of one rank. `samples`: of the resource that belongs to a kind, by kind."""
    events = _clipped(events, window)
    pieces = by_lane(events.lane, events.nests, events.start, events.end)
    own, critical = _times(events, pieces)
    length_ns = max(window.end_ns - window.start_ns, 1)
    steps = max(window.steps or 1, 1)
    bare = RankSummary(
        rank=rank,
        first_step=window.first_step,
        last_step=window.last_step,
        steps=window.steps,
        window_ms=length_ns / NS_PER_MS,
        step_ms=length_ns / NS_PER_MS / steps if window.steps else None,
        sources=list(sources),
        unseen=list(unseen),
        phases=_phases(events, critical, length_ns, steps),
        overlap=_overlap(events.kind[pieces.owner], pieces, steps),
        hardware=dict(hardware or {}),
    )
    functions = _functions(events, own, critical / length_ns, samples or {})
    return Condensed(*with_functions(bare, functions))


def _clipped(events: Events, window: Window) -> Events:
    inside = np.flatnonzero((events.end >= window.start_ns) & (events.start < window.end_ns))
    return Events(
        names=events.names,
        name=events.name[inside],
        kind=events.kind[inside],
        start=np.maximum(events.start[inside], window.start_ns),
        end=np.minimum(events.end[inside], window.end_ns),
        lane=events.lane[inside],
        nests=events.nests[inside],
        phase=events.phase[inside],
        bytes=events.bytes[inside],
        members=events.members[inside],
    )


def _times(events: Events, pieces: Pieces) -> tuple[Longs, Longs]:
    """Own time of each execution (E,), and how long it is the critical path, ns."""
    path = critical_times(events.kind[pieces.owner], pieces.start, pieces.end, len(KINDS))
    own, critical = np.zeros(len(events), np.int64), np.zeros(len(events), np.int64)
    np.add.at(own, pieces.owner, pieces.end - pieces.start)
    np.add.at(critical, pieces.owner, path)
    return own, critical


def _functions(events: Events, took: Longs, critical: Floats, samples: Mapping[int, Samples]) -> Functions:
    """`took` (E,): own times; `critical` (E,): the share of the window that each is the path."""
    key, first, group = np.unique(events.name * len(KINDS) + events.kind, return_index=True, return_inverse=True)
    rows = len(key)
    count = np.bincount(group, minlength=rows)
    total = np.zeros(rows, np.int64)
    np.add.at(total, group, took)
    longest = np.zeros(rows, np.int64)
    np.maximum.at(longest, group, took)
    means = total / np.maximum(count, 1)
    mu, sigma = np.full(rows, np.nan), np.full(rows, np.nan)
    for kind, told in samples.items():
        of_kind = np.flatnonzero(events.kind == kind)
        found = mean_and_deviation(told, group[of_kind], rows, events.start[of_kind], events.end[of_kind])
        known = np.isfinite(found[0])
        mu[known], sigma[known] = found[0][known], found[1][known]
    return Functions(
        name=tuple(events.names[at] for at in (key // len(KINDS)).tolist()),
        kind=key % len(KINDS),
        functions=np.ones(rows, np.int64),
        count=count,
        total_ns=total,
        scatter=sums(group, (took - means[group]) ** 2, rows),
        max_ns=longest,
        beta=sums(group, critical, rows),
        mu=mu,
        sigma=sigma,
        bytes=sums(group, events.bytes, rows),
        members=events.members[first],
        histograms=histogram.from_durations(group, took, rows),
    )


def _phases(events: Events, critical: Longs, length_ns: int, steps: int) -> dict[str, float]:
    """Ms per step by phase; together they are the step."""
    spent: dict[str, float] = {}
    for kind in range(len(KINDS)):
        for phase in Phase:
            if kind == COMM:
                name = "comm_barrier_wait_ms"
            else:
                name = _OF_HOST.get(phase, "host_ms") if kind == HOST else _OF_DEVICE[phase]
            here = critical[(events.kind == kind) & (events.phase == phase)].sum()
            spent[name] = spent.get(name, 0.0) + float(here) / NS_PER_MS / steps
    spent["idle_ms"] = max(length_ns / NS_PER_MS / steps - sum(spent.values()), 0.0)
    return {name: round(value, 6) for name, value in spent.items()}


def _overlap(kind: Longs, pieces: Pieces, steps: int) -> Overlap:
    parts = (kind == COMPUTE, kind == COMM, (kind == COMPUTE) | (kind == COMM))
    alone = [union(pieces.start[part], pieces.end[part]).total() for part in parts]
    spent = (alone[0], alone[1], alone[0] + alone[1] - alone[2])
    return Overlap(*(round(value / NS_PER_MS / steps, 6) for value in spent))
