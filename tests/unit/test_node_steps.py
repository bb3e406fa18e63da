"""Steps as the daemon tells them: from frames of simulated jobs to the columns of a report."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from diagnosis.contracts import probeframe, report
from diagnosis.contracts.columns import Table, null_of, unpack
from diagnosis.evidence.steps import Step
from node_daemon.collectors.frames import FrameSample, JobFrames
from node_daemon.step_watch import COMMUNICATORS_PER_PROCESS_MAX, StepWatch
from node_daemon.summarise import summarise
from tests.stepframes import FrameWriter, Played

KEY = (100, 1)
MS = 1_000_000
NULL_U4 = null_of(np.dtype("u4"))


def told_of(looks: Iterable[tuple[float, JobFrames]]) -> list[Step]:
    """What was told, look by look, where anything was."""
    watch = StepWatch()
    steps = [next(iter(watch.look([job]).values()), None) for _, job in looks]
    return [step for step in steps if step is not None]


@pytest.mark.parametrize(
    "conditions",
    [{}, {"evaluate_every": 30}, {"pause_every": 30}, {"lengths": 0.15}],
    ids=["plain", "evaluations", "checkpoints", "micro-batches of varying length"],
)
@pytest.mark.parametrize("seed", [0, 2, 6])
def test_steps_of_a_simulated_training_are_told_within_a_tenth(seed: int, conditions: dict[str, float]) -> None:
    played = Played(seed, steps=160, **conditions)  # type: ignore[arg-type]
    true_ns = float(np.median(played.steps_ms)) * MS
    for rank in (0, played.layout.world - 1):
        told = told_of(played.looks(rank))
        assert len(told) >= 8
        right = [step for step in told if abs(step.step_ns / true_ns - 1) < 0.1]
        assert len(right) >= 0.95 * len(told)


def test_a_daemon_that_comes_later_tells_the_same() -> None:
    played = Played(0)
    true_ns = float(np.median(played.steps_ms)) * MS
    told = told_of(played.looks(0, skip_ms=40 * true_ns / MS))
    assert told
    assert all(abs(step.step_ns / true_ns - 1) < 0.1 for step in told)


def train(writer: FrameWriter, steps: int, at_ns: int = 0, untold: int = 0) -> int:
    """Steps of 200 ms with two rounds each; the time at the end."""
    for _ in range(steps):
        writer.round(7, at_ns + 150 * MS, at_ns + 160 * MS, 5000, untold=untold)
        writer.round(7, at_ns + 161 * MS, at_ns + 200 * MS, 9000, untold=untold)
        at_ns += 200 * MS
    return at_ns


def job_of(writer: FrameWriter, at_ns: int) -> JobFrames:
    return JobFrames(4242, 0, 1000, 1000, [writer.sample(at_ns)])


def followed(
    writer: FrameWriter, watch: StepWatch, seconds: int, untold: int = 0
) -> tuple[JobFrames, dict[tuple[int, int], Step]]:
    at_ns, steps = 0, {}
    for _ in range(seconds):
        at_ns = train(writer, 5, at_ns, untold)
        job = job_of(writer, at_ns)
        steps = dict(watch.look([job]))
    return job, steps


def ranks_of(job: JobFrames, steps: dict[tuple[int, int], Step] | None) -> Table:
    sample, _ = summarise(job, {}, steps=steps)
    return unpack(sample.ranks, report.RANK_DTYPE, report.RANKS_MAX)


def test_the_report_tells_them_and_null_where_they_are_not_known() -> None:
    job, steps = followed(FrameWriter(), StepWatch(), 20)
    row = ranks_of(job, steps)[0]
    assert [int(row[name]) for name in ("step_us", "step_jitter_us", "step_rounds", "step_round")] == [200_000, 0, 2, 2]
    row = ranks_of(job, None)[0]
    unknown = [null_of(report.RANK_DTYPE[name]) for name in ("step_us", "step_jitter_us", "step_rounds", "step_round")]
    assert [int(row[name]) for name in ("step_us", "step_jitter_us", "step_rounds", "step_round")] == unknown


def test_a_step_too_long_for_its_column_is_unknown() -> None:
    job, _ = followed(FrameWriter(), StepWatch(), 1)
    row = ranks_of(job, {KEY: Step(NULL_U4 * 1000, None, 1 << 17, None)})[0]
    assert int(row["step_us"]) == NULL_U4
    assert int(row["step_rounds"]) == null_of(np.dtype("u2"))


def test_without_times_of_rounds_the_step_is_known_and_the_place_in_it_is_not() -> None:
    _, steps = followed(FrameWriter(), StepWatch(), 20, int(probeframe.Untold.TIMES))
    assert steps[KEY].step_ns == 200 * MS
    assert (steps[KEY].rounds, steps[KEY].round) == (2, None)


def test_a_job_that_stands_still_keeps_its_last_step() -> None:
    writer, watch = FrameWriter(), StepWatch()
    job, steps = followed(writer, watch, 20)
    for _ in range(100):
        assert watch.look([job]) == steps


def test_a_process_that_is_gone_is_forgotten_and_a_new_communicator_begins_anew() -> None:
    writer, watch = FrameWriter(), StepWatch()
    followed(writer, watch, 20)
    assert watch.look([]) == {}
    assert watch.look([job_of(writer, 1)]) == {}
    _, steps = followed(FrameWriter(), watch, 3)  # the same number, and fewer rounds
    assert steps == {}


def test_communicators_that_come_and_go_leave_nothing() -> None:
    watch = StepWatch()
    for number in range(40):
        writer = FrameWriter()
        for comm in range(16):
            writer.round(1 + 16 * number + comm, MS, 2 * MS, 100)
        watch.look([job_of(writer, 3 * MS)])
        assert watch.followed <= COMMUNICATORS_PER_PROCESS_MAX


def test_a_frame_of_nonsense_is_survived() -> None:
    dice, watch = np.random.default_rng(7), StepWatch()
    for look in range(60):
        slots = np.frombuffer(dice.bytes(16 * probeframe.SLOT_BYTES), probeframe.SLOT_DTYPE).copy()
        slots["comm_id"] = np.arange(1, 17)
        greatest = (1 << 62, 1 << 63, (1 << 64) - 1)[look // 2 % 3]
        slots["enqueued"] = dice.integers(0, greatest, 16, np.uint64) if look % 2 else 1000 * (look + 1)
        if look % 3:
            slots["rounds"]["seq"] = dice.integers(0, 1000 * (look + 2), (16, 32))
        again = slots.copy()
        if look % 5 == 0:
            again["rounds"]["seq"] = 3
        header = np.zeros(1, probeframe.HEADER_DTYPE)[0]
        watch.look([JobFrames(1, 0, 0, 0, [FrameSample(100, 1, ord("S"), look * 1000 * MS, header, slots, again)])])
