"""The order of operations of one training step on every pipeline stage (1F1B), merged so that causes come first.

A step: load data; forward and backward micro-batches in the order one forward, one backward (1F1B: as many forwards
ahead as there are stages behind); gradients over the data-parallel group in buckets; the norm over a small group;
the optimizer. Ranks of one stage run the same program, so one instruction serves all of them at once.

A rank's own time is in rows of a work matrix (one row per piece of work, one column per rank); each rank passes
each row once per step. An evaluation step has forwards only.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from diagnosis.drill.layout import Layout, Ranks

BUCKETS: Final = 2
PARTS: Final = 2
NO_WORK: Final = -1

Key = tuple[str, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Instruction:
    """One thing that ranks do: own work `work` (row, or none), then a round, a receive or a send.

    `kind`: "round", "recv", "send", "work". `ranks` (R,): who. `groups` (G, n): rounds only. `select`: rows of the
    family, (G,) for a round, (R,) for a receive. `slot`: which round of its track in this step.
    `message`: what is sent or awaited.
    """

    kind: str
    ranks: Ranks
    work: int
    track: str = ""
    slot: int = 0
    op: str = ""
    groups: Ranks = field(default_factory=lambda: np.empty((0, 0), np.int64))
    select: Ranks = field(default_factory=lambda: np.empty(0, np.int64))
    message: Key = ("", 0, 0)


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """One step. `rows`: what each work row is, (kind, micro-batch). `slots`: operation of each round per track.
    `order`: per stage, the rounds of a rank in program order as (track, slot)."""

    instructions: tuple[Instruction, ...]
    rows: tuple[tuple[str, int], ...]
    slots: dict[str, tuple[str, ...]]
    order: tuple[tuple[tuple[str, int], ...], ...]

    @property
    def passed(self) -> frozenset[int]:
        """Work rows that this step really has."""
        return frozenset(item.work for item in self.instructions)


class _Stage:
    """Writes the program of one stage."""

    def __init__(self, layout: Layout, stage: int, rows: dict[tuple[str, int, int], int]) -> None:
        self.layout, self.stage, self.rows = layout, stage, rows
        self.ranks = layout.stage_ranks[stage]
        self.last = layout.shape[1] - 1
        self.counts: dict[str, int] = {}
        self.out: list[Instruction] = []
        self.pending = NO_WORK

    def work(self, kind: str, micro_batch: int = 0, part: int = 0) -> None:
        """Own work; it is charged to the next thing that this stage does."""
        if self.pending != NO_WORK:
            self.out.append(Instruction("work", self.ranks, self.pending))
        self.pending = self.rows[kind, micro_batch, part]

    def _add(self, kind: str, track: str = "", op: str = "", message: Key = ("", 0, 0)) -> None:
        slot = self.counts.get(track, 0)
        groups, select = np.empty((0, 0), np.int64), np.empty(0, np.int64)
        if kind == "round":
            family = self.layout.families[track]
            own = np.isin(family.groups[:, 0], self.ranks) | (track in ("norm", "emb"))
            groups, select = family.groups[own], np.flatnonzero(own)
        if kind == "recv":
            pairs = self.layout.families["p2p"].groups[:, 1 if track == "act" else 0]
            select = np.argsort(pairs)[np.searchsorted(np.sort(pairs), self.ranks)]
        if kind in ("round", "recv"):
            self.counts[track] = slot + 1
        ranks = groups.ravel() if kind == "round" else self.ranks
        self.out.append(Instruction(kind, ranks, self.pending, track, slot, op, groups, select, message))
        self.pending = NO_WORK

    def round(self, track: str, op: str) -> None:
        """A round of a family that exists; nothing where it does not."""
        if track in self.layout.families:
            self._add("round", track, f"{track}.{op}")

    def micro_batch(self, direction: str, index: int) -> None:
        """One forward or backward pass of one micro-batch."""
        forward = direction == "fwd"
        step = -1 if forward else 1
        if 0 <= self.stage + step <= self.last:
            track = "act" if forward else "grad"
            self._add("recv", track, "p2p.Recv", (track, self.stage, index))
        sequence = self.layout.tp_style == "sequence"
        for part in range(PARTS):
            self.work(direction, index, part)
            self.round("tp", ("AllGather", "ReduceScatter")[part % 2] if sequence else "AllReduce")
            if part == 0:
                self.round("ep", "AllToAll")
        if 0 <= self.stage - step <= self.last:
            self._add("send", message=("act" if forward else "grad", self.stage - step, index))

    def train(self) -> None:
        """A whole training step."""
        layout = self.layout
        count = layout.micro_batches
        self.begin()
        ahead = min(self.last - self.stage, count)
        passes = [("fwd", i) for i in range(ahead)]
        for i in range(count - ahead):
            passes += [("fwd", ahead + i), ("bwd", i)]
        passes += [("bwd", i) for i in range(count - ahead, count)]
        for direction, index in passes:
            self.micro_batch(direction, index)
        for bucket in range(BUCKETS):
            self.work("grad", bucket)
            self.round("dp", "ReduceScatter" if layout.dp_style == "zero" else "AllReduce")
        if self.stage in (0, self.last):
            self.round("emb", "AllReduce")
        self.round("norm", "AllReduce")
        self.work("opt")
        if layout.dp_style == "zero":
            self.round("dp", "AllGather")

    def evaluate(self) -> None:
        """Forwards only."""
        self.begin()
        for index in range(self.layout.micro_batches):
            self.micro_batch("fwd", index)

    def begin(self) -> None:
        """Load the data, copy it to the GPU and, in some jobs, hand it round in the TP group."""
        self.work("start")
        self.work("copy")
        if self.layout.broadcast:
            self.round("tp", "Broadcast")

    def close(self) -> None:
        """Work after the last operation counts before the next step's first."""
        if self.pending != NO_WORK:
            self.out.append(Instruction("work", self.ranks, self.pending))
            self.pending = NO_WORK


