"""Less of an incident, where all of it is too much to keep: the suspects with those that they work with, or alone.

What is left out may be what a verdict followed from, so `unseen` says how much it is. Summaries and the fabric stay
whole.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from diagnosis.contracts.incident import Communicators, Frames, HealthTable, Incident, Ints
from diagnosis.evidence.bundle.files import ROW_NUMBERS

Bools = NDArray[np.bool_]


def with_neighbours(incident: Incident, ranks: Collection[int]) -> Incident:
    """All words about the communicators of `ranks`, and no others."""
    comms = incident.communicators
    of_member = np.repeat(np.arange(len(comms.ids)), np.diff(comms.start))
    theirs = np.zeros(len(comms.ids), np.bool_)
    theirs[of_member[np.isin(comms.member, list(ranks))]] = True
    rows = theirs[incident.frames.comm]
    return _part(incident, rows, theirs, "only words about the communicators of suspects are kept")


def alone(incident: Incident, ranks: Collection[int]) -> Incident:
    """Only what `ranks` themselves said."""
    frames = incident.frames
    rows = np.isin(frames.rank[frames.frame], list(ranks))
    used = np.zeros(len(incident.communicators.ids), np.bool_)
    used[frames.comm[rows]] = True
    return _part(incident, rows, used, "only words of suspects are kept")


def _part(incident: Incident, rows: Bools, comms: Bools, what: str) -> Incident:
    """The incident with some rows of its frames; `comms` are the communicators that these speak of."""
    frames, job = incident.frames, incident.job
    ranks = np.unique(frames.rank[frames.frame[rows]])
    kept, nodes = set(ranks.tolist()), np.unique(job.node[ranks])
    names = {job.node_names[node] for node in nodes.tolist() if node >= 0}
    note = f"too large to keep whole: {what}, {int(rows.sum())} of {len(rows)}"
    return replace(
        incident,
        communicators=_communicators(incident.communicators, comms),
        frames=_frames(frames, rows, comms),
        process_state={rank: state for rank, state in incident.process_state.items() if rank in kept},
        nvml=_table(incident.nvml, nodes),
        ib=_table(incident.ib, nodes),
        host=_table(incident.host, nodes),
        kernel_log=tuple(line for line in incident.kernel_log if line.node in names),
        unseen=(note, *incident.unseen),
    )


def _communicators(comms: Communicators, keep: Bools) -> Communicators:
    chosen = np.flatnonzero(keep)
    sizes = np.diff(comms.start)
    return Communicators(
        ids=tuple(comms.ids[at] for at in chosen),
        start=np.concatenate([[0], np.cumsum(sizes[chosen])]).astype(np.int64),
        member=comms.member[np.repeat(keep, sizes)],
        kind=comms.kind[chosen],
        algo=tuple(comms.algo[at] for at in chosen),
        transport=tuple(comms.transport[at] for at in chosen),
    )


def _frames(frames: Frames, rows: Bools, comms: Bools) -> Frames:
    used = np.zeros(len(frames.rank), np.bool_)
    used[frames.frame[rows]] = True
    new_frame, new_comm = np.cumsum(used) - 1, np.cumsum(comms) - 1
    return Frames(
        rank=frames.rank[used],
        t_ms=frames.t_ms[used],
        window_ms=frames.window_ms[used],
        frame=new_frame[frames.frame[rows]].astype(np.int32),
        comm=new_comm[frames.comm[rows]].astype(np.int32),
        peer=frames.peer[rows],
        state=frames.state[rows],
        signature=frames.signature[rows],
        signatures=frames.signatures,
        **{name: getattr(frames, name)[rows] for name in ROW_NUMBERS},
    )


def _table(table: HealthTable | None, nodes: Ints) -> HealthTable | None:
    if table is None:
        return None
    rows = np.flatnonzero(np.isin(table.node, nodes))
    return HealthTable(
        node=table.node[rows],
        entity=tuple(table.entity[at] for at in rows),
        values={name: column[rows] for name, column in table.values.items()},
    )
