"""S2 located: which NIC, NVLink, link or switch explains the communicators whose transfer grew.

In a ring all rates drop together, so a slow communicator names nobody in it. Three kinds of witnesses narrow it
down, the surest first: what a NIC or GPU of a member says about itself, the flows of the fabric (`fabric`), and the
intersection of slow communicators less what is also in fast ones. Without any of them the class is certain and the
culprit is not.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from diagnosis.engine.blame import Blame
from diagnosis.engine.fabric import Place, behind_own_link, locate
from diagnosis.engine.lanes import Lanes
from diagnosis.engine.slowness import Slowness
from diagnosis.engine.witnesses import Finding, Witnesses

NIC_SAYS = ("nic_fault", "nic_degraded", "transceiver_errors", "pfc_storm", "lossy_path")
BUS_CAUSES = ("pcie_degraded",)
NAMED_MAX = 16


@dataclass(frozen=True, slots=True)
class Guilty:
    """One thing that slows the network. `findings`: what hardware says; empty where only flows or sets say so."""

    rank: int | None
    node: str | None
    cause: str
    findings: tuple[Finding, ...] = ()
    place: Place | None = None


def nic_of(lanes: Lanes, rank: int) -> tuple[str | None, int | None, str | None]:
    """Node, GPU and NIC of a rank; None unknown."""
    job = lanes.incident.job
    node, gpu = int(job.node[rank]), int(job.gpu[rank])
    name = job.node_names[node] if node >= 0 else None
    return name, gpu if gpu >= 0 else None, job.nic_of_gpu.get(gpu, f"mlx5_{gpu}") if gpu >= 0 else None


def find_guilty(lanes: Lanes, slow: Slowness, blame: Blame, witnesses: Witnesses) -> list[Guilty]:
    """Who slows the communicators of `blame`; empty where nothing tells."""
    transport = lanes.incident.communicators.transport
    inside = [comm for comm in blame.comms if transport[comm].upper() == "NVLINK"]
    across = [comm for comm in blame.comms if transport[comm].upper() != "NVLINK"]
    found = _of_nvlink(lanes, inside, witnesses)
    if across:
        found += _of_network(lanes, slow, across, witnesses)
    return found


def _members(lanes: Lanes, comms: list[int]) -> list[int]:
    return sorted({int(rank) for comm in comms for rank in lanes.rank[lanes.of_comm(comm)]})


def _of_nvlink(lanes: Lanes, comms: list[int], witnesses: Witnesses) -> list[Guilty]:
    found = []
    for rank in _members(lanes, comms):
        node, gpu, _ = nic_of(lanes, rank)
        if node is None:
            continue
        said = [f for f in witnesses.about(node, gpu, None) if f.cause == "nvlink_fault" and f.entity != ""]
        if said:
            found.append(Guilty(rank, node, "nvlink_fault", tuple(said)))
    return found[:NAMED_MAX]


def _of_network(lanes: Lanes, slow: Slowness, comms: list[int], witnesses: Witnesses) -> list[Guilty]:
    fabric = lanes.incident.fabric
    members = _members(lanes, comms)
    by_nic = [guilty for rank in members for guilty in [_nic_witness(lanes, rank, witnesses)] if guilty is not None]
    clean = set(_told_by_nic(lanes)) - {guilty.rank for guilty in by_nic}
    job = lanes.incident.job
    places = locate(fabric, clean | behind_own_link(job, fabric), job.node_names) if fabric is not None else []
    if by_nic:
        by_nic = _origin(by_nic)
        if len(by_nic) <= max(NAMED_MAX, len(members) // 4) and _explain_all(lanes, slow, comms, by_nic):
            return by_nic[:NAMED_MAX]
    named = [place for place in places if place.kind != "rank"]
    if named and named[0].flows >= max((place.flows for place in places if place.kind == "rank"), default=0):
        return [Guilty(None, None, place.cause, place=place) for place in named]
    if by_nic:
        return by_nic[:NAMED_MAX]
    ends = [place for place in places if place.kind == "rank"]
    if ends:
        rank = int(ends[0].name)
        return [Guilty(rank, nic_of(lanes, rank)[0], "unknown", place=ends[0])]
    return _by_intersection(lanes, comms)


def _nic_witness(lanes: Lanes, rank: int, witnesses: Witnesses) -> Guilty | None:
    """What the NIC of a rank, or the bus to its GPU, says of itself."""
    node, gpu, nic = nic_of(lanes, rank)
    if node is None:
        return None
    said = [f for f in witnesses.about(node, gpu, nic) if f.cause in NIC_SAYS and f.entity == nic]
    said += [f for f in witnesses.about(node, gpu, nic) if f.cause in BUS_CAUSES and f.entity == gpu]
    if not said:
        return None
    order = {cause: place for place, cause in enumerate((*NIC_SAYS[:1], "transceiver_errors", *NIC_SAYS, *BUS_CAUSES))}
    said.sort(key=lambda finding: order.get(finding.cause, 99))
    return Guilty(rank, node, said[0].cause, tuple(said))


def _told_by_nic(lanes: Lanes) -> list[int]:
    """Ranks whose NIC has told its counters."""
    ib, job = lanes.incident.ib, lanes.incident.job
    if ib is None:
        return []
    told = {(int(node), entity) for node, entity in zip(ib.node, ib.entity, strict=True)}
    names = [nic_of(lanes, rank)[2] for rank in range(lanes.world)]
    return [rank for rank, name in enumerate(names) if (int(job.node[rank]), name) in told]


def _origin(found: list[Guilty]) -> list[Guilty]:
    """Errors of a NIC's own come before losses on its path: those are also seen by the innocent at the other end."""
    own = [guilty for guilty in found if guilty.cause != "lossy_path"]
    return own or found


def _explain_all(lanes: Lanes, slow: Slowness, comms: list[int], found: list[Guilty]) -> bool:
    """Whether those found are in most of the slowest communicators; the others are slow for sharing a path."""
    ranks = np.array([guilty.rank for guilty in found if guilty.rank is not None], np.int64)
    greatest = max(float(slow.transfer_part[comm]) for comm in comms)
    slowest = [comm for comm in comms if slow.transfer_part[comm] >= 0.5 * greatest]
    explained = [comm for comm in slowest if np.isin(lanes.rank[lanes.of_comm(comm)], ranks).any()]
    return len(explained) >= 0.75 * len(slowest)


def _by_intersection(lanes: Lanes, comms: list[int]) -> list[Guilty]:
    """The one node whose ranks are in every slow communicator, if there are several and it is alone."""
    job = lanes.incident.job
    if len(comms) < 2:
        return []
    votes: Counter[int] = Counter()
    for comm in comms:
        votes.update({int(job.node[rank]) for rank in lanes.rank[lanes.of_comm(comm)] if job.node[rank] >= 0})
    everywhere = [node for node, count in votes.items() if count == len(comms)]
    if len(everywhere) != 1:
        return []
    return [Guilty(None, job.node_names[everywhere[0]], "unknown")]
