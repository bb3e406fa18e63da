"""What the probe of every rank shows at a moment of the simulated timeline: the fields of `frames.jsonl`.

Counters are differences of cumulated tables: a round belongs to the window in which it is left. A rank inside a round
has executed the steps that the round's dependencies allowed up to then (`steps.settled`) or, when all are there, the
share of the transfer that has passed. Rates are steps per second of the time inside those rounds.

`fidelity` "nccl": what a stock NCCL tells. Steps are null on NVLink; durations on NVLink and all gaps exist only in
samples taken while the probe was armed; in a hang the host has handed more to the GPU than was started.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from diagnosis.drill.layout import P2P_STEPS, Family, Floats, Layout, Operation, Ranks, step_totals
from diagnosis.drill.steps import settled
from diagnosis.drill.timeline import Bools, Timeline, Track

AHEAD_MAX: Final = 6
SEQ_MAX: Final = 50_000
DIGITS: Final = 4
Entry = dict[str, Any]


class _Rounds:
    """One track with its cumulated tables."""

    def __init__(self, track: Track, sends: Ranks, recvs: Ranks) -> None:
        self.track = track
        with np.errstate(invalid="ignore"):
            self.lasting = track.leave - track.enter
        tables = (self.lasting, track.gap, sends, recvs)
        self.sums = []
        for table in tables:
            clean = np.where(np.isfinite(table), table, 0.0)
            self.sums.append(np.concatenate([np.zeros((1, table.shape[1])), np.cumsum(clean, 0)]))

    def done(self, now: Floats) -> Ranks:
        """Rounds left at `now` (W,)."""
        return np.asarray((self.track.leave <= now).sum(0))

    def entered(self, now: Floats) -> Ranks:
        """Rounds entered at `now` (W,)."""
        return np.asarray((self.track.enter <= now).sum(0))

    def between(self, first: Ranks, last: Ranks) -> list[Floats]:
        """Sums of duration, gap, sends and receives over rounds first..last-1 of each rank."""
        columns = np.arange(len(first))
        return [table[last, columns] - table[first, columns] for table in self.sums]

    def extremes(self, first: Ranks, last: Ranks) -> tuple[Floats, Floats]:
        """Least and greatest duration over those rounds; NaN where there is none."""
        number = np.arange(len(self.lasting))[:, None]
        inside = (number >= first) & (number < last)
        least = np.where(inside, self.lasting, np.inf).min(0)
        most = np.where(inside, self.lasting, -np.inf).max(0)
        return np.where(np.isfinite(least), least, np.nan), np.where(np.isfinite(most), most, np.nan)


class Probe:
    """Reads a timeline. `sample` gives one record per rank."""

    def __init__(self, layout: Layout, timeline: Timeline, fidelity: str, rng: np.random.Generator) -> None:
        self.layout, self.timeline, self.nccl, self.rng = layout, timeline, fidelity == "nccl", rng
        self.rounds: dict[str, _Rounds] = {}
        self.group_of: dict[str, Ranks] = {}
        self.position: dict[str, Ranks] = {}
        self.base: dict[str, Ranks] = {}
        world = layout.world
        for name, family in layout.families.items():
            group, position = np.full(world, -1), np.full(world, -1)
            if name != "p2p":
                group[family.groups] = np.arange(len(family.groups))[:, None]
                position[family.groups] = np.arange(family.groups.shape[1])
            self.group_of[name], self.position[name] = group, position
        self.inside = {name: self._inside(name) for name in timeline.tracks}
        for name, track in timeline.tracks.items():
            self.rounds[name] = _Rounds(track, *self._step_tables(name, track))
            base = rng.integers(0, SEQ_MAX, len(layout.families["p2p" if name in ("act", "grad") else name].ids))
            if name in ("act", "grad"):
                pairs = layout.families["p2p"].groups[:, 1 if name == "act" else 0]
                self.base[name] = np.zeros(world, np.int64)
                self.base[name][pairs] = base
            else:
                self.base[name] = base[self.group_of[name]]
        self.settled: dict[tuple[str, int, int, bytes], tuple[Ranks, Ranks]] = {}

    def _inside(self, name: str) -> Bools:
        """Whose communicator of this track stays inside a node, (W,)."""
        family = self.layout.families["p2p" if name in ("act", "grad") else name]
        nodes = self.layout.node[family.groups]
        local = (nodes == nodes[:, :1]).all(1)
        inside = np.zeros(self.layout.world, bool)
        members = family.groups[local]
        if name in ("act", "grad"):
            members = members[:, 1 if name == "act" else 0]
        inside[members] = True
        return inside

    def _step_tables(self, name: str, track: Track) -> tuple[Ranks, Ranks]:
        """Steps of every round, (K, W) each."""
        shape = track.enter.shape
        if name in ("act", "grad"):
            return np.full(shape, P2P_STEPS), np.full(shape, P2P_STEPS)
        family = self.layout.families[name]
        send, recv = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        by_op = {op: step_totals(family, self.layout.ops[op]) for op in set(track.ops)}
        for k, op in enumerate(track.ops):
            send[k], recv[k] = (total[self.position[name]] for total in by_op[op])
        return send, recv

    def sample(self, now: Floats, window_ms: float, armed: bool) -> list[list[Entry]]:
        """Entries per rank at `now` (W,), in the simulation's clock."""
        left = np.zeros(self.layout.world)
        moved = np.zeros(self.layout.world, bool)
        marks = {}
        for name, rounds in self.rounds.items():
            last, first, entered = rounds.done(now), rounds.done(now - window_ms), rounds.entered(now)
            marks[name] = first, last, entered
            moved |= last > first
            leave = np.where(rounds.track.leave <= now, rounds.track.leave, 0.0).max(0)
            left = np.maximum(left, leave)
        ahead = self._ahead(marks) if self.nccl else {}
        out: list[list[Entry]] = [[] for _ in range(self.layout.world)]
        for name in self.rounds:
            table = self._columns(name, marks[name], now, window_ms)
            since = np.where(table["entered"] > table["last"], now - table["enter"], now - left)
            for rank in np.flatnonzero(self._members(name)).tolist():
                item = self._entry(name, rank, table, bool(moved[rank]), armed)
                if not moved[rank]:
                    item["age_ms"] = round(float(since[rank]), 3)
                if self.nccl and not moved[rank]:
                    self._host_ahead(item, name, rank, table, ahead[name])
                out[rank].append(item)
        return out

    def _members(self, name: str) -> Bools:
        if name in ("act", "grad"):
            member = np.zeros(self.layout.world, bool)
            member[self.layout.families["p2p"].groups[:, 1 if name == "act" else 0]] = True
            return member
        return self.group_of[name] >= 0

    def _columns(self, name: str, marks: tuple[Ranks, Ranks, Ranks], now: Floats, window_ms: float) -> dict[str, Any]:
        rounds = self.rounds[name]
        first, last, entered = marks
        lasting, gap, send, recv = rounds.between(first, last)
        least, most = rounds.extremes(first, last)
        if name in ("act", "grad"):
            sent = self.rounds["grad" if name == "act" else "act"].track.sent
            send = P2P_STEPS * ((sent <= now) & (sent > now - window_ms)).sum(0).astype(float)
        with np.errstate(divide="ignore", invalid="ignore"):
            rates = [np.where(lasting > 0, x / lasting * 1000.0, np.nan) for x in (send, recv)]
        columns = np.arange(self.layout.world)
        newest = np.maximum(np.maximum(entered, last) - 1, 0)
        enter = rounds.track.enter[newest, columns]
        running = entered > last
        so_far = self._running_steps(name, now, newest, running)
        return {
            "first": first, "last": last, "entered": entered, "newest": newest, "enter": enter, "running": running,
            "dur": np.round(lasting, DIGITS), "gap": np.round(gap, DIGITS), "least": np.round(least, DIGITS),
            "most": np.round(most, DIGITS), "send": np.where(running, so_far[0], send).astype(np.int64),
            "recv": np.where(running, so_far[1], recv).astype(np.int64),
            "send_rate": np.round(rates[0], 2), "recv_rate": np.round(rates[1], 2),
        }  # fmt: skip

    def _running_steps(self, name: str, now: Floats, newest: Ranks, running: Bools) -> tuple[Ranks, Ranks]:
        """Steps executed so far by the ranks that are inside a round."""
        world = self.layout.world
        send, recv = np.zeros(world, np.int64), np.zeros(world, np.int64)
        track = self.timeline.tracks[name]
        for rank in np.flatnonzero(running & self._members(name)).tolist():
            k, moment = int(newest[rank]), float(now[rank])
            ready, leave = float(track.ready[k, rank]), float(track.leave[k, rank])
            share = (moment - ready) / (leave - ready) if ready <= moment and leave < np.inf and leave > ready else 0.0
            if name in ("act", "grad"):
                cap = self.timeline.caps.get((name, k, rank))
                recv[rank] = int(cap[1][0]) if cap is not None else int(min(1.0, share) * P2P_STEPS)
                continue
            family = self.layout.families[name]
            group, position = int(self.group_of[name][rank]), int(self.position[name][rank])
            op = self.layout.ops[track.ops[k]]
            here = track.enter[k, family.groups[group]] <= moment
            if here.all() and leave < np.inf:
                totals = step_totals(family, op)
                send[rank], recv[rank] = (int(min(1.0, share) * int(total[position])) for total in totals)
            else:
                both = self._at_rest(name, k, group, here, family, op)
                send[rank], recv[rank] = int(both[0][position]), int(both[1][position])
        return send, recv

    def _at_rest(
        self, name: str, k: int, group: int, here: Bools, family: Family, op: Operation
    ) -> tuple[Ranks, Ranks]:
        key = (name, k, group, here.tobytes())
        if key not in self.settled:
            far = np.full((1, len(here)), np.iinfo(np.int64).max // 4)
            caps = self.timeline.caps.get((name, k, group))
            send_cap, recv_cap = (far, far) if caps is None else (caps[0][None], caps[1][None])
            send, recv = settled(op.op, family.algo, op.loops, op.root, here[None], send_cap, recv_cap)
            self.settled[key] = send[0], recv[0]
        return self.settled[key]

    def _entry(self, name: str, rank: int, table: dict[str, Any], moved: bool, armed: bool) -> Entry:
        p2p = name in ("act", "grad")
        family = self.layout.families["p2p" if p2p else name]
        track = self.timeline.tracks[name]
        k = int(table["newest"][rank])
        op = self.timeline.replaced.get((name, k, rank)) or self.layout.ops[track.ops[k]]
        count = int(table["last"][rank] - table["first"][rank])
        used = int(table["entered"][rank]) > 0 or int(self.base[name][rank]) > 0
        item: Entry = {"comm": self._comm(name, rank)}
        if p2p:
            item["peer"] = self._peer(name, rank)
        item["seq"] = int(self.base[name][rank]) + max(int(table["entered"][rank]), int(table["last"][rank])) - 1
        item |= {"op": op.op, "dtype": op.dtype, "count": op.count, "algo": family.algo, "proto": op.proto}
        if op.root is not None:
            item["root"] = self._root(name, rank, op)
        item["state"] = "running" if table["running"][rank] else "done" if used else "none"
        item["rounds"] = count
        if moved:
            for key, column in (("dur_ms", "dur"), ("dur_min_ms", "least"), ("dur_max_ms", "most"), ("gap_ms", "gap")):
                item[key] = _known(table[column][rank])
        item["send"], item["recv"] = int(table["send"][rank]), int(table["recv"][rank])
        for key in ("send_rate", "recv_rate"):
            item[key] = _known(table[key][rank]) if moved else 0.0
        if self.nccl:
            self._stock_library(item, moved, armed, table, rank, name)
        return item

    def _stock_library(
        self, item: Entry, moved: bool, armed: bool, table: dict[str, Any], rank: int, name: str
    ) -> None:
        inside = self.inside[name][rank]
        if inside:
            item |= dict.fromkeys(("send", "recv", "send_rate", "recv_rate"))
            if item["state"] == "running":
                item["state"] = "enqueued"
                item["done_seq"] = int(self.base[name][rank] + table["last"][rank]) - 1
        if moved and not armed:
            item["gap_ms"] = None
            if inside:
                item |= dict.fromkeys(("dur_ms", "dur_min_ms", "dur_max_ms"))

    def _ahead(self, marks: dict[str, tuple[Ranks, Ranks, Ranks]]) -> dict[str, Ranks]:
        """Rounds handed to the GPU per track, (W,): the host is up to AHEAD_MAX operations ahead of a GPU that waits
        inside one, but never past the end of a step, where it waits for the norm. Where a program
        disagrees with its peers, its next word on that communicator has not come yet: else nobody could see it."""
        world = self.layout.world
        steps = self.timeline.programs
        position = np.sum([last for _, last, _ in marks.values()], 0)
        waiting = np.any([entered > last for _, last, entered in marks.values()], 0)
        ahead = {name: np.zeros(world, np.int64) for name in marks}
        for stage, ranks in enumerate(self.layout.stage_ranks):
            order = [(track, step) for step, program in enumerate(steps) for track, _ in program.order[stage]]
            ends = np.cumsum([len(program.order[stage]) for program in steps])
            for rank in ranks.tolist():
                at = int(position[rank])
                until = at
                if waiting[rank] and rank not in self.timeline.crossed:
                    limit = int(ends[np.searchsorted(ends, at, side="right")])
                    until = min(at + 1 + int(self.rng.integers(AHEAD_MAX + 1)), limit)
                    again = [i for i in range(at + 1, until) if order[i][0] == order[at][0]]
                    until = again[0] if again and self.timeline.replaced else until
                for track, _ in order[at:until]:
                    ahead[track][rank] += 1
        return {name: ahead[name] + marks[name][1] for name in marks}

    def _host_ahead(self, item: Entry, name: str, rank: int, table: dict[str, Any], ahead: Ranks) -> None:
        done, base = int(table["last"][rank]), int(self.base[name][rank])
        item["done_seq"] = base + done - 1
        handed = max(int(ahead[rank]), int(table["entered"][rank]))
        item["seq"] = base + handed - 1
        if handed - 1 > int(table["newest"][rank]):
            op = self.layout.ops[self.timeline.tracks[name].ops[handed - 1]]
            item |= {"op": op.op, "dtype": op.dtype, "count": op.count, "proto": op.proto}
            item.pop("root", None)
            if op.root is not None:
                item["root"] = self._root(name, rank, op)
        if item["state"] == "done" and handed > done:
            item["state"] = "enqueued"

    def _root(self, name: str, rank: int, op: Operation) -> int:
        return int(self.layout.families[name].groups[self.group_of[name][rank], op.root or 0])

    def _comm(self, name: str, rank: int) -> str:
        if name in ("act", "grad"):
            family = self.layout.families["p2p"]
            row = int(np.flatnonzero(family.groups[:, 1 if name == "act" else 0] == rank)[0])
            return family.ids[row]
        return self.layout.families[name].ids[int(self.group_of[name][rank])]

    def _peer(self, name: str, rank: int) -> int:
        pairs = self.layout.families["p2p"].groups
        mine, other = (1, 0) if name == "act" else (0, 1)
        return int(pairs[np.flatnonzero(pairs[:, mine] == rank)[0], other])


def _known(value: float) -> float | None:
    return None if not np.isfinite(value) else float(value)
