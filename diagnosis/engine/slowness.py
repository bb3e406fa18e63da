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
from diagnosis.engine.course import Course, course_of
from diagnosis.engine.lanes import Bools, Lanes, Longs, Means, by_kind, means
from diagnosis.engine.roles import roles_of

MAD_TO_SIGMA = 1.4826
COMMON_QUANTILE = 0.25
TAIL_QUANTILE = 0.05
EDGE_ROUNDS = 2.0
STEADY = 0.3
TOLD_PART_MIN = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class Slowness:
    """Measurements. `ratio`: unit now over unit at baseline (NaN unknown); `resolution`: how far it may be off where it
    was counted in rounds; `varied`, `unsteady`: see `course`.

    Per rank (W,), in ms per unit: `unit_ms`, `lost_ms`, `own_ms`, `own_base_ms`, `excess_ms` (centred), `noise_ms` (one
    sigma of it), `common_ms` (growth that all share); and `units_per_step`. Per communicator (C,): `transfer_ms`,
    `transfer_base_ms`, `transfer_excess_ms` (of a point-to-point connection: by how much more than others its ends wait
    for each other), `transfer_part` (of its members' loss). `compared`: ranks
    were compared with themselves at baseline rather than with peers only.
    """

    ratio: float
    resolution: float
    varied: float
    unsteady: float
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
    transfer_steady: Bools
    role: Longs


def measure(lanes: Lanes) -> Slowness:
    """All measurements of a possible slow-down."""
    course = course_of(lanes)
    base, now = means(lanes, course.base), means(lanes, course.now)
    p2p = lanes.incident.communicators.kind == Kind.P2P
    busiest = _busiest(lanes, now, ~p2p[lanes.comm])
    done = _rounds_done(lanes)
    weight = _weights(lanes, done, busiest)
    unit_now, unit_base, resolution = _units(lanes, now, base, weight, busiest)
    ratio = _ratio(unit_now, unit_base)
    lost = np.maximum(unit_now - unit_now / ratio, 0.0)
    role = roles_of(lanes)
    compared = bool(_tells(now, base).sum() > 0.5 * _tells(now).sum()) and _mostly_told(lanes, course.base)
    now_gap, base_gap = (_filled(lanes, of.gap_ms, role) for of in (now, base))
    both = ~np.isnan(now_gap) & ~np.isnan(base_gap) if compared else ~np.isnan(now_gap)
    own_now, own_base = (_own(lanes, gap, weight, both) for gap in (now_gap, base_gap))
    own_now = _where_told(lanes, now, weight, own_now, unit_now, now_gap)
    tiled = _tiled(lanes, now, weight)
    own_now = own_now * _levelled(lanes, now, np.where(np.isfinite(tiled), tiled, unit_now), role, busiest)
    own_base = own_base * _levelled(lanes, base, unit_base, role, busiest)
    raw = own_now - own_base if compared else own_now
    common = own_base * max(0.0, _quantile(raw / own_base)) if compared else _common(raw, role)
    excess = raw - common
    if not course.base.any() and np.isfinite(excess).any():  # one sample: what the slowest rank costs the others
        lost = np.full(lanes.world, max(0.0, float(np.nanmax(excess))))
        ratio = _ratio(unit_now, np.maximum(unit_now - lost, 0.0))
    transfer, transfer_base = _transfers(lanes, now), _transfers(lanes, base)
    grown = np.where(p2p, _grown_p2p(lanes, now, base, role), _grown(lanes, transfer, transfer_base))
    return Slowness(
        ratio=ratio,
        resolution=resolution,
        varied=course.varied,
        unsteady=course.unsteady,
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
        transfer_steady=_steady(lanes, course, grown) & ~p2p,
        role=role,
    )


def _tells(*of: Means) -> Bools:
    """Lanes that tell a rank's own time in all of these (M,)."""
    return np.asarray(np.all([~np.isnan(one.gap_ms) for one in of], axis=0), np.bool_)


def _mostly_told(lanes: Lanes, chosen: Bools) -> bool:
    """Whether most rows of the chosen frames that count rounds tell own times: one armed sample is no baseline."""
    frames = lanes.incident.frames
    rows = chosen[frames.frame] & (np.nan_to_num(frames.rounds) > 0)
    return bool((~np.isnan(frames.gap_ms[rows])).mean() > 0.5) if rows.any() else False


def _filled(lanes: Lanes, values: Floats, role: Longs) -> Floats:
    """Values of lanes (M,), with the middle of the same role's lanes of the same kind where one is not told."""
    blank = np.flatnonzero(np.isnan(values))
    if not len(blank) or len(blank) == len(values):
        return values
    group = role[lanes.rank] * (int(lanes.kind.max(initial=0)) + 1) + lanes.kind[lanes.comm]
    result = values.copy()
    wanted = set(group[blank].tolist())
    for members in by_kind(np.arange(len(group)), group):
        if int(group[members[0]]) in wanted:
            told = values[members][~np.isnan(values[members])]
            if len(told) > 0.5 * len(members):
                result[members] = np.where(np.isnan(values[members]), np.median(told), values[members])
    return result


def _where_told(lanes: Lanes, now: Means, weight: Floats, own: Floats, unit: Floats, filled: Floats) -> Floats:
    """Own times (W,); where a gap had to be filled in and all waiting is told, what waiting leaves of a unit. NaN for a
    rank that tells neither."""
    guessed = lanes.ranks_in((weight > 0) & np.isnan(now.gap_ms) & ~np.isnan(filled))
    silent = lanes.ranks_in((now.rounds > 0) & (weight > 0) & np.isnan(now.dur_ms))
    rest = np.maximum(unit - _waits(lanes, now, weight), 0.0)
    left = guessed & ~silent & np.isfinite(rest)
    return np.where(left, rest, np.where(lanes.ranks_in(_tells(now)), own, np.nan))


