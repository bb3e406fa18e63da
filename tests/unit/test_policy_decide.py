"""Decisions: what may be done about a verdict, and every single thing that speaks against it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from diagnosis.contracts.verdict import Action, Culprit, EvidenceItem, Verdict
from remediation.policy.case import ActRecord, Case
from remediation.policy.decide import Decision, decide
from remediation.policy.facts import Finding
from remediation.policy.reason import parse
from remediation.policy.rules import Policy
from remediation.policy.world import JobView, NodeView, World

NOW = 1_000_000.0
SUBMITTED = "2026-11-30T06:39:25"
JOB = JobView(
    job_id=42,
    submit_time=SUBMITTED,
    state="RUNNING",
    nodes=("gpu001", "gpu002", "gpu003"),
    restarts=1,
    requeueable=True,
    batch=True,
)
WORLD = World(
    NOW - 1,
    {name: NodeView(name, frozenset({"MIXED"}), gpus=8) for name in (f"gpu{number:03d}" for number in range(1, 41))},
    {42: JOB},
)
FINDING = Finding(incident="ab12cd", submit_time=SUBMITTED, restart=1, since=NOW - 3600)
POLICY = Policy.model_validate({"mode": "act", "slow": {"checkpoint_signal": "USR1"}})
SLOW = Verdict(
    job_id=42,
    anomaly="slow",
    class_="S1",
    culprits=[
        Culprit(
            kind="gpu", rank=5, node="gpu003", gpu=1, cause="gpu_clock_throttle", domain="hardware", confidence=0.97
        )
    ],
    action=Action(kind="drain", nodes=["gpu003"], requeue=True, exclude=["gpu003"]),
    evidence=[
        EvidenceItem(kind="round_time", text="a round takes 1.8 times as long", value=1.8),
        EvidenceItem(kind="own_time", text="rank 5 comes late", value=0.9),
        EvidenceItem(kind="gpu_clock", text="GPU1 runs at 1080 of 1980 MHz", value=0.55, witness="nvml"),
    ],
)
HANG = Verdict(
    job_id=42,
    anomaly="hang",
    class_="H1",
    culprits=[
        Culprit(kind="rank", rank=5, node="gpu003", gpu=1, cause="process_stuck", domain="software", confidence=0.97)
    ],
    action=Action(kind="requeue", requeue=True, exclude=["gpu003"]),
    evidence=[EvidenceItem(kind="wait_for", text="7 ranks wait for rank 5", value=7.0)],
)


def decided(
    verdict: Verdict = SLOW,
    *,
    job: JobView | None = JOB,
    world: World = WORLD,
    finding: Finding = FINDING,
    policy: Policy = POLICY,
) -> Decision:
    return decide(verdict, job, world, finding, policy, NOW)


def changed(verdict: Verdict, **fields: Any) -> Verdict:
    return msgspec.structs.replace(verdict, **fields)


def policy(**sections: Any) -> Policy:
    """The acting policy with some keys changed: `slow={"dwell_s": 3}`."""
    values = POLICY.model_dump()
    for name, value in sections.items():
        values[name] = {**values[name], **value} if isinstance(value, dict) else value
    return Policy.model_validate(values)


def with_node(name: str = "gpu003", **fields: Any) -> World:
    return replace(WORLD, nodes={**WORLD.nodes, name: replace(WORLD.nodes[name], **fields)})


def held(count: int) -> World:
    """A world in which so many other nodes are drained by us."""
    nodes = dict(WORLD.nodes)
    for number in range(10, 10 + count):
        name = f"gpu{number:03d}"
        nodes[name] = replace(nodes[name], flags=frozenset({"IDLE", "DRAIN"}), reason="tocsin:ffffff:S1:GPU1:drain x")
    return replace(WORLD, nodes=nodes)


def act(kind: str, target: str, age_s: float, outcome: str | None = "ok") -> ActRecord:
    return ActRecord(1, "ffffff", kind, target, {}, NOW - age_s, outcome, concluded_at=NOW - age_s)


def open_case(*avoid: str, job_id: int = 7, incident: str = "ffffff") -> Case:
    return Case(incident, job_id, SUBMITTED, 0, "hang", (), avoid, True, "tocsin:f:H1:rank1:requeue", False, NOW)


def test_convicted_hardware_of_a_slow_job_is_drained_and_the_job_requeued_without_it() -> None:
    decision = decided()
    case = decision.case
    assert decision.verb == "act" and case is not None
    assert (case.drain, case.avoid, case.requeue, case.progressing) == (("gpu003",), ("gpu003",), True, True)
    assert (case.incident, case.job_id, case.submit_time, case.restart) == ("ab12cd", 42, SUBMITTED, 1)
    assert case.reason == "tocsin:ab12cd:gpu_clock_throttle:GPU1:drain job 42 slow, 97% sure"
    assert decision.why == "drain gpu003 and requeue job 42 without gpu003"


def test_a_hanging_job_is_requeued_away_and_nothing_is_drained() -> None:
    decision = decided(HANG)
    case = decision.case
    assert decision.verb == "act" and case is not None
    assert (case.drain, case.avoid, case.progressing) == ((), ("gpu003",), False)
    assert decision.why == "requeue job 42 without gpu003"
    reason = parse(case.reason)
    assert reason is not None and (reason.check, reason.entity, reason.action) == ("process_stuck", "rank5", "requeue")


def test_a_hang_never_drains_even_when_the_verdict_asks_for_it() -> None:
    verdict = changed(SLOW, anomaly="hang", class_="H1")
    case = decided(verdict).case
    assert case is not None and case.drain == () and case.avoid == ("gpu003",)


def test_nothing_wrong_is_nothing_to_decide() -> None:
    assert decided(Verdict(job_id=42, anomaly="none")).verb == "none"


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        (changed(HANG, action=Action(kind="notify")), "does not call for an act: notify"),
        (changed(HANG, action=Action(kind="collect", collect="stacks of rank 5")), "stacks of rank 5"),
        (changed(HANG, action=Action(kind="requeue", requeue=True)), "does not call for an act"),
        (changed(SLOW, anomaly="failed"), "has ended, nothing is left to act upon; a person should hold"),
    ],
)
def test_a_verdict_that_calls_for_nothing_is_only_told(verdict: Verdict, words: str) -> None:
    decision = decided(verdict)
    assert (decision.verb, decision.case) == ("tell", None)
    assert words in decision.why


def test_a_policy_that_only_tells_has_no_case() -> None:
    for verdict, changes in ((SLOW, {"slow": {"act": "notify"}}), (HANG, {"hang": {"act": "notify"}})):
        decision = decided(verdict, policy=policy(**changes))
        assert (decision.verb, decision.case) == ("tell", None)


def test_a_job_that_slurm_does_not_know_is_only_told() -> None:
    assert decided(job=None).verb == "tell"


def test_observing_tells_what_would_be_done() -> None:
    decision = decided(policy=Policy())
    assert decision.verb == "tell" and decision.case is not None
    assert decision.why.startswith("would drain gpu003 and requeue job 42 without gpu003; not done: the policy only")


UNSET = {"checkpoint_signal": None}
OBJECTIONS: list[tuple[str, Callable[[], Decision], str]] = [
    ("paused", lambda: decided(policy=policy(paused=True)), "tocsin is paused"),
    ("old picture", lambda: decided(world=replace(WORLD, taken_at=NOW - 60)), "60 s old"),
    ("picture of the future", lambda: decided(world=replace(WORLD, taken_at=NOW + 60)), "-60 s old"),
    ("other attempt", lambda: decided(job=replace(JOB, restarts=2)), "started anew"),
    ("other job of this id", lambda: decided(job=replace(JOB, submit_time="2026-12-01T00:00:00")), "started anew"),
    ("attempt not told", lambda: decided(job=replace(JOB, restarts=None)), "does not tell which attempt"),
    ("pending", lambda: decided(job=replace(JOB, state="PENDING")), "is PENDING, not RUNNING"),
    ("completing", lambda: decided(job=replace(JOB, state="COMPLETING")), "is COMPLETING, not RUNNING"),
    ("suspended", lambda: decided(job=replace(JOB, state="SUSPENDED")), "is SUSPENDED, not RUNNING"),
    ("no batch job", lambda: decided(job=replace(JOB, batch=False)), "not a batch job"),
    ("batch not told", lambda: decided(job=replace(JOB, batch=None)), "not a batch job"),
    ("no requeue", lambda: decided(job=replace(JOB, requeueable=False)), "--no-requeue"),
    ("requeue not told", lambda: decided(job=replace(JOB, requeueable=None)), "--no-requeue"),
    ("unknown node", lambda: decided(world=replace(WORLD, nodes={})), "does not know node gpu003"),
    ("node of another job", lambda: decided(job=replace(JOB, nodes=("gpu001",))), "does not belong to job 42"),
    (
        "unsure",
        lambda: decided(changed(SLOW, culprits=[msgspec.structs.replace(SLOW.culprits[0], confidence=0.85)])),
        "85% sure, at least 90% is asked",
    ),
    (
        "not a number",
        lambda: decided(changed(SLOW, culprits=[msgspec.structs.replace(SLOW.culprits[0], confidence=float("nan"))])),
        "is asked",
    ),
    ("nobody named", lambda: decided(changed(HANG, culprits=[])), "names nobody"),
    (
        "one witness",
        lambda: decided(changed(SLOW, evidence=SLOW.evidence[:2])),
        "only job bears witness",
    ),
    (
        "a witness against",
        lambda: decided(
            changed(SLOW, evidence=[*SLOW.evidence[:2], msgspec.structs.replace(SLOW.evidence[2], against=True)])
        ),
        "only job bears witness",
    ),
    (
        "software",
        lambda: decided(
            changed(SLOW, culprits=[msgspec.structs.replace(SLOW.culprits[0], cause="gc_stall", domain="software")])
        ),
        "no hardware of gpu003 is convicted",
    ),
    (
        "another node's hardware",
        lambda: decided(changed(SLOW, culprits=[msgspec.structs.replace(SLOW.culprits[0], node="gpu002")])),
        "no hardware of gpu003 is convicted",
    ),
    ("loss not known", lambda: decided(changed(SLOW, evidence=SLOW.evidence[1:])), "how much time is lost"),
    (
        "cheaper to bear",
        lambda: decided(policy=policy(slow={"horizon_s": 1000.0})),
        "444 s would be lost in 1000 s, a restart costs 900 s",
    ),
    (
        "no word on checkpoints",
        lambda: decided(policy=POLICY.model_copy(update={"slow": POLICY.slow.model_copy(update=UNSET)})),
        "slow.checkpoint_signal is not set",
    ),
    (
        "requeued too often",
        lambda: decided(
            finding=replace(FINDING, recent=(act("requeue", "42", 86_000), act("requeue", "42", 4000, None)))
        ),
        "requeued 2 times in 24 hours",
    ),
    (
        "too many acts",
        lambda: decided(finding=replace(FINDING, recent=tuple(act("drain", f"n{i}", 3000) for i in range(11)))),
        "11 acts in the last hour and 2 more, 12 are allowed",
    ),
    ("absolute budget", lambda: decided(world=held(2)), "3 nodes would be held, 2 are allowed"),
    (
        "relative budget",
        lambda: decided(policy=policy(budget={"nodes_held_pct_max": 2.0})),
        "2 % of 40 GPU nodes",
    ),
    (
        "budget of open cases",
        lambda: decided(finding=replace(FINDING, open_cases=(open_case("gpu030", "gpu031"),))),
        "3 nodes would be held",
    ),
    ("same job", lambda: decided(finding=replace(FINDING, open_cases=(open_case(job_id=42),))), "already acts on job"),
    (
        "same node",
        lambda: decided(HANG, finding=replace(FINDING, open_cases=(open_case("gpu003"),))),
        "incident ffffff already acts on gpu003",
    ),
]


@pytest.mark.parametrize(("decision", "words"), [row[1:] for row in OBJECTIONS], ids=[row[0] for row in OBJECTIONS])
def test_each_objection_stops_the_act_and_is_told(decision: Callable[[], Decision], words: str) -> None:
    got = decision()
    assert got.verb == "tell" and got.case is not None
    assert words in got.why


def test_all_objections_are_told_at_once() -> None:
    decision = decided(policy=policy(paused=True), job=replace(JOB, batch=False), world=held(2))
    assert all(words in decision.why for words in ("paused", "not a batch job", "3 nodes would be held"))


def test_time_that_is_still_missing_is_waited_for() -> None:
    decision = decided(finding=replace(FINDING, since=NOW - 50))
    assert decision.verb == "wait"
    assert decision.why.endswith("if the verdict stands for 70 s more")
    assert decided(HANG, finding=replace(FINDING, since=NOW - 50)).verb == "act"


@pytest.mark.parametrize(
    "fields",
    [
        {"flags": frozenset({"MIXED", "DRAIN"}), "reason": "bad DIMM"},
        {"flags": frozenset({"MIXED", "DRAIN"}), "reason": ""},
        {"reason": "note of an administrator"},
        {"flags": frozenset({"MIXED", "REBOOT_REQUESTED"})},
        {"flags": frozenset({"MIXED", "MAINTENANCE"})},
    ],
)
def test_a_node_in_other_hands_is_avoided_but_not_drained(fields: dict[str, Any]) -> None:
    case = decided(world=with_node(**fields)).case
    assert case is not None and (case.drain, case.avoid) == ((), ("gpu003",))
    assert decided(world=with_node(**fields)).verb == "act"


def test_a_protected_node_is_avoided_but_not_drained() -> None:
    case = decided(policy=policy(protected_nodes=["gpu003"])).case
    assert case is not None and (case.drain, case.avoid) == ((), ("gpu003",))


def test_the_nodes_own_card_may_be_drained_and_a_link_may_not() -> None:
    card = Culprit(kind="nic", node="gpu003", nic="mlx5_3", cause="nic_fault", domain="network", confidence=0.97)
    link = Culprit(kind="link", node="gpu003", link="leaf1:p3", cause="link_fault", domain="network", confidence=0.97)
    evidence = [*SLOW.evidence[:2], EvidenceItem(kind="counters", text="errors", witness="network")]
    assert decided(changed(SLOW, culprits=[card], evidence=evidence)).verb == "act"
    decision = decided(changed(SLOW, culprits=[link], evidence=evidence))
    assert decision.verb == "tell" and "no hardware of gpu003" in decision.why


def test_cpu_nodes_do_not_widen_the_budget() -> None:
    nodes = {
        name: replace(view, gpus=8 if name in ("gpu001", "gpu002", "gpu003") else 0)
        for name, view in WORLD.nodes.items()
    }
    decision = decided(world=replace(WORLD, nodes=nodes))
    assert decision.verb == "tell" and "of 3 GPU nodes" in decision.why


def test_old_acts_and_failed_requeues_count_no_more() -> None:
    recent = (act("requeue", "42", 90_000), act("requeue", "42", 3000, "failed"), act("requeue", "43", 10))
    assert decided(finding=replace(FINDING, recent=recent)).verb == "act"


def test_several_culprits_are_one_case_with_one_reason() -> None:
    second = msgspec.structs.replace(SLOW.culprits[0], rank=2, node="gpu002", gpu=0)
    action = Action(kind="drain", nodes=["gpu003", "gpu002"], requeue=True, exclude=["gpu003", "gpu002"])
    case = decided(changed(SLOW, culprits=[*SLOW.culprits, second], action=action)).case
    assert case is not None and case.drain == ("gpu002", "gpu003")
    assert ":several:drain" in case.reason


def test_words_of_a_culprit_cannot_break_the_reason() -> None:
    hostile = msgspec.structs.replace(SLOW.culprits[0], gpu=None, nic="mlx5_0:1 State=IDLE", kind="nic")
    case = decided(changed(SLOW, culprits=[hostile])).case
    assert case is not None
    reason = parse(case.reason)
    assert reason is not None and reason.entity == "mlx5_0_1_State_IDLE"
