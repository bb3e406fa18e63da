"""When a job should be profiled: lasting slow-downs and stalls, and the silence on all that a healthy job does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from diagnosis.engine.pace import Floats
from diagnosis.engine.profiling_rules import TriggerRules
from diagnosis.engine.trigger import (
    STANDING_DTYPE,
    WINDOW_DTYPE,
    Cause,
    Doing,
    Event,
    JobTrigger,
    Place,
    Table,
)
from tests.stepseries import HEALTHY, STEP_MS, Teller, noisy, slower, steady

TEN_MINUTES = 600
"""Steps of a second."""
BEGIN = 203
SEEN_WITHIN = 30


def play(trigger: JobTrigger, steps: Floats, teller: Teller, seed: int = 0) -> list[tuple[int, Event]]:
    """(steps seen so far, event) of a series."""
    found = []
    for number, (now, windows) in enumerate(teller.tell(steps, np.random.default_rng(seed)), 1):
        trigger.observe(windows)
        event = trigger.look(now)
        if event is not None:
            found.append((number * teller.size, event))
    return found


def window(rank: int, first: int, steps: int, ms: float, ended_at: float) -> Table:
    return np.array([(rank, first, steps, ms, ended_at)], WINDOW_DTYPE)


def standing(told_at: float, moved_at: float, places: Iterable[Place], doing: Doing = Doing.UNKNOWN) -> Table:
    return np.array([(rank, told_at, moved_at, place, doing) for rank, place in enumerate(places)], STANDING_DTYPE)


def learnt(steps: int = 200, rules: TriggerRules | None = None) -> tuple[JobTrigger, float]:
    """A job of four ranks and steps of a second that has run for a while, and when its last step ended."""
    trigger = JobTrigger(rules)
    series = steady(np.random.default_rng(1), steps)
    assert play(trigger, series, Teller(ranks=4)) == []
    return trigger, float(series.sum() / 1e3)


INSIDE = (Place.WAITS, Place.WAITS, Place.WITHIN, Place.WAITS)
AT_THE_END = (Place.BETWEEN, Place.WAITS, Place.WAITS, Place.WAITS)


@pytest.mark.parametrize("size", [1, 4, 10, 60])
@pytest.mark.parametrize("kind", HEALTHY)
def test_a_healthy_job_is_never_taken_for_a_slow_one(kind: str, size: int) -> None:
    for seed in range(1 if size == 1 else 3):
        steps = HEALTHY[kind](np.random.default_rng(seed), 2 * TEN_MINUTES)
        assert play(JobTrigger(), steps, Teller(size=size), seed) == [], seed


@pytest.mark.parametrize("size", [1, 3, 10])
@pytest.mark.parametrize("factor", [1.3, 2.0, 5.0])
@pytest.mark.parametrize("kind", ["steady", "noisy", "compiled", "saved", "collected"])
def test_a_slow_down_is_seen_within_three_windows_of_ten_steps(kind: str, factor: float, size: int) -> None:
    begin = BEGIN if size != 10 else 200
    steps = slower(HEALTHY[kind](np.random.default_rng(7), TEN_MINUTES), begin, factor)
    (seen, event), *more = play(JobTrigger(), steps, Teller(size=size))
    assert more == []
    assert 0 < seen - begin <= SEEN_WITHIN
    assert event.causes == (Cause.SLOWER,)
    assert event.now_ms / event.usual_ms == pytest.approx(factor, rel=0.12)
    assert abs(event.first_step - begin) <= 10
    assert event.began_at == pytest.approx(steps[:begin].sum() / 1e3, abs=12.0 * factor)


def test_a_window_that_is_slow_in_part_does_not_hide_the_next() -> None:
    steps = slower(noisy(np.random.default_rng(3), TEN_MINUTES), 205, 1.3)
    ((seen, _),) = play(JobTrigger(), steps, Teller(size=10))
    assert seen <= 205 + SEEN_WITHIN + 10


def test_a_small_slow_down_takes_longer_and_one_of_three_in_a_hundred_is_none() -> None:
    healthy = steady(np.random.default_rng(0), 2 * TEN_MINUTES)
    ((seen, event),) = play(JobTrigger(), slower(healthy, 603, 1.08), Teller())
    assert 603 < seen <= 603 + 250
    assert event.now_ms / event.usual_ms == pytest.approx(1.08, abs=0.01)
    assert play(JobTrigger(), slower(healthy, 603, 1.03), Teller()) == []


def test_a_job_that_slows_down_little_by_little_is_seen() -> None:
    steps = steady(np.random.default_rng(0), 6000) * np.linspace(1.0, 1.3, 6000)
    (seen, event), *_ = play(JobTrigger(), steps, Teller())
    assert seen < 4000
    assert 1.05 < event.now_ms / event.usual_ms < 1.2


def test_pauses_every_few_steps_are_seen_and_those_that_were_there_from_the_first_are_not() -> None:
    late = steady(np.random.default_rng(0), 1200)
    early = late.copy()
    early[::8] += 2 * STEP_MS
    late[600::8] += 2 * STEP_MS
    assert play(JobTrigger(), early, Teller(size=1)) == []
    ((seen, event),) = play(JobTrigger(), late, Teller(size=1))
    assert 600 < seen <= 800
    assert 1.1 < event.now_ms / event.usual_ms < 1.4


def test_a_faster_pace_is_the_usual_one_from_then_on() -> None:
    steps = steady(np.random.default_rng(0), 900)
    steps[:300] *= 1.4
    steps[600:] *= 1.25
    ((seen, event),) = play(JobTrigger(), steps, Teller())
    assert 600 < seen <= 600 + SEEN_WITHIN
    assert event.usual_ms == pytest.approx(STEP_MS, rel=0.03)


# -- several ranks, several events ------------------------------------------------------------------------------------


def test_several_ranks_words_are_one_event_and_late_ones_join() -> None:
    trigger = JobTrigger()
    events = []
    series = slower(steady(np.random.default_rng(0), 400), 200, 1.5)
    ended_at = np.cumsum(series) / 1e3
    for first in range(390):
        of = [first - (20 if rank >= 6 else 0) for rank in range(8)]  # two ranks' words come twenty seconds late
        told = [window(rank, at, 1, series[at], ended_at[at]) for rank, at in enumerate(of) if at >= 0]
        trigger.observe(np.concatenate(told))
        events.append(trigger.look(ended_at[first]))
    new = [event for event in events if event is not None]
    assert [event.number for event in new] == [1]
    assert new[0].ranks == (0, 1, 2, 3, 4, 5)
    assert trigger.event is not None and trigger.event.ranks == tuple(range(8))
    assert "1.50 times as long" in trigger.event.text and "8 ranks" in trigger.event.text


def test_one_rank_alone_among_many_is_no_event() -> None:
    ranks = 40
    trigger = JobTrigger()
    for first in range(0, 400, 10):
        windows = np.concatenate([window(rank, first, 10, STEP_MS, first + 10.0) for rank in range(ranks)])
        windows["ms_per_step"][3] *= 1.5 if first >= 200 else 1.0
        trigger.observe(windows)
        assert trigger.look(first + 10.0) is None


def test_the_same_again_is_told_after_a_while_and_a_greater_one_at_once() -> None:
    def swings(last_factor: float, again_s: float) -> list[tuple[int, Event]]:
        steps = steady(np.random.default_rng(0), 600)
        steps[200:300] *= 1.4
        steps[450:] *= last_factor
        return play(JobTrigger(TriggerRules(again_s=again_s)), steps, Teller())

    assert [event.number for _, event in swings(1.4, 600.0)] == [1]
    assert [event.number for _, event in swings(2.0, 600.0)] == [1, 2]
    assert [event.number for _, event in swings(1.4, 100.0)] == [1, 2]


def test_rules_are_settable_while_the_job_runs() -> None:
    steps = slower(noisy(np.random.default_rng(0), 900), 200, 1.3)
    trigger = JobTrigger(TriggerRules(soon_ratio=3.0, slower_ratio=3.0))
    assert play(trigger, steps[:600], Teller()) == []
    trigger.rules = replace(trigger.rules, soon_ratio=1.15, slower_ratio=1.05, block_steps=10, again_s=0.0)
    later = Teller()
    ((seen, _),) = [
        (at, event)
        for at, event in play_on(trigger, slower(steps[600:], 150, 1.5), later, started_at=steps[:600].sum() / 1e3)
    ]
    assert 150 < seen <= 150 + SEEN_WITHIN


def play_on(trigger: JobTrigger, steps: Floats, teller: Teller, started_at: float) -> list[tuple[int, Event]]:
    """`play` for a job that has run before."""
    found = []
    for number, (now, windows) in enumerate(teller.tell(steps, np.random.default_rng(0)), 1):
        windows["ended_at"] += started_at
        trigger.observe(windows)
        event = trigger.look(now + started_at)
        if event is not None:
            found.append((number * teller.size, event))
    return found


# -- what does not end ------------------------------------------------------------------------------------------------


def test_inside_a_step_five_steps_without_an_event_are_a_stall() -> None:
    trigger, at = learnt(rules=TriggerRules(stall_floor_s=0.0))
    trigger.stand(standing(at + 4.9, at, INSIDE))
    assert trigger.look(at + 4.9) is None
    trigger.stand(standing(at + 5.2, at, INSIDE))
    event = trigger.look(at + 5.2)
    assert event is not None and event.causes == (Cause.STALLED,)
    assert event.ranks == (0, 1, 2, 3) and event.began_at == at and event.first_step == 200
    assert "nothing has moved on 4 ranks for 5,200 ms, where a step takes 999 ms" in event.text


def test_a_stall_is_told_once_however_its_clock_creeps() -> None:
    trigger, at = learnt()
    told = []
    for second in range(1, 900):
        trigger.stand(standing(at + second, at + 0.002 * second, INSIDE))
        told.append(trigger.look(at + second))
    assert [second for second, event in enumerate(told, 1) if event is not None] == [11]


def test_between_steps_it_takes_thirty_steps_and_longer_than_any_pause_so_far() -> None:
    trigger, at = learnt()
    trigger.stand(standing(at + 29.0, at, AT_THE_END))
    assert trigger.look(at + 29.0) is None
    trigger.observe(np.concatenate([window(rank, 200, 1, 29_500.0, at + 29.5) for rank in range(4)]))
    began = at + 29.5
    for still_s, expected in ((31.0, None), (42.0, None), (43.5, (Cause.STALLED,))):
        trigger.stand(standing(began + still_s, began, AT_THE_END))
        event = trigger.look(began + still_s)
        assert (event.causes if event else None) == expected
    assert trigger.event is not None and trigger.event.now_ms == pytest.approx(43_500.0)


def test_a_stall_that_was_told_is_no_pause_that_may_come_again() -> None:
    trigger, at = learnt(rules=TriggerRules(again_s=0.0))
    trigger.stand(standing(at + 35.0, at, AT_THE_END))
    assert trigger.look(at + 35.0) is not None
    trigger.observe(np.concatenate([window(rank, 200, 1, 60_000.0, at + 60.0) for rank in range(4)]))
    trigger.stand(standing(at + 200.0 + 35.0, at + 200.0, AT_THE_END))
    assert trigger.look(at + 235.0) is not None


@pytest.mark.parametrize("doing", [Doing.EVALUATION, Doing.CHECKPOINT, Doing.COMPILATION])
def test_what_the_program_says_of_itself_keeps_silence(doing: Doing) -> None:
    trigger, at = learnt()
    trigger.stand(standing(at + 300.0, at, INSIDE, doing))
    assert trigger.look(at + 300.0) is None
    trigger.stand(standing(at + 301.0, at, INSIDE, Doing.TRAINING))
    assert trigger.look(at + 301.0) is not None


def test_nothing_is_said_of_a_stall_by_old_words_or_before_a_step_is_known() -> None:
    trigger, at = learnt()
    trigger.stand(standing(at + 100.0, at, INSIDE))
    assert trigger.look(at + 200.0) is None
    trigger.stand(standing(at + 99.0, at - 500.0, INSIDE))  # came late: passed over
    assert trigger.look(at + 99.0) is not None
    young = JobTrigger()
    young.stand(standing(500.0, 0.0, INSIDE))
    assert young.look(500.0) is None
    assert young.usual_ms is None and young.steps_seen == 0
    unknown, at = learnt()
    unknown.stand(standing(at + 500.0, np.nan, INSIDE))
    assert unknown.look(at + 500.0) is None


def test_one_rank_that_moves_is_enough_for_silence() -> None:
    trigger, at = learnt()
    words = standing(at + 100.0, at, INSIDE)
    words["moved_at"][2] = at + 99.0
    trigger.stand(words)
    assert trigger.look(at + 100.0) is None


def test_a_slow_down_and_a_stall_at_once_are_one_event() -> None:
    trigger, at = learnt()
    trigger.stand(standing(at + 12.0, at, INSIDE))
    assert trigger.look(at + 12.0) is not None
    for number in range(3):
        ended_at = at + 20.0 * (number + 1)
        trigger.observe(np.concatenate([window(rank, 200, 10, 2000.0, ended_at) for rank in range(4)]))
        assert trigger.look(ended_at) is None or number == 2
    assert trigger.event is not None and trigger.event.number == 1
    assert trigger.event.causes == (Cause.STALLED, Cause.SLOWER)


# -- words that cannot be trusted --------------------------------------------------------------------------------------


def test_senseless_words_are_refused_and_counted() -> None:
    trigger = JobTrigger(ranks_max=16)
    good = (0, 0, 10, 1000.0, 10.0)
    bad = [
        (-1, 0, 10, 1000.0, 10.0),
        (16, 0, 10, 1000.0, 10.0),
        (2**31 - 1, 0, 10, 1000.0, 10.0),
        (1, 0, 0, 1000.0, 10.0),
        (1, 0, -5, 1000.0, 10.0),
        (1, 0, 2**31 - 1, 1000.0, 10.0),
        (1, 0, 10, 0.0, 10.0),
        (1, 0, 10, -1.0, 10.0),
        (1, 0, 10, np.nan, 10.0),
        (1, 0, 10, np.inf, 10.0),
        (1, 0, 10, 1000.0, np.nan),
        (1, 0, 10, 1000.0, np.inf),
    ]
    trigger.observe(np.array([good, *bad], WINDOW_DTYPE))
    assert trigger.refused == len(bad) and trigger.steps_seen == 10
    trigger.stand(np.array([(-1, 1.0, 0.0, 0, 0), (99, 1.0, 0.0, 0, 0), (0, np.nan, 0.0, 0, 0)], STANDING_DTYPE))
    assert trigger.refused == len(bad) + 3
    trigger.observe(np.empty(0, WINDOW_DTYPE))
    trigger.stand(np.array([(0, 1.0, 0.0, 200, 200)], STANDING_DTYPE))
    assert trigger.look(20.0) is None


def test_words_that_come_twice_or_late_change_nothing() -> None:
    once, often = JobTrigger(), JobTrigger()
    series = steady(np.random.default_rng(0), 300)
    events = []
    former: list[Table] = []
    for now, windows in Teller().tell(slower(series, 200, 1.5), np.random.default_rng(0)):
        once.observe(windows)
        often.observe(np.concatenate([windows, *former[-3:], windows]))
        former.append(windows)
        events.append((once.look(now), often.look(now)))
    assert once.steps_seen == often.steps_seen == 300
    assert all(first == second for first, second in events)
    assert once.event is not None


def test_many_windows_of_a_rank_at_once_are_taken_in_their_order() -> None:
    piece, whole = JobTrigger(), JobTrigger()
    tables = list(
        Teller(size=1).tell(slower(steady(np.random.default_rng(0), 300), 200, 1.5), np.random.default_rng(0))
    )
    for at in range(0, 300, 10):
        together = np.concatenate([windows for _, windows in tables[at : at + 10]])
        whole.observe(np.random.default_rng(at).permutation(together))
        for _, windows in tables[at : at + 10]:
            piece.observe(windows)
        assert (piece.look(tables[at + 9][0]) is None) == (whole.look(tables[at + 9][0]) is None)
    assert piece.event == whole.event is not None
