"""What speaks against an act. Each guard is a small pure question: None, or one sentence why not.

The guards are asked when a case is decided, and those that can change since (mode, pause, age of the picture, budget,
owner of a node) again before each act.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from diagnosis.contracts.verdict import NIC_CAUSES, Culprit, EvidenceItem, Verdict
from remediation.policy.case import ActRecord, Case
from remediation.policy.reason import is_ours
from remediation.policy.rules import Policy
from remediation.policy.world import JobView, NodeView, World

HOUR_S: Final = 3600.0
DAY_S: Final = 86_400.0
COUNTED: Final = frozenset({"drain", "set_down", "requeue"})
"""Acts that take something away from somebody; the others undo or complete them."""
IN_OTHER_HANDS: Final = frozenset(
    {
        "INVALID_REG",
        "MAINTENANCE",
        "POWERED_DOWN",
        "POWERING_DOWN",
        "POWERING_UP",
        "REBOOT_ISSUED",
        "REBOOT_REQUESTED",
    }
)
"""States in which Slurm or an administrator already does something to the node."""


# -- may anything be done at all? ------------------------------------------------------------------------------------


def observing(policy: Policy) -> str | None:
    """Observe is the default mode."""
    return "the policy only observes" if policy.mode == "observe" else None


def paused(policy: Policy) -> str | None:
    """A person can stop everything."""
    return "tocsin is paused" if policy.paused else None


def stale(world: World, policy: Policy, now: float) -> str | None:
    """Nothing is done on an old picture, nor on one from the future (a clock was set back)."""
    age_s = now - world.taken_at
    if -1.0 <= age_s <= policy.limits.world_age_s_max:
        return None
    return f"the picture of the cluster is {age_s:.0f} s old, at most {policy.limits.world_age_s_max:g} s are allowed"


# -- the job ---------------------------------------------------------------------------------------------------------


def other_attempt(job: JobView, submit_time: str, restart: int) -> str | None:
    """The verdict must be about what runs now. Slurm re-uses job ids after a crash, hence the submit time."""
    if job.restarts is None:
        return f"Slurm does not tell which attempt of job {job.job_id} runs"
    if (job.restarts, job.submit_time) != (restart, submit_time):
        return f"job {job.job_id} has been started anew since the verdict"
    return None


def not_running(job: JobView) -> str | None:
    """A pending, ending, suspended or ended job is in somebody else's hands."""
    return None if job.state == "RUNNING" else f"job {job.job_id} is {job.state}, not RUNNING"


def not_requeueable(job: JobView) -> str | None:
    """Slurm requeues batch jobs that allow it; what it does not tell is not assumed."""
    if job.batch is not True:
        return f"job {job.job_id} is not a batch job, Slurm cannot requeue it"
    if job.requeueable is not True:
        return f"job {job.job_id} was submitted with --no-requeue"
    return None


def given_up(incident: str | None) -> str | None:
    """What was tried as often as allowed is not begun again under another number."""
    return f"incident {incident} was abandoned on this attempt, a person must look" if incident else None


def requeued_too_often(job: JobView, recent: Iterable[ActRecord], policy: Policy, now: float) -> str | None:
    """A fault that follows the job is not the nodes'."""
    count = sum(
        act.kind == "requeue" and act.target == str(job.job_id) and act.outcome != "failed"
        for act in recent
        if now - act.intent_at <= DAY_S
    )
    if count < policy.budget.requeues_per_job_max:
        return None
    return f"job {job.job_id} has been requeued {count} times in 24 hours"


# -- the verdict -----------------------------------------------------------------------------------------------------


def unsure(culprits: Sequence[Culprit], confidence_min: float) -> str | None:
    """The least certain culprit counts. Written so that a confidence that is no number is too low."""
    low = [culprit for culprit in culprits if not culprit.confidence >= confidence_min]
    if culprits and not low:
        return None
    if not low:
        return "the verdict names nobody"
    return f"{low[0].confidence:.0%} sure, at least {confidence_min:.0%} is asked"


def not_convicted(verdict: Verdict, nodes: Sequence[str]) -> str | None:
    """A node is drained for its hardware or its own NIC, and left for the link to it, named for each, and on the word
    of two witnesses.

    What a job can write is one witness however often it speaks, so another must be among them.
    """
    if verdict.action.kind not in ("drain", "requeue"):
        return "the verdict asks neither for a drain nor for a requeue"
    for node in nodes:
        accused = [culprit for culprit in verdict.culprits if culprit.node == node]
        left = node not in verdict.action.nodes and any(_to_the_node(culprit) for culprit in accused)
        if not left and not any(_of_the_node(culprit) for culprit in accused):
            return f"no hardware of {node} is convicted"
    witnesses = _witnesses(verdict.evidence)
    if len(witnesses) < 2 or not witnesses - {"job"}:
        return f"only {' and '.join(sorted(witnesses)) or 'nobody'} bears witness, a drain needs two"
    return None