def _levelled(lanes: Lanes, of: Means, unit: Floats, role: Longs, busiest: Longs) -> Floats:
    """The role's usual time per unit over each rank's own (W,), 1 where it is not told.

    A job is synchronous, so its ranks need the same time for the same rounds. Where a rank's window happened to hold
    longer rounds than its peers' (more of the backward pass, say), its own time is long for the same reason. That is at
    most a round or two: what remains is the rank's.
    """
    usual = np.full(len(unit), np.nan)
    for members in by_kind(np.arange(len(role)), role):
        told = unit[members][np.isfinite(unit[members])]
        if len(told):
            usual[members] = np.median(told)
    rounds = of.rounds[np.maximum(busiest, 0)] if lanes.count else np.zeros(len(busiest))
    most = 1 + EDGE_ROUNDS / np.maximum(rounds, 1)
    return np.where(np.isfinite(usual / unit) & (unit > 0), np.clip(usual / unit, 1 / most, most), 1.0)


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


def _own(lanes: Lanes, gap: Floats, weight: Floats, told: Bools) -> Floats:
    """A rank's own time per unit (W,), over the lanes of `told`; NaN where there is none."""
    own = lanes.over_lanes_of_rank(np.where(told, weight * np.nan_to_num(gap), 0.0), np.add, 0.0)
    return np.where(lanes.ranks_in(told), own, np.nan)


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
    """The least mean duration among the members of each communicator (C,); NaN where less than half of them, or only
    one, tell theirs: the last to arrive may be among the others."""
    told = ~np.isnan(of.dur_ms)
    least = lanes.over_members(np.where(told, of.dur_ms, np.inf), np.minimum)
    enough = lanes.members_in(told) >= np.maximum(np.minimum(lanes.sizes, 2), TOLD_PART_MIN * lanes.sizes)
    return np.where(np.isfinite(least) & enough, least, np.nan)


def _grown(lanes: Lanes, now: Floats, base: Floats) -> Floats:
    """By how much each communicator's transfer grew (C,): against its baseline, else against those of its kind."""
    grown = now - base
    blank = np.flatnonzero(np.isnan(base) & ~np.isnan(now))
    for members in by_kind(blank, lanes.kind[blank]):
        grown[members] = now[members] - float(np.median(now[members]))
    return grown


def _grown_p2p(lanes: Lanes, now: Means, base: Means, role: Longs) -> Floats:
    """By how much more than elsewhere both ends of a point-to-point connection wait for each other (C,).

    A receiver waits for a late sender as well, but the late one waits less for anybody: what both ends wait longer
    than the same ends of other pipelines is the connection's own.
    """
    longer = now.dur_ms - np.where(np.isnan(base.dur_ms).all(), 0.0, base.dur_ms)
    group = role[lanes.rank] * (int(lanes.kind.max(initial=0)) + 1) + lanes.kind[lanes.comm]
    excess = np.full(lanes.count, np.nan)
    told = np.flatnonzero(~np.isnan(longer))
    for members in by_kind(told, group[told]):
        excess[members] = longer[members] - float(np.median(longer[members]))
    return lanes.over_members(excess, np.minimum)


def _steady(lanes: Lanes, course: Course, grown: Floats) -> Bools:
    """Communicators in which even the quickest round of anybody took longer (C,), or where that is not told.

    Where members are late by turns everybody waits on the average, and the least mean is more than a transfer.
    """
    now, base = (_quickest(lanes, chosen) for chosen in (course.now, course.base))
    blank = np.flatnonzero(np.isnan(base) & ~np.isnan(now))
    for members in by_kind(blank, lanes.kind[blank]):
        base[members] = float(np.median(now[members]))
    return np.isnan(now) | np.isnan(base) | (now - base >= STEADY * grown)


def _quickest(lanes: Lanes, chosen: Bools) -> Floats:
    """The quickest round of each communicator (C,) in the chosen frames, NaN where none is told."""
    frames = lanes.incident.frames
    rows = np.flatnonzero(chosen[frames.frame] & (lanes.lane_of_row >= 0) & ~np.isnan(frames.dur_min_ms))
    least = np.full(lanes.comms, np.inf)
    np.minimum.at(least, lanes.comm[lanes.lane_of_row[rows]], frames.dur_min_ms[rows])
    return np.where(np.isfinite(least), least, np.nan)


def _parts(lanes: Lanes, grown: Floats, weight: Floats, lost: Floats) -> Floats:
    """The part of its members' loss that each communicator's transfer explains (C,)."""
    with np.errstate(all="ignore"):
        part = weight * grown[lanes.comm] / lost[lanes.rank]
    part = np.where(np.isfinite(part), part, -np.inf)
    most = lanes.over_members(part, np.maximum)
    return np.where(np.isfinite(most), most, np.nan)


def loss_per_step_ms(slowness: Slowness, incident: Incident) -> float:
    """What the job loses per step: by steps that a profiler or the node daemons know, else by rounds."""
    lost = slowness.lost_ms * slowness.units_per_step
    if incident.summaries is not None:
        steps = incident.summaries.step_ms[np.isfinite(incident.summaries.step_ms)]
        if len(steps) and np.isfinite(slowness.ratio) and slowness.ratio > 1:
            return float(np.median(steps) * (1 - 1 / slowness.ratio))
    if np.isfinite(incident.job.step_ms) and np.isfinite(slowness.ratio) and slowness.ratio > 1:
        return float(incident.job.step_ms * (slowness.ratio - 1))
    told = lost[np.isfinite(lost)]
    return float(np.median(told)) if len(told) else 0.0
