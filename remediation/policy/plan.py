"""The next step of a case: a level-triggered plan. What Slurm shows decides, the ledger only tells what was tried.

    drain ─► checkpoint signal, time to save ─► requeue ─► the old nodes let go ─► exclude, start early, release
    ─► runs elsewhere ─► its ranks advance ─► what was set DOWN is undone ─► finished

`next_step` is asked again after each act, with a picture of the cluster taken after that act (of whatever case: the
budgets are counted on it). It answers from the picture alone where it can: a node that is drained is not drained
again, whoever died in between. The ledger is asked for what the cluster cannot show: whether it was we who requeued,
how often something was tried, when the waiting began.

Order. The drain comes first: it harms nothing that runs, and nobody else gets the node meanwhile. The signal comes
before the requeue, since afterwards there is nobody left to save anything. A job is requeued plainly only where every
node to be avoided is drained; else it is requeued held, because Slurm may start it again in the second in which its
old nodes let go, before anybody could exclude one. What follows the requeue is in `afterwards`.

Whoever else acts is respected: a node that got another reason or was returned to service, a job that was cancelled,
held or requeued by others. The case then ends and says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from remediation.policy import afterwards, guards
from remediation.policy.case import ActRecord, Case, Finished, Step, Wait
from remediation.policy.facts import Facts
from remediation.policy.reason import is_exactly_ours
from remediation.policy.rules import Policy
from remediation.policy.scene import Scene, ended_at
from remediation.policy.world import JobView, World


def next_step(case: Case, acts: Sequence[ActRecord], world: World, facts: Facts, policy: Policy, now: float) -> Step:
    """The one thing to do now. `acts`: the ledger of this case, `now`: seconds since the epoch as `world.taken_at`."""
    scene = Scene(case, tuple(acts), world, facts, policy, now)
    halt = scene.hold_still()
    return halt or afterwards.undo_down(scene, _nothing_to_do(scene) or _drain(scene) or _job(scene))


def _nothing_to_do(scene: Scene) -> Step | None:
    if scene.facts.recovered and not scene.acts:
        return Finished("recovered", f"{scene.job_name} is healthy again, nothing was done")
    return None


# -- nodes -----------------------------------------------------------------------------------------------------------


def _drain(scene: Scene) -> Step | None:
    """Drain what the case names, one node at a time. None when there is nothing left to drain."""
    for node in scene.case.drain:
        if not _wants_drain(scene, node):
            continue
        refusal = guards.too_many_nodes([node], (), scene.world, scene.policy)
        if refusal:
            return _ended(scene, f"node {node} is not drained: {refusal}", "abandoned")
        step = scene.attempt("drain", node, "convicted hardware gets no new work", reason=scene.case.reason)
        return step or _ended(scene, scene.failure("drain", node), "abandoned")
    return None


def _wants_drain(scene: Scene, node: str) -> bool:
    """Whether the node should be drained and is not. What somebody else did to it stays as it is.

    An undown clears the drain for an instant and sets it again; only a node without one after our last word on it was
    returned to service by a person.
    """
    view = scene.world.nodes.get(node)
    if view is None or guards.not_ours_to_hold(view, scene.policy):
        return False
    if "DRAIN" in view.flags:
        return False
    last = next((act for act in reversed(scene.acts) if act.target == node and act.kind in ("drain", "undown")), None)
    return last is None or last.kind == "undown" or last.outcome != "ok"


# -- the job, up to the requeue --------------------------------------------------------------------------------------


def _job(scene: Scene) -> Step:
    case, job = scene.case, scene.job
    if not case.requeue:
        return Finished("resolved", f"drained {_names(case.drain)}")
    if job is None:
        return _ended(scene, f"{scene.job_name} is no longer known to Slurm")
    if job.restarts is None:
        return _bounded(scene, f"Slurm does not tell which attempt of {scene.job_name} this is")
    if job.restarts > case.restart:
        if scene.last("requeue") is None:
            return _ended(scene, f"{scene.job_name} was requeued by somebody else")
        return afterwards.forward(scene, job)
    if job.restarts < case.restart or job.submit_time != case.submit_time:
        return _ended(scene, f"job id {case.job_id} belongs to another job now")
    if job.ended:
        return _ended(scene, f"{scene.job_name} ended by itself ({job.state})")
    if job.state == "COMPLETING":
        return _bounded(scene, f"{scene.job_name} is ending by itself")
    if job.state != "RUNNING":
        return _ended(scene, f"{scene.job_name} is {job.state}: somebody else acts on it")
    if scene.facts.recovered:
        return _ended(scene, f"{scene.job_name} is healthy again and is left running", "recovered")
    return _checkpoint(scene) or _requeue(scene, job)


def _checkpoint(scene: Scene) -> Step | None:
    """A job that still moves is told to save its state and given time for it. None when it may be ended."""
    if not scene.case.progressing:
        return None
    name, target = scene.policy.slow.checkpoint_signal, str(scene.case.job_id)
    if name is None:
        return _ended(scene, f"{scene.job_name} is not requeued: slow.checkpoint_signal is not set", "abandoned")
    if name == "none":
        return None
    told = scene.done("signal", target)
    if told is None:
        step = scene.attempt("signal", target, "save your state before the requeue", name=name)
        return step or _ended(scene, scene.failure("signal", target), "abandoned")
    told_at = ended_at(told)
    grace_s = scene.policy.slow.checkpoint_grace_s
    return Wait(f"{scene.job_name} has {grace_s:g} s to save its state") if scene.now < told_at + grace_s else None


def _requeue(scene: Scene, job: JobView) -> Step:
    target = str(job.job_id)
    refusal = guards.not_requeueable(job)
    if refusal:
        return _ended(scene, refusal, "abandoned")
    bare = [name for name in scene.case.avoid if not afterwards.is_held(scene, name)]
    why = f"held, until {_names(bare)} can be excluded" if bare else "its bad nodes are drained"
    step = scene.attempt("requeue", target, why, hold="true" if bare else "false")
    return step or _ended(scene, scene.failure("requeue", target), "abandoned")


# -- endings ---------------------------------------------------------------------------------------------------------


def _bounded(scene: Scene, why: str) -> Step:
    """Wait for something of Slurm's own, but not for ever."""
    if scene.waited_s() <= scene.policy.limits.completing_s_max:
        return Wait(why)
    return _ended(scene, f"{why}, for {scene.waited_s():.0f} s", "abandoned")


def _ended(scene: Scene, text: str, outcome: str | None = None) -> Finished:
    """The end of a case without our requeue, saying which nodes stay drained by it."""
    drained = [name for name in scene.case.drain if _drained_by_us(scene, name)]
    stays = f"; {_names(drained)} stays drained" if drained else ""
    return Finished(outcome or ("partly" if drained else "withdrawn"), text + stays)


def _drained_by_us(scene: Scene, name: str) -> bool:
    view = scene.world.nodes.get(name)
    return view is not None and "DRAIN" in view.flags and is_exactly_ours(view.reason, scene.case.reason)


def _names(nodes: Sequence[str]) -> str:
    return ", ".join(nodes)
