"""The causal graph as data, and the sheet on which it is drafted.

Nodes and links are small and plain, so that every way of writing them (JSON, DOT, SVG) needs nothing else. The draft is
a networkx graph: it forgets what is said twice, finds the roots and cuts the whole down to a size that people read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec
import networkx as nx

SCHEMA: Final = "tocsin.graph/1"
NODES_MAX: Final = 60
ID_CHARS_MAX: Final = 300
DETAILS_MAX: Final = 4
CROWD: Final = "ranks:"
WAITS_FOR: Final = "waits-for"
DELAYED_BY: Final = "delayed-by"
RUNS_ON: Final = "runs-on"
PASSES_THROUGH: Final = "passes-through"
EXPLAINED_BY: Final = "explained-by"
MAY_WAIT_FOR: Final = "may-wait-for"
STANDS_IN: Final = "stands-in"
AGAINST: Final = "against"
CAUSAL: Final = (WAITS_FOR, DELAYED_BY)
"""The links that are followed to a root."""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One thing. `kind`: rank | communicator | gpu | node | nic | link | switch | job | function | finding.

    `role`: culprit | victim | between (a communicator) | hardware | finding. `count`: how many alike it stands for.
    """

    id: str
    kind: str
    role: str
    label: str
    details: list[str] = []
    count: int = 1


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """From effect to cause. `weight` in `unit`: how long somebody has waited (s), or what it costs (ms a round, ms a
    step); null: not told."""

    source: str
    target: str
    kind: str
    weight: float | None = None
    unit: str | None = None


class CausalGraph(msgspec.Struct, frozen=True, kw_only=True):
    """What led to the verdict, at most NODES_MAX nodes. `roots`: ids of the nodes at which waiting and delay end,
    found on the graph and not taken from the verdict. `pruned`: nodes that were left out for want of room."""

    title: str
    nodes: list[Node]
    links: list[Link]
    roots: list[str]
    pruned: int = 0
    schema: str = SCHEMA


def printable(text: str) -> str:
    """The same with everything that does not print (controls, marks that turn the direction of text) spelled out."""
    return text if text.isprintable() else "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)


def node_id(kind: str, name: object) -> str:
    """The id of a thing: its kind and its own name."""
    return f"{kind}:{printable(str(name))}"[:ID_CHARS_MAX]


class Draft:
    """A graph in the making. A node that is added again keeps its first words and its greatest importance."""

    def __init__(self) -> None:
        self.graph: nx.DiGraph[str] = nx.DiGraph()

    def add(
        self,
        key: str,
        kind: str,
        role: str,
        label: str,
        details: Iterable[str] = (),
        *,
        importance: int,
        count: int = 1,
    ) -> str:
        """Add a node; its id. Lower `importance` stays longer. A culprit stays one, whatever else it is."""
        if key in self.graph:
            known = self.graph.nodes[key]
            known["importance"] = min(known["importance"], importance)
            known["role"] = role if role == "culprit" else known["role"]
            words = [*known["details"], *(printable(line) for line in details if line)]
            known["details"] = list(dict.fromkeys(words))[:DETAILS_MAX]
            return key
        words = [printable(line) for line in details if line][:DETAILS_MAX]
        self.graph.add_node(
            key, kind=kind, role=role, label=printable(label), details=words, importance=importance, count=count
        )
        return key

    def link(self, source: str, target: str, kind: str, weight: float | None = None, unit: str | None = None) -> None:
        """Add a link; what is causal is not overwritten by what is not. A node is not its own cause."""
        if source == target or (self.graph.has_edge(source, target) and kind not in CAUSAL):
            return
        told = weight is not None and weight == weight and abs(weight) != float("inf")
        value = round(float(weight), 3) if weight is not None and told else None
        self.graph.add_edge(source, target, kind=kind, weight=value, unit=unit if told else None)

    def roots(self) -> list[str]:
        """Where waiting and delay end: nodes with none of their own that others wait for or are delayed by.

        A communicator is never a root: where a walk ends in one, nobody knows yet who is behind it.
        """
        causal = nx.subgraph_view(self.graph, filter_edge=lambda a, b: self.graph.edges[a, b]["kind"] in CAUSAL)
        return [
            key
            for key in causal
            if self.graph.nodes[key]["kind"] != "communicator"
            and causal.out_degree(key) == 0
            and (causal.in_degree(key) > 0 or self._is_first(key))
        ]

    def finish(self, title: str, nodes_max: int = NODES_MAX) -> CausalGraph:
        """The finished graph, cut down to the most important nodes."""
        roots = self.roots()
        pruned = self._prune(nodes_max)
        attributes = self.graph.nodes(data=True)
        nodes = [Node(id=key, **{k: v for k, v in of.items() if k != "importance"}) for key, of in attributes]
        links = [Link(source=a, target=b, **of) for a, b, of in self.graph.edges(data=True)]
        here = [root for root in roots if root in self.graph]
        return CausalGraph(title=printable(title), nodes=nodes, links=links, roots=here, pruned=pruned)

    def _prune(self, nodes_max: int) -> int:
        """Drop the least important nodes, the latest first; a rank that is dropped is counted with its like."""
        order = sorted(self.graph, key=lambda key: self.graph.nodes[key]["importance"])  # stable: as they were added
        dropped = order[nodes_max:]
        for key in reversed(dropped):
            self._count_elsewhere(key)
            self.graph.remove_node(key)
        alone = [key for key in self.graph if self._is_cut_off(key)] if dropped else []
        self.graph.remove_nodes_from(alone)
        return len(dropped) + len(alone)

    def _count_elsewhere(self, key: str) -> None:
        """Add a victim to the node that stands for the other victims of the same communicator."""
        nodes = self.graph.nodes
        if nodes[key]["kind"] != "rank" or nodes[key]["role"] != "victim":
            return
        for comm in self.graph.successors(key):
            for other in self.graph.predecessors(comm):
                if other != key and nodes[other]["role"] == "victim" and other.startswith(CROWD):
                    nodes[other]["count"] += nodes[key]["count"]
                    nodes[other]["label"] = more_ranks(nodes[other]["count"])
                    return

    def _is_first(self, key: str) -> bool:
        """A culprit that nobody drawn waits for, and that is no part of another."""
        return bool(self.graph.in_degree(key) == 0) and self.graph.nodes[key]["role"] == "culprit"

    def _is_cut_off(self, key: str) -> bool:
        return bool(self.graph.degree(key) == 0) and self.graph.nodes[key]["role"] != "culprit"


def crowd_of(comm: str) -> str:
    """The id of the node for those victims in a communicator that are not shown one by one."""
    return f"{CROWD}{comm}"


def more_ranks(count: int) -> str:
    """ "and 52 more ranks"."""
    return f"and {count:,} more rank{'' if count == 1 else 's'}"
