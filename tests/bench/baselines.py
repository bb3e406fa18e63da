"""Simpler ways to name the guilty, on the inputs that the engine gets: to see what its rules are worth.

Three published ideas, written anew from their descriptions:

* `z_score`: each operator's time per step, compared over all ranks; a rank is abnormal where one of its operators lies
  more than three standard deviations off. This is how EROICA's comparison of workers is often retold; the paper itself
  uses a differential distance. An operator that a rank does not have counts as no time.
* `ccl_d`: the decisions of CCL-D. A communicator is slow where a round takes R > 3 times as long as at first. With T
  the ranks' durations of a round, P = (T_max - T_min) / (T_max - T_base) near 1 says that the rank with the shortest
  duration computes slowly, P near 0 that the rank with the lowest rate communicates slowly, between them both. In a
  hang: who has not entered; else, where operations differ, or where all are the same, who has the fewest steps. Bounds
  of P are not published: 0.8 and 0.2 here. Nothing published says which communicator counts where several are slow or
  stuck: the one with the greatest R, or that has stood longest.
* `fastest_rank`: NVIDIA's resiliency extension 0.4.1. A rank's score is the mean over compute kernels, weighted by
  their time, of the fastest rank's median over its own; below 0.75 it is a straggler. Communication is left out.

None of them follows causes from one communicator to the next, looks at machines, knows roles, or says "nobody".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from diagnosis.contracts.incident import Floats, Frames, Incident, State, Summaries
from diagnosis.contracts.verdict import Verdict

Z_MAX: Final = 3.0
R_MIN: Final = 3.0
P_COMPUTE_MIN, P_NETWORK_MAX = 0.8, 0.2
STUCK_MS_MIN: Final = 120_000.0
SCORE_MIN: Final = 0.75


@dataclass(frozen=True, slots=True)
class Blamed:
    """What one method says. `class_`: H1 .. S3, None where it says none."""

    class_: str | None = None
    ranks: frozenset[int] = frozenset()


NOBODY: Final = Blamed()


def engine(incident: Incident, verdict: Verdict) -> Blamed:
    """The engine's own verdict in the same words: a node stands for its ranks; links are no ranks."""
    ranks = {c.rank for c in verdict.culprits if c.rank is not None}
    for culprit in verdict.culprits:
        if culprit.kind == "node" and culprit.rank is None and culprit.node in incident.job.node_names:
            node = incident.job.node_names.index(culprit.node)
            ranks |= set(np.flatnonzero(incident.job.node == node).tolist())
    return Blamed(verdict.class_, frozenset(ranks))


def z_score(incident: Incident) -> Blamed:
    """See the module."""
    if incident.summaries is None:
        return NOBODY
    times = _per_step(incident.summaries, "total_time_ms", 0.0)
    spread = times.std(0)
    z = np.abs(times - times.mean(0)) / np.where(spread > 0, spread, np.inf)
    if not (z > Z_MAX).any():
        return NOBODY
    operator = int(np.argmax(z.max(0)))
    odd = incident.summaries.rank[(z > Z_MAX).any(1)]
    return Blamed("S2" if incident.summaries.kind[operator] == "comm" else "S1", frozenset(odd.tolist()))


def fastest_rank(incident: Incident) -> Blamed:
    """See the module."""
    if incident.summaries is None:
        return NOBODY
    compute = np.array([kind == "compute" for kind in incident.summaries.kind], bool)
    median = _table(incident.summaries, "p50_us")[:, compute]
    weight = _table(incident.summaries, "total_time_ms")[:, compute]
    common = np.isfinite(median).all(0) & np.isfinite(weight).all(0)
    if not common.any():
        return NOBODY
    median, weight = median[:, common], weight[:, common]
    score = (median.min(0) / median * weight).sum(1) / weight.sum(1)
    slow = frozenset(incident.summaries.rank[score < SCORE_MIN].tolist())
    return Blamed("S1", slow) if slow else NOBODY


def _per_step(summaries: Summaries, column: str, absent: float) -> Floats:
    table = _table(summaries, column) / summaries.steps[:, None]
    return np.where(np.isfinite(table), table, absent)


def _table(summaries: Summaries, column: str) -> Floats:
    """A column of the operators as (workers, names); NaN: not told."""
    table = np.full((len(summaries.rank), len(summaries.operator_names)), np.nan)
    if column in summaries.stats:
        table[summaries.worker, summaries.operator] = summaries.stats[column]
    return table


