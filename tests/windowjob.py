"""A simulated job that is profiled: ranks in step, nodes that report and arm them, and what may befall both.

Every tick each rank enters the next round of its communicator, unless it is stopped or somebody else has not come to
the last one. A step is `STEP_ROUNDS` rounds. A rank that was armed notes the steps that it profiles: by the rounds with
which they begin, as its summary will say, and by their true number, which nobody in the job knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from diagnosis.engine.window_plan import PULSE_DTYPE, Anchor, Scene
from diagnosis.engine.windows import Window, Windows

STEP_ROUNDS: Final = 4
TICK_S: Final = 0.25
STEP_S: Final = STEP_ROUNDS * TICK_S
RANKS_PER_NODE: Final = 2


@dataclass(slots=True)
class SimRank:
    """One rank. `ticks`: rounds of its job's steps it has entered; its communicator's are `offset` more."""

    rank: int
    comm_id: int
    offset: int
    ticks: int = 1
    entered_at: float = 0.0
    stopped_until: float = 0.0
    gone: bool = False
    anchor: Anchor | None = None
    steps: int = 0
    ids: list[int] = field(default_factory=list)
    true_steps: list[int] = field(default_factory=list)

    @property
    def round(self) -> int:
        """The round entered last on its communicator."""
        return self.ticks + self.offset

    def enter(self, now: float) -> None:
        """The next round; where a step of the window begins with it, it is profiled."""
        self.ticks, self.entered_at = self.ticks + 1, now
        if self.anchor is None:
            return
        passed = self.round - self.anchor.first_round
        if passed % STEP_ROUNDS == 0 and 0 <= passed < self.steps * STEP_ROUNDS:
            self.ids.append(self.round)
            self.true_steps.append((self.ticks - 1) // STEP_ROUNDS)

    @property
    def answer_due(self) -> bool:
        """It has profiled, and the window's last step is over."""
        return self.anchor is not None and bool(self.ids) and self.round >= self.anchor.begin_of(self.steps)


class SimCluster:
    """`groups`: the communicators that tell the steps, as ranks; `offsets`: rounds that each has had besides."""

    def __init__(self, groups: Sequence[Sequence[int]], offsets: Sequence[int], late_s: float = 0.3) -> None:
        self.now = 0.0
        self.late_s = late_s
        self.slow_nodes: dict[int, float] = {}
        self.dead_nodes: set[int] = set()
        self.ranks = sorted(
            (SimRank(rank, 0xC0 + place, offsets[place]) for place, group in enumerate(groups) for rank in group),
            key=lambda rank: rank.rank,
        )
        self.members = {0xC0 + place: np.array(sorted(group)) for place, group in enumerate(groups)}
        self._orders: list[tuple[float, int, Window]] = []
        self._told: set[int] = set()
        self._table = np.zeros(len(self.ranks), PULSE_DTYPE)

    def run(self, seconds: float, windows: Windows | None = None) -> None:
        """Let the job run; where there are windows, nodes are told of the current one and answer."""
        until = self.now + seconds
        while self.now < until:
            self.now += TICK_S
            last = min(rank.ticks for rank in self.ranks)
            for rank in self.ranks:
                if rank.ticks == last and self.now >= rank.stopped_until and not rank.gone:
                    rank.enter(self.now)
            for order in [order for order in self._orders if order[0] <= self.now]:
                self._orders.remove(order)
                self._arm(order[1], order[2], windows)
            if windows is not None:
                self._answer(windows)

    def send(self, window: Window) -> None:
        """Send the window to all nodes with ranks that have not confirmed."""
        for node in sorted({int(rank) // RANKS_PER_NODE for rank in window.not_armed}):
            self._orders.append((self.now + self.late_s + self.slow_nodes.get(node, 0.0), node, window))

    def _of(self, node: int) -> list[SimRank]:
        return [rank for rank in self.ranks if rank.rank // RANKS_PER_NODE == node]

    def _arm(self, node: int, window: Window, windows: Windows | None) -> None:
        if node in self.dead_nodes:
            return
        for rank in self._of(node):
            rank.anchor, rank.steps = window.anchor_of(rank.rank), window.plan.steps
        if windows is not None:
            windows.arm(window.number, [rank.rank for rank in self._of(node)])

    def _answer(self, windows: Windows) -> None:
        for rank in self.ranks:
            if rank.answer_due and rank.rank not in self._told and rank.rank // RANKS_PER_NODE not in self.dead_nodes:
                self._told.add(rank.rank)
                windows.tell(windows.number, rank.rank, rank.ids[0], rank.ids[-1])

    def scene(self) -> Scene:
        """What the controller knows; of nodes whose daemon is dead what they said last."""
        table = self._table.copy()
        for row, rank in zip(table, self.ranks, strict=True):
            if rank.rank // RANKS_PER_NODE in self.dead_nodes:
                continue
            row["rank"], row["told_at"], row["gone"], row["comm"] = rank.rank, self.now, rank.gone, rank.comm_id
            row["step_rounds"], row["round"], row["place"] = STEP_ROUNDS, rank.round, (rank.ticks - 1) % STEP_ROUNDS + 1
            row["entered_at"], row["step_ms"] = rank.entered_at, 1e3 * STEP_S
        self._table = table
        return Scene(len(self.ranks), table, self.members)
