"""The simulation: when every rank enters and leaves every round.

Dependencies decide all times (max-plus algebra): a rank enters a round when its own work is done; data moves when the
last member is there; all leave together when it has moved; a receive ends when the message is there. A rank that never
comes has the time infinity, and infinity spreads by the same rules: what the job looks like in a hang is what is left
finite. Instructions come in causal order (`program`), so that one pass over a step computes it; each instruction is
one numpy operation over all groups at once. This gives the same times as a queue of events would, because nothing in
a step depends on anything but the latest of its causes.

What can break (`Break`), besides work that never ends:

* "gpu": a GPU stops inside a round after a share of its steps; nobody leaves that round.
* "path": from a moment on nothing crosses certain hops; a round or message under way then stops where it is.
* "tag": a rank runs another operation than its group; nothing crosses between it and its neighbours.
* "swap": a rank takes two rounds of different communicators in the wrong order and waits where nobody will come.

Times in ms of the simulation's own clock, which no node shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from diagnosis.drill.layout import P2P_STEPS, Floats, Layout, Operation, Ranks, step_totals
from diagnosis.drill.program import NO_WORK, PARTS, Instruction, Program
from diagnosis.drill.weather import STEPS_MAX, Weather, step_work

Bools = NDArray[np.bool_]

LATENCY_MS: Final = {"tp": 0.02, "dp": 0.06, "ep": 0.05, "emb": 0.05, "norm": 0.12, "act": 0.03, "grad": 0.03}
TRANSFER_NOISE: Final = 0.6
NEVER: Final = np.inf


@dataclass(frozen=True, slots=True, eq=False)
class Break:
    """What breaks in a hang. `since`: steps after the onset. `instruction`: index in the program ("gpu", "tag";
    "swap": of the earlier round, `other` of the later). `ranks`: who. `share`: of the steps done ("gpu"), of the step
    ("path"). `dead`: per family the hops (G, m) that die. `op`: what the rank runs instead."""

    kind: str
    since: int
    instruction: int = 0
    other: int = 0
    ranks: tuple[int, ...] = ()
    share: float = 0.0
    dead: dict[str, Bools] = field(default_factory=dict)
    op: Operation | None = None


@dataclass(slots=True, eq=False)
class Track:
    """Rounds of one purpose, (K, W) each: `enter`, `leave`, `gap` (own time before), `ready` (the last member is
    there). NaN: the rank has no such round. `sent`: end of this rank's own message ("act", "grad"). `ops` (K,)."""

    enter: Floats
    leave: Floats
    gap: Floats
    ready: Floats
    sent: Floats
    ops: tuple[str, ...]


@dataclass(slots=True, eq=False)
class Timeline:
    """All rounds. `work`: own time per step, at work and standing still, (rows, W) each. `starts`: when each rank
    began each step. `onset`: first step with the fault. `caps`: steps (sent, received) after which a position can do
    no more, by track, round and group. `replaced`: operation that a rank runs instead of its group's, by track, round
    and rank. `crossed`: ranks that took two rounds in the wrong order."""

    tracks: dict[str, Track]
    work: list[tuple[Floats, Floats]]
    programs: list[Program]
    starts: list[Floats]
    onset: int
    end: Floats
    caps: dict[tuple[str, int, int], tuple[Ranks, Ranks]]
    replaced: dict[tuple[str, int, int], Operation]
    crossed: frozenset[int] = frozenset()


