"""A hang drawn: rounds that do not end, who stands in them and whom they wait for.

The links are those of the waits themselves. The walk begins at the culprits *and* at those who have waited longest, and
goes on from each rank to what it waits for until it finds ranks that wait for nobody. If the verdict named somebody
else, they would be roots beside its culprits.

Two kinds of suspects stand inside a round and are waited for all the same: who runs another operation or stopped there,
and the hardware that broke while all were inside (H3).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from diagnosis.engine.graph.draft import MAY_WAIT_FOR, STANDS_IN, WAITS_FOR, node_id
from diagnosis.engine.graph.sheet import CHAIN, COMMS_MAX, COMMS_PER_RANK_MAX, CULPRITS_MAX, Sheet
from diagnosis.engine.graph.waits import Round, RoundKey, WaitGraph
from diagnosis.engine.waits import Stall

MISSING_NAMED_MAX: Final = 3
SILENT_NAMED_MAX: Final = 4
LONGEST_WAITERS: Final = 3


class HangDrawing:
    """The waits of a stall on a sheet."""

    def __init__(self, sheet: Sheet, stall: Stall) -> None:
        self._sheet = sheet
        self._stall = stall
        guilty = sheet.guilty.tolist() if sheet.analysis.verdict.class_ == "H3" else []
        stopped = {rank for rank in guilty if node_id("rank", rank) in sheet.draft.graph}
        self._accused = set(stall.divergent) | stall.entered | stopped
        self._waits = WaitGraph(sheet.lanes, stall, self._accused)
        self._done: set[RoundKey] = set()
        self._broken: dict[RoundKey, list[str]] = {}

    def draw(self) -> None:
        """All rounds that matter, most telling first."""
        sheet, stall = self._sheet, self._stall
        rounds: list[Round] = []
        for culprit, anchor in sheet.anchors():
            if culprit.rank is not None and anchor == node_id("rank", culprit.rank):
                rounds += self._waits.behind(culprit.rank)[:COMMS_PER_RANK_MAX]
                continue
            broken = self._broke_inside(culprit.rank)
            rounds += broken[:COMMS_PER_RANK_MAX]
            for round_ in broken:
                self._broken.setdefault(round_.key, []).append(anchor)
        for round_ in rounds:
            self._round(round_)
        if not sheet.shown:
            for comm in [*stall.innermost, *stall.undecided][:COMMS_PER_RANK_MAX]:
                self._round(self._waits.collective(comm))
        for rank in [*self._waits.longest(LONGEST_WAITERS), *stall.circle[:LONGEST_WAITERS]]:
            self._follow(rank)
        for rank in stall.silent[:CULPRITS_MAX]:
            for round_ in self._waits.behind(rank)[:COMMS_PER_RANK_MAX]:
                self._round(round_)
        sheet.join(WAITS_FOR, "s")
        waiting = stall.waiting.copy()
        waiting[sheet.guilty] = False
        sheet.far(int(waiting.sum()), WAITS_FOR)

    def _follow(self, rank: int) -> None:
        """From a rank along what it waits for, until somebody waits for nobody."""
        for round_ in self._blocking(rank)[:1]:
            self._round(round_)

    def _blocking(self, rank: int) -> list[Round]:
        """The rounds that hold up a rank; those that only ranks are missing from who wait themselves come last."""
        broken = {*self._broken, *((comm, None) for comm in self._stall.innermost)}
        rounds = self._waits.inside(rank)
        rounds = [of for of in rounds if len(of.missing) or len(of.silent) or of.key in broken]
        return sorted(rounds, key=lambda round_: len(round_.missing) > 0 and not self._ends(int(round_.missing[0])))

    def _ends(self, rank: int) -> bool:
        """Whether waiting ends at a rank."""
        return rank in self._accused or not self._stall.waiting[rank]

    def _round(self, round_: Round) -> bool:
        """One round with those who wait in it and what they wait for: what broke, else who is missing.

        False where there is no room for it.
        """
        if round_.key in self._done:
            return True
        if len(self._done) >= COMMS_MAX or not len(round_.waiters):
            return False
        self._done.add(round_.key)
        sheet, waiters = self._sheet, round_.waiters
        here, others = len(waiters), len(round_.missing)
        detail = f"{here:,} wait{'s' if here == 1 else ''} inside"
        if round_.receiver is not None:
            detail = f"rank {round_.receiver} receives"
        elif others:
            detail = f"{detail} for {others:,} other{'' if others == 1 else 's'}"
        comm = sheet.comm(round_.comm, detail, round_.receiver)
        for rank in sheet.suffer(comm, waiters, round_.waited_s).tolist():
            sheet.victim(rank, self._since(round_, rank))
        longest = float(round_.waited_s[0])
        for broken in self._broken.get(round_.key, ()):
            sheet.draft.link(comm, broken, WAITS_FOR, longest, "s")
        if round_.key not in self._broken:
            self._waited_for(round_, comm)
        return True

    def _waited_for(self, round_: Round, comm: str) -> None:
        draft, longest = self._sheet.draft, float(round_.waited_s[0])
        ends = [rank for rank in round_.missing[:MISSING_NAMED_MAX].tolist() if self._ends(rank)]
        for rank in ends or round_.missing[:1].tolist():
            if self._missing(rank):
                draft.link(comm, node_id("rank", rank), WAITS_FOR, longest, "s")
        for rank in round_.silent[:SILENT_NAMED_MAX].tolist():
            kind = WAITS_FOR if rank in self._sheet.guilty else MAY_WAIT_FOR
            draft.link(comm, self._sheet.victim(rank, "sends no words", CHAIN), kind, longest, "s")

    def _since(self, round_: Round, rank: int) -> str:
        waited = round_.waited(rank)
        return f"has waited {waited:,.0f} s" if np.isfinite(waited) else ""

    def _missing(self, rank: int) -> bool:
        """Draw somebody who is waited for: where waiting ends, or a rank that waits elsewhere, with where that is.

        False, and nothing drawn, where there is no room for the latter: it would look like an end.
        """
        sheet = self._sheet
        if self._ends(rank):
            inside = self._waits.inside(rank)
            sheet.victim(rank, "" if inside else "is inside no round", CHAIN)
            for round_ in inside[:1]:
                if rank not in round_.missing or not len(round_.waiters):
                    comm = sheet.comm(round_.comm, receiver=round_.receiver)
                    sheet.draft.link(node_id("rank", rank), comm, STANDS_IN)
            return True
        for round_ in self._blocking(rank)[:1]:
            if self._round(round_):
                sheet.victim(rank, self._since(round_, rank), CHAIN)
                return True
        return False

    def _broke_inside(self, rank: int | None) -> list[Round]:
        """The rounds that all have entered and that wait for what broke: near a rank, or anywhere."""
        comms = set(self._stall.innermost)
        comms = comms if rank is None else comms & set(self._sheet.comms_of(rank))
        rounds = [self._waits.collective(comm) for comm in sorted(comms)]
        if not rounds and rank is not None:
            rounds = [round_ for round_ in self._waits.behind(rank) if round_.receiver is not None]
            rounds += self._waits.inside(rank)
        return rounds
