"""The causal graph: why the verdict names whom it names, as nodes and links that lead from effects to causes.

    victims -waits-for | delayed-by-> communicator -waits-for | delayed-by-> culprit -runs-on-> GPU -runs-on-> node
    communicator -passes-through-> NIC -> link -> switch            culprit -explained-by-> finding, function

It is drafted from the suspects outwards: the culprits of the verdict, the communicators that they hold up, those who
wait there longest, and what nodes and functions say of the culprits. Everybody else is counted, not drawn, so the graph
of a million ranks is as small as that of eight.

The roots are found on the graph, where waiting and delay end, and not copied from the verdict (see `hang` and `slow`):
that they are the verdict's culprits is a check of both.
"""

from __future__ import annotations

import numpy as np

from diagnosis.engine.graph.draft import NODES_MAX, CausalGraph, Draft
from diagnosis.engine.graph.hang import HangDrawing
from diagnosis.engine.graph.sheet import Sheet
from diagnosis.engine.graph.slow import SlowDrawing
from diagnosis.engine.thresholds import Thresholds
from diagnosis.engine.verdict import Analysis


def explain(analysis: Analysis, limits: Thresholds | None = None, nodes_max: int = NODES_MAX) -> CausalGraph:
    """The causal graph of an analysis, at most `nodes_max` nodes; without nodes where nothing is wrong.

    The same analysis gives the same graph. Without `limits`: the incident's.
    """
    if limits is None:
        limits = Thresholds.told(analysis.lanes.incident.thresholds)
    with np.errstate(all="ignore"):
        return _draw(analysis, limits).finish(analysis.verdict.summary, nodes_max)


def _draw(analysis: Analysis, limits: Thresholds) -> Draft:
    sheet = Sheet(analysis, limits)
    if analysis.verdict.anomaly == "none":
        return sheet.draft
    anchors = sheet.anchors()
    if analysis.stall is not None:
        HangDrawing(sheet, analysis.stall).draw()
    elif analysis.slow is not None:
        SlowDrawing(sheet, analysis.slow).draw()
    for culprit, anchor in anchors:
        sheet.hardware.explain(culprit, anchor)
    return sheet.draft
