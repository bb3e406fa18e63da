"""Since when a job is slow: which samples are its baseline and which are the incident.

The rate of rounds is told at every fidelity. Its course over the samples, as a part of the first one, tells where the
job left its usual pace:

* samples at the very beginning that are slower than the two after them are the job's warm-up and are left out;
* the *baseline* is the leading run of samples that are alike, the *incident* all from the first that is not, or that is
  more like the incident's first than like those before it. The first sample of an incident is only half of it and is
  left out where two more follow;
* a fault that comes and goes lets single samples through that are as fast as before, so one such sample ends nothing.
  When the last two are as fast as ever the job has recovered: a pause, a spike, a compilation. Then, as for a job that
  never changed, the last samples are compared with the first (less the sample in which the pause came to be told).
  A job without any round in its last sample stands still or has ended: that is not slow;
* a window that holds four rounds tells a rate to a quarter: samples are alike as far as their rounds can tell.

*Unsteadiness.* In some jobs the work differs from step to step (sequences of uneven length), so two halves of a healthy
past differ as well. How much a rank's own time varies from sample to sample, in the middle of all ranks, says by how
much a job may be slower by chance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diagnosis.contracts.incident import Floats
from diagnosis.engine.lanes import Bools, Lanes

ALIKE = 0.08
RECOVERED_SAMPLES = 2
ONE_ROUND = 1.5


@dataclass(frozen=True, slots=True, eq=False)
class Course:
    """`base`, `now` (F,): frames of the baseline and of the incident. `varied`: how far (one sigma, as a part) a rank's
    own time differs from sample to sample; `unsteady`: how far the job's mean over the incident may therefore lie from
    the baseline's by chance. NaN where no own time is told."""

    base: Bools
    now: Bools
    varied: float
    unsteady: float


def course_of(lanes: Lanes) -> Course:
    """The course of a job. With a single sample there is no baseline."""
    rate, grain = _rates(lanes)
    length = lanes.nth + lanes.nth_last + 1
    samples = int(np.bincount(length[lanes.nth_last == 0]).argmax()) if len(length) else 0
    if samples < 2:
        return Course(np.zeros(len(length), np.bool_), lanes.nth_last == 0, np.nan, np.nan)
    whole = length == samples
    pace = _pace(rate[whole].reshape(-1, samples))
    first = _warm(pace, max(ALIKE, grain))
    lead, trail = _split(pace[first:], grain)
    base, now = (lanes.nth >= first) & (lanes.nth < first + lead), lanes.nth_last < trail
    varied = _varied(lanes, whole, samples, first, lead, trail)
    return Course(base, now, varied, varied * float(np.sqrt(1 / lead + 1 / trail)))


def _pace(rate: Floats) -> Floats:
    """The middle of all ranks for each sample (S,), of each rank's course as a part of its first sample; 1 unknown."""
    with np.errstate(all="ignore"):
        relative = rate / rate[:, :1]
    result = np.ones(rate.shape[1])
    told = ~np.isnan(relative).all(axis=0)
    result[told] = np.nanmedian(relative[:, told], axis=0)
    return result


def _warm(pace: Floats, alike: float) -> int:
    """The first sample after the warm-up: two that follow are faster than one that is still compiling."""
    first = 0
    while first < len(pace) - 2 and pace[first + 1 : first + 3].min() > (1 + alike) * pace[first]:
        first += 1
    return first


def _split(pace: Floats, grain: float) -> tuple[int, int]:
    """Numbers of leading and trailing samples that are compared; `grain`: how fine a sample tells its pace."""
    samples, alike = len(pace), max(ALIKE, grain)
    lead = 1
    while lead < samples and abs(pace[lead] / np.median(pace[:lead]) - 1) <= alike:
        lead += 1
    if pace[-1] == 0:
        return lead, int(np.argmax(pace[::-1] > 0)) if (pace > 0).any() else samples - lead
    level = max(float(np.median(pace[:lead])), 1e-9)
    as_before = np.abs(pace / level - 1) <= alike
    if lead == samples or (samples - lead > RECOVERED_SAMPLES and as_before[-RECOVERED_SAMPLES:].all()):
        if lead == samples:
            return samples // 2, samples - samples // 2
        trail = RECOVERED_SAMPLES
        while trail < samples - lead and as_before[-1 - trail]:
            trail += 1
        return lead, max(trail - 1, RECOVERED_SAMPLES)
    while lead > 1 and abs(pace[lead - 1] - np.median(pace[: lead - 1])) > abs(pace[lead - 1] - pace[lead]):
        lead -= 1
    trail = samples - lead
    return lead, trail - 1 if trail >= 3 else trail


def _rates(lanes: Lanes) -> tuple[Floats, float]:
    """Rounds of the busiest lane of each frame (F,) per ms, and how fine that is (as a part).

    Where all own times and durations are told they tile the time, and the rate is exact; else it is counted in rounds
    per window, and two windows of one pace may differ by one round.
    """
    frames = lanes.incident.frames
    rounds, count = np.nan_to_num(frames.rounds), len(frames.rank)
    busy = np.zeros(count)
    np.maximum.at(busy, frames.frame, rounds)
    silent = (rounds > 0) & (np.isnan(frames.gap_ms) | np.isnan(frames.dur_ms))
    whole = np.bincount(frames.frame, silent, count) == 0
    spent = np.bincount(frames.frame, np.nan_to_num(frames.gap_ms) + np.nan_to_num(frames.dur_ms), count)
    window = np.where(np.isnan(frames.window_ms), 1000.0, frames.window_ms)
    tiled = bool(whole[lanes.nth == 0].all()) if count else False  # one measure for the whole course
    counted = busy[busy > 0]
    grain = 0.0 if tiled or not len(counted) else ONE_ROUND / float(np.median(counted))
    with np.errstate(all="ignore"):
        return np.asarray(busy / np.where(tiled & (spent > 0), spent, window), np.float64), grain


def _varied(lanes: Lanes, whole: Bools, samples: int, first: int, lead: int, trail: int) -> float:
    """The middle of all ranks of how their own time varies within the baseline and within the incident."""
    frames = lanes.incident.frames
    count = len(frames.rank)
    rounds = np.nan_to_num(frames.rounds)
    told = ~np.isnan(frames.gap_ms) & (rounds > 0)
    busy = np.zeros(count)
    np.maximum.at(busy, frames.frame[told], rounds[told])
    gaps = np.bincount(frames.frame[told], frames.gap_ms[told], count)
    with np.errstate(all="ignore"):
        own = np.where(busy > 0, gaps / busy, np.nan)[whole].reshape(-1, samples)
    apart = [_apart(part) for part in (own[:, first : first + lead], own[:, samples - trail :]) if part.shape[1] >= 2]
    told_of = np.concatenate(apart) if apart else np.empty(0)
    told_of = told_of[np.isfinite(told_of)]
    return float(np.median(told_of)) if len(told_of) else np.nan


def _apart(own: Floats) -> Floats:
    """The relative deviation of each rank's own time over samples (N,)."""
    told = own[np.isfinite(own).sum(axis=1) >= 2]
    return np.asarray(np.nanstd(told, axis=1, ddof=1) / np.nanmean(told, axis=1), np.float64)
