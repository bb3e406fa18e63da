"""Single rules of the slow side of the engine, each on the smallest job that shows it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from diagnosis.contracts.verdict import Verdict
from diagnosis.drill import Limits, draw
from diagnosis.engine.course import course_of
from diagnosis.engine.lanes import lay_out
from tests.bench.bench_accuracy import drawn_effect
from tests.jobs import ROUNDS, Own, bundle
from tests.judged import judge_drill, read, verdict_on

WORLD = 16
USUAL_MS = 10.0


def late(rank: int, by: float, since: int = 3) -> Own:
    """One rank needs longer from a sample on."""
    return lambda r, sample: USUAL_MS + 0.05 * (r % 3) + (by if r == rank and sample >= since else 0.0)


def named(verdict: Verdict) -> list[int | None]:
    return [culprit.rank for culprit in verdict.culprits]


@pytest.mark.parametrize(
    ("paces", "lead", "trail"),
    [
        ([1, 1, 1, 0.7, 0.6, 0.6], 3, 2),  # the first slow sample is half of it
        ([1, 1, 0.93, 0.87], 2, 2),  # more like what follows than like what was
        ([1, 1, 1, 0.6, 0.5, 1], 3, 2),  # a fault that comes and goes: one good sample ends nothing
        ([1, 1, 1, 0.5, 1, 1, 1], 3, 2),  # over: the last are compared, but the one after the pause
        ([1, 1, 1, 1], 2, 2),  # nothing happened: halves
        ([0.2, 0.7, 1, 1, 1, 0.6, 0.6, 0.6], 3, 2),  # a warm-up is no baseline
        ([1], 0, 1),
    ],
)
def test_the_baseline_ends_where_the_job_leaves_its_pace(paces: list[float], lead: int, trail: int) -> None:
    lanes = lay_out(read(bundle(4, len(paces), lambda rank, sample: USUAL_MS / paces[sample], lambda sample: 0.0)))
    course = course_of(lanes)
    assert (int(course.base[: len(paces)].sum()), int(course.now[: len(paces)].sum())) == (lead, trail)


def test_a_window_of_few_rounds_tells_no_fine_pace() -> None:
    def counted(rank: int, sample: int, entry: dict[str, Any]) -> None:
        entry.update(rounds=4 if sample % 2 else 3, gap_ms=None, dur_ms=None)

    assert verdict_on(bundle(8, 6, lambda rank, sample: USUAL_MS, edit=counted)).anomaly == "none"


def test_a_job_that_makes_no_rounds_is_not_slow() -> None:
    def ended(rank: int, sample: int, entry: dict[str, Any]) -> None:
        if sample == 3:
            entry.update(rounds=0, gap_ms=0.0, dur_ms=0.0)

    assert verdict_on(bundle(8, 4, lambda rank, sample: USUAL_MS * (1 + sample / 5), edit=ended)).anomaly == "none"


def test_work_that_always_differed_may_differ_a_little_more() -> None:
    draw = np.random.default_rng(3).normal(1.0, 0.15, (WORLD, 8))
    uneven = [[USUAL_MS * float(draw[rank // 4, sample]) for sample in range(8)] for rank in range(WORLD)]
    steady = verdict_on(bundle(WORLD, 8, lambda rank, sample: 12.0 if sample < 4 else 13.5))
    assert steady.anomaly == "slow"
    assert verdict_on(bundle(WORLD, 8, lambda rank, sample: uneven[rank][sample])).anomaly == "none"


def test_a_late_rank_is_named_although_its_past_is_null() -> None:
    def untold(rank: int, sample: int, entry: dict[str, Any]) -> None:
        if rank == 5 and sample < 3:
            entry["gap_ms"] = None

    assert named(verdict_on(bundle(WORLD, 6, late(5, 4.0), edit=untold))) == [5]


def test_a_late_rank_is_named_although_its_present_is_null() -> None:
    def untold(rank: int, sample: int, entry: dict[str, Any]) -> None:
        if rank == 5 and sample >= 3:
            entry["gap_ms"] = None

    assert named(verdict_on(bundle(WORLD, 6, late(5, 4.0), edit=untold))) == [5]


def test_who_is_a_little_late_beside_one_who_is_very_late_is_not_named() -> None:
    def own(rank: int, sample: int) -> float:
        return late(5, 6.0)(rank, sample) + (2.0 if rank == 6 and sample >= 3 else 0.0)

    assert named(verdict_on(bundle(WORLD, 6, own))) == [5]
    assert named(verdict_on(bundle(WORLD, 6, lambda r, s: own(r, s) + (4.0 if r == 6 and s >= 3 else 0)))) == [5, 6]


def test_who_was_fast_and_is_now_like_all_others_is_not_named() -> None:
    def own(rank: int, sample: int) -> float:
        slower = late(5, 6.0)(rank, sample)
        return slower - (6.0 if rank == 9 and sample < 3 else 0.0)

    assert named(verdict_on(bundle(WORLD, 6, own))) == [5]


def test_ranks_that_are_late_by_turns_are_no_slow_network() -> None:
    def own(rank: int, sample: int) -> float:
        return USUAL_MS

    def by_turns(rank: int, sample: int, entry: dict[str, Any]) -> None:
        if sample >= 3:  # everybody is last in some rounds and waits in the others
            entry.update(dur_ms=ROUNDS * 6.0, dur_min_ms=2.0, dur_max_ms=10.0, gap_ms=ROUNDS * 14.0)

    def longer(rank: int, sample: int, entry: dict[str, Any]) -> None:
        if sample >= 3:  # each round takes longer
            entry.update(dur_ms=ROUNDS * 10.0, dur_min_ms=9.5, dur_max_ms=11.0)

    assert verdict_on(bundle(WORLD, 6, own, edit=by_turns)).class_ != "S2"
    assert verdict_on(bundle(WORLD, 6, own, edit=longer)).class_ == "S2"


def test_a_communicator_whose_members_are_mostly_silent_says_nothing_of_its_transfer() -> None:
    def longer(rank: int, sample: int, entry: dict[str, Any]) -> None:
        if sample >= 3:
            entry.update(dur_ms=ROUNDS * 10.0, dur_min_ms=9.5, dur_max_ms=11.0)

    def own(rank: int, sample: int) -> float:
        return USUAL_MS

    assert verdict_on(bundle(WORLD, 6, own, silent=range(9), edit=longer)).class_ is None
    assert verdict_on(bundle(WORLD, 6, own, silent=range(3), edit=longer)).class_ == "S2"


def operator(name: str, ms: float, kind: str = "host") -> dict[str, Any]:
    return {"operator_name": name, "kind": kind, "invocation_count": 100, "total_time_ms": ms, "mean_us": 10 * ms}


def profile(rank: int, loading_ms: float) -> dict[str, Any]:
    operators = [operator("dataloader.next", loading_ms), operator("gemm", 60.0, "compute")]
    return {"worker_rank": rank, "profiled_steps": 10, "step_duration_ms": 12.0, "operators": operators}


def test_a_profile_in_which_nothing_grew_gives_no_cause() -> None:
    grown = [profile(rank, 42.0 if rank == 5 else 1.0) for rank in range(WORLD)]
    still = [profile(rank, 1.01 if rank == 5 else 1.0) for rank in range(WORLD)]
    causes = [verdict_on(bundle(WORLD, 6, late(5, 4.0), summaries=told)).culprits[0].cause for told in (grown, still)]
    assert causes == ["dataloader_starvation", "unknown"]


@pytest.mark.parametrize(
    ("seed", "fidelity"),
    [
        (600067, "full"),  # a NIC that only point-to-point transfers pass through
        (600416, "full"),  # the same beside a slow GPU
        (600154, "nccl"),  # a node that is a whole pipeline stage and waits for its storage, without a baseline
        (600410, "nccl"),  # the same for its data loader, which only its profile tells
        (601505, "full"),  # a NIC whose pause frames slow the whole leaf
        (600719, "full"),  # a fault that comes and goes
        (600619, "nccl"),  # ten rounds a window, and windows of nodes that begin at different rounds
        (600607, "full"),  # one memory, and a node's other ranks a little late for waiting in the same rounds
        (601704, "full"),  # a slow GPU, and a communicator of which half is silent
    ],
)
def test_drills_that_needed_a_rule_of_their_own(seed: int, fidelity: str) -> None:
    judged = judge_drill(draw(seed, Limits(effect=drawn_effect(seed), noise=0.05, fidelity=fidelity)))
    assert judged.grade.located, judged.grade.why
    assert judged.grade.cause
    assert not judged.grade.false_drain
