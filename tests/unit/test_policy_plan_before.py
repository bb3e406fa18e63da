"""Steps up to the requeue: may anything be done, the drain, the checkpoint, and the job in other hands."""

from __future__ import annotations

from dataclasses import replace

import pytest

from remediation.policy.case import Act, Case
from remediation.policy.facts import Facts
from remediation.policy.plan import next_step
from remediation.policy.rules import Policy
from remediation.policy.world import JobView, NodeView, World
from tests.planning import (
    AGAIN,
    DRAINED,
    HANG,
    JOB,
    NOW,
    OTHER,
    PENDING,
    POLICY,
    REASON,
    REQUEUED,
    SIGNALLED,
    SLOW,
    WELL,
    act,
    ask,
    done,
    ends,
    waits,
)

# -- may anything be done now? ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (POLICY.model_copy(update={"paused": True}), "paused"),
        (POLICY.model_copy(update={"mode": "observe"}), "observes"),
    ],
)
def test_nothing_is_done_while_paused_or_observing(policy: Policy, why: str) -> None:
    assert why in waits(ask(policy=policy))


def test_a_pause_says_how_to_release_a_job_that_it_leaves_held() -> None:
    paused = POLICY.model_copy(update={"paused": True})
    assert "scontrol release 42" in waits(ask(HANG, job=PENDING, acts=[REQUEUED], policy=paused))
    assert "release" not in waits(ask(HANG, job=PENDING, acts=[], policy=paused))


def test_nothing_is_done_on_an_old_picture() -> None:
    assert "60 s old" in waits(ask(age_s=60))
    assert "is older than drain gpu002" in waits(ask(acts=[act("drain", 1, target="gpu002")], age_s=2))


def test_an_act_of_unknown_outcome_is_given_time_and_then_the_cluster_decides() -> None:
    young, old = act("drain", 5, None, "gpu002"), act("drain", 11, None, "gpu002")
    assert "not known yet" in waits(ask(acts=[young]))
    assert done(ask(acts=[old])) == ("drain", "gpu002")
    assert done(ask(acts=[old], node=DRAINED)) == ("signal", "42")


# -- draining --------------------------------------------------------------------------------------------------------


def test_convicted_hardware_is_drained_first() -> None:
    step = ask()
    assert done(step) == ("drain", "gpu002")
    assert isinstance(step, Act) and step.args == {"reason": REASON}


@pytest.mark.parametrize(
    "node",
    [
        DRAINED,
        replace(DRAINED, reason=f"{REASON} : reboot issued"),
        replace(DRAINED, reason=OTHER),
        replace(DRAINED, reason="bad DIMM"),
        replace(DRAINED, reason=""),
        replace(WELL, reason="note of an administrator"),
        replace(WELL, flags=frozenset({"MIXED", "REBOOT_ISSUED"})),
        None,
    ],
    ids=lambda node: (node.reason or "+".join(sorted(node.flags))) if node else "unknown to Slurm",
)
def test_a_node_that_is_drained_or_somebody_elses_is_not_drained(node: NodeView | None) -> None:
    assert done(ask(node=node)) == ("signal", "42")


def test_a_node_that_a_person_returned_to_service_is_not_drained_again() -> None:
    assert done(ask(acts=[act("drain", 50, target="gpu002")])) == ("signal", "42")


def test_a_drain_that_an_undown_lost_is_set_again() -> None:
    acts = [act("drain", 50, target="gpu002"), REQUEUED, act("undown", 11, None, "gpu002")]
    assert done(ask(job=replace(AGAIN, nodes=("gpu003",)), acts=acts)) == ("drain", "gpu002")


def test_a_drain_beyond_the_budget_is_not_done() -> None:
    held = replace(DRAINED, name="gpu009", reason=OTHER)
    nodes = {"gpu002": WELL, "gpu003": replace(WELL, name="gpu003"), "gpu009": held}
    step = next_step(SLOW, (), World(NOW, nodes, {42: JOB}), Facts(), POLICY, NOW)
    outcome, text = ends(step)
    assert outcome == "abandoned" and "2 nodes would be held, 1 are allowed" in text


def test_a_case_without_requeue_ends_when_its_nodes_are_drained() -> None:
    assert ends(ask(replace(SLOW, requeue=False), node=DRAINED)) == ("resolved", "drained gpu002")


