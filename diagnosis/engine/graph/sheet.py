"""What drawings of hangs and of slow-downs have in common: culprits, victims by name or by number, communicators."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import numpy as np

from diagnosis.contracts.incident import Floats, Ints
from diagnosis.contracts.verdict import Culprit
from diagnosis.engine.graph.draft import Draft, crowd_of, more_ranks, node_id
from diagnosis.engine.graph.hardware import Hardware
from diagnosis.engine.lanes import Longs
from diagnosis.engine.thresholds import Thresholds
from diagnosis.engine.verdict import Analysis

CULPRITS_MAX: Final = 8
COMMS_MAX: Final = 8
COMMS_PER_RANK_MAX: Final = 3
VICTIMS_NAMED_MAX: Final = 2
# What stays when there is no room: lower stays longer.
CULPRIT, BETWEEN, CHAIN, CROWD, NAMED, FAR = 0, 1, 2, 5, 6, 7


class Sheet:
    """A draft with what is known of one analysis. `guilty`: ranks of all culprits; `shown`: culprits that are drawn."""

    def __init__(self, analysis: Analysis, limits: Thresholds) -> None:
        self.analysis = analysis
        self.lanes = analysis.lanes
        self.draft = Draft()
        self.hardware = Hardware(self.draft, analysis, limits)
        culprits = analysis.verdict.culprits
        self.shown = culprits[:CULPRITS_MAX]
        self.guilty = np.array(sorted({c.rank for c in culprits if c.rank is not None}), np.int64)
        self._held_up = np.zeros(self.lanes.world, np.bool_)
        self._drawn = np.zeros(self.lanes.comms, np.bool_)
        self._victims: set[int] = set()
        self._groups: list[tuple[str, Ints, Floats]] = []
        self._anchors: list[tuple[Culprit, str]] = []

    def anchors(self) -> list[tuple[Culprit, str]]:
        """Each culprit with the node at which waiting for it ends."""
        if not self._anchors:
            self._anchors = [(culprit, self.hardware.anchor(culprit)) for culprit in self.shown]
            unshown = len(self.analysis.verdict.culprits) - len(self.shown)
            if unshown > 0:
                kind, label = self.shown[0].kind, f"and {unshown} more culprits"
                self.draft.add("culprits:more", kind, "culprit", label, importance=CULPRIT, count=unshown)
        return self._anchors

    def lanes_of(self, rank: int) -> Longs:
        """The lanes of a rank."""
        return self.lanes.order[self.lanes.by_rank[rank] : self.lanes.by_rank[rank + 1]]

    def comms_of(self, rank: int) -> list[int]:
        """The communicators of a rank."""
        return sorted({int(comm) for comm in self.lanes.comm[self.lanes_of(rank)]})

    def victim(self, rank: int, detail: str, importance: int = NAMED) -> str:
        """A rank that suffers."""
        key = node_id("rank", rank)
        self._victims.add(rank)
        details = [detail] if key in self.draft.graph else [self.hardware.place(rank), detail]
        return self.draft.add(key, "rank", "victim", f"rank {rank}", details, importance=importance)

    def comm(self, comm: int, detail: str = "", receiver: int | None = None) -> str:
        """A communicator, or (with `receiver`) one transfer in one."""
        of = self.lanes.incident.communicators
        what = " over ".join(part for part in (of.algo[comm], of.transport[comm]) if part)
        kind = f"{int(self.lanes.sizes[comm]):,} ranks" + (f", {what}" if what else "")
        key = node_id("communicator", of.ids[comm]) + ("" if receiver is None else f":to {receiver}")
        self._drawn[comm] = True
        label = f"communicator {of.ids[comm]}"
        return self.draft.add(key, "communicator", "between", label, [kind, detail], importance=BETWEEN)

    def suffer(self, comm: str, ranks: Ints, weights: Floats) -> Ints:
        """Note all ranks that suffer in a drawn communicator, and with which weight; those to draw by name.

        The first come first. All but one are never drawn: the last is then drawn too.
        """
        self._held_up[ranks] = True
        self._groups.append((comm, ranks, weights))
        return ranks if len(ranks) == VICTIMS_NAMED_MAX + 1 else ranks[:VICTIMS_NAMED_MAX]

    def join(self, kind: str, unit: str, apart: Collection[int] = ()) -> None:
        """Link every drawn victim with all communicators that it suffers in; the rest of these are one crowd each.

        `apart`: drawn ranks that others suffer from.
        """
        crowds: dict[bytes, str] = {}
        drawn, skipped = np.array(sorted(self._victims), np.int64), np.array(sorted(apart), np.int64)
        for comm, ranks, weights in self._groups:
            left = ~np.isin(ranks, skipped)
            for at in np.flatnonzero(left & np.isin(ranks, drawn)):
                self.draft.link(node_id("rank", ranks[at]), comm, kind, float(weights[at]), unit)
                left[at] = False
            rest = np.flatnonzero(left)
            if len(rest):
                # The same ranks in two communicators are one crowd.
                crowd = crowds.setdefault(np.sort(ranks[rest]).tobytes(), crowd_of(comm))
                label, count = more_ranks(len(rest)), len(rest)
                self.draft.add(crowd, "rank", "victim", label, importance=CROWD, count=count)
                told = weights[rest][np.isfinite(weights[rest])]
                self.draft.link(crowd, comm, kind, float(np.median(told)) if len(told) else None, unit)

    def far(self, total: int, kind: str) -> None:
        """All other victims of `total`: held up by those who are drawn, in communicators that are not."""
        lanes = self.lanes
        through = np.unique(lanes.comm[self._held_up[lanes.rank] & ~self._drawn[lanes.comm]])
        left = total - int(self._held_up.sum())
        of = self.draft.graph
        first = [key for key in of if of.nodes[key]["role"] == "victim" and of.in_degree(key) == 0]
        first = [key for key in first if of.nodes[key]["count"] > 1] or first
        if left <= 0 or not len(through) or not first:
            return
        label = f"{len(through):,} more communicator{'' if len(through) == 1 else 's'}"
        between = "communicators:more"
        self.draft.add(between, "communicator", "between", label, importance=FAR, count=len(through))
        key, details = "ranks:far", ["held up by other victims"]
        self.draft.add(key, "rank", "victim", more_ranks(left), details, importance=FAR, count=left)
        self.draft.link(key, between, kind)
        for target in first:
            self.draft.link(between, target, kind)
