"""Slow-downs measured: how much slower, since when, whose own time, which communicator's transfer.

In a synchronous job everybody is slow, so waiting says nothing. What is a rank's own doing is its *gap*, the time
between leaving one operation and entering the next; what is the network's doing is the *transfer*, the time that even
the last to arrive spends inside, since he waits for nobody (the least mean duration among the members of a
communicator). With w the rounds of a lane per round of the rank's busiest lane (its *unit*):

    own_r      = sum over the rank's lanes of w * gap              compared with the same at baseline (excess_r)
    transfer_c = least duration among the members of c             compared with the same at baseline
    lost       = unit now - unit at baseline

excess_r / lost and w * transfer excess / lost are the parts of the loss that a rank or a communicator explains
(CCL-D's P towards 1, or towards 0, but per suspect and additive). What all ranks' own times have grown by alike is
taken off first: that is the job's change and no rank's.

*Which samples.* The rate of rounds needs no duration and is told at every fidelity. Its course over the samples gives
the baseline (the leading samples that are alike) and the incident (the trailing ones). Where durations have no
baseline (a stock NCCL tells them only while armed) a rank is compared with its peers instead, and a communicator with
those of its kind.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diagnosis.contracts.incident import Floats, Incident, Kind
from diagnosis.engine.lanes import Bools, Lanes, Longs, Means, by_kind, means
from diagnosis.engine.roles import roles_of

ALIKE = 0.08
MAD_TO_SIGMA = 1.4826
COMMON_QUANTILE = 0.25
TAIL_QUANTILE = 0.05


@dataclass(frozen=True, slots=True, eq=False)
class Slowness:
    """Measurements. `ratio`: unit now over unit at baseline (NaN unknown); `resolution`: how far it may be off where it
    was counted in rounds.

    Per rank (W,), in ms per unit: `unit_ms`, `lost_ms`, `own_ms`, `own_base_ms`, `excess_ms` (centred), `noise_ms` (one
    sigma of it), `common_ms` (growth that all share); and `units_per_step`. Per communicator (C,):
    `transfer_ms`, `transfer_base_ms`, `transfer_excess_ms`, `transfer_part` (of its members' loss). `compared`: ranks
    were compared with themselves at baseline rather than with peers only.
    """

    ratio: float
    resolution: float
    compared: bool
    unit_ms: Floats
    lost_ms: Floats
    own_ms: Floats
    own_base_ms: Floats
    excess_ms: Floats
    common_ms: Floats
    noise_ms: Floats
    wait_ms: Floats
    units_per_step: Floats
    transfer_ms: Floats
    transfer_base_ms: Floats
    transfer_excess_ms: Floats
    transfer_part: Floats
    role: Longs


def measure(lanes: Lanes) -> Slowness:
    """All measurements of a possible slow-down."""
    base_frames, now_frames = _spans(lanes)
    base, now = means(lanes, base_frames), means(lanes, now_frames)
    collective = lanes.incident.communicators.kind[lanes.comm] != Kind.P2P
    busiest = _busiest(lanes, now, collective)
    done = _rounds_done(lanes)
    weight = _weights(lanes, done, busiest)
    unit_now, unit_base, resolution = _units(lanes, now, base, weight, busiest)
    ratio = _ratio(unit_now, unit_base)
    lost = np.maximum(unit_now - unit_now / ratio, 0.0)
    role = roles_of(lanes)
    both = ~np.isnan(now.gap_ms) & ~np.isnan(base.gap_ms)
    own_now, own_base = (_own(lanes, of, weight, both) for of in (now, base))
    compared = bool(np.isfinite(own_base).sum() > 0.5 * np.isfinite(_own(lanes, now, weight)).sum())
    if not compared:
        own_now = _own(lanes, now, weight)
    tiled_now = _tiled(lanes, now, weight)
    own_now = own_now * _levelled(np.where(np.isfinite(tiled_now), tiled_now, unit_now), role)
    own_base = own_base * _levelled(unit_base, role)
    raw = own_now - own_base if compared else own_now
    common = own_base * max(0.0, _quantile(raw / own_base)) if compared else _common(raw, role)
    excess = raw - common
    if not base_frames.any() and np.isfinite(excess).any():  # one sample: what the slowest rank costs the others
        lost = np.full(lanes.world, max(0.0, float(np.nanmax(excess))))
        ratio = _ratio(unit_now, np.maximum(unit_now - lost, 0.0))
    transfer, transfer_base = _transfers(lanes, now), _transfers(lanes, base)
    grown = _grown(lanes, transfer, transfer_base, collective)
    return Slowness(
        ratio=ratio,
        resolution=resolution,
        compared=compared,
        unit_ms=unit_now,
        lost_ms=lost,
        own_ms=own_now,
        own_base_ms=own_base if compared else common,
        excess_ms=excess,
        common_ms=common if compared else np.full(lanes.world, np.nan),
        noise_ms=_noise(excess, own_base if compared else own_now, base, now, busiest),
        wait_ms=_waits(lanes, now, weight),
        units_per_step=_units_per_step(lanes, done, busiest),
        transfer_ms=transfer,
        transfer_base_ms=transfer_base,
        transfer_excess_ms=grown,
        transfer_part=_parts(lanes, grown, weight, lost),
        role=role,
    )


def _levelled(unit: Floats, role: Longs) -> Floats:
    """The role's usual time per unit over each rank's own (W,), 1 where it is not told.

    A job is synchronous, so its ranks need the same time for the same rounds. Where a rank's window happened to hold
    longer rounds than its peers' (more of the backward pass, say), its own time is long for the same reason.
    """
    usual = np.full(len(unit), np.nan)
    for members in by_kind(np.arange(len(role)), role):
        told = unit[members][np.isfinite(unit[members])]
        if len(told):
            usual[members] = np.median(told)
    return np.where(np.isfinite(usual / unit) & (unit > 0), usual / unit, 1.0)


def _ratio(now: Floats, base: Floats) -> float:
    """By how much all ranks together became slower; NaN where nothing is to be compared."""
    told = np.isfinite(now) & np.isfinite(base) & (base > 0) & (now > 0)
    return float(np.median(now[told] / base[told])) if told.any() else np.nan


def _noise(excess: Floats, own: Floats, base: Means, now: Means, busiest: Longs) -> Floats:
    """One sigma of each rank's excess (W,): a common relative noise of one round, over the rounds of that rank."""
    if (busiest < 0).all():
        return np.full(len(busiest), np.nan)
    lane = np.maximum(busiest, 0)
    with np.errstate(all="ignore"):
        rounds = 1 / np.maximum(now.rounds[lane], 1) + 1 / np.maximum(base.rounds[lane], 1)
        scale = own * np.sqrt(rounds)
        told = excess / scale
    return _sigma(told[np.isfinite(told)]) * scale


def _sigma(values: Floats) -> float:
    """Spread of those that are well. The lower tail has its say, since half of a small job may be guilty together."""
    if not len(values):
        return 0.0
    around = MAD_TO_SIGMA * float(np.median(np.abs(values - np.median(values))))
    quarter, tail = np.quantile(values, (COMMON_QUANTILE, TAIL_QUANTILE))
    return min(around, 2.0 * float(quarter - tail))


def _spans(lanes: Lanes) -> tuple[Bools, Bools]:
    """Which frames (F,) are the baseline and which are the incident."""
    rate = _rates(lanes)
    length = lanes.nth + lanes.nth_last + 1
    samples = int(np.bincount(length[lanes.nth_last == 0]).argmax()) if len(length) else 0
    whole = length == samples
    if samples < 2:
        return np.zeros(len(length), np.bool_), lanes.nth_last == 0
    ordered = rate[whole].reshape(-1, samples)
    with np.errstate(all="ignore"):
        relative = ordered / ordered[:, :1]
    course = np.ones(samples)
    told = ~np.isnan(relative).all(axis=0)
    course[told] = np.nanmedian(relative[:, told], axis=0)
    lead = 1
    while lead < samples - 1 and abs(course[lead] - 1) <= ALIKE:
        lead += 1
    trail = 1
    while trail < samples - lead and abs(course[-1 - trail] / max(float(course[-1]), 1e-9) - 1) <= ALIKE:
        trail += 1
    if abs(course[-1] - 1) <= ALIKE and lead == samples - 1:  # nothing much changed: compare halves
        lead = samples // 2
        trail = samples - lead
    return lanes.nth < lead, lanes.nth_last < trail


def _rates(lanes: Lanes) -> Floats:
    """Rounds of the busiest lane per ms in each frame (F,): of the time that is told, else of the window."""
    frames = lanes.incident.frames
    rounds, count = np.nan_to_num(frames.rounds), len(frames.rank)
    busy = np.zeros(count)
    np.maximum.at(busy, frames.frame, rounds)
    silent = (rounds > 0) & (np.isnan(frames.gap_ms) | np.isnan(frames.dur_ms))
    whole = np.bincount(frames.frame, silent, count) == 0
    spent = np.bincount(frames.frame, np.nan_to_num(frames.gap_ms) + np.nan_to_num(frames.dur_ms), count)
    window = np.where(np.isnan(frames.window_ms), 1000.0, frames.window_ms)
    every = whole[lanes.nth == 0].all() if count else False  # one measure for the whole course
    with np.errstate(all="ignore"):
        return np.asarray(busy / np.where(every & (spent > 0), spent, window), np.float64)


def _busiest(lanes: Lanes, now: Means, collective: Bools) -> Longs:
    """The lane of each rank with most rounds (W,), collectives first; -1 none."""
    rounds = now.rounds + np.where(collective, 0.5, -0.5)
    rounds = np.where(now.rounds > 0, rounds, -np.inf)
    best = lanes.over_lanes_of_rank(rounds, np.maximum, -np.inf)
    is_best = (rounds == best[lanes.rank]) & np.isfinite(rounds)
    chosen = np.full(lanes.world, -1, np.int64)
    found = np.flatnonzero(is_best)[::-1]
    chosen[lanes.rank[found]] = found
    return chosen


def _units(lanes: Lanes, now: Means, base: Means, weight: Floats, busiest: Longs) -> tuple[Floats, Floats, float]:
    """Wall time per unit of each rank (W,), now and at baseline, and by how much their ratio may be off.

    Own time and time inside operations tile a rank's timeline, so where both are told of all its lanes their sum is
    exact; rounds per window are only as exact as the rounds that fit into one.
    """
    tiled_now, tiled_base = _tiled(lanes, now, weight), _tiled(lanes, base, weight)
    tiled = np.isfinite(tiled_now) & np.isfinite(tiled_base)
    by_rate_now, by_rate_base = _unit(lanes, now, busiest), _unit(lanes, base, busiest)
    lane = busiest[busiest >= 0]
    counted = 1 / np.maximum(now.rounds[lane], 1) + 1 / np.maximum(base.rounds[lane], 1)
    resolution = 0.0 if tiled.sum() > 0.5 * len(lane) else float(np.median(counted)) if len(lane) else 0.0
    return np.where(tiled, tiled_now, by_rate_now), np.where(tiled, tiled_base, by_rate_base), resolution


def _tiled(lanes: Lanes, of: Means, weight: Floats) -> Floats:
    """Own time and time inside operations per unit (W,), NaN where any lane in use does not tell both."""
    used = (of.rounds > 0) & (weight > 0)
    told = used & ~np.isnan(of.gap_ms) & ~np.isnan(of.dur_ms)
    spent = np.where(told, weight * (np.nan_to_num(of.gap_ms) + np.nan_to_num(of.dur_ms)), 0.0)
    whole = lanes.over_lanes_of_rank((used & ~told).astype(np.float64), np.maximum, 0.0) == 0
    some = lanes.over_lanes_of_rank(told.astype(np.float64), np.maximum, 0.0) > 0
    return np.where(whole & some, lanes.over_lanes_of_rank(spent, np.add, 0.0), np.nan)


def _unit(lanes: Lanes, of: Means, busiest: Longs) -> Floats:
    """Wall time per unit of each rank (W,), by the rate of its rounds."""
    unit = np.full(lanes.world, np.nan)
    told = np.flatnonzero(busiest >= 0)
    lane = busiest[told]
    with np.errstate(all="ignore"):
        unit[told] = np.where(of.rounds[lane] > 0, of.span_ms[lane] / of.rounds[lane], np.nan)
    return unit


def _rounds_done(lanes: Lanes) -> Floats:
    """Rounds of each lane over all samples (M,): by sequence number where that is told, which misses none."""
    frames = lanes.incident.frames
    rows = np.flatnonzero(lanes.lane_of_row >= 0)
    lane = lanes.lane_of_row[rows]
    counted = np.bincount(lane, np.nan_to_num(frames.rounds[rows]), lanes.count)
    first, last = np.full(lanes.count, np.inf), np.full(lanes.count, -np.inf)
    told = ~np.isnan(frames.seq[rows])
    np.minimum.at(first, lane[told], frames.seq[rows][told])
    np.maximum.at(last, lane[told], frames.seq[rows][told])
    passed = np.where(np.isfinite(first) & np.isfinite(last), last - first, 0.0)
    return np.maximum(counted, passed)


def _weights(lanes: Lanes, done: Floats, busiest: Longs) -> Floats:
    """Rounds of each lane per round of its rank's busiest lane (M,)."""
    unit = np.full(lanes.world, np.nan)
    told = busiest >= 0
    unit[told] = done[busiest[told]]
    with np.errstate(all="ignore"):
        return np.asarray(np.nan_to_num(done / unit[lanes.rank], posinf=0.0), np.float64)


def _units_per_step(lanes: Lanes, done: Floats, busiest: Longs) -> Floats:
    """A step has at least one round of each of a rank's collectives: the rarest one counts the steps (W,)."""
    rarest = lanes.over_lanes_of_rank(np.where(done >= 1, done, np.inf), np.minimum, np.inf)
    unit = np.full(lanes.world, np.nan)
    told = busiest >= 0
    unit[told] = done[busiest[told]]
    with np.errstate(all="ignore"):
        return np.where(np.isfinite(rarest), unit / rarest, 1.0)


def _own(lanes: Lanes, of: Means, weight: Floats, told: Bools | None = None) -> Floats:
    """A rank's own time per unit (W,), over the lanes of `told`, else all that tell it; NaN where none does."""
    told = ~np.isnan(of.gap_ms) if told is None else told
    own = lanes.over_lanes_of_rank(np.where(told, weight * np.nan_to_num(of.gap_ms), 0.0), np.add, 0.0)
    known = lanes.over_lanes_of_rank(told.astype(np.float64), np.maximum, 0.0) > 0
    return np.where(known, own, np.nan)


def _waits(lanes: Lanes, now: Means, weight: Floats) -> Floats:
    """Time inside operations per unit (W,)."""
    told = ~np.isnan(now.dur_ms)
    wait = lanes.over_lanes_of_rank(np.where(told, weight * np.nan_to_num(now.dur_ms), 0.0), np.add, 0.0)
    known = lanes.over_lanes_of_rank(told.astype(np.float64), np.maximum, 0.0) > 0
    return np.where(known, wait, np.nan)


def _quantile(values: Floats) -> float:
    told = values[np.isfinite(values)]
    return float(np.quantile(told, COMMON_QUANTILE)) if len(told) else 0.0


def _common(values: Floats, role: Longs) -> Floats:
    """What all of a rank's role share (W,): three quarters of them have at least that."""
    result = np.full(len(values), np.nan)
    for members in by_kind(np.arange(len(role)), role):
        told = values[members][np.isfinite(values[members])]
        if len(told):
            result[members] = np.quantile(told, COMMON_QUANTILE)
    return result


def _transfers(lanes: Lanes, of: Means) -> Floats:
    """The least mean duration among the members of each communicator (C,), NaN where nobody tells one."""
    least = lanes.over_members(np.where(np.isnan(of.dur_ms), np.inf, of.dur_ms), np.minimum)
    return np.where(np.isfinite(least), least, np.nan)


def _grown(lanes: Lanes, now: Floats, base: Floats, collective: Bools) -> Floats:
    """By how much each collective's transfer grew (C,): against its baseline, else against those of its kind."""
    grown = now - base
    comms = lanes.incident.communicators
    blank = np.flatnonzero(np.isnan(base) & ~np.isnan(now))
    for members in by_kind(blank, lanes.kind[blank]):
        grown[members] = now[members] - float(np.median(now[members]))
    return np.where(comms.kind == Kind.P2P, np.nan, grown)


def _parts(lanes: Lanes, grown: Floats, weight: Floats, lost: Floats) -> Floats:
    """The part of its members' loss that each communicator's transfer explains (C,)."""
    with np.errstate(all="ignore"):
        part = weight * grown[lanes.comm] / lost[lanes.rank]
    part = np.where(np.isfinite(part), part, -np.inf)
    most = lanes.over_members(part, np.maximum)
    return np.where(np.isfinite(most), most, np.nan)


def loss_per_step_ms(slowness: Slowness, incident: Incident) -> float:
    """What the job loses per step."""
    lost = slowness.lost_ms * slowness.units_per_step
    if incident.summaries is not None:
        steps = incident.summaries.step_ms[np.isfinite(incident.summaries.step_ms)]
        if len(steps) and np.isfinite(slowness.ratio) and slowness.ratio > 1:
            return float(np.median(steps) * (1 - 1 / slowness.ratio))
    told = lost[np.isfinite(lost)]
    return float(np.median(told)) if len(told) else 0.0
