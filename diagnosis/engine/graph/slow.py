"""A slow-down drawn: who delays whom, and by how much.

A communicator is delayed by the member with the greatest excess of own time, whether it was named or not, and by the
members that were named; or, where its transfer grew, by the network. If the verdict named the wrong rank, the right one
would be a root beside it.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from diagnosis.contracts.incident import Kind
from diagnosis.contracts.verdict import Culprit
from diagnosis.engine.graph.draft import DELAYED_BY
from diagnosis.engine.graph.sheet import CHAIN, COMMS_MAX, COMMS_PER_RANK_MAX, CROWD, Sheet
from diagnosis.engine.slowness import Slowness

COMMS_BLAMED_MAX: Final = 4
MS_PER_ROUND: Final = "ms a round"


class SlowDrawing:
    """Stragglers and slow transfers on a sheet."""

    def __init__(self, sheet: Sheet, slow: Slowness) -> None:
        self._sheet = sheet
        self._slow = slow
        blame = sheet.analysis.blame
        self._blamed = blame.comms[:COMMS_BLAMED_MAX] if blame is not None else []
        named = blame.ranks if blame is not None else []
        self._named = np.array(sorted(named), np.int64)
        self._unnamed: set[int] = set()
        self._done: set[int] = set()

    def draw(self) -> None:
        """All delays that matter."""
        sheet = self._sheet
        for culprit, anchor in sheet.anchors():
            if culprit.kind == "job":
                count = sheet.lanes.world
                key = sheet.draft.add(
                    "ranks:all", "rank", "victim", f"all {count:,} ranks", importance=CROWD, count=count
                )
                sheet.draft.link(key, anchor, DELAYED_BY)
            elif sheet.hardware.by_own_time(culprit):
                self._straggler(culprit, anchor)
            else:
                self._network(culprit, anchor)
        if not sheet.shown:
            for comm in self._blamed:
                self._comm(comm)
        sheet.join(DELAYED_BY, MS_PER_ROUND, self._unnamed)
        sheet.far(sheet.lanes.world - len(self._named), DELAYED_BY)

    def _straggler(self, culprit: Culprit, anchor: str) -> None:
        """A rank, or a node's ranks together, whose own time keeps their communicators waiting."""
        sheet, lanes = self._sheet, self._sheet.lanes
        ranks = sheet.hardware.named_ranks(culprit)
        mine = {comm for rank in ranks for comm in sheet.comms_of(rank)}
        kind = lanes.incident.communicators.kind
        # Collectives first, wide ones before narrow: most of a straggler's victims stand in those.
        order = sorted(mine, key=lambda comm: (kind[comm] == Kind.P2P, -int(lanes.sizes[comm]), comm))
        outside = [comm for comm in order if not np.isin(lanes.rank[lanes.of_comm(comm)], self._named).all()]
        excess = max((float(self._slow.excess_ms[rank]) for rank in ranks), default=np.nan)
        for comm in (outside or order)[:COMMS_PER_RANK_MAX]:
            if comm in self._done or len(self._done) < COMMS_MAX:
                key = self._comm(comm)
                sheet.draft.link(key, anchor, DELAYED_BY, excess, MS_PER_ROUND)
                self._greatest(comm, key)

    def _greatest(self, comm: int, key: str) -> None:
        """The member with the greatest excess of own time, if nobody named it."""
        ranks = self._sheet.lanes.rank[self._sheet.lanes.of_comm(comm)]
        excess = np.nan_to_num(self._slow.excess_ms[ranks], nan=-np.inf)
        worst, most = int(ranks[int(excess.argmax())]), float(excess.max())
        if most > 0 and worst not in self._named:
            self._unnamed.add(worst)
            self._sheet.victim(worst, "has the greatest own time here", CHAIN)
            self._sheet.draft.link(key, f"rank:{worst}", DELAYED_BY, most, MS_PER_ROUND)

    def _network(self, culprit: Culprit, anchor: str) -> None:
        """What slows the transfers of communicators: those it is a member of, else those that pass through it."""
        sheet = self._sheet
        touched = [comm for comm in self._blamed if sheet.hardware.touches(culprit, comm)]
        for comm in touched or self._blamed:
            key = self._comm(comm)
            excess = float(self._slow.transfer_excess_ms[comm])
            sheet.draft.link(key, anchor, DELAYED_BY, excess, MS_PER_ROUND)
            sheet.hardware.path(culprit, anchor, comm, key)

    def _comm(self, comm: int) -> str:
        """A communicator with those who are held up in it."""
        sheet, slow = self._sheet, self._slow
        now, base = slow.transfer_ms[comm], slow.transfer_base_ms[comm]
        detail = f"a transfer takes {now:.2f} ms" if comm in self._blamed and np.isfinite(now) else ""
        detail += f" ({base:.2f} before)" if detail and np.isfinite(base) else ""
        key = sheet.comm(comm, detail)
        if comm in self._done:
            return key
        self._done.add(comm)
        members = sheet.lanes.rank[sheet.lanes.of_comm(comm)]
        held = members[~np.isin(members, np.concatenate([self._named, sheet.guilty]))]
        held = held[np.argsort(-np.nan_to_num(slow.wait_ms[held]), kind="stable")]
        for rank in sheet.suffer(key, held, slow.lost_ms[held]).tolist():
            waits = float(slow.wait_ms[rank])
            sheet.victim(rank, f"waits {waits:.1f} ms a round" if np.isfinite(waits) else "")
        return key
