"""Steps after the requeue: nodes that do not let go, the way back to RUNNING, and nodes that come back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from remediation.policy.case import Act
from remediation.policy.facts import Facts
from remediation.policy.rules import Policy
from remediation.policy.world import JobView, NodeView
from tests.planning import (
    AGAIN,
    COMPLETING,
    DOWN,
    DRAINED,
    EARLY,
    ELSEWHERE,
    EXCLUDED,
    GONE,
    HANG,
    IS_DOWN,
    JOB,
    LONG_AGO,
    OTHER,
    PENDING,
    POLICY,
    REASON,
    REQUEUED,
    SET_DOWN,
    SIGNALLED,
    STARTED,
    WELL,
    act,
    ask,
    done,
    ends,
    waits,
)

# -- COMPLETING ------------------------------------------------------------------------------------------------------


def test_old_nodes_are_given_time_to_let_go() -> None:
    assert waits(ask(HANG, job=COMPLETING, acts=[REQUEUED])) == "job 42 is COMPLETING on gpu002"


def test_a_bad_node_that_alone_does_not_let_go_is_set_down() -> None:
    step = ask(HANG, job=COMPLETING, acts=[LONG_AGO])
    assert done(step) == ("set_down", "gpu002") and isinstance(step, Act) and step.args == {"reason": DOWN}


def test_a_drained_node_that_is_set_down_keeps_the_reason_of_its_drain() -> None:
    for reason in (REASON, OTHER, f"{OTHER} : reboot issued"):
        node = replace(DRAINED, reason=reason)
        step = ask(job=COMPLETING, node=node, acts=[SIGNALLED, LONG_AGO])
        assert done(step) == ("set_down", "gpu002")
        assert isinstance(step, Act) and step.args == {"reason": reason.removesuffix(" : reboot issued")}


@pytest.mark.parametrize(
    ("node", "policy", "words"),
    [
        (replace(WELL, reason="bad DIMM"), POLICY, "held by somebody else"),
        (replace(WELL, flags=frozenset({"DOWN"}), reason="Not responding"), POLICY, "is DOWN already"),
        (WELL, POLICY.model_copy(update={"protected_nodes": ["gpu002"]}), "is protected"),
        (
            WELL,
            POLICY.model_copy(update={"budget": POLICY.budget.model_copy(update={"nodes_held_max": 0})}),
            "1 nodes would be held, 0 are allowed",
        ),
        (None, POLICY, "does not know node gpu002"),
    ],
)
def test_a_node_that_may_not_be_set_down_is_waited_for(node: NodeView | None, policy: Policy, words: str) -> None:
    assert words in waits(ask(HANG, job=COMPLETING, node=node, acts=[LONG_AGO], policy=policy))


@pytest.mark.parametrize(
    ("version", "words"), [((22, 5), "Slurm 22.05 forgets"), (None, "a Slurm of unknown version forgets")]
)
def test_a_slurm_that_would_forget_the_jobs_gpus_is_left_to_free_it_itself(
    version: tuple[int, int] | None, words: str
) -> None:
    assert words in waits(ask(HANG, job=COMPLETING, acts=[LONG_AGO], version=version))
    cpu = replace(WELL, gpus=0)
    assert done(ask(HANG, job=COMPLETING, node=cpu, acts=[LONG_AGO], version=version)) == ("set_down", "gpu002")


def test_no_node_is_set_down_while_an_innocent_one_has_not_let_go_either() -> None:
    job = replace(COMPLETING, nodes=("gpu001", "gpu002"))
    assert "not all its bad nodes" in waits(ask(HANG, job=job, acts=[LONG_AGO]))


def test_completing_for_ever_is_abandoned() -> None:
    outcome, text = ends(ask(EARLY, job=COMPLETING, acts=[act("requeue", 1000, hold="true")]))
    assert outcome == "abandoned" and text == "job 42 is still COMPLETING on gpu002 after 1000 s"


# -- PENDING ---------------------------------------------------------------------------------------------------------


def test_exclusions_are_merged_and_come_before_the_early_start_and_the_release() -> None:
    step = ask(HANG, job=PENDING, acts=[REQUEUED])
    assert done(step) == ("set_exclude", "42") and isinstance(step, Act) and step.args == {"nodes": "gpu002,gpu008"}
    step = ask(HANG, job=EXCLUDED, acts=[REQUEUED, act("set_exclude", 15)])
    assert done(step) == ("start_in", "42") and isinstance(step, Act) and step.args == {"seconds": "2"}
    assert done(ask(HANG, job=EXCLUDED, acts=[REQUEUED, act("start_in", 15)])) == ("release", "42")


def test_an_exclusion_that_is_there_already_is_not_set_again() -> None:
    assert done(ask(HANG, job=EXCLUDED, acts=[REQUEUED])) == ("start_in", "42")


def test_a_job_whose_launch_failed_is_left_to_slurms_own_delay() -> None:
    job = replace(EXCLUDED, restarts=2, held=False, reason="BeginTime")
    acts = [REQUEUED, act("start_in", 15, "failed"), act("release", 14)]
    assert waits(ask(HANG, job=job, acts=acts)) == "job 42 is PENDING (BeginTime)"


def test_an_early_start_is_asked_for_once() -> None:
    job = replace(EXCLUDED, held=False, reason="Resources")
    assert waits(ask(HANG, job=job, acts=[REQUEUED, act("start_in", 15)])) == "job 42 is PENDING (Resources)"


@pytest.mark.parametrize(
    ("job", "hold"),
    [
        (replace(EXCLUDED, restarts=2, reason="launch failed requeued held"), "true"),
        (replace(EXCLUDED, reason="JobHeldUser"), "true"),
        (replace(EXCLUDED, reason="JobHeldAdmin"), "false"),
    ],
)
def test_a_hold_of_others_is_not_lifted(job: JobView, hold: str) -> None:
    outcome, text = ends(ask(HANG, job=job, acts=[act("requeue", 20, hold=hold), act("start_in", 15)]))
    assert outcome == "partly" and f"held by others ({job.reason})" in text


def test_a_full_cluster_is_no_reason_to_wait_for_ever() -> None:
    acts = [act("requeue", 1000, hold="true"), act("start_in", 990), act("release", 950)]
    job = replace(EXCLUDED, held=False, reason="Resources")
    outcome, text = ends(ask(EARLY, job=job, acts=acts))
    assert outcome == "partly" and text == "job 42 was requeued and waits in the queue after 950 s (Resources)"


# -- RUNNING and later -----------------------------------------------------------------------------------------------


def test_a_job_has_arrived_when_its_ranks_advance() -> None:
    assert "not been seen to advance yet" in waits(ask(HANG, job=ELSEWHERE, acts=STARTED))
    outcome, text = ends(ask(HANG, job=ELSEWHERE, acts=STARTED, facts=Facts(stepping_elsewhere=True)))
    assert outcome == "resolved" and text == "job 42 runs without gpu002, and its ranks advance"


def test_a_job_whose_ranks_never_advance_is_told_of() -> None:
    old = [act("requeue", 2000, hold="true"), act("release", 1900)]
    outcome, text = ends(ask(EARLY, job=ELSEWHERE, acts=old))
    assert outcome == "partly" and "were not seen to advance" in text


def test_a_job_that_got_the_bad_node_again_is_told_of() -> None:
    outcome, text = ends(ask(HANG, job=AGAIN, acts=STARTED, facts=Facts(stepping_elsewhere=True)))
    assert outcome == "abandoned" and "runs on gpu002 again" in text


@pytest.mark.parametrize(
    ("state", "outcome"), [("COMPLETED", "resolved"), ("CANCELLED", "partly"), ("FAILED", "abandoned")]
)
def test_a_job_that_ended_after_its_requeue_ends_the_case(state: str, outcome: str) -> None:
    assert ends(ask(HANG, job=replace(ELSEWHERE, state=state), acts=STARTED))[0] == outcome


# -- what was set DOWN -----------------------------------------------------------------------------------------------


def test_a_node_set_down_is_brought_back_when_its_old_processes_are_gone() -> None:
    assert done(ask(HANG, job=ELSEWHERE, node=IS_DOWN, acts=SET_DOWN, facts=GONE)) == ("undown", "gpu002")
    rebooted = replace(IS_DOWN, reason=f"{DOWN} : reboot issued")
    assert done(ask(HANG, job=ELSEWHERE, node=rebooted, acts=SET_DOWN, facts=GONE)) == ("undown", "gpu002")


@pytest.mark.parametrize("gone", [False, None])
def test_a_node_set_down_stays_so_while_old_processes_may_live_there(gone: bool | None) -> None:
    facts = replace(GONE, old_ranks_gone={"gpu002": gone})
    assert "node gpu002 is DOWN, old processes" in waits(
        ask(HANG, job=ELSEWHERE, node=IS_DOWN, acts=SET_DOWN, facts=facts)
    )
    old = [act("requeue", 5000, hold="true"), act("set_down", 4000, target="gpu002", reason=DOWN)]
    outcome, text = ends(ask(EARLY, job=ELSEWHERE, node=IS_DOWN, acts=old, facts=facts))
    assert outcome == "partly" and "is left DOWN" in text and "its ranks advance" in text


@pytest.mark.parametrize("reason", ["bad DIMM", f"{DOWN} and keep it", OTHER, ""])
def test_a_node_whose_reason_is_no_longer_exactly_ours_is_not_brought_back(reason: str) -> None:
    node = replace(IS_DOWN, reason=reason)
    assert ends(ask(HANG, job=ELSEWHERE, node=node, acts=SET_DOWN, facts=GONE))[0] == "resolved"


def test_a_down_that_we_did_not_set_is_not_undone() -> None:
    assert ends(ask(HANG, job=ELSEWHERE, node=IS_DOWN, acts=STARTED, facts=GONE))[0] == "resolved"


def test_the_jobs_own_way_comes_before_the_node() -> None:
    step = ask(HANG, job=PENDING, node=IS_DOWN, acts=SET_DOWN[:2], facts=GONE)
    assert done(step) == ("set_exclude", "42")


@pytest.mark.parametrize("job", [None, replace(JOB, submit_time="T9"), replace(ELSEWHERE, state="CANCELLED")])
def test_a_node_set_down_is_brought_back_also_when_its_job_is_over_or_forgotten(job: JobView | None) -> None:
    assert done(ask(HANG, job=job, node=IS_DOWN, acts=SET_DOWN, facts=GONE)) == ("undown", "gpu002")
    alive = replace(GONE, old_ranks_gone={"gpu002": False})
    assert "old processes still live there" in waits(ask(HANG, job=job, node=IS_DOWN, acts=SET_DOWN, facts=alive))
    old = [act("requeue", 5000, hold="true"), act("set_down", 4000, target="gpu002", reason=DOWN)]
    outcome, text = ends(ask(EARLY, job=job, node=IS_DOWN, acts=old, facts=alive))
    assert outcome == "partly" and "node gpu002 is left DOWN" in text
