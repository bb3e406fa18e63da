"""The causal graph as a picture: SVG that stands alone, without script, readable on light and on dark ground.

Whatever a name contains, it is escaped and cannot leave its text; what does not print is spelled out already in the
graph. Text is fitted by estimate, since only the viewer knows its font: widths are those of a wide common one.
"""

from __future__ import annotations

import unicodedata
from typing import Final
from xml.sax.saxutils import escape

from diagnosis.engine.graph.draft import CausalGraph, Link, Node
from diagnosis.engine.graph.layout import Box, Layout, Route, lay_out
from diagnosis.engine.graph.text import weight

MARGIN: Final = 24.0
PADDING: Final = 10.0
LINE: Final = 17.0
FONT: Final = 13.0
SMALL: Final = 12.0
HEADING: Final = 16.0
HEADING_LINE: Final = 23.0
LABEL_WIDTH_MAX: Final = 210.0
LABEL_LINES_MAX: Final = 2
DETAIL_LINES_MAX: Final = 6
WIDTH_MIN: Final = 720.0
STYLE: Final = """
text{font-family:system-ui,"DejaVu Sans",Verdana,sans-serif;fill:#1f2933}
.d,.k{fill:#52606d}
.bg{fill:#fff}
.box{stroke-width:1.2}
.victim{fill:#f0f3f7;stroke:#8895a7}
.between{fill:#fff;stroke:#8895a7}
.culprit{fill:#fde8e4;stroke:#c43d2b;stroke-width:2.4}
.hardware{fill:#f6f0e4;stroke:#a8894f}
.finding{fill:#e9f4ec;stroke:#55906a}
.link{fill:none;stroke:#8895a7;stroke-width:1.3}
.tip{fill:#8895a7}
.causal{stroke:#c43d2b}
.causal-tip{fill:#c43d2b}
.dashed{stroke-dasharray:5 4}
@media (prefers-color-scheme:dark){
text{fill:#e4e9ef}
.d,.k{fill:#a9b4c0}
.bg{fill:#14181d}
.victim{fill:#232a33;stroke:#7d8b9c}
.between{fill:#14181d;stroke:#7d8b9c}
.culprit{fill:#43201b;stroke:#ef7d6c}
.hardware{fill:#332b1c;stroke:#c2a469}
.finding{fill:#1b3023;stroke:#74b48b}
.link{stroke:#7d8b9c}
.tip{fill:#7d8b9c}
.causal{stroke:#ef7d6c}
.causal-tip{fill:#ef7d6c}
}
"""
_CAUSAL: Final = ("waits-for", "delayed-by")
_DASHED: Final = ("stands-in", "may-wait-for", "against")
_ROLES: Final = (
    ("culprit", "culprit"),
    ("victim", "suffers"),
    ("between", "communicator"),
    ("hardware", "hardware"),
    ("finding", "finding or function"),
)
_LINKS: Final = (
    ("waits-for", "waits for"),
    ("delayed-by", "is delayed by"),
    ("may-wait-for", "may wait for"),
    ("stands-in", "stands in"),
    ("runs-on", "runs on"),
    ("passes-through", "passes through"),
    ("explained-by", "is explained by"),
    ("against", "speaks against it"),
)


def to_svg(graph: CausalGraph) -> str:
    """The picture of a graph; of one without nodes, its title."""
    texts = {node.id: _Text(node) for node in graph.nodes}
    layout = lay_out(graph, {key: text.size for key, text in texts.items()})
    legend = _legend(graph)
    width = max(WIDTH_MIN, layout.width + 2 * MARGIN)
    heading = wrap(graph.title, width - 2 * MARGIN, HEADING, 4)
    top = MARGIN + HEADING_LINE * len(heading) + 12
    bottom = top + layout.height + 30
    rows = _legend_rows(legend, width - 2 * MARGIN)
    height = bottom + LINE * 1.5 * len(rows) + MARGIN - 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width:.0f} {height:.0f}"'
        f' width="{width:.0f}" height="{height:.0f}">',
        f"<title>{escape(graph.title)}</title>",
        f"<desc>{escape(_description(graph))}</desc>",
        f"<style>{STYLE}</style>",
        '<rect class="bg" width="100%" height="100%"/>',
    ]
    for number, line in enumerate(heading):
        y = MARGIN + HEADING_LINE * (number + 0.7)
        parts.append(_words(line, MARGIN, y, HEADING, 'font-weight="600"'))
    left = MARGIN + max(0.0, (width - 2 * MARGIN - layout.width) / 2)
    parts.append(f'<g transform="translate({left:.1f} {top:.1f})">')
    parts += _links(layout)
    parts += [_node(node, texts[node.id], layout.boxes[node.id]) for node in graph.nodes]
    parts.append("</g>")
    for number, row in enumerate(rows):
        parts += [_legend_item(*item, bottom + LINE * 1.5 * number) for item in row]
    return "\n".join([*parts, "</svg>", ""])


