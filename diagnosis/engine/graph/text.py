"""The causal graph as JSON (node-link form, "tocsin.graph/1") and as DOT for Graphviz."""

from __future__ import annotations

from typing import Final

import msgspec

from diagnosis.engine.graph.draft import CausalGraph, Link, Node

_SHAPES: Final = {"communicator": "ellipse", "finding": "note", "function": "component"}
_DASHED: Final = ("may-wait-for", "passes-through", "stands-in", "against")


def to_json(graph: CausalGraph) -> bytes:
    """UTF-8 JSON; also what networkx.node_link_graph(..., edges="links") reads."""
    plain = {"directed": True, "multigraph": False, "graph": {}, **msgspec.to_builtins(graph)}
    return msgspec.json.format(msgspec.json.encode(plain), indent=1) + b"\n"


def to_dot(graph: CausalGraph) -> str:
    """DOT. Every name is quoted: it can neither end its string nor begin a record or HTML label."""
    roots = set(graph.roots)
    lines = [
        "digraph causes {",
        f"  graph [rankdir=LR, label={_quoted(graph.title)}];",
        '  node [fontname="sans-serif"];',
    ]
    lines += [f"  {_quoted(node.id)} [{_node(node, node.id in roots)}];" for node in graph.nodes]
    lines += [f"  {_quoted(link.source)} -> {_quoted(link.target)} [{_link(link)}];" for link in graph.links]
    return "\n".join([*lines, "}", ""])


def weight(link: Link) -> str:
    """ "31 s", "32.9 ms a round", "" where it is not told."""
    if link.weight is None:
        return ""
    digits = (
        f"{link.weight:,.0f}" if abs(link.weight) >= 100 or link.weight == int(link.weight) else f"{link.weight:,.1f}"
    )
    return f"{digits} {link.unit or ''}".rstrip()


def _node(node: Node, root: bool) -> str:
    label = _quoted("\n".join([node.label, *node.details]))
    shape = _SHAPES.get(node.kind, "box")
    heavy = ", penwidth=3" if root or node.role == "culprit" else ""
    return f"label={label}, shape={shape}, class={_quoted(f'{node.kind} {node.role}')}{heavy}"


def _link(link: Link) -> str:
    told = weight(link)
    label = _quoted(f"{link.kind}\n{told}" if told else link.kind)
    return f"label={label}" + (", style=dashed" if link.kind in _DASHED else "")


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
