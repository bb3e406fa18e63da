"""The links that flows take through a topology, as places that can be told apart.

From both ends up to the first switch that both have above them. Where several switches are above, or none is told, the
way ends in one link to all that lies beyond. Links that the same flows take cannot be told apart and are one: of a job
on two nodes, the path between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from diagnosis.contracts.topology import Topology

BEYOND: Final = "fabric"
"""Stands in names for all that lies beyond what is told."""
SWITCHES_DEEP_MAX: Final = 16
NAMES_SHOWN: Final = 4

End = tuple[str, str]
"""A node, and its port ("": not known)."""


@dataclass(slots=True)
class Links:
    """Names and ends of links ("": beyond). `paths`: per flow, indices into `names`."""

    names: list[str] = field(default_factory=list)
    a: list[str] = field(default_factory=list)
    b: list[str] = field(default_factory=list)
    paths: list[list[int]] = field(default_factory=list)


def links_of(topology: Topology, flows: Sequence[tuple[End, End]]) -> Links:
    """The links of flows between ends on different nodes."""
    takers: dict[tuple[str, str], list[int]] = {}
    for flow, ends in enumerate(flows):
        for link in _path(topology, *ends):
            takers.setdefault(link, []).append(flow)
    alike: dict[tuple[int, ...], list[tuple[str, str]]] = {}
    for link, taken_by in takers.items():
        alike.setdefault(tuple(taken_by), []).append(link)
    found = Links(paths=[[] for _ in flows])
    nodes = {node for ends in flows for node, _ in ends}
    for taken_by_all, links in alike.items():
        a, b = _ends(links, nodes)
        for flow in taken_by_all:
            found.paths[flow].append(len(found.names))
        found.names.append(f"{a}-{b or BEYOND}")
        found.a.append(a)
        found.b.append(b)
    return found


def _ends(links: Sequence[tuple[str, str]], nodes: Collection[str]) -> tuple[str, str]:
    """The two ends of links that are one: the nodes', if two have an end there; else what only one of the links has."""
    counts = Counter(end for link in links for end in link)
    mine = sorted(end for end in counts if end in nodes)
    if len(mine) > 1:
        return mine[0], mine[1]
    alone = sorted((end for end in counts if counts[end] == 1), key=lambda end: (not end, end not in nodes, end))
    return (alone[0], alone[1]) if len(alone) == 2 else (links[0][0], links[-1][1])


def _path(topology: Topology, one: End, other: End) -> list[tuple[str, str]]:
    """Links as (lower end, upper end), up from both ends to where they meet."""
    ways = [_way_up(topology, end) for end in (one, other)]
    meeting = next(switch for switch in ways[0] if switch in ways[1])
    return [link for way in ways for link in pairwise(way[: way.index(meeting) + 1])]


def _way_up(topology: Topology, end: End) -> list[str]:
    """The node and the switches above it; "" at the end: what lies beyond."""
    node, port = end
    way = [node]
    while len(way) < SWITCHES_DEEP_MAX and (above := topology.next_above(way[-1], port if way[-1] == node else "")):
        if above in way:
            break
        way.append(above)
    return [*way, ""]


def unseen_ways(topology: Topology, ends: Iterable[End]) -> list[str]:
    """What a topology leaves open for these ends, for people; with what its source could not tell."""
    open_at: set[str] = set()
    for end in ends:
        way = _way_up(topology, end)
        last = way[-2]
        if topology.next_above(last, end[1] if last == end[0] else "") == "":
            open_at.add(last)
    notes = list(topology.unseen)
    if open_at:
        shown = sorted(open_at)
        more = f" and {len(shown) - NAMES_SHOWN} others" if len(shown) > NAMES_SHOWN else ""
        names = ", ".join(shown[:NAMES_SHOWN]) + more
        notes.append(f"which of several switches above {names} a connection takes is not told: they are one place")
    return notes
