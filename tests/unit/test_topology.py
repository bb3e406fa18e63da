"""Slurm's topology.conf becomes a tree of switches."""

from __future__ import annotations

from pathlib import Path

import pytest

from diagnosis.contracts.errors import OperatorFault
from remediation.backends.topology import parse_topology, read_topology

TREE = """\
# two racks
SwitchName=leaf1 Nodes=gpu[001-002] LinkSpeed=400
switchname=leaf2 nodes=gpu003,gpu004
SwitchName=spine \\
  Switches=leaf[1-2]
"""


def test_each_name_has_the_switch_above_it() -> None:
    assert parse_topology(TREE) == {
        "gpu001": "leaf1",
        "gpu002": "leaf1",
        "gpu003": "leaf2",
        "gpu004": "leaf2",
        "leaf1": "spine",
        "leaf2": "spine",
    }


def test_of_several_parents_the_first_counts_and_nothing_is_above_itself() -> None:
    text = "SwitchName=a Nodes=n1\nSwitchName=b Nodes=n1 Switches=b\nBlockName=x Nodes=n2\n"
    assert parse_topology(text) == {"n1": "a"}


@pytest.mark.parametrize("line", ["SwitchName=a Nodes=n[1-", "SwitchName=a Switches=s[b"])
def test_a_list_that_is_none_is_told_with_its_line(line: str) -> None:
    with pytest.raises(OperatorFault, match=r"topology\.conf:2"):
        parse_topology(f"# x\n{line}\n")


def test_a_file_that_is_not_there_is_the_operators_fault(tmp_path: Path) -> None:
    with pytest.raises(OperatorFault, match="topology_file"):
        read_topology(tmp_path / "topology.conf")
