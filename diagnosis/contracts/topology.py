"""The switches above nodes, whoever told them: Slurm, ibnetdiscover or LLDP.

Real fabrics are no trees. A node may have a port in each of several planes (rails), and in a fat tree every leaf has
many spines above it, of which a connection takes one that nobody tells: routing chooses it by addresses and ports, or
packet by packet. So a name may have several switches above it. For a node the port decides, where it is told which port
leads where; else all that lies beyond is one place, and what is lost thereby is said (`diagnosis.evidence.topology`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

NAME_CHARS_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class Topology:
    """`above`: the switches above each node and each switch. `of_port`: the switch that a node's port leads to, by
    (node, port), as far as it is told. `unseen`: what the source told and this cannot hold, for people."""

    above: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    of_port: Mapping[tuple[str, str], str] = field(default_factory=dict)
    unseen: tuple[str, ...] = ()

    def next_above(self, name: str, port: str = "") -> str | None:
        """The one switch above a name, by its port where it has several. "": one of several; None: none is told."""
        of_port = self.of_port.get((name, port))
        if of_port is not None:
            return of_port
        above = self.above.get(name, ())
        return above[0] if len(above) == 1 else "" if above else None


def joined(pairs: Iterable[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    """`above` of pairs (name, switch above it), in their order and each once; nothing is above itself."""
    found: dict[str, dict[str, None]] = {}
    for name, switch in pairs:
        if name != switch:
            found.setdefault(name, {})[switch] = None
    return {name: tuple(switches) for name, switches in found.items()}