class Simulation:
    """State of one run. `bandwidth(since)`: GB/s per track as `network.track_bandwidth` gives it."""

    def __init__(
        self,
        layout: Layout,
        programs: tuple[Program, Program],
        weather: Weather,
        bandwidth: list[dict[str, Floats]],
        network_pattern: tuple[bool, ...] = (True,),
        breakage: Break | None = None,
        rng: np.random.Generator | None = None,
    ) -> None:
        self.layout, self.programs, self.weather, self.rng = layout, programs, weather, rng
        self.bandwidth, self.network_pattern, self.breakage = bandwidth, network_pattern, breakage
        world = layout.world
        self.clock = np.zeros(world)
        self.left = np.zeros(world)
        self.held = np.zeros(world)
        self.messages: dict[tuple[str, int, int], Floats] = {}
        self.dead_from = NEVER
        self.counts: dict[str, int] = {}
        self.store: dict[str, list[Floats]] = {}
        self.ops: dict[str, list[str]] = {}
        self.caps: dict[tuple[str, int, int], tuple[Ranks, Ranks]] = {}
        self.replaced: dict[tuple[str, int, int], Operation] = {}

    def run(self, onset_ms: float, end_ms: float) -> Timeline:
        """Steps until every rank is past `end_ms` or stuck. The fault sets in with the first step that begins after
        `onset_ms`."""
        work: list[tuple[Floats, Floats]] = []
        programs: list[Program] = []
        starts: list[Floats] = []
        onset = STEPS_MAX
        for step in range(STEPS_MAX):
            begin = float(self.clock.min())
            if (begin > end_ms and onset < STEPS_MAX) or not np.isfinite(self.clock).any():
                break
            if onset == STEPS_MAX and begin >= onset_ms:
                onset = step
            since = step - onset
            program = self.programs[1 if self.weather.evaluate and since >= 0 else 0]
            own, still = step_work(self.layout, self.weather, program.rows, PARTS, step, since, self.rng)
            starts.append(self.clock.copy())
            self.step(program, own + still, since)
            work.append((own, still))
            programs.append(program)
        tracks = {}
        swap = self.breakage is not None and self.breakage.kind == "swap"
        crossed = frozenset(self.breakage.ranks if self.breakage is not None and swap else ())
        for track, tables in self.store.items():
            enter, leave, gap, ready, sent = np.concatenate(tables, 1)
            tracks[track] = Track(enter, leave, gap, ready, sent, tuple(self.ops[track]))
        return Timeline(tracks, work, programs, starts, onset, self.clock, self.caps, self.replaced, crossed)

    def step(self, program: Program, work: Floats, since: int) -> None:
        """One step of all ranks."""
        layout, breakage = self.layout, self.breakage
        here = breakage if breakage is not None and since == breakage.since else None
        phase = int(since >= 0 and self.network_pattern[since % len(self.network_pattern)])
        bandwidth = self.bandwidth[phase]
        if here is not None and here.kind == "path":
            own = work.sum(0).max()
            self.dead_from = float(self.clock.min() + here.share * own)
        tables = {track: np.full((5, len(ops), layout.world), np.nan) for track, ops in program.slots.items()}
        size = (len(program.instructions), layout.world)
        noise = (
            np.ones(size)
            if self.rng is None
            else np.exp(TRANSFER_NOISE * self.weather.noise * self.rng.standard_normal(size))
        )
        for number, item in enumerate(program.instructions):
            if item.work != NO_WORK:
                self.clock[item.ranks] += work[item.work, item.ranks]
            if item.kind == "round":
                self._round(item, number, tables[item.track], bandwidth[item.track], noise[number], here)
            elif item.kind == "recv":
                self._receive(item, tables[item.track], bandwidth[item.track], noise[number])
            elif item.kind == "send":
                self.messages[item.message] = self.clock[item.ranks].copy()
        for track, table in tables.items():
            self.store.setdefault(track, []).append(table)
            self.ops.setdefault(track, []).extend(program.slots[track])
            self.counts[track] = self.counts.get(track, 0) + len(program.slots[track])

    def _round(
        self, item: Instruction, number: int, table: Floats, bandwidth: Floats, noise: Floats, here: Break | None
    ) -> None:
        groups, slot = item.groups, item.slot
        op = self.layout.ops[item.op]
        if here is not None and here.kind == "swap" and number == here.instruction:
            self.held[list(here.ranks)] = self.clock[list(here.ranks)]
            self.clock[list(here.ranks)] = NEVER
        if here is not None and here.kind == "swap" and number == here.other:
            self.clock[list(here.ranks)] = self.held[list(here.ranks)]
        enter = self.clock[groups]
        ready = enter.max(1)
        lasting = LATENCY_MS[item.track] + op.hop_bytes / bandwidth[item.select] / 1e6
        leave = ready + lasting * noise[groups[:, 0]]
        if here is not None or self.dead_from < NEVER:
            leave = self._broken(item, number, enter, ready, leave, here)
        table[0, slot][groups] = enter
        table[1, slot][groups] = leave[:, None] + 0.1 * np.abs(noise[groups] - 1.0)
        with np.errstate(invalid="ignore"):
            table[2, slot][groups] = enter - self.left[groups]
        table[3, slot][groups] = ready[:, None]
        self.clock[groups] = table[1, slot][groups]
        self.left[groups] = self.clock[groups]

    def _broken(
        self, item: Instruction, number: int, enter: Floats, ready: Floats, leave: Floats, here: Break | None
    ) -> Floats:
        """When the groups of a round leave it if something is broken, and how far its members come."""
        family = self.layout.families[item.track]
        op = self.layout.ops[item.op]
        totals = step_totals(family, op)
        slot = self.counts.get(item.track, 0) + item.slot
        leave = leave.copy()
        if self.dead_from < NEVER and self.breakage is not None and item.track in self.breakage.dead:
            dead = self.breakage.dead[item.track][item.select]
            for row in np.flatnonzero(dead.any(1) & (leave > self.dead_from)).tolist():
                share = 0.0
                if np.isfinite(ready[row]):
                    share = float(np.clip((self.dead_from - ready[row]) / (leave[row] - ready[row]), 0.0, 1.0))
                leave[row] = NEVER
                edges = family.edges[item.select[row]][dead[row]]
                self.caps[item.track, slot, int(item.select[row])] = _dead_hops(item.groups[row], edges, totals, share)
        if here is not None and number == here.instruction and here.kind in ("gpu", "tag"):
            for rank in here.ranks:
                row, position = (int(x[0]) for x in np.nonzero(item.groups == rank))
                leave[row] = NEVER
                send, recv = (np.full(len(totals[0]), np.iinfo(np.int64).max // 4) for _ in range(2))
                if here.kind == "gpu":
                    send[position], recv[position] = (int(here.share * total[position]) for total in totals)
                else:
                    send[position] = min(1, int(totals[0][position]))
                    recv[position] = 0
                    if family.algo == "RING":
                        recv[(position + 1) % len(recv)] = 0
                    if here.op is not None:
                        self.replaced[item.track, slot, rank] = here.op
                self.caps[item.track, slot, int(item.select[row])] = send, recv
        return leave

    def _receive(self, item: Instruction, table: Floats, bandwidth: Floats, noise: Floats) -> None:
        ranks, slot = item.ranks, item.slot
        posted = self.messages.pop(item.message)
        enter = self.clock[ranks].copy()
        lasting = LATENCY_MS[item.track] + self.layout.ops["p2p.Recv"].hop_bytes / bandwidth[ranks] / 1e6
        arrival = posted + lasting * noise[ranks]
        column = 0 if item.track == "act" else 1
        pairs, rows = self.layout.families["p2p"].groups, item.select
        if self.dead_from < NEVER and self.breakage is not None and "p2p" in self.breakage.dead:
            dead = self.breakage.dead["p2p"][rows, column] & (arrival > self.dead_from)
            with np.errstate(invalid="ignore"):
                share = np.clip((self.dead_from - posted) / lasting, 0.0, 1.0)
            key_slot = self.counts.get(item.track, 0) + slot
            for i in np.flatnonzero(dead & np.isfinite(posted)).tolist():
                steps = np.array([int(share[i] * P2P_STEPS)])
                self.caps[item.track, key_slot, int(ranks[i])] = steps, steps
            arrival = np.where(dead, NEVER, arrival)
        table[4, slot][pairs[rows, column]] = arrival
        leave = np.maximum(enter, arrival)
        table[0, slot][ranks], table[1, slot][ranks] = enter, leave
        with np.errstate(invalid="ignore"):
            table[2, slot][ranks] = enter - self.left[ranks]
        table[3, slot][ranks] = np.maximum(enter, posted)
        self.clock[ranks] = leave
        self.left[ranks] = leave


def _dead_hops(group: Ranks, edges: Ranks, totals: tuple[Ranks, Ranks], share: float) -> tuple[Ranks, Ranks]:
    """Caps of a group whose dead hops (m, 2) stopped after `share` of the transfer: the receiver gets no more."""
    far = np.iinfo(np.int64).max // 4
    send, recv = np.full(len(group), far), np.full(len(group), far)
    at = np.flatnonzero(np.isin(group, edges[:, 1]))
    recv[at] = (share * totals[1][at]).astype(np.int64)
    return send, recv
