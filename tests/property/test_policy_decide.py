"""What no verdict, cluster or policy whatever can bring a decision to do."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as replace_struct

from diagnosis.contracts.verdict import DOMAIN_OF_CAUSE, NIC_CAUSES, Action, Culprit, EvidenceItem, Verdict
from remediation.policy.case import ActRecord, Case
from remediation.policy.decide import decide
from remediation.policy.facts import Finding
from remediation.policy.reason import CHARS_MAX, is_ours, parse
from remediation.policy.rules import Policy
from remediation.policy.world import JobView, NodeView, World

NOW = 1_000_000.0
NODES = tuple(f"n{number}" for number in range(8))
FOREIGN = ("bad DIMM", "NHC: check_hw", "Not responding")
OURS = ("tocsin:ffffff:S1:GPU1:drain x", "tocsin:eeeeee:H1:rank1:down y : reboot issued")

node_names = st.sampled_from(NODES)
culprits = st.builds(
    Culprit,
    kind=st.sampled_from(("rank", "gpu", "node", "nic", "link", "switch", "job")),
    cause=st.sampled_from(tuple(DOMAIN_OF_CAUSE)),
    domain=st.sampled_from(("hardware", "network", "software", "workload", "io", "unknown")),
    confidence=st.sampled_from((0.0, 0.5, 0.85, 0.97, 1.0, float("nan"))),
    rank=st.none() | st.integers(0, 63),
    node=st.none() | node_names,
    gpu=st.none() | st.integers(0, 7),
    nic=st.none() | st.sampled_from(("mlx5_0", "mlx5_0:1", "x y")),
    link=st.none() | st.text(max_size=8),
)
evidence = st.builds(
    EvidenceItem,
    kind=st.sampled_from(("round_time", "own_time", "gpu_clock")),
    text=st.just("seen"),
    value=st.none() | st.sampled_from((0.5, 1.01, 1.8, 9.0, float("nan"))),
    witness=st.sampled_from(("job", "nvml", "kernel", "network")),
    against=st.booleans(),
)
actions = st.builds(
    Action,
    kind=st.sampled_from(("drain", "drain", "requeue", "notify", "collect", "none")),
    nodes=st.lists(node_names, max_size=3),
    requeue=st.booleans(),
    exclude=st.lists(node_names, max_size=3),
)
verdicts = st.builds(
    Verdict,
    job_id=st.just(42),
    anomaly=st.sampled_from(("slow", "hang", "failed", "none")),
    class_=st.sampled_from(("S1", "H1", None)),
    culprits=st.lists(culprits, max_size=3),
    action=actions,
    evidence=st.lists(evidence, max_size=5),
)
jobs = st.builds(
    JobView,
    job_id=st.just(42),
    submit_time=st.sampled_from(("T1", "T1", "T1", "T2")),
    state=st.sampled_from(("RUNNING", "RUNNING", "RUNNING", "PENDING", "COMPLETING", "CANCELLED")),
    nodes=st.just(NODES) | st.lists(node_names, unique=True).map(tuple),
    restarts=st.sampled_from((0, 0, 0, 1, None)),
    requeueable=st.sampled_from((True, True, False, None)),
    batch=st.sampled_from((True, True, False, None)),
)
views = st.builds(
    NodeView,
    name=st.just(""),
    flags=st.sets(st.sampled_from(("IDLE", "MIXED", "DRAIN", "DOWN", "REBOOT_ISSUED")), min_size=1).map(frozenset),
    reason=st.sampled_from(("", "", "", *FOREIGN, *OURS)),
    gpus=st.sampled_from((0, 8)),
)
cases = st.builds(
    Case,
    incident=st.sampled_from(("ab12cd", "ffffff")),
    job_id=st.sampled_from((7, 42)),
    submit_time=st.just("T1"),
    restart=st.just(0),
    anomaly=st.just("hang"),
    drain=st.just(()),
    avoid=st.lists(node_names, max_size=2, unique=True).map(tuple),
    requeue=st.just(True),
    reason=st.just(OURS[0]),
    progressing=st.booleans(),
    decided_at=st.just(NOW),
)
records = st.builds(
    ActRecord,
    seq=st.just(1),
    incident=st.just("ffffff"),
    kind=st.sampled_from(("drain", "requeue", "release")),
    target=st.sampled_from(("42", "n1")),
    args=st.just({}),
    intent_at=st.floats(NOW - 100_000, NOW),
    outcome=st.sampled_from(("ok", "failed", None)),
)
findings = st.builds(
    Finding,
    incident=st.just("ab12cd"),
    submit_time=st.just("T1"),
    restart=st.just(0),
    since=st.floats(NOW - 1000, NOW),
    open_cases=st.lists(cases, max_size=2).map(tuple),
    recent=st.lists(records, max_size=4).map(tuple),
)


SOUND = Verdict(
    job_id=42,
    anomaly="slow",
    class_="S1",
    culprits=[
        Culprit(kind="gpu", rank=5, node="n3", gpu=1, cause="gpu_clock_throttle", domain="hardware", confidence=0.97)
    ],
    action=Action(kind="drain", nodes=["n3"], requeue=True, exclude=["n3"]),
    evidence=[
        EvidenceItem(kind="round_time", text="slow", value=1.8),
        EvidenceItem(kind="gpu_clock", text="low", value=0.5, witness="nvml"),
    ],
)
JOB = JobView(42, "T1", "RUNNING", nodes=NODES, restarts=0, requeueable=True, batch=True)
CALM = Finding(incident="ab12cd", submit_time="T1", restart=0, since=NOW - 3600)
Situation = tuple[Verdict, JobView | None, World, Finding, Policy]


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    """A sound one, of which some parts are whatever: were all of them, nothing would ever be decided."""
    wild = draw(st.sets(st.sampled_from(("verdict", "culprits", "evidence", "job", "world", "finding", "policy"))))
    verdict = draw(verdicts) if "verdict" in wild else SOUND
    if "culprits" in wild:
        verdict = replace_struct(verdict, culprits=draw(st.lists(culprits, max_size=3)))
    if "evidence" in wild:
        verdict = replace_struct(verdict, evidence=[*SOUND.evidence[:1], *draw(st.lists(evidence, max_size=3))])
    job = draw(st.none() | jobs) if "job" in wild else JOB
    world = draw(worlds()) if "world" in wild else draw(worlds(well=True))
    finding = draw(findings) if "finding" in wild else CALM
    return verdict, job, world, finding, draw(policies(wild="policy" in wild))


@st.composite
def worlds(draw: st.DrawFn, *, well: bool = False) -> World:
    """Nodes that are well but for some, seen just now or at another time."""
    plain = {name: NodeView(name, frozenset({"MIXED"}), gpus=8) for name in NODES}
    if well:
        return World(NOW - 1, plain)
    for name in draw(st.lists(node_names, max_size=4, unique=True)):
        plain[name] = replace(draw(views), name=name)
    for name in draw(st.lists(node_names, max_size=1)):
        plain.pop(name, None)
    return World(NOW - draw(st.sampled_from((0.5, 0.5, 0.5, 100.0, -100.0))), plain)


@st.composite
def policies(draw: st.DrawFn, *, wild: bool) -> Policy:
    """One that acts, or any."""
    if not wild:
        return Policy.model_validate(
            {"mode": "act", "budget": {"nodes_held_pct_max": 50.0}, "slow": {"checkpoint_signal": "USR1"}}
        )
    return Policy.model_validate(
        {
            "mode": draw(st.sampled_from(("act", "act", "act", "observe"))),
            "paused": draw(st.sampled_from((False, False, False, True))),
            "protected_nodes": draw(st.lists(node_names, max_size=1)),
            "budget": {
                "nodes_held_max": draw(st.integers(0, 4)),
                "nodes_held_pct_max": draw(st.sampled_from((0.0, 12.5, 50.0, 100.0))),
                "requeues_per_job_max": draw(st.integers(0, 3)),
            },
            "slow": {"checkpoint_signal": draw(st.sampled_from(("USR1", "none"))), "confidence_min": 0.8},
        }
    )


@settings(max_examples=600, deadline=None)
@given(situations())
def test_an_act_is_never_decided_against_a_safety_rule(situation: Situation) -> None:
    verdict, job, world, finding, policy = situation
    decision = decide(verdict, job, world, finding, policy, NOW)
    case = decision.case
    assert decision.why
    if case is not None:
        assert len(case.reason) <= CHARS_MAX and case.reason.isascii() and parse(case.reason) is not None
        assert set(case.drain) <= set(case.avoid) and case.avoid
    if decision.verb not in ("act", "wait"):
        return
    assert case is not None and job is not None
    assert policy.mode == "act" and not policy.paused
    assert 0 <= NOW - world.taken_at <= policy.limits.world_age_s_max
    assert (job.state, job.restarts, job.submit_time) == ("RUNNING", 0, "T1")
    assert job.batch is True and job.requeueable is True
    assert set(case.avoid) <= set(job.nodes) & set(world.nodes)
    assert not any(other.job_id == 42 for other in finding.open_cases if other.incident != "ab12cd")
    if case.drain:
        _drain_is_sound(case, verdict, world, finding, policy)


def test_a_sound_situation_does_act() -> None:
    """Else the property above would hold for want of acts."""
    world = World(NOW - 1, {name: NodeView(name, frozenset({"MIXED"}), gpus=8) for name in NODES})
    policy = Policy.model_validate(
        {"mode": "act", "budget": {"nodes_held_pct_max": 50.0}, "slow": {"checkpoint_signal": "USR1"}}
    )
    assert decide(SOUND, JOB, world, CALM, policy, NOW).verb == "act"


def _drain_is_sound(case: Case, verdict: Verdict, world: World, finding: Finding, policy: Policy) -> None:
    witnesses = {item.witness for item in verdict.evidence if not item.against}
    assert verdict.anomaly == "slow" and verdict.action.kind == "drain"
    assert len(witnesses) >= 2 and witnesses - {"job"}
    for node in case.drain:
        view = world.nodes[node]
        assert node not in policy.protected_nodes
        assert is_ours(view.reason) or not (view.reason or view.held)
        assert any(
            culprit.node == node and (culprit.domain == "hardware" or culprit.cause in NIC_CAUSES)
            for culprit in verdict.culprits
        )
    others = {node for other in finding.open_cases if other.incident != case.incident for node in other.avoid}
    ours = {name for name, view in world.nodes.items() if view.held and is_ours(view.reason)}
    held = len(ours | others | set(case.drain))
    gpu_nodes = sum(view.gpus > 0 for view in world.nodes.values())
    assert held <= policy.budget.nodes_held_max
    assert held * 100 <= policy.budget.nodes_held_pct_max * gpu_nodes
