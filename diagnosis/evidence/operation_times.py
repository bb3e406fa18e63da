"""Operation times of a pipeline-parallel job (tables as StragglerAnalysis publishes them): what if they were even?

Columns: `dp_rank`, `stage`, `rank`, `step`, `optype`, `start_ts` and `duration` (s), `mb_id` (microbatch), `gmc` (model
chunk along the whole pipeline, where a stage holds several). Only the compute operations are judged: the durations of
sends, receives and collectives hold the waiting for others, which is nobody's doing.

A worker is one stage of one data-parallel replica. Comparing workers directly misleads twice: a stage may be slower by
design, and a slow operation costs nothing where the pipeline has slack. So the question is put to a replay (ByteDance
and NYU, OSDI'25). The compute operations are run again on their dependency graph: each worker runs its own in the
order that it had, a forward needs the forward of the chunk before, a backward the backward of the chunk behind, and a
step lasts until the last worker is done. Transfers take no time. Then:

* `T` with the times as they were, `T_even` with each operation's mean over all workers: the slow-down is
  `T / T_even`, the loss `T - T_even`.
* Fixing the slow workers (their times become the mean of the same stage in the other replicas) recovers a share of
  the loss, and evening out the slowest stage, or the microbatches, some of what is left. Whoever recovers most of it
  is what the job waits for.

A worker is compared with the same stage only, so a stage that is slow in every replica is the job's design and nobody's
fault. One slow replica of a job with one replica cannot be told from design: then no worker is named.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from diagnosis.contracts.errors import AgentFault
from diagnosis.contracts.incident import Floats
from diagnosis.contracts.verdict import DOMAIN_OF_CAUSE, Action, Culprit, EvidenceItem, Verdict

SLOWDOWN_MIN: Final = 1.1
SHARE_MIN: Final = 0.5
WORKER_RATIO_MIN: Final = 1.2
WORKERS_SHARE_MAX: Final = 0.25
WORKERS_NAMED_MAX: Final = 32
CELLS_MAX: Final = 1 << 26
OPERATIONS_MAX: Final = 1 << 15
FORWARD, BACKWARD = 0, 1
OPERATIONS: Final = ("forward-compute", "backward-compute")
NEEDED: Final = ("dp_rank", "stage", "step", "optype", "start_ts", "duration", "mb_id")
OPTIONAL: Final = ("rank", "gmc")

Longs = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class OperationTimes:
    """Compute times as a tensor.

    `duration_s`, `start_s` (operation 2, chunk V, microbatch M, step S, replica D); NaN: not told. `stage` (V,): which
    stage holds a chunk. `rank` (stage P, replica D): the worker's global rank, -1 unknown.
    """

    duration_s: Floats
    start_s: Floats
    stage: Longs
    rank: Longs


@dataclass(frozen=True, slots=True, eq=False)
class _Schedule:
    """Operations (O,) in an order in which each comes behind all it needs: its place in the tensor, the operation of
    the same stage before it and the one of the chunk beside it (-1: none)."""

    operation: Longs
    chunk: Longs
    microbatch: Longs
    before: Longs
    needs: Longs


def tensor(columns: dict[str, NDArray[np.generic]]) -> OperationTimes:
    """Columns of equal length (by name, see the module) as a tensor. The last of several rows for one place counts.

    Raises: AgentFault (a column is missing, holds no numbers, or the table is too large or too sparse).
    """
    missing = [name for name in NEEDED if name not in columns]
    if missing:
        raise AgentFault(f"column {missing[0]} is missing", reason="columns")
    words = columns["optype"].astype(str)
    keep = np.isin(words, OPERATIONS)
    operation = (words[keep] == OPERATIONS[BACKWARD]).astype(np.int64)
    numbers = {name: _numbers(name, columns[name][keep]) for name in (*NEEDED, *OPTIONAL) if name in columns}
    numbers.pop("optype")
    whole = ~np.isnan(numbers["stage"] + numbers["dp_rank"] + numbers["step"] + numbers["mb_id"])
    whole &= (numbers["mb_id"] >= 0) & (numbers["stage"] >= 0)
    chunk_of = numbers.get("gmc", numbers["stage"])
    chunk_of = np.where(np.isnan(chunk_of) | (chunk_of < 0), numbers["stage"], chunk_of)
    if not whole.any():
        raise AgentFault("no compute operation has its place", reason="columns")
    places = []
    sizes = []
    for column in (chunk_of, numbers["mb_id"], numbers["step"], numbers["dp_rank"], numbers["stage"]):
        values, index = np.unique(column[whole], return_inverse=True)
        places.append(index.reshape(-1))
        sizes.append(len(values))
    chunk, microbatch, step, replica, stage = places
    shape = (2, *sizes[:4])
    if np.prod(shape, dtype=np.float64) > min(CELLS_MAX, 64.0 * len(chunk) + 1024):
        raise AgentFault("the table is too large, or most of it is missing", reason="size")
    duration, start = np.full(shape, np.nan), np.full(shape, np.nan)
    at = (operation[whole], chunk, microbatch, step, replica)
    seconds = numbers["duration"][whole]
    duration[at] = np.where(np.isfinite(seconds) & (seconds >= 0), seconds, np.nan)
    start[at] = numbers["start_ts"][whole]
    stage_of_chunk = np.zeros(sizes[0], np.int64)
    stage_of_chunk[chunk] = stage
    rank = np.full((sizes[4], sizes[3]), -1, np.int64)
    if "rank" in numbers:
        told = np.nan_to_num(numbers["rank"][whole], nan=-1.0)
        rank[stage, replica] = np.where((told >= 0) & (told < 1 << 31), told, -1).astype(np.int64)
    return OperationTimes(duration, start, stage_of_chunk, rank)


def _numbers(name: str, column: NDArray[np.generic]) -> Floats:
    if name == "optype":
        return np.empty(0)
    try:
        return column.astype(np.float64)
    except (ValueError, TypeError):
        raise AgentFault(f"column {name} does not hold numbers", reason="columns") from None


def judge(times: OperationTimes) -> Verdict:
    """Whether the job is slower than its own even times, and what it waits for: workers, a stage, uneven microbatches,
    or nothing that these times show."""
    schedule = _schedule(times)
    if schedule is None:
        return _undecided("the operations cannot be put in an order that respects their dependencies", [], None)
    filled = _filled(times.duration_s)
    step_s = _replay(schedule, filled)
    even_s = _replay(schedule, np.broadcast_to(filled.mean(axis=(1, 2, 3, 4), keepdims=True), filled.shape))
    slowdown, loss_s = step_s / even_s if even_s > 0 else 1.0, step_s - even_s
    took = f"replayed, a step takes {step_s * 1000:.0f} ms, and {even_s * 1000:.0f} ms if its operations took the mean"
    facts = [EvidenceItem(kind="slowdown", text=took, value=round(slowdown, 4))]
    if slowdown < SLOWDOWN_MIN:
        return Verdict(job_id=None, anomaly="none", summary="No worker and no stage holds the job up.", evidence=facts)
    workers = _slow_workers(times, filled)
    mended = _with_workers_fixed(times, filled, workers)
    mended_s = _replay(schedule, mended)
    stage, even_stage = _with_slowest_stage_even(times, mended)
    even_microbatches = np.broadcast_to(mended.mean(axis=2, keepdims=True), mended.shape)
    by_workers = (step_s - mended_s) / loss_s
    by_stage = (mended_s - _replay(schedule, even_stage)) / loss_s
    by_microbatch = (mended_s - _replay(schedule, even_microbatches)) / loss_s
    facts += [
        _share("workers", f"workers that are slow among the same stage ({len(workers)} of them)", by_workers),
        _share("stage", f"stage {stage}", by_stage),
        _share("microbatches", "uneven microbatches", by_microbatch),
    ]
    few = len(workers) <= max(1.0, WORKERS_SHARE_MAX * times.rank.size)
    if workers and few and by_workers >= SHARE_MIN:
        return _workers_verdict(times, schedule, filled, workers, by_workers, slowdown, mended_s, facts)
    longer = f"Steps take {slowdown:.2f} times as long as even ones"
    if by_stage >= max(SHARE_MIN, by_microbatch):
        return _imbalance(f"{longer}: stage {stage} has more work than the others.", by_stage, loss_s, facts)
    if by_microbatch >= SHARE_MIN:
        return _imbalance(f"{longer}: microbatches are uneven.", by_microbatch, loss_s, facts)
    return _undecided(f"{longer}, and nobody explains most of it", facts, slowdown)


def _share(kind: str, what: str, share: float) -> EvidenceItem:
    text = f"fixing {what} wins back {min(max(share, 0.0), 1.0):.0%} of what is lost"
    return EvidenceItem(kind=kind, text=text, value=round(share, 4), against=share < SHARE_MIN)


def _schedule(times: OperationTimes) -> _Schedule | None:
    """Each stage's operations in the order that they mostly had, laid out so that all can be run; None if they
    cannot."""
    _, chunks, microbatches = times.duration_s.shape[:3]
    told = np.asarray(~np.isnan(times.start_s).all(axis=(3, 4)))
    if not told.any() or 2 * chunks * microbatches > OPERATIONS_MAX:
        return None
    started = np.full(told.shape, np.nan)
    started[told] = np.nanmedian(times.start_s[told].reshape(int(told.sum()), -1), axis=1)
    queues: list[list[tuple[int, int, int]]] = []
    for stage in range(int(times.stage.max()) + 1):
        mine = [(int(o), int(v), int(m)) for o, v, m in np.argwhere(told) if times.stage[v] == stage]
        queues.append(sorted(mine, key=lambda place: started[place]))
    index: dict[tuple[int, int, int], int] = {}
    needs, before = [], []
    last = [-1] * len(queues)
    heads = [0] * len(queues)
    moved = True
    while moved:
        moved = False
        for stage, queue in enumerate(queues):
            while heads[stage] < len(queue):
                place = queue[heads[stage]]
                needed = _needed(place, chunks)
                if needed is not None and told[needed] and needed not in index:
                    break
                needs.append(index.get(needed, -1) if needed is not None else -1)
                before.append(last[stage])
                index[place] = last[stage] = len(index)
                heads[stage] += 1
                moved = True
    if len(index) != int(told.sum()):
        return None
    places = np.array(list(index), np.int64).reshape(-1, 3)
    return _Schedule(places[:, 0], places[:, 1], places[:, 2], np.array(before), np.array(needs))


def _needed(place: tuple[int, int, int], chunks: int) -> tuple[int, int, int] | None:
    operation, chunk, microbatch = place
    if operation == FORWARD:
        return (FORWARD, chunk - 1, microbatch) if chunk > 0 else None
    return (BACKWARD, chunk + 1, microbatch) if chunk + 1 < chunks else (FORWARD, chunk, microbatch)


def _replay(schedule: _Schedule, duration_s: Floats) -> float:
    """Mean over the steps of the time until the last worker is done (s)."""
    ends = np.zeros((len(schedule.chunk) + 1, *duration_s.shape[3:]))  # the last row, index -1, is the beginning
    for at in range(len(schedule.chunk)):
        place = (schedule.operation[at], schedule.chunk[at], schedule.microbatch[at])
        ends[at] = np.maximum(ends[schedule.before[at]], ends[schedule.needs[at]]) + duration_s[place]
    return float(ends.max(axis=(0, 2)).mean())


def _filled(duration_s: Floats) -> Floats:
    """Unknown times as the mean of what is known of the operation, so that they count neither way."""
    total = np.nansum(duration_s, axis=(1, 2, 3, 4), keepdims=True)
    count = np.maximum((~np.isnan(duration_s)).sum(axis=(1, 2, 3, 4), keepdims=True), 1)
    return np.asarray(np.where(np.isnan(duration_s), total / count, duration_s), np.float64)


def _slow_workers(times: OperationTimes, filled: Floats) -> list[tuple[int, int]]:
    """(stage, replica) of workers whose compute takes much longer than that of the median replica, slowest first."""
    if times.rank.shape[1] < 2:
        return []
    of_chunk = np.asarray(filled.sum(axis=(0, 2, 3)), np.float64)
    own = np.zeros(times.rank.shape)
    np.add.at(own, times.stage, of_chunk)
    usual = np.median(own, axis=1, keepdims=True) if times.rank.shape[1] > 2 else own.min(axis=1, keepdims=True)
    ratio = own / np.maximum(usual, 1e-12)
    slow = sorted(np.argwhere(ratio >= WORKER_RATIO_MIN).tolist(), key=lambda at: -ratio[at[0], at[1]])
    return [(int(stage), int(replica)) for stage, replica in slow]


def _with_workers_fixed(times: OperationTimes, filled: Floats, workers: list[tuple[int, int]]) -> Floats:
    """The times with those of `workers` as the mean of the same stage in the replicas that are not among them."""
    fixed = filled.copy()
    for stage in {stage for stage, _ in workers}:
        bad = [replica for s, replica in workers if s == stage]
        good = np.setdiff1d(np.arange(times.rank.shape[1]), bad)
        if len(good):
            for chunk in np.flatnonzero(times.stage == stage):
                fixed[:, chunk][..., bad] = filled[:, chunk][..., good].mean(axis=-1, keepdims=True)
    return fixed


def _with_slowest_stage_even(times: OperationTimes, filled: Floats) -> tuple[int, Floats]:
    """The stage that computes longest, and the times with its own as the mean of the other stages."""
    stages = np.unique(times.stage)
    slowest = int(max(stages, key=lambda stage: filled[:, times.stage == stage].sum()))
    mine = times.stage == slowest
    even = filled.copy()
    if not mine.all():
        even[:, mine] = filled[:, ~mine].mean(axis=1, keepdims=True)
    return slowest, even


def _workers_verdict(
    times: OperationTimes,
    schedule: _Schedule,
    filled: Floats,
    workers: list[tuple[int, int]],
    share: float,
    slowdown: float,
    mended_s: float,
    facts: list[EvidenceItem],
) -> Verdict:
    culprits = []
    for stage, replica in workers[:WORKERS_NAMED_MAX]:
        others = [worker for worker in workers if worker != (stage, replica)]
        alone_s = _replay(schedule, _with_workers_fixed(times, filled, others))
        rank = int(times.rank[stage, replica])
        culprits.append(
            Culprit(
                kind="rank" if rank >= 0 else "job",
                rank=rank if rank >= 0 else None,
                cause="unknown",
                domain=DOMAIN_OF_CAUSE["unknown"],
                confidence=round(min(0.9, share), 2),
                lost_ms_per_step=round(max(0.0, alone_s - mended_s) * 1000, 1),
            )
        )
    names = ", ".join(_worker_name(times, worker) for worker in workers[:4])
    more = f" and {len(workers) - 4} more" if len(workers) > 4 else ""
    return Verdict(
        job_id=None,
        anomaly="slow",
        class_="S1",
        culprits=culprits,
        victims={"ranks": int(times.rank.size) - len(workers)},
        action=Action(kind="collect", collect=f"GPU clocks, their event reasons and host load of {names}{more}"),
        summary=f"Steps take {slowdown:.2f} times as long as even ones, and {min(share, 1.0):.0%} of that is "
        f"{names}{more} computing slowly; nothing here says why.",
        evidence=facts,
    )


def _worker_name(times: OperationTimes, worker: tuple[int, int]) -> str:
    stage, replica = worker
    rank = times.rank[worker]
    return f"stage {stage} of replica {replica}" + (f" (rank {rank})" if rank >= 0 else "")


def _imbalance(summary: str, share: float, loss_s: float, facts: list[EvidenceItem]) -> Verdict:
    culprit = Culprit(
        kind="job",
        cause="workload_imbalance",
        domain=DOMAIN_OF_CAUSE["workload_imbalance"],
        confidence=round(min(0.9, share), 2),
        lost_ms_per_step=round(loss_s * 1000, 1),
    )
    return Verdict(
        job_id=None, anomaly="slow", culprits=[culprit], action=Action(kind="notify"), summary=summary, evidence=facts
    )


def _undecided(summary: str, facts: list[EvidenceItem], slowdown: float | None) -> Verdict:
    return Verdict(
        job_id=None,
        anomaly="none" if slowdown is None else "slow",
        action=Action(kind="collect", collect="the probe's frames or a profiling window of all ranks"),
        summary=f"{summary}; not enough evidence.",
        evidence=facts,
    )
