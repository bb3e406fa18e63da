"""Own times and the critical path against a clock that is asked every nanosecond."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from diagnosis.evidence.critical_path import Pieces, by_lane, critical_times, union

_LONG = 40
_spans = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, _LONG), st.integers(0, _LONG)).map(
        lambda one: (one[0], min(one[1:]), max(one[1:]))
    ),
    max_size=25,
)


def _columns(spans: list[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    table = np.array(spans, np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


def _own(pieces: Pieces, executions: int) -> np.ndarray:
    own = np.zeros(executions, np.int64)
    np.add.at(own, pieces.owner, pieces.end - pieces.start)
    return own


def _key(spans: list[tuple[int, int, int]], one: int) -> tuple[int, int, int]:
    """Who began last owns the moment; of two that began together the shorter, then the later of the list."""
    return spans[one][1], -spans[one][2], one


@given(_spans)
def test_a_moment_of_a_lane_belongs_to_who_began_last(spans: list[tuple[int, int, int]]) -> None:
    lane, start, end = _columns(spans)
    expected = np.zeros(len(spans), np.int64)
    for lane_id in range(4):
        for now in range(_LONG):
            running = [at for at, (own, first, last) in enumerate(spans) if own == lane_id and first <= now < last]
            if running:
                expected[max(running, key=lambda one: _key(spans, one))] += 1
    assert _own(by_lane(lane, np.ones(len(spans), np.bool_), start, end), len(spans)).tolist() == expected.tolist()


@given(_spans)
def test_what_does_not_nest_has_all_its_time(spans: list[tuple[int, int, int]]) -> None:
    lane, start, end = _columns(spans)
    own = _own(by_lane(lane, lane > 1, start, end), len(spans))
    assert (own == end - start)[lane <= 1].all()
    assert (own <= end - start).all()


@given(_spans)
def test_the_highest_class_owns_the_moment(spans: list[tuple[int, int, int]]) -> None:
    kind, start, end = _columns(spans)
    expected = np.zeros(len(spans), np.int64)
    for now in range(_LONG):
        running = [at for at, (_, first, last) in enumerate(spans) if first <= now < last]
        if running:
            expected[min(running, key=lambda one: (spans[one][0], *(-part for part in _key(spans, one))))] += 1
    assert critical_times(kind, start, end, 4).tolist() == expected.tolist()


@given(_spans)
def test_a_union_covers_what_any_covers(spans: list[tuple[int, int, int]]) -> None:
    _, start, end = _columns(spans)
    covered = union(start, end)
    every = [any(first <= now < last for _, first, last in spans) for now in range(_LONG)]
    assert covered.upto(np.arange(_LONG + 1)).tolist() == [0, *np.cumsum(every).tolist()]
    assert covered.total() == sum(every)
