"""What-if on operation times: whoever is slow among the same stage, a stage that has more work, or nobody."""

from __future__ import annotations

import io
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from diagnosis.contracts.errors import AgentFault
from diagnosis.contracts.verdict import Verdict
from diagnosis.evidence.gather import gather
from diagnosis.evidence.operation_times import NEEDED, OPTIONAL, judge, tensor
from diagnosis.evidence.parquet import read_columns

SAMPLES = Path(__file__).parents[3] / "shared" / "samples" / "straggler_analysis"
STAGES, REPLICAS, MICROBATCHES, STEPS = 4, 4, 8, 3


def table(slow: dict[tuple[int, int], float] | None = None, stage: dict[int, float] | None = None) -> dict[str, Any]:
    """A job of the usual order (one forward, one backward), with factors on workers or on whole stages."""
    noise = np.random.default_rng(5)
    rows: list[tuple[Any, ...]] = []
    for step in range(STEPS):
        for replica in range(REPLICAS):
            for s in range(STAGES):
                factor = (slow or {}).get((s, replica), 1.0) * (stage or {}).get(s, 1.0)
                warm = min(MICROBATCHES, STAGES - 1 - s)
                order = [("forward-compute", m) for m in range(warm)]
                for m in range(MICROBATCHES):
                    order += [("forward-compute", m + warm)] if m + warm < MICROBATCHES else []
                    order += [("backward-compute", m)]
                for at, (operation, microbatch) in enumerate(order):
                    base = 0.1 if operation == "forward-compute" else 0.2
                    duration = base * factor * noise.uniform(0.99, 1.01)
                    rows.append((replica, s, step, operation, float(at), duration, microbatch, replica * STAGES + s, s))
                rows.append((replica, s, step, "grads-reduce-scatter", 99.0, 30.0, -1, replica * STAGES + s, -1))
    columns = list(zip(*rows, strict=True))
    return {name: np.array(column) for name, column in zip((*NEEDED, *OPTIONAL), columns, strict=True)}


def verdict_of(columns: dict[str, Any]) -> Verdict:
    return judge(tensor(columns))


def test_an_even_job_is_not_slow() -> None:
    verdict = verdict_of(table())
    assert (verdict.anomaly, verdict.culprits) == ("none", [])


def test_a_worker_that_is_slow_among_its_stage_is_named_with_what_it_costs() -> None:
    verdict = verdict_of(table(slow={(2, 1): 2.0}))
    assert (verdict.anomaly, verdict.class_, [culprit.rank for culprit in verdict.culprits]) == ("slow", "S1", [6])
    lost_ms = verdict.culprits[0].lost_ms_per_step
    assert lost_ms is not None and lost_ms == pytest.approx(
        8 * 300, rel=0.1
    )  # eight microbatches of 300 ms take twice as long
    assert verdict.action.kind == "collect" and not verdict.action.nodes


def test_two_slow_workers_are_both_named_though_neither_alone_explains_it() -> None:
    verdict = verdict_of(table(slow={(2, 1): 2.0, (0, 3): 1.9}))
    assert {culprit.rank for culprit in verdict.culprits} == {6, 12}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_stage_that_is_slow_in_every_replica_is_by_design(stage: int) -> None:
    verdict = verdict_of(table(stage={stage: 1.6}))
    assert (verdict.anomaly, verdict.class_) == ("slow", None)
    assert [(culprit.kind, culprit.cause, culprit.rank) for culprit in verdict.culprits] == [
        ("job", "workload_imbalance", None)
    ]
    assert f"stage {stage}" in verdict.summary and verdict.action.kind == "notify"


def test_a_single_replica_has_nobody_to_be_compared_with() -> None:
    columns = table(slow={(2, 0): 2.0})
    alone = columns["dp_rank"] == 0
    verdict = verdict_of({name: column[alone] for name, column in columns.items()})
    assert [culprit.rank for culprit in verdict.culprits] == [None]


def test_a_slow_worker_with_slack_around_it_costs_little_and_is_not_named() -> None:
    verdict = verdict_of(table(slow={(0, 1): 1.25}, stage={3: 1.6}))
    assert all(culprit.rank is None for culprit in verdict.culprits)


def test_unknown_times_count_neither_way() -> None:
    columns = table()
    columns["duration"][::7] = np.nan
    columns["duration"][3::11] = -5.0
    assert verdict_of(columns).anomaly == "none"


def test_an_order_that_cannot_be_is_undecided() -> None:
    columns = table()
    columns["start_ts"] = -columns["start_ts"]
    verdict = verdict_of(columns)
    assert verdict.culprits == [] and verdict.action.kind == "collect"


@pytest.mark.parametrize("change", ["missing", "words", "empty", "sparse"])
def test_a_table_of_something_else_is_refused(change: str) -> None:
    columns = table()
    if change == "missing":
        del columns["mb_id"]
    elif change == "words":
        columns["duration"] = np.array(["x"] * len(columns["step"]))
    elif change == "empty":
        columns["optype"] = np.array(["nothing"] * len(columns["step"]))
    else:
        columns |= {name: np.arange(len(columns["step"])) for name in ("step", "mb_id", "dp_rank")}
    with pytest.raises(AgentFault):
        tensor(columns)


def _parquet(columns: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), out)
    return out.getvalue()


def test_a_parquet_file_goes_all_the_way() -> None:
    evidence = gather([("anything.bin", [_parquet(table(slow={(1, 2): 2.0}))])])
    assert evidence.incident is None and [c.rank for c in evidence.verdicts[0].culprits] == [9]


def test_parquet_that_is_none_or_of_other_types_is_unseen() -> None:
    whole = _parquet(table())
    for content in (b"PAR1", b"PAR1" + b"\x00" * 64 + b"PAR1", whole[:-20] + b"\xff" * 20, whole[: len(whole) // 2]):
        evidence = gather([("x.parquet", [content])])
        assert not evidence.readable and "the parquet cannot be read" in evidence.unseen[0]
    with pytest.raises(AgentFault):
        read_columns(_parquet({"step": ["a"]}), ("step",), ())


def test_without_pyarrow_the_file_is_unseen_and_the_rest_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    evidence = gather([("x.parquet", [_parquet(table())]), ("job.json", [b'{"world_size": 2}'])])
    assert evidence.verdicts == () and evidence.incident is not None
    assert "install tocsin with the extra parquet" in evidence.unseen[0]


def test_the_sample_tables_give_the_published_slow_downs() -> None:
    if not SAMPLES.is_dir():
        warnings.warn("the sample tables are not at hand: none was read", stacklevel=1)
        return
    for name, ranks in (("AR", [0]), ("ST", [None])):
        verdict = gather([("t", [(SAMPLES / f"trace-{name}.parquet").read_bytes()])]).verdicts[0]
        published = json.loads((SAMPLES / f"mw-{name}.json").read_bytes())
        slowdown = verdict.evidence[0].value
        assert [culprit.rank for culprit in verdict.culprits] == ranks
        assert slowdown is not None
        assert slowdown == pytest.approx(published["tori"] / published["tideal"], rel=0.03)
