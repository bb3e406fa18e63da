"""A job of any size as columns, made directly: TP within the node, DP across nodes, one communicator of the whole job.

For benchmarks and property tests of the engine; times are drawn, not simulated (`diagnosis.drill` does that).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diagnosis.contracts.incident import Communicators, Floats, Frames, HealthTable, Incident, Job, Kind, State

GPUS = 8
LANES = 3
ROUNDS_PER_STEP = np.array([16.0, 1.0, 1.0])  # TP, DP, world
TRANSFER_MS = np.array([0.5, 8.0, 0.2])
OWN_MS = 10.0
WINDOW_MS = 1000.0


@dataclass(frozen=True, slots=True)
class Fault:
    """At most one of: `slow`, a rank and the factor of its own work; `stuck`, a rank that never enters."""

    slow: tuple[int, float] | None = None
    stuck: int | None = None


def communicators(world: int, dp: int) -> Communicators:
    """TP groups of 8 consecutive ranks; DP groups of `dp` ranks with a stride of 8; all."""
    ranks = np.arange(world, dtype=np.int32)
    tp = ranks.reshape(-1, GPUS)
    replicas = ranks.reshape(-1, dp, GPUS).transpose(0, 2, 1).reshape(-1, dp)
    sizes = np.concatenate([np.full(len(tp), GPUS), np.full(len(replicas), dp), [world]])
    count = len(sizes)
    return Communicators(
        ids=tuple(f"c{number}" for number in range(count)),
        start=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        member=np.concatenate([tp.ravel(), replicas.ravel(), ranks]).astype(np.int32),
        kind=np.full(count, Kind.COLLECTIVE, np.uint8),
        algo=("RING",) * count,
        transport=("NVLINK",) * len(tp) + ("NET",) * (len(replicas) + 1),
    )


def job(world: int, dp: int = 16, seed: int = 0, fault: Fault | None = None) -> Incident:
    """One incident with a healthy sample and one of the fault. `world`: a multiple of 8 * `dp`."""
    fault = fault or Fault()
    comms = communicators(world, dp)
    nodes = world // GPUS
    return Incident(
        job=Job(
            job_id=1,
            world_size=world,
            node_names=tuple(f"gpu{number:06d}" for number in range(nodes)),
            node=(np.arange(world) // GPUS).astype(np.int32),
            gpu=(np.arange(world) % GPUS).astype(np.int32),
        ),
        communicators=comms,
        frames=_frames(world, dp, np.random.default_rng(seed), fault),
        nvml=_clocks(world, fault),
    )


def _frames(world: int, dp: int, random: np.random.Generator, fault: Fault) -> Frames:
    shape = (world, 2, LANES)
    ranks = np.arange(world, dtype=np.int32)
    comm = np.stack(
        [
            ranks // GPUS,
            world // GPUS + ranks // (GPUS * dp) * GPUS + ranks % GPUS,
            np.full(world, world // GPUS + world // dp),
        ],
        axis=1,
    ).astype(np.int32)
    factor = np.ones((world, 2))
    if fault.slow:
        factor[fault.slow[0], 1] = fault.slow[1]
    own = OWN_MS * factor * random.lognormal(0, 0.01, (world, 2))
    unit = OWN_MS * factor.max(axis=0) + float((TRANSFER_MS * ROUNDS_PER_STEP).sum()) / ROUNDS_PER_STEP[0]
    rounds = np.broadcast_to(np.maximum(1, np.round(WINDOW_MS / unit / 16))[None, :, None] * ROUNDS_PER_STEP, shape)
    dur = np.broadcast_to(TRANSFER_MS, shape).copy()
    if fault.slow:
        _wait(fault.slow, dp, ranks, dur[:, 1])
    gap = np.zeros(shape)
    gap[:, :, 0] = own
    seq = np.broadcast_to(ROUNDS_PER_STEP * np.array([10.0, 20.0])[:, None], shape).copy()
    state = np.full(shape, State.DONE, np.uint8)
    age = np.full(shape, np.nan)
    if fault.stuck is not None:
        rounds = rounds.copy()
        rounds[:, 1] = 0
        age[:, 1] = 400_000.0
        _freeze(fault.stuck, dp, ranks, seq[:, 1], state[:, 1])
    nothing = np.full(world * 2 * LANES, np.nan)
    return Frames(
        rank=np.repeat(ranks, 2),
        t_ms=np.tile(np.array([1000.0, 2000.0]), world),
        window_ms=np.full(2 * world, WINDOW_MS),
        frame=np.repeat(np.arange(2 * world, dtype=np.int32), LANES),
        comm=np.repeat(comm[:, None, :], 2, axis=1).ravel(),
        peer=np.full(world * 2 * LANES, -1, np.int32),
        state=state.ravel(),
        signature=np.tile(np.arange(LANES, dtype=np.int32), 2 * world),
        signatures=("AllReduce bf16 16777216", "AllReduce bf16 134217728", "AllReduce f32 2"),
        seq=seq.ravel(),
        done_seq=nothing,
        age_ms=age.ravel(),
        send=nothing,
        recv=nothing,
        send_rate=nothing,
        recv_rate=nothing,
        rounds=rounds.ravel(),
        dur_ms=(dur * rounds).ravel(),
        dur_min_ms=dur.ravel(),
        dur_max_ms=dur.ravel(),
        gap_ms=(gap * rounds).ravel(),
        idle_seq=nothing,
        errors=nothing,
    )


def _where_each_waits(guilty: int, dp: int, ranks: NDArray[np.int32]) -> tuple[NDArray[np.bool_], ...]:
    """Its TP peers wait in TP, the replicas of those in DP, all others in the communicator of all."""
    tp = (ranks // GPUS == guilty // GPUS) & (ranks != guilty)
    group = (ranks // (GPUS * dp) == guilty // (GPUS * dp)) & (ranks // GPUS != guilty // GPUS)
    return tp, group, ~tp & ~group & (ranks != guilty)


def _wait(slow: tuple[int, float], dp: int, ranks: NDArray[np.int32], dur: Floats) -> None:
    late_ms = OWN_MS * (slow[1] - 1) * ROUNDS_PER_STEP[0]
    for lane, waiting in enumerate(_where_each_waits(slow[0], dp, ranks)):
        dur[waiting, lane] += late_ms / ROUNDS_PER_STEP[lane]


def _freeze(stuck: int, dp: int, ranks: NDArray[np.int32], seq: Floats, state: NDArray[np.uint8]) -> None:
    tp, group, others = _where_each_waits(stuck, dp, ranks)
    for lane, waiting in enumerate((tp, group, others)):
        seq[waiting, lane] += 1
        state[waiting, lane] = State.RUNNING
    seq[group | others, 0] += 5
    seq[others, 1] += 1


def _clocks(world: int, fault: Fault) -> HealthTable:
    clock = np.full(world, 1980.0)
    reasons = np.zeros(world)
    if fault.slow:
        clock[fault.slow[0]] = 1980.0 / fault.slow[1]
        reasons[fault.slow[0]] = 0x40
    return HealthTable(
        node=(np.arange(world) // GPUS).astype(np.int32),
        entity=tuple(int(gpu) for gpu in np.arange(world) % GPUS),
        values={"sm_clock_mhz": clock, "sm_clock_max_mhz": np.full(world, 1980.0), "clocks_event_reasons": reasons},
    )
