"""Slurm's topology.conf(5): which switch is above each node and each switch.

Of `topology/tree` only: lines `SwitchName=leaf1 Nodes=gpu[001-004]` and `SwitchName=spine Switches=leaf[1-2]`. Where a
name has several parents (a fat tree told in full) the first counts: Slurm takes it so too. Lines of other kinds
(`LinkSpeed` alone, blocks) are passed over.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ClusterShell.NodeSet import NodeSetException

from diagnosis.contracts.errors import OperatorFault
from remediation.backends.parse import hosts

FILE_BYTES_MAX: Final = 16 << 20


def read_topology(path: Path) -> dict[str, str]:
    """The switch above each name. Raises OperatorFault where the file cannot be read or understood."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise OperatorFault(f"slurm.topology_file {path}: {error.strerror}", reason="config") from error
    if len(data) > FILE_BYTES_MAX:
        raise OperatorFault(f"{path}: more than {FILE_BYTES_MAX} bytes are no topology", reason="config")
    return parse_topology(data.decode(errors="replace"), str(path))


def parse_topology(text: str, name: str = "topology.conf") -> dict[str, str]:
    """See `read_topology`."""
    above: dict[str, str] = {}
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
            for one in below:
                if one != switch:
                    above.setdefault(one, switch)
    return above
