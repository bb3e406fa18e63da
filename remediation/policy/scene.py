"""Everything `next_step` looks at, and what the ledger says of one act: tried, in flight, failed, how often."""

from __future__ import annotations

from dataclasses import dataclass

from remediation.policy import guards
from remediation.policy.case import Act, ActRecord, Case, Step, Wait
from remediation.policy.facts import Facts
from remediation.policy.rules import Policy
from remediation.policy.world import JobView, World


@dataclass(frozen=True, slots=True)
class Scene:
    """The arguments of `next_step`. `acts`: the case's own, in the order of their intents."""

    case: Case
    acts: tuple[ActRecord, ...]
    world: World
    facts: Facts
    policy: Policy
    now: float

    @property
    def job(self) -> JobView | None:
        """The case's job as Slurm shows it now."""
        return self.world.jobs.get(self.case.job_id)

    @property
    def job_name(self) -> str:
        """ "job 42"."""
        return f"job {self.case.job_id}"

    def records(self, kind: str, target: str) -> list[ActRecord]:
        """What the ledger holds of one act, oldest first."""
        return [act for act in self.acts if act.kind == kind and act.target == target]

    def done(self, kind: str, target: str) -> ActRecord | None:
        """The newest record of an act that has been done, or may have been: an act whose trace Slurm does not show is
        not repeated because we died over it."""
        return next((act for act in reversed(self.records(kind, target)) if act.outcome != "failed"), None)

    def last(self, kind: str) -> ActRecord | None:
        """The newest act of a kind, whatever became of it."""
        return next((act for act in reversed(self.acts) if act.kind == kind), None)

    def newest_at(self) -> float:
        """When the case last moved: its newest act, or its decision."""
        return max([self.case.decided_at, *(ended_at(act) for act in self.acts)])

    def waited_s(self) -> float:
        """For how long nothing has been done for the case."""
        return self.now - self.newest_at()

    def hold_still(self) -> Wait | None:
        """Why nothing may be done at this moment, whatever there is to do."""
        refusal = (
            guards.observing(self.policy)
            or guards.paused(self.policy)
            or guards.stale(self.world, self.policy, self.now)
        )
        if refusal:
            return Wait(refusal + self._left_held())
        for act in self.acts:
            if act.outcome is None and self.now - act.intent_at < self.policy.limits.settle_s:
                return Wait(f"what became of {act.kind} {act.target} is not known yet")
            if ended_at(act) > self.world.taken_at:
                return Wait(f"the picture of the cluster is older than {act.kind} {act.target}")
        return None

    def _left_held(self) -> str:
        """A warning that belongs to every halt: a job that is held stays held."""
        job = self.job
        if job is None or not job.held or not self.records("requeue", str(self.case.job_id)):
            return ""
        return f"; {self.job_name} stays held until then, or until: scontrol release {self.case.job_id}"

    def attempt(self, kind: str, target: str, why: str, **args: str) -> Step | None:
        """The act, or the wait before trying it again; None when it has been tried as often as allowed."""
        tried = self.records(kind, target)
        limits = self.policy.limits
        if len(tried) >= limits.tries_max:
            return None
        if tried:
            pause_s = limits.retry_after_s * 2 ** (len(tried) - 1)
            if self.now - ended_at(tried[-1]) < pause_s:
                return Wait(f"{kind} {target} did not succeed ({tried[-1].detail or 'no effect'}), next try soon")
        return Act(kind, target, args, why)

    def failure(self, kind: str, target: str) -> str:
        """A sentence about an act that has been tried as often as allowed."""
        tried = self.records(kind, target)
        detail = tried[-1].detail if tried and tried[-1].detail else "it had no effect"
        return f"{kind} {target} was tried {len(tried)} times: {detail}"


def ended_at(act: ActRecord) -> float:
    """When an act ended; of an unknown outcome only its beginning is known."""
    return act.intent_at if act.concluded_at is None else act.concluded_at