def compile_step(layout: Layout, evaluate: bool = False) -> Program:
    """The program of one step of all stages, in an order in which every cause stands before its effect."""
    rows: list[tuple[str, int, int]] = [("start", 0, 0), ("copy", 0, 0), ("opt", 0, 0)]
    rows += [("grad", bucket, 0) for bucket in range(BUCKETS)]
    for direction in ("fwd", "bwd"):
        rows += [(direction, i, part) for i in range(layout.micro_batches) for part in range(PARTS)]
    index = {row: number for number, row in enumerate(rows)}
    stages = [_Stage(layout, stage, index) for stage in range(layout.shape[1])]
    for stage in stages:
        if evaluate:
            stage.evaluate()
        else:
            stage.train()
        stage.close()
    slots: dict[str, dict[int, str]] = {}
    for stage in stages:
        for item in stage.out:
            if item.kind in ("round", "recv"):
                slots.setdefault(item.track, {})[item.slot] = item.op
    order = tuple(tuple((i.track, i.slot) for i in stage.out if i.kind in ("round", "recv")) for stage in stages)
    return Program(
        instructions=tuple(_merge([stage.out for stage in stages])),
        rows=tuple((kind, micro_batch) for kind, micro_batch, _ in rows),
        slots={track: tuple(table[k] for k in sorted(table)) for track, table in slots.items()},
        order=order,
    )


def _merge(stages: list[list[Instruction]]) -> list[Instruction]:
    merged: list[Instruction] = []
    at = [0] * len(stages)
    sent: set[Key] = set()
    last = len(stages) - 1
    while any(at[s] < len(stages[s]) for s in range(len(stages))):
        moved = len(merged)
        for s, program in enumerate(stages):
            while at[s] < len(program):
                item = program[at[s]]
                if item.kind == "recv" and item.message not in sent:
                    break
                if item.kind == "round" and item.track in ("norm", "emb"):
                    everyone = range(len(stages)) if item.track == "norm" else sorted({0, last})
                    if any(at[o] >= len(stages[o]) or stages[o][at[o]].track != item.track for o in everyone):
                        break
                    merged += [_own_work(stages[o][at[o]], stages[o]) for o in everyone if o != s]
                    for o in everyone:
                        at[o] += 1
                    merged += [_own_work(item, program), replace(item, work=NO_WORK)]
                    continue
                if item.kind == "send":
                    sent.add(item.message)
                merged.append(item)
                at[s] += 1
        if len(merged) == moved:
            raise AssertionError("the pipeline schedule has no next instruction")
    return merged


def _own_work(item: Instruction, program: list[Instruction]) -> Instruction:
    """The work of one stage before a round that spans stages."""
    ranks = next(i.ranks for i in program if i.kind != "round" or i.track not in ("norm", "emb"))
    return Instruction("work", ranks, item.work)
