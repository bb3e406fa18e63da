"""The shapes in which collectives pass data on: rings, chains and trees, and the steps that a whole round has."""

from __future__ import annotations

from typing import Final

import numpy as np

from diagnosis.contracts.incident import Floats, State
from diagnosis.engine.lanes import Bools, Lanes, Longs

SLOTS: Final = 8
"""Steps that a connection holds before the receiver takes them (NCCL: `NCCL_STEPS`)."""
RING_OPS: Final = frozenset({"AllReduce", "AllGather", "ReduceScatter"})
CHAIN_OPS: Final = frozenset({"Broadcast", "Reduce"})
FITS_WITHIN: Final = 0.04
FITS_MIN: Final = 0.75


def algorithm_is(lanes: Lanes, name: str) -> Bools:
    """Communicators of an algorithm, whatever follows its name (C,)."""
    return np.array([algo.upper().startswith(name) for algo in lanes.incident.communicators.algo], np.bool_)


def neighbours(lanes: Lanes) -> tuple[Longs, Longs]:
    """The lanes before and after each lane in the ring of its communicator (M,), (M,)."""
    number = np.arange(lanes.count)
    before, after = number - 1, number + 1
    full = np.flatnonzero(lanes.sizes > 0)
    first, last = lanes.start[:-1][full], lanes.start[1:][full] - 1
    before[first], after[last] = last, first
    return before, after


def usual_steps(lanes: Lanes) -> Floats:
    """Steps sent per healthy round of each lane (M,). A lane inside a round tells the steps of that round alone."""
    frames = lanes.incident.frames
    outside = (frames.state == State.DONE) & (np.nan_to_num(frames.rounds) > 0) & ~np.isnan(frames.send)
    rows = np.flatnonzero((lanes.nth_last[frames.frame] > 0) & (lanes.lane_of_row >= 0) & outside)
    lane = lanes.lane_of_row[rows]
    rounds = np.bincount(lane, frames.rounds[rows], lanes.count)
    steps = np.bincount(lane, frames.send[rows], lanes.count)
    usual = np.full(lanes.count, np.nan)
    np.divide(steps, rounds, out=usual, where=rounds > 0)
    return usual


def heap_links(count: int) -> Floats:
    """Neighbours of each position of a heap, in which the children of i are 2i + 1 and 2i + 2 (n,)."""
    place = np.arange(count)
    links = (place > 0).astype(np.float64) + (2 * place + 1 < count) + (2 * place + 2 < count)
    return np.maximum(links, 1.0)


def heap_above(place: int) -> list[int]:
    """The positions above one in a heap, up to the root."""
    above = []
    while place > 0:
        place = (place - 1) // 2
        above.append(place)
    return above


def is_heap(usual: Floats) -> bool:
    """Whether usual steps (n,) fit the numbers of neighbours in a heap. A silent member has no usual steps.

    A window may cut rounds of several sizes, so some members may be off; were it another tree, most would be.
    """
    unit = usual / heap_links(len(usual))
    told = unit[np.isfinite(unit) & (unit > 0)]
    if len(told) < max(2, len(usual) // 2):
        return False
    return bool((np.abs(told / np.median(told) - 1) <= FITS_WITHIN).mean() >= FITS_MIN)
