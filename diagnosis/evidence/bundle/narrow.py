"""Less of an incident, where all of it is too much to keep: suspects with those that they work with.

A rank is kept whole or not at all. Of a rank that waits in one communicator and whose word on that one is missing it
would look as if it waited nowhere, and so it would be taken for the culprit; a rank without any words is only unseen.
What is left out may still be what a verdict followed from, so `unseen` says how much it is. Summaries and fabric stay.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from diagnosis.contracts.incident import UNKNOWN, Communicators, Fabric, Frames, HealthTable, Incident, Ints
from diagnosis.evidence.bundle.files import ROW_NUMBERS

Bools = NDArray[np.bool_]


def part_of(incident: Incident, suspects: Collection[int], rows_max: int) -> Incident:
    """All words of `suspects`, and of all members of their communicators, the smallest first, within `rows_max` rows.

    The suspects are kept whatever they said: with `rows_max` 0 nobody else is.
    """
    frames, comms = incident.frames, incident.communicators
    said = np.bincount(frames.rank[frames.frame], minlength=incident.job.world_size)
    kept = np.zeros(incident.job.world_size, np.bool_)
    kept[list(suspects)] = True
    sizes = np.diff(comms.start)
    of_member = np.repeat(np.arange(len(comms.ids)), sizes)
    theirs = np.unique(of_member[kept[comms.member]])
    for comm in theirs[np.argsort(sizes[theirs], kind="stable")]:
        more = kept.copy()
        more[comms.member[comms.start[comm] : comms.start[comm + 1]]] = True
        if said[more].sum() > rows_max:
            break
        kept = more
    return _only(incident, kept)


def _only(incident: Incident, kept: Bools) -> Incident:
    """What is known of the ranks that are `kept` (W,) and of their nodes."""
    frames, job = incident.frames, incident.job
    rows = kept[frames.rank[frames.frame]]
    comms = np.zeros(len(incident.communicators.ids), np.bool_)
    comms[frames.comm[rows]] = True
    nodes = np.unique(job.node[kept])
    names = {job.node_names[node] for node in nodes.tolist() if node >= 0}
    count = int(kept.sum())
    note = f"too large to keep whole: only suspects and their nearest are, {count} of {job.world_size} ranks"
    return replace(
        incident,
        communicators=_communicators(incident.communicators, comms),
        frames=_frames(frames, rows, comms),
        process_state={rank: state for rank, state in incident.process_state.items() if kept[rank]},
        nvml=_table(incident.nvml, nodes),
        ib=_table(incident.ib, nodes),
        host=_table(incident.host, nodes),
        kernel_log=tuple(line for line in incident.kernel_log if line.node in names),
        fabric=_fabric(incident.fabric, comms),
        flights=tuple(line for line in incident.flights if kept[line.world_rank]),
        processes=tuple(line for line in incident.processes if kept[line.world_rank]),
        exits=tuple(line for line in incident.exits if kept[line.world_rank]),
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
    if not len(rows):
        return None
    return HealthTable(
        node=table.node[rows],
        entity=tuple(table.entity[at] for at in rows),
        values={name: column[rows] for name, column in table.values.items()},
    )


def _fabric(fabric: Fabric | None, comms: Bools) -> Fabric | None:
    if fabric is None or not len(comms):
        return fabric
    new = np.where(comms, np.cumsum(comms) - 1, UNKNOWN)
    return replace(fabric, comm=np.where(fabric.comm >= 0, new[fabric.comm], UNKNOWN).astype(np.int32))
