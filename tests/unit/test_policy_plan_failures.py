"""Acts that fail: tried again, then given up and told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from remediation.policy.case import ActRecord, Step
from tests.planning import (
    COMPLETING,
    DOWN,
    DRAINED,
    ELSEWHERE,
    EXCLUDED,
    GONE,
    HANG,
    IS_DOWN,
    PENDING,
    act,
    ask,
    done,
    ends,
    waits,
)

# -- acts that fail --------------------------------------------------------------------------------------------------


def test_a_failed_act_is_tried_again_later_and_later() -> None:
    once = [act("drain", 4, "failed", "gpu002")]
    assert "next try soon" in waits(ask(acts=once))
    assert done(ask(acts=[act("drain", 6, "failed", "gpu002")])) == ("drain", "gpu002")
    twice = [act("drain", 30, "failed", "gpu002"), act("drain", 6, "failed", "gpu002")]
    assert "next try soon" in waits(ask(acts=twice))
    twice[1] = act("drain", 11, "failed", "gpu002")
    assert done(ask(acts=twice)) == ("drain", "gpu002")


def thrice(kind: str, target: str = "42", **args: str) -> list[ActRecord]:
    return [act(kind, age_s, "failed", target, **args) for age_s in (300, 200, 100)]


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda: ask(acts=thrice("drain", "gpu002")), "drain gpu002 was tried 3 times: refused"),
        (
            lambda: ask(node=DRAINED, acts=thrice("signal")),
            "signal 42 was tried 3 times: refused; gpu002 stays drained",
        ),
        (lambda: ask(HANG, acts=thrice("requeue")), "requeue 42 was tried 3 times: refused"),
        (
            lambda: ask(HANG, job=PENDING, acts=[act("requeue", 400, hold="true"), *thrice("set_exclude")]),
            "set_exclude 42 was tried 3 times: refused; it stays held until: scontrol release 42",
        ),
        (
            lambda: ask(
                HANG, job=EXCLUDED, acts=[act("requeue", 400, hold="true"), act("start_in", 390), *thrice("release")]
            ),
            "release 42 was tried 3 times: refused; it stays held until: scontrol release 42",
        ),
    ],
)
def test_an_act_that_keeps_failing_is_given_up_and_told(step: Callable[[], Step], words: str) -> None:
    assert ends(step()) == ("abandoned", words)


def test_a_failing_exclusion_does_not_stop_a_job_whose_bad_nodes_are_drained() -> None:
    job = replace(PENDING, held=False, reason="BeginTime")
    acts = [act("requeue", 400, hold="false"), *thrice("set_exclude")]
    assert done(ask(job=job, node=DRAINED, acts=acts)) == ("start_in", "42")


def test_a_failing_early_start_does_not_stop_the_release() -> None:
    acts = [act("requeue", 400, hold="true"), *thrice("start_in")]
    assert done(ask(HANG, job=EXCLUDED, acts=acts)) == ("release", "42")


def test_a_failing_down_is_told_while_slurm_goes_on_trying() -> None:
    acts = [act("requeue", 400, hold="true"), *thrice("set_down", "gpu002", reason=DOWN)]
    assert "set_down gpu002 was tried 3 times" in waits(ask(HANG, job=COMPLETING, acts=acts))


def test_a_failing_undown_is_told() -> None:
    acts = [act("requeue", 500, hold="true"), act("set_down", 400, target="gpu002", reason=DOWN)]
    acts += thrice("undown", "gpu002")
    outcome, text = ends(ask(HANG, job=ELSEWHERE, node=IS_DOWN, acts=acts, facts=GONE))
    assert outcome == "partly" and "undown gpu002 was tried 3 times" in text
