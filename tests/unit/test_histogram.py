"""Buckets are the same however they are found, quantiles are within 2.2 %, and what travels is read back or refused."""

from __future__ import annotations

from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnosis.contracts import histogram
from diagnosis.contracts.errors import AgentFault

_durations = st.one_of(
    st.integers(0, 1 << 45),
    st.sampled_from(histogram.BORDERS),
    st.sampled_from(histogram.BORDERS).map(lambda border: border - 1),
    st.sampled_from(histogram.BORDERS).map(lambda border: border + 1),
)


def test_borders_are_the_powers_rounded_up() -> None:
    with localcontext() as context:
        context.prec = 60
        for k, border in enumerate(histogram.BORDERS):
            power = Decimal(2) ** (Decimal(k) / 16)
            assert border - 1 < power - Decimal("1e-40") or k % 16 == 0
            assert border >= power - Decimal("1e-40")
            assert border - power < 1


def test_no_cell_of_an_octave_has_two_borders_inside() -> None:
    cells = [border >> 58 & 31 for border in histogram.MANTISSA_BORDERS]
    assert len(set(cells)) == len(cells)


@given(_durations)
def test_both_ways_find_the_same_bucket_and_its_middle_is_near(duration_ns: int) -> None:
    bucket = histogram.bucket_of(duration_ns)
    assert bucket == histogram.buckets_of(np.array([duration_ns]))[0]
    if 0 < bucket < histogram.OVER:
        assert abs(histogram.MIDDLES_NS[bucket] / duration_ns - 1) <= 0.022


def test_every_border_of_every_octave_is_found_by_both_ways() -> None:
    around = np.unique(np.array(histogram.BORDERS)[:, None] + np.array([-1, 0, 1]))
    assert [histogram.bucket_of(int(value)) for value in around] == histogram.buckets_of(around).tolist()


@given(st.lists(_durations, min_size=1, max_size=200), st.floats(0, 1))
def test_a_quantile_is_within_its_bucket_of_the_true_one(durations: list[int], part: float) -> None:
    durations = [min(duration, histogram.BORDERS[-1] - 1) for duration in durations]
    rows = np.zeros(len(durations), np.int64)
    found = histogram.quantiles(histogram.from_durations(rows, np.array(durations), 1), np.array([part]))[0, 0]
    true = sorted(durations)[max(int(np.ceil(part * len(durations))), 1) - 1]
    assert abs(found - true) <= 0.022 * true


@st.composite
def _many(draw: st.DrawFn) -> histogram.Histograms:
    rows = draw(st.integers(0, 6))
    values = draw(st.lists(st.tuples(st.integers(0, max(rows - 1, 0)), _durations), max_size=60 if rows else 0))
    table = np.array(values, np.int64).reshape(-1, 2)
    return histogram.from_durations(table[:, 0], table[:, 1], rows)


def _same(one: histogram.Histograms, other: histogram.Histograms) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ("start", "bucket", "count"))


@given(_many())
def test_what_travels_comes_back(told: histogram.Histograms) -> None:
    assert _same(histogram.decode(histogram.encode(told), told.rows), told)


@given(st.lists(_many(), max_size=4))
def test_many_strings_are_read_as_one_by_one(told: list[histogram.Histograms]) -> None:
    packed = [histogram.encode(one) for one in told]
    rows = [one.rows for one in told]
    at_once = histogram.decode_all(packed, rows)
    assert at_once.rows == sum(rows)
    first = 0
    for one in told:
        part = slice(int(at_once.start[first]), int(at_once.start[first + one.rows]))
        assert at_once.bucket[part].tolist() == one.bucket.tolist()
        assert at_once.count[part].tolist() == one.count.tolist()
        first += one.rows


def test_one_string_cannot_lend_numbers_to_the_next() -> None:
    with pytest.raises(AgentFault):
        histogram.decode_all([b"\x01\x01\x01\x01", b""], [1, 1])
    with pytest.raises(AgentFault):
        histogram.decode_all([b"\x01\x01\x81", b"\x01"], [1, 0])


@given(_many(), st.data())
def test_merging_adds(told: histogram.Histograms, data: st.DataObject) -> None:
    into = np.array(data.draw(st.lists(st.integers(0, 2), min_size=told.rows, max_size=told.rows)), np.int64)
    merged = histogram.merge(told, into, 3)
    assert merged.totals().sum() == told.totals().sum()
    for row in range(3):
        own = np.isin(told.row_of(), np.flatnonzero(into == row))
        dense = np.bincount(told.bucket[own], told.count[own], minlength=histogram.BUCKETS)
        part = slice(merged.start[row], merged.start[row + 1])
        assert np.array_equal(np.flatnonzero(dense), merged.bucket[part])
        assert np.array_equal(dense[dense > 0], merged.count[part])


@given(st.binary(max_size=60), st.integers(0, 5))
def test_any_bytes_are_read_or_refused(packed: bytes, rows: int) -> None:
    try:
        told = histogram.decode(packed, rows)
    except AgentFault:
        return
    assert _same(histogram.decode(histogram.encode(told), rows), told)


@pytest.mark.parametrize(
    "packed",
    [
        b"\x80",  # breaks off
        b"\xff\xff\xff\xff\xff\xff\x01",  # too large a number
        b"\x01\x01",  # a bucket without a count
        b"\x01\x00\x01",  # no distance
        b"\x01\x01\x00",  # counts nothing
        b"\x01\xc3\x05\x01",  # bucket 706
        b"\x02\xc2\x05\x01\x01\x01",  # 705 and one more
        b"\x01\x01\x81\x80\x80\x80\x80\x20",  # COUNT_MAX and one more
    ],
)
def test_impossible_histograms_are_refused(packed: bytes) -> None:
    with pytest.raises(AgentFault):
        histogram.decode(packed, 1)


def test_the_greatest_count_and_bucket_are_taken() -> None:
    told = histogram.from_cells(np.array([0]), np.array([histogram.OVER]), np.array([histogram.COUNT_MAX]), 1)
    assert _same(histogram.decode(histogram.encode(told), 1), told)
    assert histogram.quantiles(told, np.array([0.5]))[0, 0] == histogram.BORDERS[-1]


def test_nothing_counted_has_no_quantile() -> None:
    none = histogram.from_durations(np.empty(0, np.int64), np.empty(0, np.int64), 2)
    assert np.isnan(histogram.quantiles(none, np.array([0.5, 0.9]))).all()
