"""Slurm's topology.conf, ibnetdiscover's output and LLDP become the same: the switches above each node and switch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from controller.settings import TopologySettings
from controller.topology import read_topology
from diagnosis.contracts.errors import AgentFault, OperatorFault
from diagnosis.contracts.topology import Topology, joined
from diagnosis.evidence.topology.ibnetdiscover import looks_like, parse_ibnetdiscover
from diagnosis.evidence.topology.lldp import parse_lldp, topology_of
from diagnosis.evidence.topology.paths import links_of, unseen_ways
from remediation.backends.topology import parse_topology
from tests.cables import Cables

TREE = """\
# two racks
SwitchName=leaf1 Nodes=gpu[001-002] LinkSpeed=400
switchname=leaf2 nodes=gpu003,gpu004
SwitchName=spine \\
  Switches=leaf[1-2]
"""


def test_each_name_has_the_switch_above_it() -> None:
    assert parse_topology(TREE).above == {
        "gpu001": ("leaf1",),
        "gpu002": ("leaf1",),
        "gpu003": ("leaf2",),
        "gpu004": ("leaf2",),
        "leaf1": ("spine",),
        "leaf2": ("spine",),
    }


def test_several_parents_are_all_kept_and_nothing_is_above_itself() -> None:
    text = "SwitchName=a Nodes=n1\nSwitchName=b Nodes=n1 Switches=b\nBlockName=x Nodes=n2\n"
    assert parse_topology(text).above == {"n1": ("a", "b")}


@pytest.mark.parametrize("line", ["SwitchName=a Nodes=n[1-", "SwitchName=a Switches=s[b"])
def test_a_list_that_is_none_is_told_with_its_line(line: str) -> None:
    with pytest.raises(OperatorFault, match=r"topology\.conf:2"):
        parse_topology(f"# x\n{line}\n")


def test_a_file_that_is_not_there_is_the_operators_fault(tmp_path: Path) -> None:
    with pytest.raises(OperatorFault, match=r"topology\.file"):
        read_topology(TopologySettings(source="slurm", file=tmp_path / "topology.conf"))


@pytest.mark.parametrize(("source", "file"), [("slurm", None), ("ibnetdiscover", None), ("lldp", "/x"), ("none", "/x")])
def test_a_source_that_reads_no_file_has_none(source: str, file: str | None) -> None:
    with pytest.raises(ValueError, match="need a file"):
        TopologySettings.model_validate({"source": source, "file": file})


# -- ibnetdiscover ---------------------------------------------------------------------------------------------------


def _fat_tree() -> Cables:
    """Two leaves of two nodes each, two spines above both; SHARP's aggregation nodes in the spines."""
    fabric = Cables()
    spines = [fabric.device(f"5a{at:014x}", "Switch", f"MF0;spine{at}:MQM8700/U1") for at in (1, 2)]
    for leaf in (1, 2):
        switch = fabric.device(f"1e{leaf:014x}", "Switch", f"MF0;leaf{leaf}:MQM8700/U1")
        for node in (2 * leaf - 1, 2 * leaf):
            fabric.join(fabric.device(f"0c{node:014x}", "Ca", f"gpu00{node} mlx5_0"), switch)
        for spine in spines:
            fabric.join(switch, spine)
    for at, spine in enumerate(spines):
        fabric.join(fabric.device(f"a9{at:014x}", "Ca", "Mellanox Technologies Aggregation Node"), spine)
    return fabric


def test_heights_follow_from_hosts_and_all_spines_are_kept() -> None:
    text = _fat_tree().text()
    assert looks_like(text.encode())
    topology = parse_ibnetdiscover(text)
    assert topology.above == {
        "gpu001": ("leaf1",),
        "gpu002": ("leaf1",),
        "gpu003": ("leaf2",),
        "gpu004": ("leaf2",),
        "leaf1": ("spine1", "spine2"),
        "leaf2": ("spine1", "spine2"),
    }
    assert topology.of_port["gpu003", "mlx5_0"] == "leaf2"
    assert topology.unseen == ()


def test_a_path_through_one_of_several_spines_is_one_place_and_that_is_said() -> None:
    topology = parse_ibnetdiscover(_fat_tree().text())
    ends = [(("gpu001", ""), ("gpu003", "")), (("gpu001", ""), ("gpu002", "")), (("gpu002", ""), ("gpu004", ""))]
    links = links_of(topology, ends)
    named = [[links.names[link] for link in path] for path in links.paths]
    assert named[0] == ["gpu001-leaf1", "leaf1-leaf2", "gpu003-leaf2"]
    assert named[1] == ["gpu001-leaf1", "gpu002-leaf1"], "within a leaf nothing beyond it is passed"
    assert unseen_ways(topology, [end for pair in ends for end in pair]) == [
        "which of several switches above leaf1, leaf2 a connection takes is not told: they are one place"
    ]


