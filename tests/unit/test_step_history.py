"""A job's steps at the controller: over its ranks, on the status, and in the words of a verdict."""

from __future__ import annotations

import numpy as np
import pytest

from diagnosis.contracts import report as wire
from diagnosis.contracts.columns import Columns, empty, null_of, pack, unpack
from diagnosis.engine.history import JobHistory
from diagnosis.engine.live import examine
from diagnosis.engine.step_history import StepHistory, StepNow, step_of_row
from diagnosis.engine.thresholds import Thresholds
from diagnosis.evidence.bundle.reader import read_bundle
from diagnosis.evidence.bundle.writer import write_bundle
from tests.simjob import SimJob

STEP_MS = 120.0
"""Three of the job's rounds of 40 ms."""


def row(**told: int) -> np.void:
    table = empty(wire.RANK_DTYPE, 1)
    for name, value in told.items():
        table[name] = value
    found: np.void = table[0]
    return found


def test_a_row_tells_its_step_and_null_is_not_zero() -> None:
    assert step_of_row(row()) is None
    assert step_of_row(row(step_us=0)) is None
    assert step_of_row(row(step_us=40_000)) == StepNow(40.0, None, None, None)
    assert step_of_row(row(step_us=40_000, step_jitter_us=0, step_rounds=3, step_round=2)) == StepNow(40.0, 0.0, 3, 2)
    assert step_of_row(row(step_us=1, step_rounds=3, step_round=4)) == StepNow(0.001, None, 3, None)
    assert step_of_row(row(step_us=1, step_round=4)) == StepNow(0.001, None, None, None)


def test_a_job_s_step_is_that_of_most_of_its_ranks() -> None:
    steps = StepHistory()
    assert steps.now is None
    steps.observe([None, StepNow(40.0, 1.0, 3, 1), StepNow(41.0, None, 3, 2), StepNow(900.0, 9.0, 1, 1)], 5.0)
    assert steps.now == StepNow(41.0, 5.0, None, None)
    steps.observe([None], 6.0)
    assert steps.now == StepNow(41.0, 5.0, None, None)


def test_the_usual_step_is_the_first_that_was_known_and_not_that_of_the_slow_down() -> None:
    steps = StepHistory()
    for second in range(7):
        steps.observe([StepNow(40.0, None, None, None)], float(second))
    assert steps.usual_ms(before=100.0) is None
    for second in range(7, 60):
        steps.observe([StepNow(40.0 if second < 20 else 90.0, None, None, None)], float(second))
    assert steps.usual_ms(before=20.0) == 40.0
    assert steps.usual_ms(before=7.0) is None


def with_step(ranks: Columns, step_ms: float) -> Columns:
    table = unpack(ranks, wire.RANK_DTYPE, wire.RANKS_MAX)
    table["step_us"] = int(step_ms * 1000)
    return pack(table)


def slowed(step_ms: float | None) -> JobHistory:
    """A job of 40 ms a round that takes 60 ms since one rank computes slowly."""
    job, history = SimJob(), JobHistory(7, 0, Thresholds(), 0.0)

    def report() -> None:
        for node in job.nodes:
            sample = job.sample(node)
            if step_ms is not None:
                slower = 1.5 if job.now_ms > 30_000 else 1.0
                sample = wire.JobSample(
                    7, 0, 1000, with_step(sample.ranks, slower * step_ms), sample.comms, sample.rounds
                )
            history.observe(node, "boot", sample, job.now_ms / 1000)

    while job.now_ms < 30_000:
        job.steps(25, lambda rank, step: 30.0)
        report()
    while job.now_ms < 40_000:
        job.steps(25, lambda rank, step: 50.0 if rank == 5 else 30.0)
        report()
    return history


def test_a_verdict_tells_what_is_lost_of_a_step() -> None:
    history = slowed(STEP_MS)
    judged = examine(history, {}, 40.0)
    assert judged.verdict.anomaly == "slow"
    assert "(60 ms lost a step)" in judged.verdict.summary
    (culprit,) = judged.verdict.culprits
    assert culprit.rank == 5
    assert culprit.lost_ms_per_step == pytest.approx(60.0, rel=0.1)


def test_where_no_step_is_known_it_is_told_by_rounds() -> None:
    judged = examine(slowed(None), {}, 40.0)
    assert "(20 ms lost a step)" in judged.verdict.summary


def test_what_was_captured_says_the_same() -> None:
    judged = examine(slowed(STEP_MS), {}, 40.0)
    assert judged.incident is not None
    assert judged.incident.job.step_ms == STEP_MS
    read = read_bundle((name, [content]) for name, content in write_bundle(judged.incident).items())
    assert read.job.step_ms == STEP_MS


def test_null_is_the_greatest_value() -> None:
    assert null_of(wire.RANK_DTYPE["step_us"]) == 0xFFFF_FFFF
