"""Connections over which nothing moves any more, and whose doing that is.

What all dead flows have in common is guilty (`fabric.locate`). A flow with an end at a rank that is silent too is no
sign of life where its other end has nothing under way: what the silent end sends in vain is told by nobody.

Where the dead flows have no single thing in common, each of them still says that the path between two nodes is dead,
and not at which of its ends. In a ring that stands still most flows are idle, so a dead node's link may show in one
flow alone; which of two links it is, no count of transfer steps tells, for the lowest may stand at the wrong end.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from diagnosis.contracts.incident import Fabric, Incident, Job
from diagnosis.contracts.verdict import Culprit, EvidenceItem
from diagnosis.engine.fabric import Place, behind_own_link, dead_flows, locate
from diagnosis.engine.lanes import Bools

FLOWS_DEAD: Final = 0.95  # what all dead flows have in common: 952 of 952
LINK_UNSURE: Final = 0.55  # the connection between two ranks or nodes, and no more
BETWEEN_MAX: Final = 4


def in_common(incident: Incident) -> tuple[list[Culprit], list[EvidenceItem]]:
    """The links or switches that all dead flows have in common; empty where no flow is dead, or nothing is common."""
    fabric = incident.fabric
    if fabric is None or not dead_flows(fabric).any():
        return [], []
    job = incident.job
    spared = _well_connected(incident) | behind_own_link(job, fabric)
    places = locate(fabric, spared, job.node_names, _untold(incident, fabric))
    places = [one for one in places if one.kind in ("link", "switch")]
    evidence = [EvidenceItem(kind="flows", text=place.text, witness="network") for place in places]
    return [_culprit(place) for place in places], evidence


def between(incident: Incident) -> tuple[list[Culprit], list[EvidenceItem]]:
    """The pairs of nodes between which flows are dead, for where `in_common` finds nothing."""
    fabric = incident.fabric
    if fabric is None:
        return [], []
    pairs = {tuple(sorted(_ends(incident.job, fabric, flow))) for flow in np.flatnonzero(dead_flows(fabric)).tolist()}
    names = sorted("-".join(pair) for pair in pairs if len(pair) == 2)[:BETWEEN_MAX]
    text = "data is under way and nothing is acknowledged; which end it is nothing tells"
    evidence = [EvidenceItem(kind="flows", text=f"between {name} {text}", witness="network") for name in names]
    return [link_between(name) for name in names], evidence


def link_between(name: str) -> Culprit:
    """A connection of which it is not known at which end it fails."""
    return Culprit(kind="link", link=name, cause="link_fault", domain="network", confidence=LINK_UNSURE)


def _culprit(place: Place) -> Culprit:
    link, switch = (place.name if place.kind == kind else None for kind in ("link", "switch"))
    sure = FLOWS_DEAD
    return Culprit(
        kind=place.kind,
        link=link,
        switch=switch,
        node=place.node,
        cause="link_fault",
        domain="network",
        confidence=sure,
    )


def _untold(incident: Incident, fabric: Fabric) -> Bools:
    """Flows of which nobody could tell that they are dead (P,): those of silent ranks that are not."""
    spoke = np.zeros(max(incident.job.world_size, 1), np.bool_)
    spoke[incident.frames.rank] = True
    ends = np.stack([fabric.src, fabric.dst])
    silent = (ends >= 0) & ~spoke[np.maximum(ends, 0)]
    return np.asarray(silent.any(axis=0) & ~dead_flows(fabric), np.bool_)


def _ends(job: Job, fabric: Fabric, flow: int) -> set[str]:
    """The nodes at the ends of a flow, as far as they are known."""
    ranks = (int(fabric.src[flow]), int(fabric.dst[flow]))
    return {job.node_names[job.node[rank]] for rank in ranks if rank >= 0 and job.node[rank] >= 0}


def _well_connected(incident: Incident) -> set[int]:
    """Ranks whose NIC has told that its link is up: dead flows are not its doing."""
    table, job = incident.ib, incident.job
    if table is None or "link" not in table.values:
        return set()
    up = np.flatnonzero((table.values["link"] > 0) & (table.node >= 0))
    told = {(job.node_names[table.node[row]], table.entity[row]) for row in up}
    found = set()
    for rank, (node, gpu) in enumerate(zip(job.node.tolist(), job.gpu.tolist(), strict=True)):
        if node >= 0 and gpu >= 0 and (job.node_names[node], job.nic_of_gpu.get(gpu, f"mlx5_{gpu}")) in told:
            found.add(rank)
    return found
