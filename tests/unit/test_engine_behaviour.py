"""Unusual functions: one worker apart from its peers, all workers alike, and nobody where roles differ by design."""

from __future__ import annotations

import numpy as np

from diagnosis.contracts.incident import Summaries
from diagnosis.engine.behaviour import unusual

GEMM, LOADER, REDUCE = 0, 1, 2


def _summaries(beta: dict[int, dict[int, float]], workers: int = 16) -> Summaries:
    """`beta` of a function on a worker where it differs from the usual 0.5, 0.005 and 0.2."""
    rows = [(worker, function) for worker in range(workers) for function in (GEMM, LOADER, REDUCE)]
    usual = (0.5, 0.005, 0.2)
    share = np.array([beta.get(function, {}).get(worker, usual[function]) for worker, function in rows])
    return Summaries(
        rank=np.arange(workers, dtype=np.int32),
        step_ms=np.full(workers, 100.0),
        steps=np.full(workers, 2.0),
        phases={},
        worker=np.array([worker for worker, _ in rows], np.int32),
        operator=np.array([function for _, function in rows], np.int32),
        operator_names=("gemm", "dataloader.next", "AllReduce"),
        kind=("compute", "host", "comm"),
        stats={"beta": share, "mu": np.full(len(rows), 0.9), "sigma": np.full(len(rows), 0.1)},
    )


def test_nothing_is_unusual_where_all_behave_alike() -> None:
    assert unusual(_summaries({}), np.zeros(16, np.int64)) == []


def test_one_worker_that_differs_is_found_and_only_it() -> None:
    found = unusual(_summaries({LOADER: {3: 0.4}}), np.zeros(16, np.int64))
    assert [(one.function, one.rank) for one in found] == [("dataloader.next", 3)]


def test_a_function_that_is_slow_everywhere_is_found_by_expectation() -> None:
    found = unusual(_summaries({LOADER: dict.fromkeys(range(16), 0.3)}), np.zeros(16, np.int64))
    assert [(one.function, one.rank) for one in found] == [("dataloader.next", None)]


def test_a_stage_that_works_more_by_design_is_compared_with_itself() -> None:
    last_stage = dict.fromkeys(range(12, 16), 0.9)
    role = np.array([0] * 12 + [1] * 4, np.int64)
    assert unusual(_summaries({GEMM: last_stage}), role) == []
    assert {one.rank for one in unusual(_summaries({GEMM: last_stage}), np.zeros(16, np.int64))} == {12, 13, 14, 15}


def test_without_patterns_there_is_nothing_to_say() -> None:
    told = _summaries({LOADER: {3: 0.4}})
    without = Summaries(**{**{name: getattr(told, name) for name in told.__dataclass_fields__}, "stats": {}})
    assert unusual(without, np.zeros(16, np.int64)) == []
