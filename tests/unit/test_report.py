"""What a report may hold: all that is made of it, kept or shown is bounded, however small its body is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from diagnosis.contracts import report as wire
from diagnosis.contracts.columns import pack
from diagnosis.contracts.errors import AgentFault
from diagnosis.contracts.report import GpuFacts, HardwareFacts, JobSample, Report


def make(**fields: Any) -> Report:
    words: dict[str, Any] = {"node": "gpu001", "boot_id": "b", "epoch": 1, "sample": 1, "window_ms": 1000}
    return Report(**{"mono_ms": 0, "wall_ms": 0} | words | fields)


def job(ranks: int = 0, comms: int = 0, rounds: int = 0) -> JobSample:
    return JobSample(
        7,
        0,
        1000,
        pack(np.zeros(ranks, wire.RANK_DTYPE)),
        pack(np.zeros(comms, wire.COMM_DTYPE)),
        pack(np.zeros(rounds, wire.ROUND_DTYPE)),
    )


def reason_of(report: Report) -> str:
    with pytest.raises(AgentFault) as caught:
        wire.decode(wire.encode(report))
    return caught.value.reason


def test_a_report_at_its_limits_is_taken() -> None:
    full = job(wire.RANKS_MAX, wire.COMM_ROWS_MAX, wire.ROUND_ROWS_MAX)
    refused = {f"{number:01024}": 1 for number in range(wire.REASONS_MAX)}
    told = make(jobs=[full, job()], refused=refused, hardware=HardwareFacts("ok", gpus=[GpuFacts(0, uuid="u" * 1024)]))
    assert wire.decode(wire.encode(told)) == told


@pytest.mark.parametrize(
    "jobs",
    [
        [job(ranks=wire.RANKS_MAX), job(ranks=1)],
        [job(comms=wire.COMM_ROWS_MAX), job(comms=1)],
        [job(rounds=wire.ROUND_ROWS_MAX // 2)] * 3,
        [JobSample(7, 0, 1000, {}, {}, {"signature": bytes(4 * (wire.ROUND_ROWS_MAX + 1))})],
    ],
)
def test_rows_are_bounded_over_all_jobs_of_a_report_and_whichever_columns_it_has(jobs: list[JobSample]) -> None:
    assert reason_of(make(jobs=jobs)) == "limits"


@pytest.mark.parametrize(
    "fields",
    [
        {"refused": {str(number): 1 for number in range(wire.REASONS_MAX + 1)}},
        {"refused": {"x" * 1025: 1}},
        {"boot_id": "b" * 1025},
        {"hardware": HardwareFacts("o" * 1025)},
        {"hardware": HardwareFacts("error", detail="d" * 1025)},
        {"hardware": HardwareFacts("ok", gpus=[GpuFacts(0, uuid="u" * 1025)])},
        {"hardware": HardwareFacts("ok", gpus=[GpuFacts(0, bus_id="u" * 1025)])},
    ],
)
def test_texts_and_reasons_are_bounded(fields: dict[str, Any]) -> None:
    assert reason_of(make(**fields)) == "limits"
