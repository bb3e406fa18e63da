"""Live jobs whose probes do not see the ends of rounds (NCCL without kernel events): what can still be said."""

from __future__ import annotations

import msgspec
import numpy as np

from diagnosis.contracts import report as wire
from diagnosis.contracts.columns import null_of, pack, unpack
from diagnosis.engine.history import JobHistory
from diagnosis.engine.live import diagnose
from diagnosis.engine.thresholds import Thresholds
from tests.simjob import SimJob

LIMITS = Thresholds(hang_floor_s=6.0, startup_floor_s=6.0)


class UntoldJob(SimJob):
    """A job that tells which round each rank entered last, and no more."""

    def sample(self, node: str) -> wire.JobSample:
        told = super().sample(node)
        comms = unpack(told.comms, wire.COMM_DTYPE, wire.COMM_ROWS_MAX).copy()
        for name in ("state", "done_seq", "rounds", "dur_us", "gap_us", "send", "recv"):
            comms[name] = null_of(comms.dtype[name])
        return msgspec.structs.replace(told, comms=pack(comms), rounds=pack(np.zeros(0, wire.ROUND_DTYPE)))


def quiet(job: SimJob, seconds: int = 30) -> tuple[JobHistory, float]:
    """The history of a job that works for a while and is then as it is, for so long."""
    history = JobHistory(job.job_id, job.restart, LIMITS, 0.0)
    for _ in range(seconds):
        for node in job.nodes:
            history.observe(node, "boot", job.sample(node), job.now_ms / 1000)
        job.now_ms += 1000
    return history, job.now_ms / 1000 - 1


def test_a_pause_after_a_round_that_all_entered_blames_nobody() -> None:
    job = UntoldJob()
    job.steps(50, lambda rank, step: 40.0)
    history, now = quiet(job)
    verdict = diagnose(history, {}, now)
    assert verdict.culprits == [] or verdict.anomaly == "none"


def test_a_rank_that_did_not_enter_is_named_all_the_same() -> None:
    job = UntoldJob()
    job.steps(50, lambda rank, step: 40.0)
    job.hang(absent=[5])
    history, now = quiet(job)
    verdict = diagnose(history, {}, now)
    (culprit,) = verdict.culprits
    assert (verdict.class_, culprit.rank) == ("H1", 5)
    assert culprit.cause != "process_exit"
    assert verdict.action.nodes == []