# -- up to the requeue -----------------------------------------------------------------------------------------------


def test_a_job_that_moves_is_told_to_save_its_state_and_given_the_time() -> None:
    step = ask(node=DRAINED)
    assert done(step) == ("signal", "42") and isinstance(step, Act) and step.args == {"name": "USR1"}
    assert waits(ask(node=DRAINED, acts=[act("signal", 59)])) == "job 42 has 60 s to save its state"
    assert done(ask(node=DRAINED, acts=[act("signal", 61)])) == ("requeue", "42")


def test_without_a_checkpoint_signal_a_job_that_moves_is_not_ended() -> None:
    slow = POLICY.slow.model_copy(update={"checkpoint_signal": None})
    outcome, text = ends(ask(node=DRAINED, policy=POLICY.model_copy(update={"slow": slow})))
    assert outcome == "abandoned" and "checkpoint_signal is not set; gpu002 stays drained" in text


def test_the_word_none_ends_a_job_without_a_signal() -> None:
    slow = POLICY.slow.model_copy(update={"checkpoint_signal": "none"})
    assert done(ask(node=DRAINED, policy=POLICY.model_copy(update={"slow": slow}))) == ("requeue", "42")


def test_a_job_that_hangs_is_not_asked_to_save_anything() -> None:
    assert done(ask(HANG)) == ("requeue", "42")


@pytest.mark.parametrize(
    ("case", "node", "hold"),
    [
        (SLOW, DRAINED, "false"),
        (HANG, WELL, "true"),
        (HANG, replace(WELL, flags=frozenset({"DOWN"}), reason="Not responding"), "true"),
        (replace(SLOW, avoid=("gpu001", "gpu002")), DRAINED, "true"),
    ],
)
def test_a_job_is_requeued_held_unless_every_bad_node_is_drained(case: Case, node: NodeView, hold: str) -> None:
    step = ask(case, node=node, acts=[SIGNALLED])
    assert done(step) == ("requeue", "42") and isinstance(step, Act) and step.args == {"hold": hold}


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (None, "no longer known to Slurm"),
        (replace(JOB, state="CANCELLED"), "ended by itself (CANCELLED)"),
        (replace(JOB, state="COMPLETED"), "ended by itself (COMPLETED)"),
        (replace(JOB, state="SUSPENDED"), "somebody else acts on it"),
        (replace(JOB, state="PENDING"), "somebody else acts on it"),
        (AGAIN, "requeued by somebody else"),
        (replace(JOB, submit_time="T9"), "belongs to another job now"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_job_in_other_hands_is_left_alone_and_the_case_says_so(job: JobView | None, words: str) -> None:
    outcome, text = ends(ask(HANG, job=job))
    assert outcome == "withdrawn" and words in text
    outcome, text = ends(ask(job=job, node=DRAINED))
    assert outcome == "partly" and words in text and text.endswith("gpu002 stays drained")


def test_a_smaller_restart_count_is_another_job() -> None:
    outcome, text = ends(ask(replace(HANG, restart=2, submit_time="T1"), job=AGAIN))
    assert outcome == "withdrawn" and "belongs to another job" in text


@pytest.mark.parametrize("job", [replace(JOB, state="COMPLETING"), replace(JOB, restarts=None)])
def test_a_job_that_ends_by_itself_is_waited_for_but_not_for_ever(job: JobView) -> None:
    assert waits(ask(HANG, job=job))
    assert ends(ask(replace(HANG, decided_at=NOW - 1000), job=job))[0] == "abandoned"


def test_a_job_that_is_healthy_again_is_left_running() -> None:
    well = Facts(recovered=True)
    assert ends(ask(facts=well)) == ("recovered", "job 42 is healthy again, nothing was done")
    outcome, text = ends(ask(node=DRAINED, facts=well, acts=[act("drain", 50, target="gpu002")]))
    assert outcome == "recovered" and "is left running; gpu002 stays drained" in text


def test_a_job_that_became_impossible_to_requeue_is_left_running() -> None:
    outcome, text = ends(ask(HANG, job=replace(JOB, requeueable=False)))
    assert outcome == "abandoned" and "--no-requeue" in text
