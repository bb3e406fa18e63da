"""Who owns each moment: the functions of a window without overlap, within a thread and on the critical path.

**Within a thread** functions call functions. The moment belongs to the one that was called last and has not returned,
so a function's own time is what it took without those that it called. One pass over the functions by their start, with
a stack whose ends fall from bottom to top: whoever starts goes on top; whoever would end before it can own no moment
any more and is taken off. That needs no proper nesting, which streams and hostile traces do not have.

**On the critical path** functions of all threads and streams overlap, and a class owns the moment: computation before
copies before communication before the host (EROICA, NSDI'26). Communication that computation hides costs nothing and
has no share; within a class the function that began last owns the moment. Each class is laid out as above, and what the
higher classes cover is taken off it, by an integral: `covered(t)` is how long higher classes ran up to t.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Longs = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Moments and their owners, in order and without overlap. Shapes (P,). `owner`: index of a function's execution."""

    owner: Longs
    start: Longs
    end: Longs


def laid_out(index: Longs, start: Longs, end: Longs) -> Pieces:
    """The executions `index` of one thread, or of one class, as pieces. `start`, `end`: of all executions, ns."""
    order = index[np.lexsort((-end[index], start[index]))]
    owners: list[int] = []
    starts: list[int] = []
    ends: list[int] = []
    stack: list[tuple[int, int]] = []  # (execution, end), ends falling

    def own_until(until: int, now: int) -> int:
        while stack and now < until:
            owner, its_end = stack[-1]
            upto = min(its_end, until)
            if upto > now:
                owners.append(owner)
                starts.append(now)
                ends.append(upto)
                now = upto
            if its_end <= upto:
                stack.pop()
        return max(now, until)

    now = int(start[order[0]]) if len(order) else 0
    for one, its_start, its_end in zip(order.tolist(), start[order].tolist(), end[order].tolist(), strict=True):
        now = own_until(its_start, now)
        while stack and stack[-1][1] <= its_end:
            stack.pop()
        stack.append((one, its_end))
    if stack:
        own_until(stack[0][1], now)
    return Pieces(np.array(owners, np.int64), np.array(starts, np.int64), np.array(ends, np.int64))


def by_lane(lane: Longs, nests: NDArray[np.bool_], start: Longs, end: Longs) -> Pieces:
    """What each execution (E,) does itself: its own pieces where its lane `nests`, all of it where not. Order: by lane.

    A function that waits for what it called does nothing, on the critical path neither.
    """
    whole = np.flatnonzero(~nests)
    parts = [Pieces(whole, start[whole], end[whole])]
    nested = np.flatnonzero(nests)
    order = nested[np.argsort(lane[nested], kind="stable")]
    cuts = np.flatnonzero(np.diff(lane[order])) + 1
    parts += [laid_out(members, start, end) for members in np.split(order, cuts) if len(members)]
    return Pieces(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("owner", "start", "end")))


@dataclass(frozen=True, slots=True, eq=False)
class Covered:
    """A union of moments. Shapes (U,): starts and ends in order, disjoint."""

    start: Longs
    end: Longs

    def upto(self, moments: Longs) -> Longs:
        """How long of the time before each moment is covered, ns."""
        before = np.concatenate([[0], np.cumsum(self.end - self.start)])
        place = np.searchsorted(self.start, moments, side="right")
        ends = np.concatenate([[0], self.end])
        beyond = np.where(place > 0, np.maximum(ends[place] - moments, 0), 0)
        covered: Longs = before[place] - beyond
        return covered

    def total(self) -> int:
        """All of it, ns."""
        return int((self.end - self.start).sum())


def union(start: Longs, end: Longs) -> Covered:
    """The moments that any of the executions covers."""
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order]) if len(order) else end
    first = np.concatenate([[True], start[1:] > end[:-1]]) if len(order) else np.empty(0, bool)
    return Covered(start[first], np.concatenate([end[:-1][first[1:]], end[-1:]]))


def critical_times(kind: Longs, start: Longs, end: Longs, kinds: int) -> Longs:
    """How long each (E,) is the critical path, ns. `kind` (E,): 0 has the first right to a moment."""
    time = np.zeros(len(start), np.int64)
    higher = union(start[:0], end[:0])
    for one in range(kinds):
        members = np.flatnonzero(kind == one)
        if not len(members):
            continue
        pieces = laid_out(members, start, end)
        left = pieces.end - pieces.start - (higher.upto(pieces.end) - higher.upto(pieces.start))
        np.add.at(time, pieces.owner, left)
        higher = union(np.concatenate([higher.start, pieces.start]), np.concatenate([higher.end, pieces.end]))
    return time
