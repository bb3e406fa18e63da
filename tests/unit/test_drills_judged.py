"""Fifty drills from a seed to a graded verdict: one of each kind and a few more, on seeds that were not tuned on.

`tests/bench/bench_accuracy.py` measures a thousand; this keeps what was reached.
"""

from __future__ import annotations

import pytest

from diagnosis.drill import Drill, Limits, kinds
from tests.judged import Judged, judge_drill

SEED = 1_500_000
MORE = ("gpu_clock_throttle", "gpu_xid", "process_stuck")
LIMITS = Limits(world_max=64, effect=0.25, noise=0.03, fidelity="full")
LOCATED_MIN, CAUSE_MIN = 49, 49


@pytest.fixture(scope="module")
def judged() -> list[Judged]:
    chosen = [*((SEED, kind) for kind in kinds()), *((SEED + 1, kind) for kind in MORE)]
    return [judge_drill(Drill(seed, kind, LIMITS)) for seed, kind in chosen]


def test_the_guilty_are_found(judged: list[Judged]) -> None:
    wrong = [f"{done.drill.kind} {done.drill.seed}: {done.grade.why}" for done in judged if not done.grade.located]
    assert len(judged) - len(wrong) >= LOCATED_MIN, wrong


def test_the_cause_is_named(judged: list[Judged]) -> None:
    wrong = [f"{done.drill.kind} {done.drill.seed}: {done.verdict.summary}" for done in judged if not done.grade.cause]
    assert len(judged) - len(wrong) >= CAUSE_MIN, wrong


def test_no_innocent_node_is_drained(judged: list[Judged]) -> None:
    assert [(d.drill.kind, d.drill.seed, d.grade.false_drain) for d in judged if d.grade.false_drain] == []


def test_hardware_that_is_convicted_is_drained(judged: list[Judged]) -> None:
    wanted = [
        done for done in judged if done.drill.truth["action"] == "drain" and done.grade.located and done.grade.cause
    ]
    drained = [done for done in wanted if done.verdict.action.nodes]
    assert len(wanted) >= 8
    assert len(drained) >= 0.9 * len(wanted), [(d.drill.kind, d.verdict.action) for d in wanted if d not in drained]
