"""Topologies among the inputs of an incident: the paths of its flows laid out anew.

A bundle that was captured without a topology has flows that take their nodes' own links. Where the switches are told
beside it (`ibnetdiscover`, a file of LLDP for each node, named after it), the flows take the links between them. Paths
that already name switches are kept: whoever wrote them may know the routing.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

import numpy as np

from diagnosis.contracts.incident import Fabric, Incident
from diagnosis.contracts.topology import Topology
from diagnosis.evidence.notes import Notes
from diagnosis.evidence.topology.ibnetdiscover import looks_like, parse_ibnetdiscover
from diagnosis.evidence.topology.lldp import Uplink, parse_lldp, topology_of
from diagnosis.evidence.topology.paths import End, links_of, unseen_ways

IBNETDISCOVER: Final = "output of ibnetdiscover"
LLDP: Final = "LLDP of a node"
KINDS: Final = (IBNETDISCOVER, LLDP)
WHERE: Final = "topology"
_LLDP_HEAD: Final = re.compile(rb'\s*\{\s*"lldp"\s*:')
_NODE_OF_FILE: Final = re.compile(r"(?:lldp[-_])?(.+?)(?:[-_.]lldp)?(?:\.json0?|\.txt)?")


def recognise(head: bytes) -> str | None:
    """Which of KINDS a file is that begins so, or None."""
    if _LLDP_HEAD.match(head):
        return LLDP
    return IBNETDISCOVER if looks_like(head) else None


class ToldTopology:
    """What inputs tell. The last output of ibnetdiscover counts before any LLDP."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._whole: Topology | None = None
        self._uplinks: dict[str, list[Uplink]] = {}

    def take(self, name: str, kind: str, content: bytes) -> None:
        """One file. Raises AgentFault or OperatorFault where it cannot be understood."""
        if kind == IBNETDISCOVER:
            self._whole = parse_ibnetdiscover(content.decode(errors="replace"), name.rsplit("/", 1)[-1])
            return
        node = _NODE_OF_FILE.fullmatch(name.rsplit("/", 1)[-1])
        if node is not None:
            self._uplinks[node[1]] = parse_lldp(content)

    def lay_out(self, incident: Incident) -> Incident:
        """The incident with its flows on the links that are told; as it is where none are, or where it knows better."""
        fabric = incident.fabric
        if self._whole is None and not self._uplinks:
            return incident
        if fabric is None or not len(fabric.gbps):
            self._notes.add(WHERE, "no flows are told, so no path is needed")
            return incident
        if not {*fabric.a, *fabric.b} <= {*incident.job.node_names, ""}:
            self._notes.add(WHERE, "the flows' paths name switches already and are kept")
            return incident
        topology = self._whole if self._whole is not None else topology_of(self._uplinks)
        ends = [(_end(incident, src), _end(incident, dst)) for src, dst in zip(fabric.src, fabric.dst, strict=True)]
        for note in unseen_ways(topology, {end for pair in ends for end in pair if end[0]}):
            self._notes.add(WHERE, note)
        return replace(incident, fabric=_laid_out(incident, fabric, topology, ends, self._notes))


def _end(incident: Incident, rank: int) -> End:
    """Node and port of a rank; "" where it is not known."""
    job = incident.job
    if rank < 0 or job.node[rank] < 0:
        return "", ""
    gpu = int(job.gpu[rank])
    return job.node_names[job.node[rank]], job.nic_of_gpu.get(gpu, f"mlx5_{gpu}") if gpu >= 0 else ""


def _laid_out(
    incident: Incident, fabric: Fabric, topology: Topology, ends: list[tuple[End, End]], notes: Notes
) -> Fabric:
    known = [flow for flow, (one, other) in enumerate(ends) if one[0] and other[0] and one[0] != other[0]]
    lost = len(ends) - len(known)
    notes.add(WHERE, "a flow inside a node, or of a rank whose node is not known, takes no link", count=lost)
    links = links_of(topology, [ends[flow] for flow in known])
    paths: list[list[int]] = [[] for _ in ends]
    for flow, path in zip(known, links.paths, strict=True):
        paths[flow] = path
    path_of = {frozenset(pair): path for pair, path in zip(ends, paths, strict=True)}
    probes = [
        replace(probe, path=tuple(path_of.get(frozenset(_end(incident, rank) for rank in (probe.src, probe.dst)), ())))
        for probe in fabric.probes
    ]
    return replace(
        fabric,
        links=tuple(links.names),
        a=tuple(links.a),
        b=tuple(links.b),
        capacity_gbps=np.full(len(links.names), np.nan),
        path_start=np.concatenate([[0], np.cumsum([len(path) for path in paths])]).astype(np.int64),
        path=np.array([link for path in paths for link in path], np.int32),
        probes=tuple(probes),
    )
