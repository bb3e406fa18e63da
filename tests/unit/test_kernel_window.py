"""A window's file is the job's word: whatever stands in it, it is read or refused."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnosis.contracts import kernelwindow as contract
from diagnosis.contracts.errors import AgentFault
from diagnosis.contracts.kernelwindow import Request, Unseen, Why, parse_control, parse_window
from diagnosis.contracts.summary import COMM, COMPUTE, table
from diagnosis.evidence.kernel_window import functions_of, summary_of


def made(names: tuple[str, ...] = ("gemm", "nccl"), header: Mapping[str, int] = MappingProxyType({})) -> bytes:
    """A sound window of 10 ms, five steps: each function ran twice, 1 ms and 3 ms."""
    top = np.zeros(1, contract.HEADER_DTYPE)
    rows = np.zeros(len(names), contract.ROW_DTYPE)
    cells = np.zeros(2 * len(names), contract.CELL_DTYPE)
    texts = [name.encode() for name in names]
    rows["count"], rows["total_ns"], rows["scatter"], rows["max_ns"] = 2, 4_000_000, 2e12, 3_000_000
    rows["kind"], rows["cells"], rows["functions"] = [COMPUTE, *[COMM] * (len(names) - 1)], 2, 1
    rows["critical_ns"], rows["name_bytes"] = 4_000_000, [len(text) for text in texts]
    cells["count"], cells["bucket"] = 1, [300, 310] * len(names)
    top["magic"], top["version"], top["header_bytes"] = contract.MAGIC_WINDOW, contract.VERSION, contract.HEADER_BYTES
    top["row_bytes"], top["rows"], top["cells"] = contract.ROW_DTYPE.itemsize, len(rows), len(cells)
    top["name_bytes"], top["begin_ns"], top["end_ns"] = sum(map(len, texts)), 5_000_000, 15_000_000
    top["critical_ns"] = [[4_000_000, 0, 4_000_000, 0]]
    for name, value in header.items():
        top[name] = value
    return top.tobytes() + rows.tobytes() + cells.tobytes() + b"".join(texts)


def test_a_sound_window_becomes_a_summary() -> None:
    told = summary_of(parse_window(made()), 3, 5, first_step=100)
    summary = told.summary
    assert (summary.step_ms, summary.first_step, summary.last_step, summary.sources) == (2.0, 100, 104, ["cupti"])
    assert sum(summary.phases.values()) == pytest.approx(summary.step_ms)
    assert summary.phases["comm_barrier_wait_ms"] == 0.8 and summary.unseen == []
    functions, histograms = table(summary)
    assert {text for _, text in told.names.values()} == {"gemm", "nccl"}
    assert functions["count"].tolist() == [2, 2] and functions["beta"].tolist() == [400_000, 400_000]
    assert functions["deviation_ns"].tolist() == [1_000_000, 1_000_000]
    assert histograms.totals().tolist() == [2, 2]


def test_rows_of_one_name_are_one_function() -> None:
    told = functions_of(parse_window(made(("a", "b", "b", ""))))
    assert sorted(told.name) == ["(other comm)", "a", "b"]
    at = told.name.index("b")
    assert (told.count[at], told.total_ns[at], told.scatter[at]) == (4, 8_000_000, 4e12)
    assert told.histograms.totals().sum() == 8


def test_what_a_window_could_not_see_is_said() -> None:
    lost = parse_window(made(header={"unseen": Unseen.RECORDS | Unseen.CRITICAL, "dropped": 17, "why": Why.DEADLINE}))
    told = summary_of(lost, 0, None).summary
    assert (told.steps, told.step_ms, told.phases, told.overlap) == (None, None, {}, None)
    assert len(told.unseen) == 4 and any("17" in note for note in told.unseen)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"magic": 1}, "magic"),
        ({"version": 9}, "version"),
        ({"rows": 3}, "sizes"),
        ({"rows": contract.ROW_COUNT_MAX + 1}, "limits"),
        ({"cells": 1 << 31}, "limits"),
        ({"name_bytes": 7}, "sizes"),
        ({"header_bytes": 16}, "sizes"),
        ({"row_bytes": 0}, "sizes"),
    ],
    ids=str,
)
def test_a_header_that_lies_is_refused(header: dict[str, int], reason: str) -> None:
    with pytest.raises(AgentFault) as refused:
        parse_window(made(header=header))
    assert refused.value.reason == reason


@pytest.mark.parametrize(
    ("field", "value"),
    [("kind", 9), ("cells", 7), ("name_bytes", 100), ("total_ns", 1 << 48), ("count", 1 << 62), ("scatter", np.nan)],
)
def test_a_row_that_lies_is_refused(field: str, value: float) -> None:
    data = bytearray(made())
    rows = np.frombuffer(data, contract.ROW_DTYPE, 2, contract.HEADER_BYTES)
    rows[field][1] = value
    with pytest.raises(AgentFault):
        parse_window(bytes(data))


@given(st.lists(st.tuples(st.integers(0, len(made()) - 1), st.integers(0, 255)), max_size=12))
def test_whatever_bytes_are_changed_it_is_read_or_refused(changes: list[tuple[int, int]]) -> None:
    data = bytearray(made())
    for place, value in changes:
        data[place] = value
    try:
        window = parse_window(bytes(data))
    except AgentFault:
        return
    table(summary_of(window, 0, 5).summary)


@given(st.binary(max_size=600))
def test_whatever_bytes_there_are_it_is_read_or_refused(data: bytes) -> None:
    for parse in (parse_window, parse_control):
        with pytest.raises(AgentFault):
            parse(data)


def test_a_request_lies_where_the_collector_reads_it() -> None:
    packed = Request(7, 8, 9, 1, 2, 3, 4, 5).packed()
    record = np.zeros(1, contract.CONTROL_DTYPE)
    data = bytearray(record.tobytes())
    data[contract.REQUEST_OFFSET : contract.REQUEST_OFFSET + len(packed)] = packed
    told = np.frombuffer(bytes(data), contract.CONTROL_DTYPE)[0]
    names = (
        "window",
        "deadline_ns",
        "comm_id",
        "warm_round",
        "first_round",
        "end_round",
        "step_rounds",
        "duration_ns",
        "asked",
    )
    assert [int(told[name]) for name in names] == [7, 8, 9, 1, 2, 3, 4, 5, 0]
    assert contract.CONTROL_DTYPE.itemsize == contract.CONTROL_BYTES
    assert contract.HEADER_DTYPE.itemsize == contract.HEADER_BYTES