def _of_the_node(culprit: Culprit) -> bool:
    return culprit.domain == "hardware" or (
        culprit.domain == "network" and culprit.kind == "nic" and culprit.cause in NIC_CAUSES
    )


def _to_the_node(culprit: Culprit) -> bool:
    return culprit.domain == "network" and culprit.kind == "link"


def _witnesses(evidence: Iterable[EvidenceItem]) -> set[str]:
    """NCCL's RAS answers out of the job's own processes: it is the job's word in other words."""
    return {"job" if item.witness == "ras" else item.witness for item in evidence if not item.against}


def not_worth_it(verdict: Verdict, policy: Policy) -> str | None:
    """Ending a job that moves must win more than it costs: lost share of the horizon against the restart."""
    ratios = [item.value for item in verdict.evidence if item.kind == "round_time" and item.value]
    if not ratios:
        return "how much time is lost is not known"
    lost_s = max(0.0, 1 - 1 / max(ratios)) * policy.slow.horizon_s
    if lost_s > policy.slow.restart_cost_s:
        return None
    return (
        f"{lost_s:.0f} s would be lost in {policy.slow.horizon_s:g} s, a restart costs {policy.slow.restart_cost_s:g} s"
    )


def no_checkpoint(policy: Policy) -> str | None:
    """Ending a job that moves needs a word on how it saves its state."""
    return None if policy.slow.checkpoint_signal else "slow.checkpoint_signal is not set"


# -- the nodes -------------------------------------------------------------------------------------------------------


def unknown_nodes(nodes: Iterable[str], job: JobView, world: World) -> str | None:
    """Each node must exist and belong to the job."""
    for node in nodes:
        if node not in world.nodes:
            return f"Slurm does not know node {node}"
        if node not in job.nodes:
            return f"node {node} does not belong to job {job.job_id}"
    return None


def not_ours_to_hold(view: NodeView, policy: Policy) -> str | None:
    """Whose the node is: protected, held or spoken for by somebody else, or in Slurm's own hands.

    A held node always has a reason; one without is somebody's who did not say why.
    """
    if view.name in policy.protected_nodes:
        return f"node {view.name} is protected by the policy"
    if (view.reason or view.held) and not is_ours(view.reason):
        return f"node {view.name} is held by somebody else ({view.reason or 'no reason given'})"
    if busy := view.flags & IN_OTHER_HANDS:
        return f"node {view.name} is {'+'.join(sorted(busy))}"
    return None


def in_another_case(case: Case, open_cases: Iterable[Case]) -> str | None:
    """One case per job at a time, and never two on one node."""
    for other in open_cases:
        if other.incident == case.incident:
            continue
        if other.job_id == case.job_id:
            return f"incident {other.incident} already acts on job {case.job_id}"
        if shared := sorted(set(other.avoid) & set(case.avoid)):
            return f"incident {other.incident} already acts on {', '.join(shared)}"
    return None


# -- budgets ---------------------------------------------------------------------------------------------------------


def held_by_us(world: World) -> set[str]:
    """Nodes that are drained or down in our name."""
    return {view.name for view in world.nodes.values() if view.held and is_ours(view.reason)}


def too_many_nodes(nodes: Iterable[str], planned: Iterable[str], world: World, policy: Policy) -> str | None:
    """Both budgets of nodes: those held now, those that open cases may yet hold (`planned`), and these.

    CPU nodes do not widen the budget: a share of a cluster that is mostly CPU nodes would allow every GPU node. Where
    there is no GPU node at all, the share is of all nodes.
    """
    gpu_nodes = sum(view.gpus > 0 for view in world.nodes.values())
    base, kind = (gpu_nodes, "GPU nodes") if gpu_nodes else (len(world.nodes), "nodes")
    budget = policy.budget
    allowed = min(budget.nodes_held_max, int(budget.nodes_held_pct_max * base / 100))
    wanted = held_by_us(world) | set(planned) | set(nodes)
    if len(wanted) <= allowed:
        return None
    return (
        f"{len(wanted)} nodes would be held, {allowed} are allowed"
        f" (nodes_held_max {budget.nodes_held_max}, {budget.nodes_held_pct_max:g} % of {base} {kind})"
    )


def too_many_acts(count: int, recent: Iterable[ActRecord], policy: Policy, now: float) -> str | None:
    """How fast tocsin may act at all."""
    done = sum(act.kind in COUNTED and now - act.intent_at <= HOUR_S for act in recent)
    if done + count <= policy.budget.acts_per_hour_max:
        return None
    return f"{done} acts in the last hour and {count} more, {policy.budget.acts_per_hour_max} are allowed"
