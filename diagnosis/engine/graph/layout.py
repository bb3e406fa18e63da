"""Where the boxes of a causal graph go: columns from effects on the left to causes on the right.

The usual four steps of layered drawing (after Sugiyama, Tagawa and Toda), small because the graph is:

1. *Columns.* Links that close a circle are turned round. A node stands as many columns left of the ends as its longest
   way to one; what lies behind an end (hardware, findings) follows to its right.
2. *Detours.* A link over several columns gets a thin place of its own in each, so that it never runs through a box.
3. *Order.* Within a column by the mean place of the neighbours, swept to and fro a few times.
4. *Heights.* Each box wants to stand at the mean height of its neighbours. The nearest places to that which keep order
   and distance are found by pooling neighbours that would overlap.

Everything is deterministic: ties keep the order in which nodes were drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import networkx as nx

from diagnosis.engine.graph.draft import STANDS_IN, CausalGraph, Link

GAP_Y: Final = 16.0
GAP_X: Final = 64.0
DETOUR_HEIGHT: Final = 6.0
SWEEPS: Final = 6


@dataclass(slots=True)
class Box:
    """Something with a place: a node, or (`key` empty) where a link passes a column. `y` is its upper edge."""

    key: str
    column: int
    width: float
    height: float
    x: float = 0.0
    y: float = 0.0
    before: list[Box] = field(default_factory=list)
    after: list[Box] = field(default_factory=list)

    @property
    def middle(self) -> float:
        """Height of its middle."""
        return self.y + self.height / 2


@dataclass(frozen=True, slots=True)
class Route:
    """A link with the boxes that it goes through from left to right. `turned`: its arrow points to the left."""

    link: Link
    boxes: list[Box]
    turned: bool


@dataclass(frozen=True, slots=True)
class Layout:
    """Places of all nodes by id, routes of all links, and the size of the whole."""

    boxes: dict[str, Box]
    routes: list[Route]
    width: float
    height: float


def lay_out(graph: CausalGraph, sizes: Mapping[str, tuple[float, float]]) -> Layout:
    """Places for nodes of the given sizes (width, height by id)."""
    column = _columns(graph)
    boxes = {node.id: Box(node.id, column[node.id], *sizes[node.id]) for node in graph.nodes}
    columns: list[list[Box]] = [[] for _ in range(max(column.values(), default=-1) + 1)]
    for box in boxes.values():
        columns[box.column].append(box)
    routes = [_route(link, boxes, columns) for link in graph.links]
    _order(columns)
    height = _heights(columns)
    x = 0.0
    for in_column in columns:
        widest = max((box.width for box in in_column if box.key), default=0.0)
        for box in in_column:
            box.x, box.width = x, widest
        x += widest + GAP_X
    return Layout(boxes, routes, max(0.0, x - GAP_X), height)


def _columns(graph: CausalGraph) -> dict[str, int]:
    """The column of each node, from 0 on."""
    flow: nx.DiGraph[str] = nx.DiGraph()
    flow.add_nodes_from(node.id for node in graph.nodes)
    flow.add_edges_from((link.source, link.target) for link in graph.links if link.kind != STANDS_IN)
    _break_circles(flow)
    kind = {node.id: node.kind for node in graph.nodes}
    ends = set(graph.roots) | {key for key in flow if kind[key] == "communicator" and flow.out_degree(key) == 0}
    towards = ends.union(*(nx.ancestors(flow, end) for end in ends)) if ends else set(flow)
    order = list(nx.topological_sort(flow))
    left: dict[str, int] = {}  # columns to the left of the rightmost end
    for key in reversed(order):
        if key in towards:
            ahead = [left[after] + 1 for after in flow.successors(key) if after in towards]
            left[key] = max(ahead, default=1 if kind[key] == "communicator" else 0)
    most = max(left.values(), default=0)
    column = {key: most - away for key, away in left.items()}
    for key in order:
        if key not in column:
            column[key] = max((column[before] + 1 for before in flow.predecessors(key)), default=0)
    least = min(column.values(), default=0)
    return {key: at - least for key, at in column.items()}


def _break_circles(flow: nx.DiGraph[str]) -> None:
    """Remove the links that lead back, as a walk from the first node on meets them."""
    state: dict[str, int] = {}
    back: list[tuple[str, str]] = []
    sources = [key for key in flow if flow.in_degree(key) == 0]
    for start in [*sources, *flow]:
        if start in state:
            continue
        stack = [(start, iter(list(flow.successors(start))))]
        state[start] = 1
        while stack:
            key, following = stack[-1]
            after = next(following, None)
            if after is None:
                state[key] = 2
                stack.pop()
            elif state.get(after) == 1:
                back.append((key, after))
            elif after not in state:
                state[after] = 1
                stack.append((after, iter(list(flow.successors(after)))))
    flow.remove_edges_from(back)


def _route(link: Link, boxes: Mapping[str, Box], columns: list[list[Box]]) -> Route:
    first, last = boxes[link.source], boxes[link.target]
    turned = first.column > last.column
    if turned:
        first, last = last, first
    passed = [Box("", column, 0.0, DETOUR_HEIGHT) for column in range(first.column + 1, last.column)]
    way = [first, *passed, last]
    for box in passed:
        columns[box.column].append(box)
    for here, there in pairwise(way):
        here.after.append(there)
        there.before.append(here)
    return Route(link, way, turned)


def _order(columns: list[list[Box]]) -> None:
    place: dict[int, float] = {}

    def settle(boxes: list[Box], ordered: list[Box]) -> None:
        boxes[:] = ordered
        for number, box in enumerate(boxes):
            place[id(box)] = number - len(boxes) / 2

    for boxes in columns:
        settle(boxes, list(boxes))
    for sweep in range(SWEEPS):
        to_right = sweep % 2 == 1
        for boxes in columns if to_right else columns[::-1]:
            wanted = {}
            for box in boxes:
                mean = _mean(box.before if to_right else box.after, lambda other: place[id(other)])
                wanted[id(box)] = place[id(box)] if mean is None else mean
            settle(boxes, sorted(boxes, key=lambda box: wanted[id(box)]))


def _mean(boxes: list[Box], of: Callable[[Box], float]) -> float | None:
    return sum(of(box) for box in boxes) / len(boxes) if boxes else None


def _heights(columns: list[list[Box]]) -> float:
    """Set all `y`; the height of the whole."""
    for boxes in columns:
        _stack(boxes, [0.0] * len(boxes))
    for sweep in range(2 * SWEEPS):
        for boxes in columns if sweep % 2 else columns[::-1]:
            wanted = [_mean(box.before + box.after, lambda other: other.middle) for box in boxes]
            _stack(boxes, [box.middle if at is None else at for box, at in zip(boxes, wanted, strict=True)])
    top = min((box.y for boxes in columns for box in boxes), default=0.0)
    for boxes in columns:
        for box in boxes:
            box.y -= top
    return max((box.y + box.height for boxes in columns for box in boxes), default=0.0)


def _stack(boxes: list[Box], middles: list[float]) -> None:
    """Place boxes in their order, none overlapping, as near to the wanted middles as can be (least squares)."""
    offsets, at = [], 0.0
    for box in boxes:
        offsets.append(at)
        at += box.height + GAP_Y
    # With each box's own offset taken off, "in order and apart" becomes "not descending": pool what descends.
    pools: list[tuple[float, int]] = []
    for box, middle, offset in zip(boxes, middles, offsets, strict=True):
        value, count = middle - box.height / 2 - offset, 1
        while pools and pools[-1][0] > value:
            before, many = pools.pop()
            value, count = (before * many + value * count) / (many + count), many + count
        pools.append((value, count))
    starts = [value for value, count in pools for _ in range(count)]
    for box, start, offset in zip(boxes, starts, offsets, strict=True):
        box.y = start + offset
