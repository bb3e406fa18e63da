"""Steps inferred from rounds alone: the period of a record, and what a beat makes of looks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np
import pytest

from diagnosis.contracts import probeframe
from diagnosis.contracts.probeframe import Dtype, Op
from diagnosis.evidence.periods import POINT_DTYPE, POINTS_MAX, Points, find_period, is_light
from diagnosis.evidence.steps import Beat, Look, Step, step_of

LAYER, SHARD, ROOT, BUCKET, REST = 50_000, 40_000, 30_000, 20_000, 10_000
LOSS = 1
MS = 1_000_000


def mark(elements: int) -> int:
    one = np.ones(1, np.uint8)
    count, root = np.array([elements], np.uint64), np.array([-1], np.int32)
    return int(probeframe.signatures(one * Op.ALL_REDUCE, one * Dtype.BFLOAT16, count, root)[0])


def record(rounds: Iterable[int], stride: int = 1, between: Iterable[int] = (), gaps: Iterable[float] = ()) -> Points:
    """Rounds by their elements: every `stride`-th is recorded, and those `between` were seen by chance."""
    seen = set(between)
    gap = dict(enumerate(gaps, 1))
    rows = [
        (seq, mark(elements), gap.get(seq, 1000.0) if seq % stride == 0 else np.nan)
        for seq, elements in enumerate(rounds, 1)
        if seq % stride == 0 or seq in seen
    ]
    return np.array(rows, POINT_DTYPE)


def forever(step: list[int], insert_every: int = 0, inserted: Iterable[int] = ()) -> Iterator[int]:
    for number in itertools.count(1):
        yield from step
        if insert_every and number % insert_every == 0:
            yield from inserted


def some(rounds: Iterator[int], count: int) -> list[int]:
    return list(itertools.islice(rounds, count))


def rounds_of(points: Points, stride: int = 1, mean_gap_us: float = 1000.0) -> int | None:
    found = find_period(points, stride, mean_gap_us)
    return None if found is None else found.rounds


SHARDED = [ROOT, *[LAYER] * 8, *[LAYER, SHARD] * 8]


@pytest.mark.parametrize(
    "step",
    [
        [BUCKET, REST],
        [BUCKET, BUCKET, BUCKET, REST],
        [LAYER] * 40 + [REST],
        SHARDED,
        [ROOT, *[LAYER] * 80, *[LAYER, SHARD] * 80],
        [LAYER, LAYER, SHARD, LAYER, LAYER, REST],
    ],
)
def test_a_step_is_as_long_as_its_sequence(step: list[int]) -> None:
    assert rounds_of(record(some(forever(step), POINTS_MAX))) == len(step)


@pytest.mark.parametrize("begin", [0, 1, 3])
def test_a_record_may_begin_in_the_middle_of_a_step(begin: int) -> None:
    points = record(some(forever([BUCKET, BUCKET, BUCKET, REST]), 200))[begin:]
    assert rounds_of(points) == 4


@pytest.mark.parametrize(
    ("every", "inserted"), [(10, [LOSS]), (40, [2, 2, 2, 2, 2]), (7, [0]), (50, [SHARD, SHARD, SHARD, SHARD])]
)
def test_what_comes_between_steps_does_not_change_them(every: int, inserted: list[int]) -> None:
    points = record(some(forever([BUCKET, ROOT, REST], every, inserted), POINTS_MAX))
    assert rounds_of(points) == 3


def test_a_small_round_of_every_step_is_counted_in() -> None:
    assert rounds_of(record(some(forever([BUCKET, REST, LOSS]), 300))) == 3


def test_too_few_rounds_tell_nothing() -> None:
    assert rounds_of(record(some(forever([BUCKET, REST]), 9))) is None


def test_rounds_without_an_order_tell_nothing() -> None:
    dice = np.random.default_rng(1)
    assert rounds_of(record(dice.choice([LAYER, SHARD, REST], POINTS_MAX).tolist())) is None


@pytest.mark.parametrize("stride", [2, 4, 16])
@pytest.mark.parametrize("step", [[BUCKET, ROOT, REST], [BUCKET, REST], [BUCKET, ROOT, LAYER, REST]])
def test_a_step_is_found_though_only_some_rounds_are_recorded(stride: int, step: list[int]) -> None:
    count = 300 * stride
    dice = np.random.default_rng(stride)
    between = dice.integers(1, count, 200).tolist()
    assert rounds_of(record(some(forever(step), count), stride, between), stride) == len(step)


@pytest.mark.parametrize("step", [[BUCKET, ROOT, REST], [BUCKET, REST], [BUCKET]])
def test_without_a_round_in_between_the_power_of_two_is_unknown(step: list[int]) -> None:
    assert rounds_of(record(some(forever(step), 2000), 4), 4) is None


def test_a_longer_loop_whose_halves_differ_is_no_shorter_one() -> None:
    step = [LAYER, SHARD, LAYER, REST]  # every second round is alike, the others tell
    dice = np.random.default_rng(3)
    assert rounds_of(record(some(forever(step), 2000), 2, dice.integers(1, 2000, 99).tolist()), 2) == 4


def test_equal_rounds_with_even_own_times_are_steps() -> None:
    assert rounds_of(record([BUCKET] * 60)) == 1


def test_equal_rounds_with_a_pattern_in_own_times_are_told_apart_by_it() -> None:
    points = record([BUCKET] * 60, gaps=itertools.islice(itertools.cycle([90_000.0, 900.0, 1100.0, 1000.0]), 60))
    assert rounds_of(points, mean_gap_us=23_000) == 4


def test_equal_rounds_are_no_steps_while_most_own_time_lies_before_rounds_that_are_not_recorded() -> None:
    between = range(1, 400, 10)
    assert rounds_of(record([BUCKET] * 400, 4, between), 4, mean_gap_us=1000.0) == 1
    assert rounds_of(record([BUCKET] * 400, 4, between), 4, mean_gap_us=23_000.0) is None


def test_equal_rounds_with_any_own_times_tell_nothing() -> None:
    dice = np.random.default_rng(2)
    assert rounds_of(record([BUCKET] * 200, gaps=dice.uniform(1, 90_000, 200)), mean_gap_us=45_000) is None


def test_small_operations_are_known_by_their_signature() -> None:
    assert is_light(np.array([mark(0), mark(1), mark(31), mark(32), mark(BUCKET)], np.uint32)).tolist() == [
        *[True] * 3,
        *[False] * 2,
    ]


# -- beats -----------------------------------------------------------------------------------------------------------


class Job:
    """One communicator whose rounds the test enters one by one; `look` is what a daemon sees."""

    def __init__(self) -> None:
        self.beat, self.now_ns, self.seq, self.gap_us = Beat(), 1000 * MS, 0, 0.0
        self.fresh: list[tuple[int, int, float]] = []
        self.elements = BUCKET

    def enter(self, elements: int, gap_ms: float) -> None:
        self.now_ns += int(gap_ms * MS)
        self.seq += 1
        self.gap_us += gap_ms * 1000
        self.elements = elements
        self.fresh.append((self.seq, mark(elements), gap_ms * 1000))

    def look(self) -> Beat:
        points = np.array(self.fresh, POINT_DTYPE)
        self.beat.observe(Look(self.now_ns, self.seq, self.now_ns, points, 1, self.gap_us, self.elements))
        self.fresh = []
        if self.beat.due:
            self.beat.learn()
        return self.beat

    def step(self, ms: float) -> None:
        """A training step of three rounds that takes `ms`."""
        for elements, share in ((BUCKET, 0.8), (ROOT, 0.1), (REST, 0.1)):
            self.enter(elements, ms * share)

    def train(self, steps: int, ms: float = 100.0, per_look: int = 3) -> Step | None:
        for number in range(1, steps + 1):
            self.step(ms)
            if number % per_look == 0:
                self.look()
        return self.look().step


def test_a_step_has_its_time_its_rounds_and_the_place_in_it() -> None:
    job = Job()
    assert job.train(60) == Step(100 * MS, 0, 3, 3)
    job.enter(BUCKET, 80)
    step = job.look().step
    assert step is not None
    assert (step.step_ns, step.round) == (100 * MS, 1)


def test_a_step_that_is_seldom_seen_is_timed_over_many() -> None:
    job = Job()
    assert job.train(400, per_look=37) == Step(100 * MS, 0, 3, 3)


def test_jitter_is_the_deviation_of_one_step() -> None:
    job, dice = Job(), np.random.default_rng(4)
    for _ in range(300):
        for _ in range(5):
            job.step(float(100 + 8 * dice.standard_normal()))
        job.look()
    step = job.beat.step
    assert step is not None
    assert step.jitter_ns is not None
    assert abs(step.step_ns - 100 * MS) < 4 * MS
    assert 3 * MS < step.jitter_ns < 16 * MS  # 15 windows estimate 8 ms


def test_pauses_evaluations_and_logged_losses_do_not_move_the_step() -> None:
    job = Job()
    job.train(60)
    for number in range(1, 121):
        job.step(100)
        if number % 10 == 0:
            job.enter(LOSS, 1)
        if number % 30 == 0:
            for _ in range(4):
                job.enter(2, 20)
        if number % 40 == 0:
            job.now_ns += 30_000 * MS
        if number % 3 == 0:
            job.look()
    step = job.look().step
    assert step is not None
    assert abs(step.step_ns - 100 * MS) < 2 * MS
    assert (step.rounds, step.round) == (3, 3)


def test_rounds_of_the_pattern_that_come_out_of_turn_move_the_place_in_it() -> None:
    job = Job()
    job.train(60)
    job.enter(BUCKET, 10)  # a step that was given up
    step = job.train(6)
    assert step is not None
    assert step.round == 3


def test_a_step_that_becomes_slower_is_told_after_a_few_windows() -> None:
    job = Job()
    job.train(60)
    step = job.train(45, ms=150.0)
    assert step is not None
    assert step.step_ns == 150 * MS


def test_another_program_is_learnt_anew() -> None:
    job = Job()
    job.train(60)
    for number in range(1, 201):
        for elements in (LAYER, SHARD, SHARD, LAYER, REST):
            job.enter(elements, 10)
        if number % 3 == 0:
            job.look()
    step = job.look().step
    assert step is not None
    assert (step.step_ns, step.rounds) == (50 * MS, 5)


def test_nothing_is_told_before_the_pattern_is_known() -> None:
    job = Job()
    job.step(100)
    job.step(100)
    assert job.look().step is None


def beat_of(step: list[tuple[int, float]], steps: int, rest_ms: float = 0.0) -> Job:
    """A communicator whose step has these rounds (elements, ms before), and pauses besides."""
    job = Job()
    for number in range(steps):
        for elements, ms in step:
            job.enter(elements, ms)
        job.now_ns += int(rest_ms * MS)
        if number % 3 == 2:
            job.look()
    return job


def test_the_slowest_communicator_that_carries_something_tells_the_step() -> None:
    activations = beat_of([(LAYER, 5.0), (SHARD, 5.0)], 600)
    gradients = beat_of([(BUCKET, 1.0), (REST, 1.0)], 60, 98.0)
    barriers = beat_of([(0, 1.0)], 30, 199.0)
    step = step_of([activations.beat, gradients.beat, barriers.beat])
    assert step is not None
    assert abs(step.step_ns - 100 * MS) < MS


def test_the_step_is_unknown_while_a_slower_communicator_is_being_learnt() -> None:
    activations = beat_of([(LAYER, 5.0), (SHARD, 5.0)], 600)
    gradients = beat_of([(BUCKET, 1.0), (REST, 1.0)], 6, 998.0)
    assert gradients.beat.step is None
    assert step_of([activations.beat, gradients.beat]) is None
    assert step_of([activations.beat]) is not None


def test_nothing_known_is_no_step() -> None:
    assert step_of([]) is None
    assert step_of([Beat()]) is None


def test_what_a_job_makes_up_is_bounded() -> None:
    dice, beat, seq = np.random.default_rng(5), Beat(), 0
    for look in range(400):
        points = np.zeros(33, POINT_DTYPE)
        points["seq"] = seq + np.sort(dice.choice(np.arange(1, 10**6), 33, replace=False))
        points["signature"] = dice.integers(0, 1 << 32, 33)
        points["gap_us"] = dice.choice([np.nan, 0.0, 4e9], 33)
        seq = int(points["seq"][-1])
        beat.observe(
            Look(look * MS, seq, int(dice.integers(0, 1 << 63)), points, 1 << int(dice.integers(0, 31)), 0.0, 9)
        )
        if beat.due:
            beat.learn()
    assert beat.step is None
