"""`tocsin diagnose` with a bundle and, beside it, what tells the switches between its nodes."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np

from diagnosis.contracts.incident import Incident
from diagnosis.contracts.topology import Topology, joined
from diagnosis.engine.fabric import locate
from diagnosis.engine.live import incident_of
from diagnosis.evidence.bundle.writer import write_bundle
from diagnosis.evidence.gather import Evidence, gather
from tests.cables import Cables
from tests.unit.test_engine_flows import _healthy

NODES = 8


def _captured(topology: Topology | None = None) -> Incident:
    """A ring over eight nodes, two below each leaf; what leaves or enters the second leaf is late."""
    history, wires = _healthy(NODES, 1, topology)
    incident = incident_of(history, {}, wires.job.now_ms / 1000)
    fabric = incident.fabric
    assert fabric is not None
    late = [{int(src), int(dst)} in ({1, 2}, {3, 4}) for src, dst in zip(fabric.src, fabric.dst, strict=True)]
    return replace(incident, fabric=replace(fabric, dragged=np.where(late, 0.7, 0.02)))


def _read(incident: Incident, **more: str) -> Evidence:
    inputs = {f"b/{name}": content for name, content in write_bundle(incident).items()}
    inputs |= {f"b/{name}": content.encode() for name, content in more.items()}
    return gather((name, [content]) for name, content in inputs.items())


def _cables() -> str:
    fabric = Cables()
    spine = fabric.device("5a", "Switch", "MF0;spine1:MQM8700/U1")
    for leaf in range(1, 5):
        switch = fabric.device(f"1e{leaf}", "Switch", f"MF0;leaf{leaf}:MQM8700/U1")
        for node in (2 * leaf - 1, 2 * leaf):
            fabric.join(fabric.device(f"0c{node}", "Ca", f"gpu00{node} mlx5_0"), switch)
        fabric.join(switch, spine)
    return fabric.text()


def _named(evidence: Evidence) -> list[str]:
    assert evidence.incident is not None and evidence.incident.fabric is not None
    incident = evidence.incident
    assert incident.fabric is not None
    ranks = range(incident.job.world_size)  # as where every NIC has told that it is well
    return [place.name for place in locate(incident.fabric, ranks, incident.job.node_names)]


def test_the_link_above_a_leaf_is_named_once_the_cables_are_told() -> None:
    incident = _captured()
    assert "leaf2-spine1" not in _named(_read(incident))
    evidence = _read(incident, **{"fabric.txt": _cables()})
    assert _named(evidence) == ["leaf2-spine1"]
    assert evidence.incident is not None and evidence.incident.fabric is not None
    assert set(np.diff(evidence.incident.fabric.path_start).tolist()) == {2, 4}, "within a leaf, and across the spine"


def test_lldp_of_each_node_tells_its_leaf() -> None:
    def told(leaf: str) -> str:
        return json.dumps(
            {"lldp": {"interface": [{"eth0": {"chassis": {leaf: {"id": {"type": "mac", "value": "x"}}}}}]}}
        )

    files = {f"gpu00{node}.json": told(f"leaf{(node + 1) // 2}") for node in range(1, NODES + 1)}
    evidence = _read(_captured(), **files)
    assert _named(evidence) == ["leaf2-fabric"]
    assert evidence.unseen == ()


def test_paths_that_name_switches_are_kept_and_that_is_said() -> None:
    tree = Topology(joined((f"gpu00{node}", f"rack{node % 2}") for node in range(1, NODES + 1)))
    incident = _captured(tree)
    assert incident.fabric is not None
    evidence = _read(incident, **{"fabric.txt": _cables()})
    assert evidence.incident is not None and evidence.incident.fabric is not None
    assert evidence.incident.fabric.links == incident.fabric.links
    assert any("are kept" in note for note in evidence.unseen)


def test_a_topology_that_cannot_be_read_is_unseen_and_nothing_else() -> None:
    incident = _captured()
    broken = {"cables.txt": 'Ca\t1 "H-1"\t\t# "gpu001 mlx5_0"\n', "gpu001.json": '{"lldp": '}
    evidence = _read(incident, **broken)
    assert sorted(note.split(":")[0] for note in evidence.unseen) == ["b/cables.txt", "b/gpu001.json"]
    assert incident.fabric is not None and evidence.incident is not None and evidence.incident.fabric is not None
    assert evidence.incident.fabric.links == incident.fabric.links


def test_a_topology_alone_is_nothing_to_judge() -> None:
    evidence = gather([("cables.txt", [_cables().encode()])])
    assert not evidence.readable and evidence.incident is None
