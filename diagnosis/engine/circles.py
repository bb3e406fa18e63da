"""Deadlocks: ranks that wait for each other in a circle, because they called collectives in different orders.

The graph has ranks and communicators as nodes: a rank points to the communicator that it stands inside, a
communicator to the members that have not entered. A circle is a strongly connected part with more than one rank.
Whoever called in another order than the rest is the one without whom there would be no circle. Where that holds for
more than one (two ranks against each other), the guilty one stands alone, or beside ranks that nobody waits for,
while the rest stand beside each other and are all waited for somewhere. If that tells nobody apart either, nobody is
named.

Point-to-point edges are left out: a sender that has sent goes on, and its receiver's edge to it would be none.
"""

from __future__ import annotations

from dataclasses import dataclass

import networkx as nx
import numpy as np

from diagnosis.contracts.incident import Kind
from diagnosis.engine.lanes import Bools, Lanes

EDGES_MAX = 500_000
NAMED_MAX = 64
CANDIDATES_MAX = 128
ALIKE_MAX = 0.34


@dataclass(frozen=True, slots=True)
class Circle:
    """`ranks` of the circle, and those `odd` among them that the rest are right against."""

    ranks: list[int]
    odd: list[int]


def find_circle(lanes: Lanes, standing: Bools, behind: Bools) -> Circle:
    """The greatest circle of a stall; empty where there is none.

    `standing` (M,): lanes in whose round their rank may stand; `behind` (M,): lanes that others wait for.
    """
    pending = standing & (lanes.incident.communicators.kind[lanes.comm] != Kind.P2P)
    inside, missed = np.flatnonzero(pending), np.flatnonzero(behind)
    if not len(inside) or not len(missed) or len(inside) + len(missed) > EDGES_MAX:
        return Circle([], [])
    graph: nx.DiGraph[int] = nx.DiGraph()
    comms = lanes.world + lanes.comm.astype(np.int64)  # numbers of communicators follow those of ranks
    graph.add_edges_from(zip(lanes.rank[inside].tolist(), comms[inside].tolist(), strict=True))
    graph.add_edges_from(zip(comms[missed].tolist(), lanes.rank[missed].tolist(), strict=True))
    parts = list(nx.strongly_connected_components(graph))
    ranks = max((sorted(node for node in part if node < lanes.world) for part in parts), key=len, default=[])
    if len(ranks) < 2:
        return Circle([], [])
    member = np.zeros(lanes.world, np.bool_)
    member[ranks] = True
    odd = _odd(lanes, pending, behind, member)
    return Circle(ranks[:NAMED_MAX], _guilty(graph, parts, ranks, odd)[:NAMED_MAX])


def _guilty(graph: nx.DiGraph[int], parts: list[set[int]], ranks: list[int], odd: list[int]) -> list[int]:
    """Ranks without whom there would be no circle, told apart by `odd` where there are several."""
    circle = graph.subgraph(next(part for part in parts if ranks[0] in part))
    keys = []
    for rank in ranks if len(ranks) <= CANDIDATES_MAX else odd[:CANDIDATES_MAX]:
        rest = circle.subgraph([node for node in circle if node != rank])
        if nx.is_directed_acyclic_graph(rest):
            keys.append(rank)
    if len(keys) <= 1:
        return keys or odd
    both = [rank for rank in keys if rank in odd]
    return both if len(both) == 1 else []


def _odd(lanes: Lanes, pending: Bools, behind: Bools, member: Bools) -> list[int]:
    waited_for = lanes.ranks_in(behind)
    beside = lanes.members_in(pending)[lanes.comm] - 1
    theirs = (pending & waited_for[lanes.rank]).astype(np.float64)
    alike = np.nan_to_num(lanes.over_members(theirs, np.add))[lanes.comm] - theirs
    unlike = (beside > 0) & (alike <= ALIKE_MAX * beside)
    crowd = lanes.over_lanes_of_rank(np.where(behind, beside + 1, 0.0), np.maximum, 0.0)
    lonely = (beside == 0) & (crowd[lanes.rank] >= 2)
    odd = sorted({int(rank) for rank in lanes.rank[pending & member[lanes.rank] & (unlike | lonely)]})
    return odd if len(odd) < int(member.sum()) else []
