"""Summaries on the wire: what travels comes back, within its limits, and the tail is merged, never dropped."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from diagnosis.contracts import histogram, summary
from diagnosis.contracts.errors import AgentFault
from diagnosis.contracts.summary import COMM, COMPUTE, HOST, KINDS, OTHERS, PARTS, NodeSummaries, RankSummary
from diagnosis.evidence import summary_columns
from diagnosis.evidence.functions import Functions, fitted, merged, with_functions
from diagnosis.evidence.notes import Notes
from diagnosis.evidence.summary_columns import columns_of

BARE = RankSummary(rank=3, first_step=10, last_step=11, steps=2, window_ms=200.0, step_ms=100.0)


def functions(durations_ns: list[np.ndarray], kinds: list[int], names: list[str] | None = None) -> Functions:
    """A function per array of durations."""
    rows = len(durations_ns)
    row = np.repeat(np.arange(rows), [len(one) for one in durations_ns])
    unknown = np.full(rows, np.nan)
    return Functions(
        name=tuple(names or (f"kernel_{at}" for at in range(rows))),
        kind=np.array(kinds, np.int64),
        functions=np.ones(rows, np.int64),
        count=np.array([len(one) for one in durations_ns], np.int64),
        total_ns=np.array([one.sum() for one in durations_ns], np.int64),
        scatter=np.array([((one - one.mean()) ** 2).sum() for one in durations_ns]),
        max_ns=np.array([one.max() for one in durations_ns], np.int64),
        beta=np.array([one.sum() / 2e8 for one in durations_ns]),
        mu=unknown,
        sigma=unknown,
        bytes=unknown,
        members=unknown,
        histograms=histogram.from_durations(row, np.concatenate(durations_ns), rows),
    )


def a_step(names: int, launches: int, seed: int = 1) -> Functions:
    """Two steps of `launches` kernels with `names` names, popular ones and rare ones, microseconds to milliseconds."""
    rng = np.random.default_rng(seed)
    often = 1 + rng.multinomial(2 * launches - names, (weight := 1 / np.arange(1, names + 1)) / weight.sum())
    usual = np.exp(rng.normal(np.log(2e4), 1.2, names))
    took = [
        np.maximum(rng.normal(usual[at], usual[at] * 0.05, often[at]), 1000).astype(np.int64) for at in range(names)
    ]
    return functions(took, [COMM if at % 20 == 0 else COMPUTE for at in range(names)])


def packed(told: Functions) -> RankSummary:
    return with_functions(BARE, told)[0]


@pytest.mark.parametrize("names", [200, 2000])
def test_a_real_sized_step_fits_and_nothing_is_lost(names: int) -> None:
    told = a_step(names, 5000)
    one, texts = with_functions(BARE, told)
    assert summary.rank_bytes(one) <= summary.RANK_BYTES_MAX
    rows, histograms = summary.table(one)
    assert rows["functions"].sum() == names
    assert rows["count"].sum() == 10_000
    assert rows["total_ns"].sum() == told.total_ns.sum()
    assert histograms.totals().sum() == 10_000
    assert set(rows["name"].tolist()) == set(texts)


def test_the_greatest_functions_stay_and_the_rest_is_a_row_a_kind() -> None:
    told = a_step(300, 1000)
    kept = merged(told, 100)
    assert len(kept.name) == 96 + 2
    assert kept.name[-2:] == (OTHERS[COMPUTE], OTHERS[COMM])
    tail = np.sort(told.total_ns)[:-96]
    assert kept.total_ns[-2:].sum() == tail.sum()
    assert kept.functions[-2:].sum() == 204
    assert kept.total_ns[:96].min() >= tail.max()


def test_merging_keeps_the_variance_of_all_executions() -> None:
    took = [np.array([10, 20, 30]), np.array([100, 300]), np.array([7]), np.array([50] * 4), np.array([1])]
    kept = merged(functions([*took, *[np.array([10**6])] * 6], [HOST] * 11), 6 + len(KINDS))
    every = np.concatenate(took)
    assert kept.name[-1] == OTHERS[HOST]
    assert kept.count[-1] == len(every)
    assert kept.scatter[-1] == pytest.approx(((every - every.mean()) ** 2).sum())
    assert kept.max_ns[-1] == 300


def test_two_long_names_stay_two_and_the_same_stays_the_same() -> None:
    one, other = "k" * 300 + "<1>", "k" * 300 + "<2>"
    assert fitted(one) != fitted(other)
    assert fitted(one) == fitted("k" * 300 + "<1>")
    assert max(len(fitted(one)), len(fitted(other))) <= summary.NAME_CHARS_MAX
    assert fitted("short") == "short"


def test_what_travels_comes_back() -> None:
    one, texts = with_functions(BARE, a_step(50, 500))
    sent = NodeSummaries("gpu001", 7, 1, 1000, 4, [one], [summary.Missing(4, "stopped")], list(texts.values()))
    got = summary.decode(summary.encode(sent))
    assert got == sent
    assert {summary.name_hash(kind, text) for kind, text in got.names} == set(texts)


def test_columns_have_what_was_told_and_not_what_nobody_knows() -> None:
    told = functions([np.array([1000, 3000]), np.array([500])], [COMPUTE, HOST], ["mm", "gc"])
    one, texts = with_functions(BARE, told)
    columns = columns_of([one], texts, Notes())
    assert columns is not None
    at = columns.operator.tolist().index(columns.operator_names.index("mm"))
    assert {name: values[at] for name, values in columns.stats.items() if not name.startswith("p")} == pytest.approx(
        {
            "invocation_count": 2,
            "total_time_ms": 0.004,
            "mean_us": 2.0,
            "max_us": 3.0,
            "variance_us2": 1.0,
            "beta": 4000 / 2e8,
            "mu": np.nan,
            "sigma": np.nan,
        },
        nan_ok=True,
    )
    assert columns.stats["p50_us"][at] == pytest.approx(1.0, rel=0.022)
    assert columns.stats["p99_us"][at] == pytest.approx(3.0, rel=0.022)
    assert columns.kind[columns.operator_names.index("gc")] == "host"


def test_rows_of_many_functions_have_sums_alone() -> None:
    one, texts = with_functions(BARE, merged(a_step(300, 1000), 60))
    columns = columns_of([one], texts, Notes())
    assert columns is not None
    at = columns.operator.tolist().index(columns.operator_names.index(OTHERS[COMPUTE]))
    assert columns.stats["total_time_ms"][at] > 0
    assert np.isnan([columns.stats[name][at] for name in ("mean_us", "p99_us", "beta")]).all()


def test_ranks_are_joined_by_name_and_sorted() -> None:
    first = packed(functions([np.array([1000])], [HOST], ["shared"]))
    second, texts = with_functions(
        msgspec.structs.replace(BARE, rank=1, phases={"host_ms": 2.0}),
        functions([np.array([5000]), np.array([9000])], [HOST, COMPUTE], ["shared", "shared"]),
    )
    notes = Notes()
    columns = columns_of([first, second, first], texts, notes)
    assert columns is not None
    assert columns.rank.tolist() == [1, 3]
    assert columns.operator_names == ("shared", "shared")
    assert set(columns.kind) == {"host", "compute"}
    host = columns.kind.index("host")
    assert columns.stats["mean_us"][columns.operator == host].tolist() == [5.0, 1.0]
    assert np.isnan(columns.phases["host_ms"][1])
    assert notes.lines() == ("summaries: a second summary of a rank is left out",)


def test_many_ranks_are_read_in_parts_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [with_functions(msgspec.structs.replace(BARE, rank=rank), a_step(9, 40, rank)) for rank in range(7)]
    broken = msgspec.structs.replace(BARE, rank=7, functions={"name": b"\x00"}, histograms=b"\x01")
    ranks, texts = [*(one for one, _ in told), broken], {at: text for _, names in told for at, text in names.items()}
    at_once = columns_of(ranks, texts, Notes())
    monkeypatch.setattr(summary_columns, "_AT_ONCE", 3)
    in_parts = columns_of(ranks, texts, Notes())
    assert at_once is not None
    assert in_parts is not None
    assert in_parts.rank.tolist() == at_once.rank.tolist() == list(range(7))
    assert in_parts.worker.tolist() == at_once.worker.tolist()
    assert in_parts.operator.tolist() == at_once.operator.tolist()
    for name, values in at_once.stats.items():
        assert np.array_equal(in_parts.stats[name], values, equal_nan=True)


def test_a_name_that_has_not_come_is_still_a_function() -> None:
    notes = Notes()
    columns = columns_of([packed(functions([np.array([1000])], [HOST], ["lost"]))], {}, notes)
    assert columns is not None
    assert columns.operator_names[0].startswith("(unnamed ")
    assert len(notes.lines()) == 1


def _sent(**changes: Any) -> NodeSummaries:
    rank = msgspec.structs.replace(packed(a_step(5, 20)), **{k: v for k, v in changes.items() if k in RANK_FIELDS})
    rest = {k: v for k, v in changes.items() if k not in RANK_FIELDS}
    return msgspec.structs.replace(NodeSummaries("n", 1, 0, 0, 1, [rank]), **rest)


RANK_FIELDS = RankSummary.__struct_fields__


@pytest.mark.parametrize(
    "changes",
    [
        {"names": [(9, "x")]},
        {"names": [(0, "x" * 257)]},
        {"names": [(0, str(at)) for at in range(summary.NAMES_MAX + 1)]},
        {"ranks": [BARE] * 257},
        {"missing": [summary.Missing(1, "y" * 300)]},
        {"phases": {str(at): 0.0 for at in range(17)}},
        {"phases": {"x": float("nan")}},
        {"step_ms": float("inf")},
        {"hardware": {"clock": summary.Range(float("inf"), 0, 0)}},
        {"unseen": ["z" * 300]},
        {"sources": ["z"] * 17},
    ],
)
def test_more_than_the_limits_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(AgentFault) as refused:
        summary.decode(summary.encode(_sent(**changes)))
    assert refused.value.reason == "limits"


def test_a_later_version_and_garbage_are_refused() -> None:
    later = zstandard.ZstdCompressor().compress(msgspec.msgpack.encode((summary.VERSION + 1, None)))
    with pytest.raises(AgentFault, match="upgrade"):
        summary.decode(later)
    for body in (b"", b"x", zstandard.ZstdCompressor().compress(b"\x92\x01\x01")):
        with pytest.raises(AgentFault) as refused:
            summary.decode(body)
        assert refused.value.reason == "garbage"


@pytest.mark.parametrize(
    "columns",
    [
        {"kind": b"\x04" * 5},
        {"count": b"\x00"},
        {"name": b"\x00" * 8 * (summary.FUNCTIONS_MAX + 1)},
    ],
)
def test_a_table_that_is_none_is_left_out_and_said(columns: dict[str, bytes]) -> None:
    one = packed(a_step(5, 20))
    notes = Notes()
    assert columns_of([msgspec.structs.replace(one, functions={**one.functions, **columns})], {}, notes) is None
    assert "cannot be read" in notes.lines()[0]


@given(
    st.dictionaries(st.sampled_from(summary.FUNCTION_DTYPE.names or ()), st.binary(max_size=48)), st.binary(max_size=40)
)
def test_any_table_is_read_or_left_out(columns: dict[str, bytes], histograms: bytes) -> None:
    one = msgspec.structs.replace(BARE, functions=columns, histograms=histograms)
    told = columns_of([one], {}, Notes())
    if told is not None:
        for name, values in told.stats.items():
            assert (np.isnan(values) | (values >= 0)).all(), name


def test_shares_beyond_one_are_unknown() -> None:
    one = packed(functions([np.array([1000])], [HOST], ["x"]))
    beta = np.array([PARTS + 1], "<u4").tobytes()
    told = columns_of([msgspec.structs.replace(one, functions={**one.functions, "beta": beta})], {}, Notes())
    assert told is not None
    assert np.isnan(told.stats["beta"]).all()
