"""Frames as the probe would write them for a simulated training job: what the tests of step inference look at.

`FrameWriter` follows the probe's rules for which rounds are recorded (`native/frame/recording.c`). `Played` runs a
program of the drill simulator, with evaluations and pauses between steps, and shows a rank's frame at any time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from diagnosis.contracts import probeframe
from diagnosis.contracts.probeframe import ROUND_COUNT, Dtype, Op
from diagnosis.drill.layout import Layout, draw_layout
from diagnosis.drill.program import PARTS, compile_step
from diagnosis.drill.timeline import Simulation
from diagnosis.drill.weather import Weather, step_work
from node_daemon.collectors.frames import FrameSample, JobFrames

SPAN_NS, SPACING_NS = 2_000_000_000, 1_000_000_000
_OPS = {
    "AllReduce": Op.ALL_REDUCE,
    "AllGather": Op.ALL_GATHER,
    "ReduceScatter": Op.REDUCE_SCATTER,
    "AllToAll": Op.ALL_TO_ALL,
    "Broadcast": Op.BROADCAST,
}


@dataclass
class _Recording:
    entered_ns: list[int] = field(default_factory=lambda: [0] * ROUND_COUNT)
    recorded: int = 0
    restrided: int = 0
    newest_ns: int = 0


class FrameWriter:
    """The frame of one process. Times in ns; rounds end in the order in which they were entered."""

    def __init__(self, pid: int = 100, rank: int = 0) -> None:
        self.pid = pid
        self.header = np.zeros(1, probeframe.HEADER_DTYPE)[0]
        self.header["pid"], self.header["rank"] = pid, rank
        self.slots = np.zeros(probeframe.SLOT_COUNT, probeframe.SLOT_DTYPE)
        self._recordings: dict[int, _Recording] = {}
        self._last_ns = 0

    def round(
        self, comm_id: int, enter_ns: int, leave_ns: int, count: int, op: int = Op.ALL_REDUCE, *, untold: int = 0
    ) -> None:
        """One whole round on a communicator, which gets a slot at its first."""
        row = list(self._recordings).index(comm_id) if comm_id in self._recordings else len(self._recordings)
        recording, slot = self._recordings.setdefault(comm_id, _Recording()), self.slots[row]
        seq = int(slot["enqueued"]) + 1
        slot["comm_id"], slot["comm_size"], slot["stride"] = comm_id, 8, max(1, int(slot["stride"]))
        slot["op"], slot["dtype"], slot["count"], slot["root"] = op, Dtype.BFLOAT16, count, -1
        slot["unknown"] = untold
        gap_ns = max(0, enter_ns - self._last_ns) if self._last_ns else 0
        told = self.slots[row : row + 1]
        mark = int(probeframe.signatures(told["op"], told["dtype"], told["count"], told["root"])[0])
        self._record(recording, slot, seq, enter_ns, (gap_ns // 1000, (leave_ns - enter_ns) // 1000, mark))
        slot["enqueued"] = slot["started"] = slot["done"] = seq
        slot["t_enqueued_ns"], slot["t_done_ns"] = enter_ns, leave_ns
        slot["gap_sum_ns"] += gap_ns
        slot["dur_sum_ns"] += leave_ns - enter_ns
        self._last_ns = leave_ns

    def _record(self, recording: _Recording, slot: np.void, seq: int, now_ns: int, row: tuple[int, int, int]) -> None:
        stride, oldest_ns = int(slot["stride"]), recording.entered_ns[recording.recorded % ROUND_COUNT]
        if stride > 1 and now_ns - recording.newest_ns > SPACING_NS:
            slot["stride"], recording.restrided = stride // 2, recording.recorded
        elif recording.recorded - recording.restrided >= ROUND_COUNT and now_ns - oldest_ns < SPAN_NS:
            slot["stride"], recording.restrided = stride * 2, recording.recorded
        if seq % int(slot["stride"]):
            return
        place = recording.recorded % ROUND_COUNT
        recording.recorded += 1
        recording.entered_ns[place] = recording.newest_ns = now_ns
        slot["rounds"][place] = (seq, *row[:2], row[2])

    def sample(self, at_ns: int) -> FrameSample:
        """The frame as it stands."""
        slots = self.slots[self.slots["comm_id"] != 0].copy()
        return FrameSample(self.pid, 1, ord("S"), at_ns, self.header.copy(), slots, slots)


class Played:
    """A simulated job. `evaluate_every`, `pause_every`: steps between evaluations (3 batches) and pauses of `pause_ms`.

    `starts_ms`: when the rank began each training step, those after an evaluation or a pause left out of `steps_ms`.
    """

    def __init__(
        self,
        seed: int,
        *,
        steps: int = 120,
        noise: float = 0.02,
        slower: float = 1.0,
        evaluate_every: int = 0,
        pause_every: int = 0,
        lengths: float = 0.0,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.layout: Layout = draw_layout(rng, 16, 64, frozenset())
        programs = compile_step(self.layout), compile_step(self.layout, evaluate=True)
        weather = Weather(
            base=np.ones(self.layout.shape[1]),
            personal=np.ones(self.layout.world),
            noise=noise,
            sequence_sigma=(lengths, lengths),
        )
        bandwidth = {track: np.full(self.layout.world, 50.0) for track in (*self.layout.families, "act", "grad")}
        self._simulation = Simulation(self.layout, programs, weather, [bandwidth, bandwidth], (True,), None, rng)
        starts: list[float | None] = []
        for step in range(steps):
            kinds = [0]
            if evaluate_every and step % evaluate_every == evaluate_every - 1:
                kinds += [1, 1, 1]
            for kind in kinds:
                starts.append(float(self._simulation.clock[0]) if kind == 0 else None)
                own, _ = step_work(self.layout, weather, programs[kind].rows, PARTS, step, -1, rng)
                self._simulation.step(programs[kind], own * slower, -1)
            if pause_every and step % pause_every == pause_every - 1:
                self._simulation.clock += 20_000.0
                starts.append(None)
        self.steps_ms = [
            after - before for before, after in pairwise(starts) if before is not None and after is not None
        ]

    def rounds(self, rank: int) -> Iterator[tuple[float, float, int, str]]:
        """(enter, leave, track number, operation) of a rank's collectives in order of time, ms."""

        def of(number: int, track: str) -> Iterator[tuple[float, float, int, str]]:
            table = np.concatenate(self._simulation.store[track], axis=1)[:, :, rank]
            for enter, leave, op in zip(table[0], table[1], self._simulation.ops[track], strict=True):
                if np.isfinite(enter):
                    yield float(enter), float(leave), number, op

        tracks = [track for track in self._simulation.store if track in self.layout.families and track != "p2p"]
        return heapq.merge(*(of(number, track) for number, track in enumerate(tracks)))

    def looks(self, rank: int, period_ms: float = 1000.0, skip_ms: float = 0.0) -> Iterator[tuple[float, JobFrames]]:
        """The rank's frame once a period: (time in ms, frames)."""
        writer, due = FrameWriter(100 + rank, rank), skip_ms + period_ms
        for enter, leave, number, name in self.rounds(rank):
            while enter > due:
                yield due, JobFrames(1, 0, 0, 0, [writer.sample(int(due * 1e6))])
                due += period_ms
            op = self.layout.ops[name]
            writer.round(number + 1, int(enter * 1e6) + 1, int(leave * 1e6) + 1, op.count, _OPS[op.op])