# -- text ------------------------------------------------------------------------------------------------------------


def width_of(text: str, size: float) -> float:
    """Estimated width of a text, rather too wide than too narrow."""
    return size * sum(_width(char) for char in text)


def _width(char: str) -> float:
    if char in "iljt.,:;|!'()[]/ fr":
        return 0.42
    if char in "mwMW@%":
        return 1.0
    if unicodedata.east_asian_width(char) in "WF":
        return 1.05
    return 0.74 if char.isupper() else 0.65


def wrap(text: str, width: float, size: float, lines_max: int) -> list[str]:
    """A text in lines that fit, at spaces where there are any; what does not fit is cut off with an ellipsis."""
    lines: list[str] = []
    rest = " ".join(text.split())
    while rest and len(lines) < lines_max:
        fits = _fitting(rest, width, size)
        if fits < len(rest):
            space = rest.rfind(" ", 1, fits + 1)
            fits = space if space >= 0.4 * fits else fits
        lines.append(rest[:fits].rstrip())
        rest = rest[fits:].lstrip()
    if rest:
        lines[-1] = lines[-1][: _fitting(lines[-1], width - width_of("…", size), size)].rstrip() + "…"
    return lines


def _fitting(text: str, width: float, size: float) -> int:
    """How many characters fit, at least one."""
    used = 0.0
    for number, char in enumerate(text):
        used += size * _width(char)
        if used > width:
            return max(1, number)
    return len(text)


class _Text:
    """The words of a node in lines, and the size of its box."""

    def __init__(self, node: Node) -> None:
        self.label = wrap(node.label, LABEL_WIDTH_MAX, FONT, LABEL_LINES_MAX)
        lines = [line for detail in node.details for line in wrap(detail, LABEL_WIDTH_MAX, SMALL, 4)]
        self.details = lines[:DETAIL_LINES_MAX]
        widths = [width_of(line, FONT) * 1.04 for line in self.label] + [width_of(line, SMALL) for line in self.details]
        width = max([72.0, *widths]) + 2 * PADDING
        self.size = (width, LINE * (len(self.label) + len(self.details)) + 2 * PADDING - 4)


def _words(text: str, x: float, y: float, size: float, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:.0f}" {more}>{escape(text)}</text>'


def _description(graph: CausalGraph) -> str:
    label = {node.id: node.label for node in graph.nodes}
    ends = ", ".join(label[root] for root in graph.roots) or "nobody that is known"
    pruned = f" {graph.pruned} less important things are left out." if graph.pruned else ""
    return f"What waits and is delayed, from left to right. It ends at: {ends}.{pruned}"


# -- drawing ---------------------------------------------------------------------------------------------------------


def _node(node: Node, text: _Text, box: Box) -> str:
    round_ = min(box.height / 2, 20.0) if node.kind == "communicator" else 5.0
    x = box.x + PADDING if node.kind != "communicator" else box.x + box.width / 2
    anchor = 'text-anchor="middle" ' if node.kind == "communicator" else ""
    lines = [
        "<g>",
        f"<title>{escape(' | '.join([node.label, *node.details]))}</title>",
        f'<rect class="box {node.role}" x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}"'
        f' height="{box.height:.1f}" rx="{round_:.1f}"/>',
    ]
    if node.count > 1:  # a second edge behind: this stands for many
        lines.insert(
            2,
            f'<rect class="box {node.role}" x="{box.x + 4:.1f}" y="{box.y + 4:.1f}" width="{box.width:.1f}"'
            f' height="{box.height:.1f}" rx="{round_:.1f}"/>',
        )
    y = box.y + PADDING + 9
    for line in text.label:
        lines.append(_words(line, x, y, FONT, f'{anchor}font-weight="600"'))
        y += LINE
    for line in text.details:
        lines.append(_words(line, x, y, SMALL, f'{anchor}class="d"'))
        y += LINE
    return "\n".join([*lines, "</g>"])


