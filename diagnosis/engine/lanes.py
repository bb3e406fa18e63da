"""The incident laid out by lanes: one slot per member of each communicator, so that every rule is a pass over arrays.

A *lane* is one rank in one communicator. Lanes are the slots of `Communicators.member`: the lanes of communicator c
are `start[c]:start[c + 1]`, hence "over the members of a communicator" is one `reduceat`. Frames come by rank and
time; this module lays them out once, in O(n) for n lanes (a rank has few communicators, so its lane is found by a
handful of comparisons instead of a search).

Two layouts are made of the same rows: `Now`, the newest words of each lane (for hangs), and `Means`, the mean round
of each lane over some of the samples (for slow-downs).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diagnosis.contracts.incident import Bytes, Communicators, Floats, Incident, Ints, State

Bools = NDArray[np.bool_]
Longs = NDArray[np.int64]
LANES_TRIED_MAX = 32


@dataclass(frozen=True, slots=True, eq=False)
class Lanes:
    """Shapes: M lanes, W ranks, F frames, R rows.

    `rank`, `comm` (M,); `sizes`, `kind` (C,): members, and a number that is equal for communicators of the same size,
    transport and kind. `order`, `by_rank` list lanes by
    rank: those of rank r are `order[by_rank[r]:by_rank[r + 1]]`. `lane_of_row` (R,), -1 where the row's communicator
    does not list its rank. `nth`, `nth_last` (F,): the frame's number within its rank, from the first and the last.
    """

    incident: Incident
    rank: Ints
    comm: Ints
    start: Longs
    sizes: Longs
    kind: Longs
    order: Longs
    by_rank: Longs
    lane_of_row: Longs
    nth: Longs
    nth_last: Longs

    @property
    def count(self) -> int:
        """Number of lanes."""
        return len(self.rank)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.incident.job.world_size

    @property
    def comms(self) -> int:
        """Number of communicators."""
        return len(self.start) - 1

    def of_comm(self, comm: int) -> slice:
        """The lanes of a communicator."""
        return slice(int(self.start[comm]), int(self.start[comm + 1]))

    def over_members(self, values: Floats, how: np.ufunc) -> Floats:
        """`how` ("minimum", "add", ...) over the members of each communicator (C,); NaN for an empty one."""
        result = np.full(self.comms, np.nan)
        full = np.flatnonzero(self.sizes > 0)
        if len(full):
            result[full] = how.reduceat(values, self.start[:-1][full])
        return result

    def members_in(self, chosen: Bools) -> Floats:
        """How many of the `chosen` lanes (M,) each communicator has (C,)."""
        return np.nan_to_num(self.over_members(chosen.astype(np.float64), np.add))

    def ranks_in(self, chosen: Bools) -> Bools:
        """Which ranks have any of the `chosen` lanes (W,)."""
        return np.asarray(self.over_lanes_of_rank(chosen.astype(np.float64), np.maximum, 0.0) > 0, np.bool_)

    def over_lanes_of_rank(self, values: Floats, how: np.ufunc, empty: float) -> Floats:
        """`how` over the lanes of each rank (W,); `empty` for a rank without lanes."""
        result = np.full(self.world, empty)
        full = np.flatnonzero(np.diff(self.by_rank) > 0)
        if len(full):
            result[full] = how.reduceat(values[self.order], self.by_rank[:-1][full])
        return result


@dataclass(frozen=True, slots=True, eq=False)
class Now:
    """The newest words of each lane (M,). `heard`: the lane's rank spoke of it in its newest frame.

    `done`: rounds 0..done are complete; `seq`: the newest round entered or enqueued (NaN none). `idle_seq`: the rank
    runs no operation of its library, and this is the newest round of the lane that it ran. `errors`: rounds of the lane
    that ended with one, ever. `kept_out`: as `presence`
    tells.
    """

    heard: Bools
    state: Bytes
    seq: Floats
    done: Floats
    age_ms: Floats
    rounds: Floats
    send: Floats
    recv: Floats
    signature: Ints
    idle_seq: Floats
    errors: Floats
    kept_out: Bools

    @property
    def pending(self) -> Bools:
        """Lanes inside a round, or with one enqueued that has not ended."""
        inside = (self.state == State.RUNNING) | (self.state == State.ENQUEUED)
        return np.asarray(self.heard & inside & (self.seq > self.done), np.bool_)


@dataclass(frozen=True, slots=True, eq=False)
class Means:
    """Rounds of each lane over some samples (M,): `rounds` in `span_ms`, and per round `gap_ms` and `dur_ms` or NaN."""

    rounds: Floats
    span_ms: Floats
    gap_ms: Floats
    dur_ms: Floats


def lay_out(incident: Incident) -> Lanes:
    """The lanes of an incident, with its rows assigned."""
    comms, frames, world = incident.communicators, incident.frames, incident.job.world_size
    rank = comms.member
    sizes = np.diff(comms.start)
    comm = np.repeat(np.arange(len(comms.ids), dtype=np.int32), sizes)
    order = np.argsort(rank, kind="stable")
    by_rank = np.zeros(world + 1, np.int64)
    np.cumsum(np.bincount(rank, minlength=world), out=by_rank[1:])
    first = np.searchsorted(frames.rank, frames.rank, side="left")
    last = np.searchsorted(frames.rank, frames.rank, side="right")
    number = np.arange(len(frames.rank), dtype=np.int64)
    row_rank = frames.rank[frames.frame] if len(frames.frame) else np.empty(0, np.int32)
    return Lanes(
        incident=incident,
        rank=rank,
        comm=comm,
        start=comms.start,
        sizes=sizes,
        kind=_kinds(comms, sizes),
        order=order,
        by_rank=by_rank,
        lane_of_row=_lane_of_row(frames.frame, row_rank, frames.comm, comm, order, by_rank),
        nth=number - first,
        nth_last=last - 1 - number,
    )


def _kinds(comms: Communicators, sizes: Longs) -> Longs:
    transports = {name: number for number, name in enumerate(dict.fromkeys(comms.transport))}
    transport = np.array([transports[name] for name in comms.transport], np.int64)
    _, kind = np.unique((sizes * max(1, len(transports)) + transport) * 4 + comms.kind, return_inverse=True)
    return np.asarray(kind, np.int64)


def by_kind(values: Longs, kind: Longs) -> list[Longs]:
    """`values` grouped by their `kind`, each group in the order given."""
    order = np.argsort(kind, kind="stable")
    return [values[part] for part in np.split(order, np.flatnonzero(np.diff(kind[order])) + 1) if len(part)]


def _lane_of_row(
    row_frame: Ints, row_rank: Ints, row_comm: Ints, lane_comm: Ints, order: Longs, by_rank: Longs
) -> Longs:
    """For each row its lane: guess that a frame tells a rank's lanes in their order, else try all of the rank's."""
    found = np.full(len(row_rank), -1, np.int64)
    if not len(order):
        return found
    begin, end = by_rank[row_rank], by_rank[row_rank + 1]
    new_frame = np.flatnonzero(np.diff(row_frame, prepend=-1))
    nth = np.arange(len(row_rank)) - np.repeat(new_frame, np.diff(new_frame, append=len(row_rank)))
    guess = order[np.minimum(begin + nth, len(order) - 1)]
    right = (nth < end - begin) & (lane_comm[guess] == row_comm)
    found[right] = guess[right]
    open_rows = np.flatnonzero(~right & (end > begin))
    for step in range(min(LANES_TRIED_MAX, int((end - begin).max(initial=0)))):
        at = begin[open_rows] + step
        inside = at < end[open_rows]
        open_rows, at = open_rows[inside], at[inside]
        if not len(open_rows):
            return found
        lane = order[at]
        match = lane_comm[lane] == row_comm[open_rows]
        found[open_rows[match]] = lane[match]
        open_rows = open_rows[~match]
    if len(open_rows):  # ranks with very many communicators: search
        key = (
            lane_comm.astype(np.int64) * len(by_rank)
            + np.repeat(np.arange(len(by_rank) - 1), np.diff(by_rank))[np.argsort(order, kind="stable")]
        )
        sorted_key = np.argsort(key, kind="stable")
        wanted = row_comm[open_rows].astype(np.int64) * len(by_rank) + row_rank[open_rows]
        at = np.minimum(np.searchsorted(key[sorted_key], wanted), len(key) - 1)
        match = key[sorted_key[at]] == wanted
        found[open_rows[match]] = sorted_key[at[match]]
    return found


def newest(lanes: Lanes) -> Now:
    """The newest words of each lane."""
    frames = lanes.incident.frames
    rows = np.flatnonzero((lanes.nth_last[frames.frame] == 0) & (lanes.lane_of_row >= 0))
    lane = lanes.lane_of_row[rows]

    def spread(values: Floats) -> Floats:
        laid = np.full(lanes.count, np.nan)
        laid[lane] = values[rows]
        return laid

    heard = np.zeros(lanes.count, np.bool_)
    heard[lane] = True
    state = np.zeros(lanes.count, np.uint8)
    state[lane] = frames.state[rows]
    signature = np.full(lanes.count, -1, np.int32)
    signature[lane] = frames.signature[rows]
    seq, done = spread(frames.seq), spread(frames.done_seq)
    told = ~np.isnan(done)
    inside = (state == State.RUNNING) | (state == State.ENQUEUED)
    done = np.where(told, done, np.where(inside, seq - 1, seq))
    done = np.where(~told & ((state == State.NONE) | ((state == State.UNKNOWN) & np.isnan(seq))), -1.0, done)
    return Now(
        heard=heard,
        state=state,
        seq=np.where(np.isnan(seq) & (state == State.NONE), -1.0, seq),
        done=done,
        age_ms=spread(frames.age_ms),
        rounds=spread(frames.rounds),
        send=spread(frames.send),
        recv=spread(frames.recv),
        signature=signature,
        idle_seq=spread(frames.idle_seq),
        errors=spread(frames.errors),
        kept_out=np.zeros(lanes.count, np.bool_),
    )


def means(lanes: Lanes, chosen: Bools) -> Means:
    """The mean round of each lane over the `chosen` frames (F,)."""
    frames = lanes.incident.frames
    rows = np.flatnonzero(chosen[frames.frame] & (lanes.lane_of_row >= 0) & ~np.isnan(frames.rounds))
    lane, rounds, count = lanes.lane_of_row[rows], frames.rounds[rows], lanes.count

    def total(values: Floats) -> Floats:
        return np.asarray(np.bincount(lane, values, count), np.float64)

    def per_round(values: Floats) -> Floats:
        picked = values[rows]
        told = ~np.isnan(picked) & (rounds > 0)
        summed = total(np.where(told, picked, 0.0))
        told_rounds = total(np.where(told, rounds, 0.0))
        result = np.full(count, np.nan)
        np.divide(summed, told_rounds, out=result, where=told_rounds > 0)
        return result

    return Means(
        rounds=total(rounds),
        span_ms=total(np.nan_to_num(frames.window_ms[frames.frame[rows]])),
        gap_ms=per_round(frames.gap_ms),
        dur_ms=per_round(frames.dur_ms),
    )
