"""Slow-downs: blame by own time, never by waiting time.

In a synchronous job everybody is slow. What is a rank's own doing is its *gap*, the time between leaving one
operation and entering the next; what is done to it is its duration inside. Per window and rank:

    excess_i  = gap_i now - gap_i at baseline, less the median excess of all members (a job-wide change blames nobody)
    lost      = round time now - round time at baseline
    share_i   = excess_i / lost        how much of the loss the rank's own time explains

A rank is named (S1, computation slow) when its share is large, its excess stands clear of the others' and it waits
less than they do: the last to come waits least (CCL-D's P -> 1). When the loss is not any rank's own time it lies in
the communication (P -> 0); with this evidence alone nobody is named then.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diagnosis.engine.history import CommHistory, Floats, JobHistory, RankNow, Window

STANDS_CLEAR = 2.5


@dataclass(frozen=True, slots=True)
class Straggler:
    """One rank whose own time grew. All times in ms per round."""

    rank: RankNow
    share: float
    gap_ms: float
    gap_base_ms: float
    dur_ms: float
    others_dur_ms: float


@dataclass(frozen=True, slots=True)
class Slowdown:
    """A communicator's rounds take `ratio` times as long as at baseline. `p` is CCL-D's P, None if not computable."""

    comm_id: int
    ratio: float
    period_ms: float
    base_ms: float
    p: float | None
    stragglers: list[Straggler]

    @property
    def lost_ms(self) -> float:
        """Time lost per round."""
        return self.period_ms - self.base_ms


def find_slowdown(history: JobHistory, now: float) -> Slowdown | None:
    """The worst lasting slow-down among the job's communicators, or None."""
    limits = history.limits
    found: list[Slowdown] = []
    for comm in history.comms.values():
        recent = list(comm.windows)[-limits.windows :]
        if (
            not comm.learnt(limits)
            or len(recent) < limits.windows
            or comm.baseline[-1] in recent
            or now - recent[-1].ended_at > limits.stale_after_s
        ):
            continue
        base = np.array([window.period_ms for window in comm.baseline])
        base_ms = comm.baseline_ms
        spread_ms = float(np.median(np.abs(base - base_ms)))
        floor_ms = max(limits.slow_ratio * base_ms, base_ms + limits.noise_factor * spread_ms)
        periods = [window.period_ms for window in recent]
        if np.median(periods) > floor_ms and min(periods) > (base_ms + floor_ms) / 2:
            found.append(_attribute(history, comm, recent, base_ms))
    return max(found, key=lambda slow: slow.lost_ms, default=None)


def _median(windows: list[Window], name: str, members: int) -> Floats:
    """Per member, the median over windows; NaN where a member said nothing in any."""
    rows = np.full((len(windows), members), np.nan)
    for row, window in zip(rows, windows, strict=True):
        values: Floats = getattr(window, name)
        row[: len(values)] = values
    heard = ~np.isnan(rows).all(axis=0)
    result = np.full(members, np.nan)
    result[heard] = np.nanmedian(rows[:, heard], axis=0)
    return result


def _attribute(history: JobHistory, comm: CommHistory, recent: list[Window], base_ms: float) -> Slowdown:
    limits, members = history.limits, len(comm.members)
    period_ms = float(np.median([window.period_ms for window in recent]))
    gap, dur = _median(recent, "gap_ms", members), _median(recent, "dur_ms", members)
    gap_base, dur_base = _median(comm.baseline, "gap_ms", members), _median(comm.baseline, "dur_ms", members)
    excess = gap - gap_base
    excess = excess - max(0.0, float(np.nanmedian(excess)))
    lost = max(period_ms - base_ms, 1e-9)
    spread = float(np.nanmax(dur)) - float(np.nanmedian(dur_base))
    p = (float(np.nanmax(dur)) - float(np.nanmin(dur))) / spread if spread > 0 else None
    named = np.flatnonzero(np.nan_to_num(excess) / lost >= limits.blame_share_min)
    others = np.delete(excess, named)
    crowd = float(np.nanmax(np.abs(others))) if len(others) else np.inf
    clear = [i for i in named if excess[i] >= STANDS_CLEAR * crowd and dur[i] <= np.nanmedian(dur)]
    stragglers = [
        Straggler(
            rank=history.ranks[member.rank],
            share=float(min(1.0, excess[i] / lost)),
            gap_ms=float(gap[i]),
            gap_base_ms=float(gap_base[i]),
            dur_ms=float(dur[i]),
            others_dur_ms=float(np.nanmedian(np.delete(dur, i))) if members > 1 else float("nan"),
        )
        for i, member in enumerate(comm.members.values())
        if i in clear
    ]
    if len(stragglers) > max(1, members // 4):
        stragglers = []
    stragglers.sort(key=lambda straggler: -straggler.share)
    return Slowdown(comm.comm_id, period_ms / base_ms, period_ms, base_ms, p, stragglers)
