"""Slurm's topology.conf(5): which switches are above each node and each switch.

Of `topology/tree` only: lines `SwitchName=leaf1 Nodes=gpu[001-004]` and `SwitchName=spine Switches=leaf[1-2]`. Lines of
other kinds (`LinkSpeed` alone, blocks) are passed over.
"""

from __future__ import annotations

from ClusterShell.NodeSet import NodeSetException

from diagnosis.contracts.errors import OperatorFault
from diagnosis.contracts.topology import Topology, joined
from remediation.backends.parse import hosts


def parse_topology(text: str, name: str = "topology.conf") -> Topology:
    """The switches above each name. Raises OperatorFault where the text cannot be understood."""
    pairs: list[tuple[str, str]] = []
    for number, line in enumerate(text.replace("\\\n", " ").splitlines(), 1):
        words = line.partition("#")[0].split()
        told = {key.lower(): value for key, _, value in (word.partition("=") for word in words)}
        switch = told.get("switchname")
        if not switch:
            continue
        for key in ("nodes", "switches"):
            try:
                below = hosts(told.get(key, ""))
            except (ValueError, NodeSetException) as error:
                raise OperatorFault(f"{name}:{number}: {key}: {error}", reason="config") from error
            pairs += [(one, switch) for one in below]
    return Topology(joined(pairs))