def _links(layout: Layout) -> list[str]:
    parts = []
    for route in sorted(layout.routes, key=lambda route: route.link.kind in _CAUSAL):  # what matters lies on top
        causal = " causal" if route.link.kind in _CAUSAL else ""
        dashed = " dashed" if route.link.kind in _DASHED else ""
        told = " ".join(part for part in (_word(route.link), weight(route.link)) if part)
        parts.append(
            f'<g><title>{escape(told)}</title><path class="link{causal}{dashed}" d="{_path(route)}"/>{_tip(route)}</g>'
        )
    return parts


def _word(link: Link) -> str:
    return dict(_LINKS)[link.kind]


def _path(route: Route) -> str:
    """From the right edge of the first box to the left edge of the last, level through every column between."""
    first, *between, last = route.boxes
    lift = 7.0 if route.turned else 0.0  # apart from a link the other way
    x, y = first.x + first.width + (7.0 if route.turned else 0.0), first.middle + lift
    path = f"M{x:.1f} {y:.1f}"
    for box in [*between, last]:
        end_x = box.x - (0.0 if route.turned or box is not last else 7.0)
        end_y = box.middle + (lift if box is last else 0.0)
        half = (x + end_x) / 2
        path += f"C{half:.1f} {y:.1f} {half:.1f} {end_y:.1f} {end_x:.1f} {end_y:.1f}"
        if box is not last:
            path += f"H{box.x + box.width:.1f}"
        x, y = box.x + box.width, end_y
    return path


def _tip(route: Route) -> str:
    """The arrow head, at the end of the link."""
    kind = "causal-tip" if route.link.kind in _CAUSAL else "tip"
    if route.turned:
        box = route.boxes[0]
        x, y, back = box.x + box.width + 1, box.middle + 7, 8.0
    else:
        box = route.boxes[-1]
        x, y, back = box.x - 1, box.middle, -8.0
    return f'<path class="{kind}" d="M{x:.1f} {y:.1f}l{back:.1f} -4.5v9z"/>'


# -- legend ----------------------------------------------------------------------------------------------------------


def _legend(graph: CausalGraph) -> list[tuple[str, str, bool]]:
    """Only what the picture has: (class or kind, words, whether it is a link)."""
    roles, kinds = {node.role for node in graph.nodes}, {link.kind for link in graph.links}
    return [(role, text, False) for role, text in _ROLES if role in roles] + [
        (kind, text, True) for kind, text in _LINKS if kind in kinds
    ]


def _legend_rows(items: list[tuple[str, str, bool]], width: float) -> list[list[tuple[str, str, bool, float]]]:
    rows: list[list[tuple[str, str, bool, float]]] = []
    x = width
    for name, text, is_link in items:
        wide = 34 + width_of(text, SMALL) + 20
        if x + wide > width:
            rows.append([])
            x = 0.0
        rows[-1].append((name, text, is_link, MARGIN + x))
        x += wide
    return rows


def _legend_item(name: str, text: str, is_link: bool, x: float, y: float) -> str:
    if is_link:
        causal, dashed = " causal" if name in _CAUSAL else "", " dashed" if name in _DASHED else ""
        tip = "causal-tip" if name in _CAUSAL else "tip"
        mark = f'<path class="link{causal}{dashed}" d="M{x:.1f} {y:.1f}h20"/>'
        mark += f'<path class="{tip}" d="M{x + 26:.1f} {y:.1f}l-8 -4.5v9z"/>'
    else:
        round_ = 7 if name == "between" else 3
        mark = f'<rect class="box {name}" x="{x:.1f}" y="{y - 7:.1f}" width="26" height="14" rx="{round_}"/>'
    return mark + _words(text, x + 34, y + 4.5, SMALL, 'class="k"')
