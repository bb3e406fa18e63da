"""Traces of torch.profiler among other evidence: each is condensed as it comes, together they are `Summaries`."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from diagnosis.contracts.incident import UNKNOWN, Incident, Job
from diagnosis.contracts.summary import RankSummary
from diagnosis.evidence.bundle.reader import BundleReader
from diagnosis.evidence.kineto import read_trace
from diagnosis.evidence.limits import Limits
from diagnosis.evidence.notes import Notes
from diagnosis.evidence.summary_columns import columns_of

KIND: Final = "profiler trace"
_MARKS: Final = (b'"traceEvents"', b'"baseTimeNanoseconds"')


def recognise(head: bytes) -> str | None:
    """KIND where the first bytes are those of a trace."""
    return KIND if any(mark in head for mark in _MARKS) else None


def padded(job: Job, world: int) -> Job:
    """The job with `world` ranks; of those that it did not know nothing is known."""
    more = np.full(world - job.world_size, UNKNOWN, np.int32)
    return replace(job, world_size=world, node=np.concatenate([job.node, more]), gpu=np.concatenate([job.gpu, more]))


class Traces:
    """Takes traces one by one; of each no more is kept than what would have travelled."""

    def __init__(self, limits: Limits, notes: Notes) -> None:
        self._limits = limits
        self._notes = notes
        self._summaries: list[RankSummary] = []
        self._names: dict[int, tuple[int, str]] = {}
        self._world = 0

    def take(self, name: str, content: bytes) -> None:
        """One trace.

        Raises: AgentFault (it is none).
        """
        trace = read_trace(name, content, self._notes)
        if trace.rank is None:
            self._notes.add(name, "the trace does not say of which rank it is: name the file rankN.json")
            return
        condensed = trace.condensed(trace.rank)
        self._summaries.append(condensed.summary)
        self._names.update(condensed.names)
        self._world = max(self._world, trace.world_size or 0, trace.rank + 1)
        for line in trace.unseen:
            self._notes.add(KIND, line)

    def added_to(self, incident: Incident | None) -> Incident | None:
        """The incident with what the traces say, unless it has summaries; without one, the traces alone."""
        summaries = columns_of(self._summaries, self._names, self._notes)
        if summaries is None:
            return incident
        known = incident or BundleReader(Notes(), self._limits).incident()
        if known.summaries is not None:
            self._notes.add(KIND, "the bundle has summaries: traces are not used", count=len(self._summaries))
            return known
        world = max(known.job.world_size, self._world)
        return replace(known, job=padded(known.job, world), summaries=summaries)
