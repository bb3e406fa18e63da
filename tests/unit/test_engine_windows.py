"""Profiling windows: the same steps on all ranks, whoever is late, missing or dead; one at a time, within a budget."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnosis.engine.profiling_rules import WindowRules
from diagnosis.engine.window_budget import Budget
from diagnosis.engine.window_plan import PULSE_DTYPE, Scene, Table, plan_of, sound
from diagnosis.engine.windows import Absence, Ask, Asked, Ending, Outcome, Receipt, Windows
from tests.windowjob import STEP_ROUNDS, STEP_S, SimCluster

WORLD = [range(8)]
SLOWER = Ask("steps take 1.30 times as long as before")


def finish(cluster: SimCluster, windows: Windows, seconds: float = 200.0, *, send: bool = True) -> Outcome:
    """The outcome of the current window. Each second the controller looks, and tells nodes that have not confirmed."""
    until = cluster.now + seconds
    while cluster.now < until:
        cluster.run(1.0, windows)
        outcome = windows.look(cluster.scene(), cluster.now)
        if outcome is not None:
            return outcome
        if windows.current is not None and send:
            cluster.send(windows.current)
    raise AssertionError("the window never ended")


def begin(cluster: SimCluster, windows: Windows, ask: Ask = SLOWER) -> None:
    assert windows.ask(ask, cluster.scene(), cluster.now) is Asked.PLANNED
    assert windows.current is not None
    cluster.send(windows.current)


def ids(cluster: SimCluster) -> set[tuple[int, ...]]:
    return {tuple(rank.ids) for rank in cluster.ranks if rank.ids}


def true_steps(cluster: SimCluster) -> set[tuple[int, ...]]:
    return {tuple(rank.true_steps) for rank in cluster.ranks if rank.ids}


# -- the same steps ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warm_s", [7.0, 7.25, 7.5, 7.75])
def test_all_ranks_profile_the_same_steps(warm_s: float) -> None:
    cluster, windows = SimCluster(WORLD, [5]), Windows()
    cluster.run(warm_s)
    begin(cluster, windows)
    outcome = finish(cluster, windows)
    assert outcome.ending is Ending.COMPLETE and outcome.told == tuple(range(8)) and not outcome.missing
    assert outcome.plan.exact and outcome.plan.steps == 3
    (steps,) = ids(cluster)
    assert steps == tuple(outcome.plan.anchors[0].begin_of(step) for step in range(3))
    assert (steps[0] - 5 - 1) % STEP_ROUNDS == 0  # where a step of the program begins
    ((first, *_),) = true_steps(cluster)
    assert first * STEP_S - warm_s >= WindowRules().lead_s - STEP_S
    assert outcome.text == "8 of 8 ranks told of 3 steps"


def test_a_rank_that_is_stopped_for_three_seconds_profiles_the_same_steps() -> None:
    cluster, windows = SimCluster(WORLD, [0]), Windows()
    cluster.run(10.0)
    begin(cluster, windows)
    cluster.ranks[5].stopped_until = cluster.now + 3.5
    outcome = finish(cluster, windows)
    assert outcome.told == tuple(range(8)) and len(ids(cluster)) == 1


def test_with_one_daemon_killed_the_others_profile_and_its_ranks_are_reported() -> None:
    cluster, windows = SimCluster(WORLD, [0]), Windows()
    cluster.run(10.0)
    cluster.scene()
    cluster.dead_nodes.add(1)
    begin(cluster, windows)
    cluster.ranks[5].stopped_until = cluster.now + 3.5
    outcome = finish(cluster, windows)
    assert outcome.ending is Ending.QUORUM and outcome.told == (0, 1, 4, 5, 6, 7)
    assert outcome.missing == {Absence.UNSEEN: (2, 3)}
    assert len(ids(cluster)) == 1
    assert outcome.text == "6 of 8 ranks told of 3 steps, 2 unseen"


def test_a_node_that_is_told_late_takes_part_from_its_next_step_on() -> None:
    cluster, windows = SimCluster(WORLD, [0]), Windows()
    cluster.run(10.0)
    cluster.slow_nodes[2] = 3.5
    begin(cluster, windows)
    outcome = finish(cluster, windows)
    assert outcome.told == (0, 1, 2, 3, 6, 7) and outcome.partly == (4, 5)
    assert "2 of a part of them" in outcome.text
    assert set(cluster.ranks[4].ids) < set(cluster.ranks[0].ids)


def test_groups_without_a_common_communicator_profile_the_same_steps_by_numbers_of_their_own() -> None:
    for warm_s in np.arange(9.0, 11.0, 0.25).tolist():
        cluster = SimCluster([range(0, 8, 2), range(1, 8, 2)], [3, 1002])
        windows = Windows()
        cluster.run(warm_s)
        scene = cluster.scene()
        scene.pulses["entered_at"] += np.where(scene.pulses["rank"] % 2, -0.3, 0.1) * STEP_S  # clocks are not all right
        assert windows.ask(SLOWER, scene, cluster.now) is Asked.PLANNED
        outcome = finish(cluster, windows)
        assert outcome.told == tuple(range(8)) and not outcome.plan.exact
        assert len(ids(cluster)) == 2
        assert len(true_steps(cluster)) == 1


def test_the_fewest_communicators_are_taken_and_who_is_on_none_is_reported() -> None:
    cluster = SimCluster([range(4), range(4, 8)], [0, 0])
    cluster.run(10.0)
    scene = cluster.scene()
    whole = replace(scene, members={**scene.members, 0xC0: np.arange(8)})
    plan = plan_of(sound(whole), None, cluster.now, WindowRules())
    assert plan is not None and plan.exact and plan.anchors[0].ranks.tolist() == list(range(8))
    scene.pulses["comm"][4:] = 0
    windows = Windows()
    assert windows.ask(SLOWER, scene, cluster.now) is Asked.PLANNED
    assert windows.current is not None and windows.current.not_armed.tolist() == [0, 1, 2, 3]
    assert windows.current.anchor_of(4) is None and windows.current.anchor_of(-1) is None
    windows.arm(1, [0, 1, 2, 3, 4, 99, -1])
    for rank in range(4):
        first = windows.current.plan.anchors[0].first_round
        assert windows.tell(1, rank, first, first + 2 * STEP_ROUNDS) is Receipt.TAKEN
    outcome = windows.look(scene, cluster.now + 5.0)
    assert outcome is not None and outcome.missing == {Absence.UNREACHED: (4, 5, 6, 7)}


def test_a_job_that_stands_is_given_a_step_that_it_has_not_passed() -> None:
    cluster = SimCluster(WORLD, [0])
    cluster.run(10.0)
    stood_at = cluster.ranks[0].round
    cluster.ranks[3].stopped_until = cluster.now + 60.0
    cluster.run(60.0)
    windows = Windows()
    begin(cluster, windows)
    assert windows.current is not None
    first = windows.current.plan.anchors[0].first_round
    assert stood_at < first <= stood_at + 5 * STEP_ROUNDS
    outcome = finish(cluster, windows)
    assert outcome.told == tuple(range(8)) and len(ids(cluster)) == 1


def test_how_many_steps() -> None:
    def steps(step_ms: float, asked: int | None = None) -> int:
        table = np.zeros(1, PULSE_DTYPE)
        table["told_at"], table["comm"], table["step_rounds"], table["round"] = 100.0, 1, 2, 50
        table["entered_at"], table["step_ms"] = 100.0, step_ms
        plan = plan_of(sound(Scene(1, table, {})), asked, 100.0, WindowRules())
        assert plan is not None
        return plan.steps

    assert [steps(ms) for ms in (1.0, 250.0, 500.0, 1000.0, 60_000.0, 250_000.0, 4_000_000.0)] == [10, 8, 4, 3, 3, 2, 1]
    assert [steps(1000.0, asked) for asked in (-3, 1, 50, 5000)] == [1, 1, 50, 100]


# -- who is missing, and when it is over ------------------------------------------------------------------------------


def test_a_process_that_has_ended_is_not_waited_for() -> None:
    cluster, windows = SimCluster(WORLD, [0]), Windows()
    cluster.run(10.0)
    begin(cluster, windows)
    cluster.run(7.0, windows)
    assert windows.current is not None and windows.current.told.all()
    windows.current.told[6] = windows.current.whole[6] = False
    cluster.ranks[6].gone = True
    outcome = windows.look(cluster.scene(), cluster.now)
    assert outcome is not None and outcome.ending is Ending.COMPLETE
    assert outcome.missing == {Absence.GONE: (6,)}


def test_a_job_that_never_comes_to_the_window_ends_it_at_its_deadline_and_pays_nothing() -> None:
    cluster, windows = SimCluster(WORLD, [0]), Windows()
    cluster.run(10.0)
    begin(cluster, windows)
    cluster.ranks[3].stopped_until = float("inf")
    outcome = finish(cluster, windows)
    assert outcome.ending is Ending.DEADLINE and not outcome.begun
    assert outcome.missing == {Absence.LATE: tuple(range(8))}
    assert windows.budget.windows == 0
    assert cluster.now == pytest.approx(outcome.plan.deadline_at, abs=2.0)


def test_refusals_silence_and_words_that_come_twice_or_from_strangers() -> None:
    cluster, windows = SimCluster(WORLD, [0]), Windows()
    cluster.run(10.0)
    assert windows.tell(1, 0, 1, 2) is Receipt.STRANGER
    assert windows.look(cluster.scene(), cluster.now) is None and windows.cancel(cluster.scene(), cluster.now) is None
    assert windows.ask(SLOWER, cluster.scene(), cluster.now) is Asked.PLANNED
    assert windows.current is not None
    first = windows.current.plan.anchors[0].first_round
    windows.arm(1, range(7))
    windows.arm(2, [7])
    for rank in range(5):
        assert windows.tell(1, rank, first, first + 2 * STEP_ROUNDS) is Receipt.TAKEN
    assert windows.tell(1, 4, None, None) is Receipt.TWICE
    assert windows.tell(2, 5, first, first) is Receipt.STRANGER
    assert windows.tell(1, 8, first, first) is Receipt.STRANGER
    windows.refuse(1, 5, "the program's own profiler runs" * 100)
    windows.refuse(1, 99, "")
    windows.refuse(9, 6, "")
    outcome = finish(cluster, windows, send=False)
    assert outcome.ending is Ending.DEADLINE
    assert outcome.told == (0, 1, 2, 3, 4)
    assert outcome.missing == {Absence.REFUSED: (5,), Absence.SILENT: (6,), Absence.NOT_ARMED: (7,)}
    assert outcome.refusals[5].startswith("the program's own profiler") and len(outcome.refusals[5]) == 256
    assert windows.tell(1, 6, first, first) is Receipt.STRANGER


def test_a_summary_of_other_steps_counts_as_a_part() -> None:
    cluster, windows = SimCluster(WORLD, [0]), Windows()
    cluster.run(10.0)
    begin(cluster, windows)
    assert windows.current is not None
    first = windows.current.plan.anchors[0].first_round
    for rank, (one, last) in enumerate(((first, first + 8), (first, first + 4), (None, None), (-(2**70), 2**70))):
        windows.tell(1, rank, one, last)
    outcome = windows.cancel(cluster.scene(), cluster.now)
    assert outcome is not None and outcome.ending is Ending.CANCELLED
    assert outcome.told == (0,) and outcome.partly == (1, 2, 3)


def test_a_second_ask_joins_and_the_next_window_has_the_next_number() -> None:
    cluster, windows = SimCluster(WORLD, [0]), Windows(number=7)
    cluster.run(10.0)
    begin(cluster, windows)
    assert windows.ask(Ask("nothing has moved"), cluster.scene(), cluster.now) is Asked.JOINED
    assert windows.ask(Ask("ann asks", person=True), cluster.scene(), cluster.now) is Asked.JOINED
    assert windows.ask(SLOWER, cluster.scene(), cluster.now) is Asked.JOINED
    assert windows.ask(Ask("ann asks", person=True, stacks=True), cluster.scene(), cluster.now) is Asked.BUSY
    for number in range(100):
        windows.ask(Ask(f"cause {number}"), cluster.scene(), cluster.now)
    outcome = finish(cluster, windows)
    assert outcome.window == 8 and len(outcome.causes) == 16
    assert outcome.causes[:3] == (SLOWER.cause, "nothing has moved", "ann asks")
    begin(cluster, windows, Ask("ann asks", person=True, stacks=True))
    assert windows.current is not None and windows.current.number == 9
    assert windows.ask(SLOWER, cluster.scene(), cluster.now) is Asked.JOINED


# -- words that make no sense -----------------------------------------------------------------------------------------


def test_without_a_step_there_is_no_window() -> None:
    windows = Windows()
    assert windows.ask(SLOWER, Scene(8, np.zeros(0, PULSE_DTYPE), {}), 10.0) is Asked.NO_STEP
    cluster = SimCluster(WORLD, [0])
    cluster.run(10.0)
    scene = cluster.scene()
    assert windows.ask(SLOWER, scene, cluster.now + 60.0) is Asked.NO_STEP  # words are old
    scene.pulses["gone"] = True
    assert windows.ask(Ask("", person=True), scene, cluster.now) is Asked.NO_STEP
    assert windows.budget.windows == 0 and windows.number == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("comm", 0),
        ("step_rounds", 0),
        ("step_rounds", -4),
        ("round", 0),
        ("round", 2**62),
        ("round", 500_000),
        ("place", 5),
        ("place", -1),
        ("entered_at", np.nan),
        ("entered_at", np.inf),
        ("step_ms", 0.0),
        ("step_ms", np.nan),
        ("step_ms", 1e300),
        ("told_at", np.nan),
    ],
)
def test_a_rank_whose_words_make_no_sense_does_not_hinder_the_others(name: str, value: float) -> None:
    cluster, windows = SimCluster(WORLD, [0]), Windows()
    cluster.run(10.0)
    scene = cluster.scene()
    plan = plan_of(sound(scene), None, cluster.now, windows.rules)
    scene.pulses[name][0] = value
    other = plan_of(sound(scene), None, cluster.now, windows.rules)
    assert plan is not None and other is not None
    assert other.anchors[0].first_round == plan.anchors[0].first_round
    assert other.anchors[0].ranks.tolist() == list(range(8))


_numbers = st.one_of(st.floats(allow_nan=True, allow_infinity=True), st.sampled_from([0.0, 1.0, -1.0, 1e-320, 2.0**62]))
_ints = st.integers(-(2**31), 2**31 - 1)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(-2, 6),
            _numbers,
            st.booleans(),
            st.integers(0, 3),
            _ints,
            st.integers(-(2**63), 2**63 - 1),
            _ints,
            _numbers,
            _numbers,
        ),
        max_size=12,
    ),
    st.floats(0, 1e9),
)
def test_whatever_a_job_says_a_window_is_planned_soon_or_not_at_all(rows: list[tuple[float, ...]], now: float) -> None:
    table: Table = np.array(rows, PULSE_DTYPE)
    windows = Windows()
    scene = Scene(5, table, {1: np.array([0, 1, 99, -1])})
    if windows.ask(Ask("", person=True), scene, now) is Asked.PLANNED:
        assert windows.current is not None
        plan = windows.current.plan
        assert 1 <= plan.steps <= 10 and plan.begins_at <= plan.ends_at <= plan.deadline_at
        assert plan.begins_at >= now
        for anchor in plan.anchors:
            assert 0 < anchor.begin_of(plan.steps) < 2**63
        windows.look(scene, now)
        assert windows.look(scene, plan.deadline_at) is not None or windows.current is None


# -- budget -----------------------------------------------------------------------------------------------------------


def test_after_three_windows_a_job_pays_with_its_steps() -> None:
    rules, budget = WindowRules(), Budget()
    for _ in range(3):
        assert budget.left(0.0, rules) == float("inf")
        budget.take(10, 0.0, rules)
    assert budget.left(0.0, rules) == 0.0
    budget.made(5000, 100.0)
    assert budget.left(200.0, rules) == 10.0
    budget.take(10, 200.0, rules)
    assert budget.left(300.0, rules) == 0.0
    budget.give_back(10, 200.0)
    assert budget.left(300.0, rules) == 10.0
    assert Budget.restored(budget.saved()).left(300.0, rules) == 10.0
    assert budget.left(100.0 + 25 * 3600.0, rules) == 0.0  # steps of yesterday pay for nothing


def test_a_person_is_never_refused_and_what_she_asks_for_does_not_count() -> None:
    cluster, windows = SimCluster(WORLD, [0]), Windows(WindowRules(free_windows=1))
    cluster.run(10.0)
    for ask in (SLOWER, Ask("ann", person=True, steps=40), Ask("ann", person=True)):
        assert windows.ask(ask, cluster.scene(), cluster.now) is Asked.PLANNED
        assert windows.current is not None
        windows.current.begun = True
        assert windows.cancel(cluster.scene(), cluster.now) is not None
    assert windows.ask(SLOWER, cluster.scene(), cluster.now) is Asked.OVER_BUDGET
    windows.budget.made(1500, cluster.now)
    assert windows.ask(SLOWER, cluster.scene(), cluster.now) is Asked.PLANNED


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(1.0, 7200.0), st.integers(0, 9000), st.integers(1, 12)), max_size=80))
def test_no_window_is_taken_beyond_the_share_of_the_day_before_it(moves: list[tuple[float, int, int]]) -> None:
    rules, budget, now = WindowRules(), Budget(), 0.0
    made: list[tuple[float, int]] = []
    taken: list[tuple[float, int]] = []
    for passed_s, steps, wanted in moves:
        now += passed_s
        budget.made(steps, now)
        made.append((now, steps))
        free = budget.windows < rules.free_windows
        if wanted > budget.left(now, rules):
            continue
        budget.take(wanted, now, rules)
        if not free:
            taken.append((now, wanted))
            day = now - rules.budget_s
            armed = sum(steps for at, steps in taken if at >= day)
            assert armed <= rules.budget_share * sum(steps for at, steps in made if at >= day)
    assert budget.windows == len(taken) + min(rules.free_windows, budget.windows)
