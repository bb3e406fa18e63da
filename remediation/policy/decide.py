"""From a verdict to a case: what would be done, whether it may be done, and one sentence why or why not.

Pure, and free to be asked again each cycle: a decision that only tells becomes one that acts when what spoke against
it has passed (a dwell, a pause, a budget), as long as the verdict stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from diagnosis.contracts.verdict import Culprit, Verdict, slurm_entity
from remediation.policy import guards
from remediation.policy.case import Case
from remediation.policy.facts import Finding
from remediation.policy.reason import Reason, word
from remediation.policy.rules import Hang, Policy, Slow
from remediation.policy.world import JobView, World


@dataclass(frozen=True, slots=True)
class Decision:
    """`verb` none: nothing is wrong; tell: say it and leave it; wait: only time is missing; act: carry the case out.

    `case`: what is to be done, or would be; None where the evidence or the policy calls for nothing. `why` is a
    sentence for people.
    """

    verb: Literal["none", "tell", "wait", "act"]
    case: Case | None
    why: str


def decide(
    verdict: Verdict, job: JobView | None, world: World, finding: Finding, policy: Policy, now: float
) -> Decision:
    """The decision about one verdict. `job`: the verdict's job as `world` shows it, None where Slurm has it not."""
    if verdict.anomaly == "none":
        return Decision("none", None, "nothing is wrong")
    if job is None:
        return Decision("tell", None, f"job {verdict.job_id} is not known to Slurm")
    nothing = _calls_for_nothing(verdict, policy)
    if nothing:
        return Decision("tell", None, nothing)
    case = _case(verdict, job, world, finding, policy, now)
    against = _objections(case, verdict, job, world, finding, policy, now)
    if against:
        return Decision("tell", case, f"would {describe(case)}; not done: {'; '.join(against)}")
    left_s = finding.since + _rules(verdict, policy).dwell_s - now
    if left_s > 0:
        return Decision("wait", case, f"will {describe(case)} if the verdict stands for {left_s:.0f} s more")
    return Decision("act", case, describe(case))


def describe(case: Case) -> str:
    """The case as a phrase: "drain gpu003 and requeue job 42 without gpu003"."""
    words = [f"drain {', '.join(case.drain)}"] if case.drain else []
    words += [f"requeue job {case.job_id} without {', '.join(case.avoid)}"] if case.requeue else []
    return " and ".join(words)


def _rules(verdict: Verdict, policy: Policy) -> Hang | Slow:
    return policy.slow if verdict.anomaly == "slow" else policy.hang


def _calls_for_nothing(verdict: Verdict, policy: Policy) -> str | None:
    """Why there is not even a case to weigh."""
    rules, action = _rules(verdict, policy), verdict.action
    if verdict.anomaly == "failed":
        hold = f"; a person should hold {', '.join(action.nodes)}" if action.nodes else ""
        return f"the job has ended, nothing is left to act upon{hold}"
    if rules.act == "notify":
        return f"the policy only tells of a job that is {'slow' if verdict.anomaly == 'slow' else 'hanging'}"
    if not action.requeue or not (action.nodes or action.exclude):
        return f"the evidence does not call for an act: {action.collect or action.kind}"
    return None


def _case(verdict: Verdict, job: JobView, world: World, finding: Finding, policy: Policy, now: float) -> Case:
    """Hardware of a slow job is drained, unless the node is another's; everything named is avoided."""
    action = verdict.action
    slow = verdict.anomaly == "slow"
    free = [
        name
        for name in sorted(set(action.nodes))
        if name not in world.nodes or guards.not_ours_to_hold(world.nodes[name], policy) is None
    ]
    avoid = tuple(sorted({*action.nodes, *action.exclude}))
    return Case(
        incident=finding.incident,
        job_id=job.job_id,
        submit_time=finding.submit_time,
        restart=finding.restart,
        anomaly=verdict.anomaly,
        drain=tuple(free) if slow else (),
        avoid=avoid,
        requeue=True,
        reason=_reason(verdict, avoid, finding, "drain" if slow else "requeue"),
        progressing=slow,
        decided_at=now,
    )


def _reason(verdict: Verdict, nodes: Sequence[str], finding: Finding, action: str) -> str:
    culprits = _culprits_on(verdict, nodes)
    first = culprits[0] if culprits else None
    check = first.cause if first and first.cause != "unknown" else verdict.class_ or verdict.anomaly
    entities = {word(slurm_entity(culprit)) for culprit in culprits}
    entity = entities.pop() if len(entities) == 1 else "several"
    sure = f", {first.confidence:.0%} sure" if first else ""
    return str(Reason(finding.incident, check, entity, action, f"job {verdict.job_id} {verdict.anomaly}{sure}"))


def _culprits_on(verdict: Verdict, nodes: Sequence[str]) -> list[Culprit]:
    return [culprit for culprit in verdict.culprits if culprit.node in nodes]


def _objections(
    case: Case, verdict: Verdict, job: JobView, world: World, finding: Finding, policy: Policy, now: float
) -> list[str]:
    """Everything that speaks against it, so that a person sees all of it at once."""
    others = [other for other in finding.open_cases if other.incident != case.incident]
    planned = {node for other in others for node in other.avoid}
    asked = [
        guards.observing(policy),
        guards.paused(policy),
        guards.stale(world, policy, now),
        guards.other_attempt(job, finding.submit_time, finding.restart),
        guards.not_running(job),
        guards.not_requeueable(job),
        guards.given_up(finding.given_up),
        guards.unknown_nodes(case.avoid, job, world),
        guards.unsure(_culprits_on(verdict, case.avoid), _rules(verdict, policy).confidence_min),
        guards.in_another_case(case, others),
        guards.requeued_too_often(job, finding.recent, policy, now),
        guards.too_many_nodes(case.drain, planned, world, policy) if case.drain else None,
        guards.too_many_acts(len(case.drain) + 1, finding.recent, policy, now),
    ]
    if case.progressing:
        asked += [
            guards.not_convicted(verdict, case.avoid),
            guards.not_worth_it(verdict, policy),
            guards.no_checkpoint(policy),
        ]
    return [refusal for refusal in asked if refusal]
