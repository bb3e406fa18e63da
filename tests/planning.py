"""One picture of the cluster, one ledger, one answer of the plan: the pieces of which its tests are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from remediation.policy.case import Act, ActRecord, Case, Finished, Step, Wait
from remediation.policy.facts import Facts
from remediation.policy.plan import next_step
from remediation.policy.rules import Policy
from remediation.policy.world import JobView, NodeView, World

NOW = 1_000_000.0
REASON = "tocsin:ab12cd:gpu_clock_throttle:GPU5:drain job 42 slow, 97% sure"
DOWN = "tocsin:ab12cd:gpu_clock_throttle:GPU5:down job 42 slow, 97% sure"
OTHER = "tocsin:ffffff:S1:GPU1:drain other"
POLICY = Policy.model_validate(
    {
        "mode": "act",
        "budget": {"nodes_held_max": 1, "nodes_held_pct_max": 50.0},
        "slow": {"checkpoint_signal": "USR1", "checkpoint_grace_s": 60},
        "completing": {"down_after_s": 30},
    }
)
SLOW = Case("ab12cd", 42, "T0", 0, "slow", ("gpu002",), ("gpu002",), True, REASON, True, NOW - 100)
HANG = replace(SLOW, anomaly="hang", drain=(), progressing=False)
JOB = JobView(
    42, "T0", "RUNNING", nodes=("gpu001", "gpu002"), exclude=("gpu008",), restarts=0, requeueable=True, batch=True
)
AGAIN = replace(JOB, submit_time="T1", restarts=1)
WELL = NodeView("gpu002", frozenset({"MIXED"}), gpus=8)
DRAINED = replace(WELL, flags=frozenset({"MIXED", "DRAIN"}), reason=REASON)


def act(kind: str, age_s: float, outcome: str | None = "ok", target: str = "42", **args: str) -> ActRecord:
    """A line of the ledger; the older, the smaller its number."""
    concluded = None if outcome is None else NOW - age_s
    return ActRecord(int(NOW - age_s), "ab12cd", kind, target, args, NOW - age_s, outcome, "refused", concluded)


def ask(
    case: Case = SLOW,
    *,
    job: JobView | None = JOB,
    node: NodeView | None = WELL,
    acts: Sequence[ActRecord] = (),
    facts: Facts | None = None,
    policy: Policy = POLICY,
    age_s: float = 0.0,
    version: tuple[int, int] | None = (24, 11),
) -> Step:
    """The next step, where all other nodes are well. `version`: of Slurm."""
    nodes = {
        name: NodeView(name, frozenset({"IDLE"}), gpus=8, version=version)
        for name in ("gpu001", "gpu003", "gpu004", "gpu008")
    }
    if node is not None:
        nodes[node.name] = node
    world = World(NOW - age_s, nodes, {42: job} if job else {})
    return next_step(case, acts, world, facts or Facts(), policy, NOW)


def done(step: Step) -> tuple[str, str]:
    assert isinstance(step, Act), step
    return step.kind, step.target


def waits(step: Step) -> str:
    assert isinstance(step, Wait), step
    return step.why


def ends(step: Step) -> tuple[str, str]:
    assert isinstance(step, Finished), step
    return step.outcome, step.text


SIGNALLED = act("signal", 90, name="USR1")
REQUEUED = act("requeue", 20, hold="true")
PENDING = replace(AGAIN, state="PENDING", held=True, nodes=(), reason="job requeued in held state")
EXCLUDED = replace(PENDING, exclude=("gpu002", "gpu008"))
COMPLETING = replace(AGAIN, state="COMPLETING", nodes=("gpu002",))
LONG_AGO = act("requeue", 40, hold="true")
EARLY = replace(HANG, decided_at=NOW - 10_000)
ELSEWHERE = replace(AGAIN, nodes=("gpu001", "gpu003"))
STARTED = [REQUEUED, act("set_exclude", 18), act("start_in", 17), act("release", 16)]
IS_DOWN = replace(WELL, flags=frozenset({"DOWN"}), reason=DOWN)
SET_DOWN = [LONG_AGO, act("set_down", 17, target="gpu002", reason=DOWN), act("release", 16)]
GONE = Facts(stepping_elsewhere=True, old_ranks_gone={"gpu002": True})