def ccl_d(incident: Incident) -> Blamed:
    """See the module."""
    frames = incident.frames
    first, last = _row_of(frames, newest=False), _row_of(frames, newest=True)
    stuck = [row for row in last.values() if _inside(frames, row) and frames.age_ms[row] >= STUCK_MS_MIN]
    if stuck:
        oldest = max(stuck, key=lambda row: float(frames.age_ms[row]))
        return _stuck(frames, [row for (_, comm), row in last.items() if comm == frames.comm[oldest]])
    slowest, found = R_MIN, NOBODY
    for comm in range(len(incident.communicators.ids)):
        ranks = [
            (rank, first[rank, comm], last[rank, comm])
            for rank in incident.communicators.member[
                incident.communicators.start[comm] : incident.communicators.start[comm + 1]
            ].tolist()
            if (rank, comm) in last
        ]
        ratio, blamed = _slow(frames, ranks)
        if ratio > slowest:
            slowest, found = ratio, blamed
    return found


def _row_of(frames: Frames, *, newest: bool) -> dict[tuple[int, int], int]:
    """The row of each (rank, communicator) in the rank's first or newest frame."""
    rank = frames.rank[frames.frame].tolist()
    rows = range(len(rank))
    return {(rank[row], int(frames.comm[row])): row for row in (rows if newest else reversed(rows))}


def _inside(frames: Frames, row: int) -> bool:
    return int(frames.state[row]) in (State.RUNNING, State.ENQUEUED)


def _stuck(frames: Frames, rows: list[int]) -> Blamed:
    """Who holds up a communicator, given the newest row of each member that spoke."""
    inside = [row for row in rows if _inside(frames, row)]
    done = frames.done_seq[inside]
    stuck_at = float(np.where(np.isfinite(done), done + 1, frames.seq[inside]).min())
    absent = [row for row in rows if frames.seq[row] < stuck_at]
    if absent:
        return Blamed("H1", _ranks(frames, absent))
    differ = len({int(frames.signature[row]) for row in inside}) > 1
    steps = frames.send[inside] + frames.recv[inside]
    if not np.isfinite(steps).any():
        return Blamed("H2" if differ else "H3")
    fewest = [row for row, count in zip(inside, steps, strict=True) if count == np.nanmin(steps)]
    return Blamed("H2" if differ else "H3", _ranks(frames, fewest))


def _ranks(frames: Frames, rows: list[int]) -> frozenset[int]:
    return frozenset(frames.rank[frames.frame[rows]].tolist())


def _slow(frames: Frames, members: list[tuple[int, int, int]]) -> tuple[float, Blamed]:
    """R of a communicator and who is to blame. `members`: rank, its first row and its newest row."""
    if len(members) < 2:
        return 0.0, NOBODY
    ranks = np.array([rank for rank, _, _ in members])
    before, now = (_duration_ms(frames, np.array(rows)) for rows in zip(*((a, b) for _, a, b in members), strict=True))
    told = np.isfinite(now)
    if not np.isfinite(before).any() or told.sum() < 2:
        return 0.0, NOBODY
    base, most, least = float(np.nanmean(before)), float(now[told].max()), float(now[told].min())
    if base <= 0 or most <= base:
        return 0.0, NOBODY
    share = (most - least) / (most - base)
    shortest = int(ranks[told][np.argmin(now[told])])
    rate = frames.send_rate[[row for _, _, row in members]]
    lowest = {int(ranks[np.nanargmin(rate)])} if np.isfinite(rate).any() else set()
    if share >= P_COMPUTE_MIN:
        return most / base, Blamed("S1", frozenset({shortest}))
    if share <= P_NETWORK_MAX:
        return most / base, Blamed("S2", frozenset(lowest))
    return most / base, Blamed("S3", frozenset({shortest, *lowest}))


def _duration_ms(frames: Frames, rows: NDArray[np.int64]) -> Floats:
    """Mean duration of a round; NaN: not told."""
    rounds = frames.rounds[rows]
    return np.asarray(frames.dur_ms[rows] / np.where(rounds > 0, rounds, np.nan))


METHODS: Final[dict[str, Callable[[Incident], Blamed]]] = {
    "CCL-D's rules": ccl_d,
    "z-score per operator": z_score,
    "score against the fastest rank": fastest_rank,
}
