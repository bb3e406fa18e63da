"""The engine on jobs made of numbers: the right rank, class and action, and nobody where nothing is wrong."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from diagnosis.contracts.report import GpuFacts
from diagnosis.contracts.verdict import Verdict
from diagnosis.engine.history import JobHistory
from diagnosis.engine.live import GpusOfNode, diagnose, suspects, suspicion
from diagnosis.engine.thresholds import Thresholds
from tests.simjob import SimJob

LIMITS = Thresholds(hang_floor_s=6.0, startup_floor_s=30.0)
CULPRIT = 5


def _noise(seed: int) -> Callable[[int, int], float]:
    dice = random.Random(seed)
    return lambda rank, step: 40.0 + dice.uniform(-2.0, 2.0)


def _observe(history: JobHistory, job: SimJob, silent: frozenset[str] = frozenset()) -> float:
    for node in job.nodes:
        if node not in silent:
            history.observe(node, "boot", job.sample(node), job.now_ms / 1000)
    return job.now_ms / 1000


def _healthy(seed: int = 1, seconds: int = 14) -> tuple[SimJob, JobHistory]:
    job = SimJob()
    history = JobHistory(job.job_id, job.restart, LIMITS, 0.0)
    _run(job, history, _noise(seed), seconds)
    return job, history


def _run(job: SimJob, history: JobHistory, gap_ms: Callable[[int, int], float], seconds: int) -> float:
    now = job.now_ms / 1000
    until = job.now_ms + seconds * 1000
    while job.now_ms < until:
        job.steps(18, gap_ms)
        now = _observe(history, job)
    return now


def _gpus(job: SimJob, sm_clock_mhz: Callable[[int], int], reasons: int) -> GpusOfNode:
    return {
        node: {
            rank.gpu: GpuFacts(
                index=rank.gpu,
                sm_clock_mhz=sm_clock_mhz(rank.rank),
                sm_clock_max_mhz=1980,
                clocks_event_reasons=reasons if sm_clock_mhz(rank.rank) < 1980 else 0,
            )
            for rank in job.ranks
            if rank.node == node
        }
        for node in job.nodes
    }


def _slowed(seed: int, factor: float, ranks: tuple[int, ...] = (CULPRIT,)) -> Callable[[int, int], float]:
    base = _noise(seed)
    return lambda rank, step: base(rank, step) * (factor if rank in ranks else 1.0)


def _wait(job: SimJob, history: JobHistory, seconds: float, silent: frozenset[str] = frozenset()) -> float:
    for _ in range(int(seconds)):
        job.now_ms += 1000
        _observe(history, job, silent)
    return job.now_ms / 1000


def _names(verdict: Verdict) -> list[int]:
    return [culprit.rank for culprit in verdict.culprits if culprit.rank is not None]


@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_job_has_no_anomaly(seed: int) -> None:
    job, history = _healthy(seed, seconds=40)
    assert diagnose(history, {}, job.now_ms / 1000).anomaly == "none"


def test_one_checkpoint_pause_is_no_anomaly() -> None:
    job, history = _healthy()
    job.steps(1, lambda rank, step: 5000.0 if rank == 0 else 40.0)
    now = _observe(history, job)
    assert diagnose(history, {}, now).anomaly == "none"
    for _ in range(6):
        now = _run(job, history, _noise(9), 1)
        assert diagnose(history, {}, now).anomaly == "none"


def test_a_rank_that_never_enters_is_named_and_nothing_is_drained() -> None:
    job, history = _healthy()
    job.hang(absent=[CULPRIT])
    now = _wait(job, history, 7)
    verdict = diagnose(history, {}, now)
    assert (verdict.anomaly, verdict.class_, _names(verdict)) == ("hang", "H1", [CULPRIT])
    assert verdict.culprits[0].cause == "process_stuck"
    assert (verdict.action.kind, verdict.action.nodes, verdict.action.exclude) == ("requeue", [], ["gpu003"])


def test_no_verdict_before_the_bound_but_a_suspicion_earlier() -> None:
    job, history = _healthy()
    job.hang(absent=[CULPRIT])
    now = _wait(job, history, 4)
    assert diagnose(history, {}, now).anomaly == "none"
    hang = suspicion(history, now, share=0.5)
    assert hang is not None and suspects(history, hang) == [CULPRIT]


def test_a_rank_stopped_inside_the_round_is_named_by_the_kernels_word() -> None:
    job, history = _healthy()
    job.hang(inside=[CULPRIT])
    verdict = diagnose(history, {}, _wait(job, history, 7))
    assert (verdict.class_, _names(verdict)) == ("H1", [CULPRIT])
    assert any(item.witness == "kernel" for item in verdict.evidence)


def test_neighbours_that_are_kept_inside_a_round_by_a_stopped_rank_are_victims() -> None:
    job, history = _healthy()
    job.hang(inside=[CULPRIT], ahead=[0, 1, 2, 3, 7])
    verdict = diagnose(history, {}, _wait(job, history, 7))
    assert (verdict.class_, _names(verdict)) == ("H1", [CULPRIT])


def test_ranks_that_are_kept_inside_a_round_by_nobody_knows_whom_are_not_named() -> None:
    job, history = _healthy()
    job.hang(ahead=[0, 1, 2, 3, 7])
    verdict = diagnose(history, {}, _wait(job, history, 7))
    assert (verdict.class_, verdict.culprits, verdict.action.kind) == (None, [], "collect")


def test_a_round_that_all_entered_and_all_live_in_names_nobody() -> None:
    job, history = _healthy()
    job.hang()
    verdict = diagnose(history, {}, _wait(job, history, 7))
    assert (verdict.anomaly, verdict.class_, verdict.culprits, verdict.action.kind) == ("hang", None, [], "collect")


def test_a_silent_node_is_unseen_and_not_guilty() -> None:
    job, history = _healthy()
    job.hang(absent=[CULPRIT])
    verdict = diagnose(history, {}, _wait(job, history, 7, silent=frozenset({"gpu003"})))
    assert verdict.culprits == [] and verdict.action.kind == "collect"
    assert any("gpu003" in note for note in verdict.unseen)


def test_two_absent_ranks_are_both_named() -> None:
    job, history = _healthy()
    job.hang(absent=[2, CULPRIT])
    assert sorted(_names(diagnose(history, {}, _wait(job, history, 7)))) == [2, CULPRIT]


def test_another_operation_by_one_rank_is_divergence_and_only_told() -> None:
    job, history = _healthy()
    job.hang()
    job.ranks[CULPRIT].signature = 99
    verdict = diagnose(history, {}, _wait(job, history, 7))
    assert (verdict.class_, _names(verdict), verdict.action.kind) == ("H2", [CULPRIT], "notify")


def test_a_tie_of_operations_is_left_undecided() -> None:
    job, history = _healthy()
    job.hang()
    for rank in job.ranks[:4]:
        rank.signature = 99
    verdict = diagnose(history, {}, _wait(job, history, 7))
    assert verdict.culprits == [] and verdict.action.kind == "collect"


def test_a_throttled_gpu_that_explains_the_loss_is_convicted() -> None:
    job, history = _healthy()
    now = _run(job, history, _slowed(2, 2.0), 6)
    verdict = diagnose(history, _gpus(job, lambda r: 1080 if r == CULPRIT else 1980, 0x8), now)
    culprit = verdict.culprits[0]
    assert (verdict.class_, culprit.rank, culprit.cause, culprit.domain) == ("S1", 5, "gpu_clock_throttle", "hardware")
    assert (verdict.action.kind, verdict.action.nodes, verdict.action.requeue) == ("drain", ["gpu003"], True)
    assert {item.witness for item in verdict.evidence if not item.against} == {"job", "nvml"}


def test_a_slow_rank_without_a_hardware_witness_is_named_and_nothing_is_drained() -> None:
    job, history = _healthy()
    now = _run(job, history, _slowed(2, 2.0), 6)
    for gpus in ({}, _gpus(job, lambda r: 1980, 0)):
        verdict = diagnose(history, gpus, now)
        assert (verdict.class_, _names(verdict)) == ("S1", [CULPRIT])
        assert (verdict.action.kind, verdict.action.nodes, verdict.culprits[0].cause) == ("collect", [], "unknown")


@pytest.mark.parametrize(
    ("clock", "reasons", "why"),
    [
        (lambda r: 1080, 0x8, "all GPUs are equally low, so the clock does not set this rank apart"),
        (lambda r: 1080 if r == CULPRIT else 1980, 0x4, "a software power cap is normal"),
        (lambda r: 1900 if r == CULPRIT else 1980, 0x8, "four per cent of clock do not explain half of the time"),
        (lambda r: 1080 if r == 4 else 1980, 0x8, "it is the other GPU of the node"),
    ],
)
def test_a_clock_fact_that_does_not_explain_the_loss_convicts_nobody(
    clock: Callable[[int], int], reasons: int, why: str
) -> None:
    job, history = _healthy()
    now = _run(job, history, _slowed(2, 2.0), 6)
    verdict = diagnose(history, _gpus(job, clock, reasons), now)
    assert _names(verdict) == [CULPRIT], why
    assert verdict.action.nodes == [] and verdict.culprits[0].domain == "unknown", why


def test_a_job_wide_slowdown_is_a_change_of_the_work_and_names_nobody() -> None:
    job, history = _healthy()
    now = _run(job, history, _slowed(2, 1.8, ranks=tuple(range(8))), 6)
    verdict = diagnose(history, {}, now)
    assert (verdict.anomaly, verdict.class_) == ("slow", None)
    assert [(culprit.kind, culprit.cause) for culprit in verdict.culprits] == [("job", "workload_change")]
    assert (verdict.action.kind, verdict.action.nodes) == ("notify", [])


def test_a_slow_transfer_names_no_rank() -> None:
    job, history = _healthy()
    for _ in range(6):
        job.steps(12, _noise(3), transfer_ms=60.0)
        _observe(history, job)
    verdict = diagnose(history, {}, job.now_ms / 1000)
    assert (verdict.anomaly, verdict.culprits) == ("slow", [])


def test_two_stragglers_are_both_named() -> None:
    job, history = _healthy()
    now = _run(job, history, _slowed(2, 2.0, ranks=(1, CULPRIT)), 6)
    assert sorted(_names(diagnose(history, {}, now))) == [1, CULPRIT]


def test_a_rank_claimed_by_two_nodes_is_said_to_be_unseen() -> None:
    job, history = _healthy()
    thief = SimJob()
    for rank in thief.ranks:
        rank.node = "gpu009"
    history.observe("gpu009", "boot", thief.sample("gpu009"), job.now_ms / 1000)
    assert history.ranks[CULPRIT].node == "gpu003"
    assert any("claimed by more than one node" in note for note in diagnose(history, {}, job.now_ms / 1000).unseen)


@pytest.mark.parametrize("seed", range(3))
def test_renaming_ranks_renames_the_verdict(seed: int) -> None:
    order = list(range(8))
    random.Random(seed).shuffle(order)
    job, history = _healthy()
    job.hang(absent=[order[0]])
    assert _names(diagnose(history, {}, _wait(job, history, 7))) == [order[0]]