def test_switches_without_a_name_of_their_own_go_by_chip_or_guid() -> None:
    fabric = Cables()
    names = ["MF0;core:CS8500/L01/U1", "MF0;core:CS8500/L02/U1", "Quantum Mellanox Technologies"]
    switches = [fabric.device(f"{at:016x}", "Switch", name) for at, name in enumerate(names)]
    for at, switch in enumerate(switches):
        fabric.join(fabric.device(f"{at + 16:016x}", "Ca", f"gpu{at}.cluster HCA-1"), switch)
    above = parse_ibnetdiscover(fabric.text()).above
    assert above == {"gpu0": ("core/L01/U1",), "gpu1": ("core/L02/U1",), "gpu2": (f"S-{2:016x}",)}


def test_what_leads_neither_up_nor_down_and_whom_no_host_reaches_is_said() -> None:
    fabric = _fat_tree()
    fabric.join(f"1e{1:014x}", f"1e{2:014x}")
    fabric.device("ff", "Switch", "MF0;lonely:MQM8700/U1")
    fabric.device("fe", "Rt", "router")
    unseen = parse_ibnetdiscover(fabric.text(), "ib.txt").unseen
    assert [note.split(": ")[1].split()[0] for note in unseen] == ["1", "1", "1"]


@pytest.mark.parametrize("text", ["", "hello", 'Ca 1 "H-1" # "gpu1 mlx5_0"\n[1](1) "S-2"[1]'])
def test_a_text_without_switches_is_no_fabric(text: str) -> None:
    with pytest.raises(OperatorFault, match="no switch"):
        parse_ibnetdiscover(text)


# -- LLDP ------------------------------------------------------------------------------------------------------------


def _neighbour(name: str | None, *capabilities: tuple[str, bool]) -> dict[str, object]:
    """As lldpd tells a neighbour in `json`."""
    chassis: dict[str, object] = {"id": {"type": "mac", "value": "00:00:5e:00:53:01"}, "descr": "a switch"}
    listed = [{"type": kind, "enabled": enabled} for kind, enabled in capabilities]
    if listed:
        chassis["capability"] = listed[0] if len(listed) == 1 else listed
    port = {"id": {"type": "ifname", "value": "Ethernet1/1"}, "ttl": "120"}
    return {
        "via": "LLDP",
        "rid": "1",
        "age": "0 day, 01:00:00",
        "chassis": {name: chassis} if name else chassis,
        "port": port,
    }


def _told(*interfaces: tuple[str, dict[str, object]]) -> bytes:
    listed = [{port: neighbour} for port, neighbour in interfaces]
    return json.dumps({"lldp": {"interface": listed[0] if len(listed) == 1 else listed}}).encode()


BRIDGE = ("Bridge", True)


def test_each_port_has_its_switch_whatever_form_it_is_told_in() -> None:
    two = _told(
        ("eth0", _neighbour("leaf1.dc.example", BRIDGE, ("Router", False))),
        ("eth1", _neighbour("leaf2", ("Router", True))),
        ("eth2", _neighbour("gpu007", ("Station", True))),
        ("eth3", _neighbour(None)),
        ("eth4", _neighbour("leaf1", BRIDGE)),
        ("eth4", _neighbour("leaf2", BRIDGE)),
    )
    assert parse_lldp(two) == [("eth0", "leaf1"), ("eth1", "leaf2"), ("eth3", "00:00:5e:00:53:01")]
    assert parse_lldp(_told(("eth0", _neighbour("leaf1", BRIDGE)))) == [("eth0", "leaf1")]
    chassis = [
        {
            "id": [{"type": "mac", "value": "x"}],
            "name": [{"value": "leaf1"}],
            "capability": [{"type": "Bridge", "enabled": True}],
        }
    ]
    full = {"lldp": [{"interface": [{"name": "eth0", "via": "LLDP", "chassis": chassis}]}]}
    assert parse_lldp(json.dumps(full).encode()) == [("eth0", "leaf1")]
    assert parse_lldp(b'{"lldp": {}}') == []


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff", b"[" * 100_000])
def test_what_is_no_lldp_is_refused(content: bytes) -> None:
    with pytest.raises(AgentFault):
        parse_lldp(content)


def test_a_node_s_port_decides_between_its_planes() -> None:
    rails = {node: [("eth0", "rail0"), ("eth1", "rail1")] for node in ("gpu001", "gpu002", "gpu003")}
    topology = topology_of(rails)
    assert topology.above["gpu001"] == ("rail0", "rail1")
    flows = [
        ((f"gpu00{one}", port), (f"gpu00{two}", port)) for port in ("eth0", "eth1") for one, two in ((1, 2), (2, 3))
    ]
    links = links_of(topology, flows)
    assert {end for end in links.b if end.startswith("rail")} == {"rail0", "rail1"}
    assert not set(links.paths[0]) & set(links.paths[2]), "planes share nothing"
    assert unseen_ways(topology, [end for flow in flows for end in flow]) == []
    assert len(unseen_ways(topology, [("gpu001", "ib0")])) == 1, "a port that is not told may lead to any plane"


def test_what_goes_round_in_circles_ends() -> None:
    topology = Topology(joined([("n1", "a"), ("a", "b"), ("b", "a"), ("n2", "b")]))
    assert len(links_of(topology, [(("n1", ""), ("n2", ""))]).names) == 1
