"""A case after its requeue: the old nodes let go, the job starts elsewhere, what was set DOWN is undone.

Four things about Slurm shape it, each measured:

- A requeued job stays COMPLETING until every old node has let go of it. A node that is dead or holds an unkillable
  process keeps it there for minutes. Setting that node DOWN makes Slurm give up on it; this convicts nobody, counts in
  the budget, and is undone once the old processes are gone.
- A requeued job waits for the life of its credential (two minutes by default) before it may start again. It may be
  made to start earlier, but not in the second of the requeue: revocation counts in whole seconds, and the new start
  would be killed with the old one. It is asked for once: where a launch fails, Slurm's own delay is the cure.
- Slurm 22.05 forgets the GPUs of a job whose last COMPLETING node is set DOWN: the job starts again, none of its steps
  can ("Invalid generic resource (gres) specification"), it ends, and the GPUs of its new nodes stay counted as taken.
  24.11 does not. Before, and where the version is not known, such a job is left to Slurm's UnkillableStepTimeout.
- Slurm drops what a job excludes when it is told a new list: the user's nodes must be in it.
"""

from __future__ import annotations

from remediation.policy import guards
from remediation.policy.case import Act, ActRecord, Finished, Step, Wait
from remediation.policy.reason import is_exactly_ours, with_action, without_suffix
from remediation.policy.scene import Scene, ended_at
from remediation.policy.world import JobView

START_IN_S = 2
STARTING = frozenset({"RUNNING", "CONFIGURING"})
DOWN_KEEPS_GPUS_SINCE = (24, 11)


def undo_down(scene: Scene, step: Step) -> Step:
    """The job's own `step` comes first, then what was set DOWN; the case ends when both are done, however the job's own
    way ends: also where it is cancelled and Slurm has forgotten it meanwhile."""
    if isinstance(step, Act):
        return step
    undo = _undo_down(scene)
    if isinstance(undo, Act):
        return undo
    if isinstance(step, Wait) or undo is None:
        return step
    if isinstance(undo, Wait):
        return undo
    outcome = "partly" if step.outcome in ("resolved", "withdrawn") else step.outcome
    return Finished(outcome, f"{step.text}; {undo.text}")


def is_held(scene: Scene, node: str) -> bool:
    """Whether Slurm starts nothing there for as long as nobody undoes it; a node that is only DOWN may come back."""
    view = scene.world.nodes.get(node)
    return view is not None and bool(view.flags & {"DRAIN", "FAIL"})


def forward(scene: Scene, job: JobView) -> Step:
    """The requeued job's own way: let go, start, arrive."""
    if job.state == "COMPLETING":
        return _let_go(scene, job)
    if job.state == "PENDING":
        return _start(scene, job)
    if job.state in STARTING:
        return _arrive(scene, job)
    if job.state == "COMPLETED":
        return Finished("resolved", f"{scene.job_name} was requeued and has run to its end")
    if job.state == "CANCELLED":
        return Finished("partly", f"{scene.job_name} was cancelled after the requeue")
    return Finished("abandoned", f"{scene.job_name} is {job.state} after the requeue")


# -- COMPLETING ------------------------------------------------------------------------------------------------------


def _let_go(scene: Scene, job: JobView) -> Step:
    """Wait for the old nodes, then give up on those that are to be avoided anyhow."""
    requeue = scene.last("requeue")
    since = ended_at(requeue) if requeue else scene.case.decided_at
    waited_s, names = scene.now - since, ", ".join(job.nodes)
    if waited_s > scene.policy.limits.completing_s_max:
        return Finished("abandoned", f"{scene.job_name} is still COMPLETING on {names} after {waited_s:.0f} s")
    if waited_s < scene.policy.completing.down_after_s or not job.nodes:
        return Wait(f"{scene.job_name} is COMPLETING on {names or 'its old nodes'}")
    if not set(job.nodes) <= set(scene.case.avoid):
        return Wait(f"{scene.job_name} is COMPLETING on {names}, which are not all its bad nodes")
    against = []
    for name in job.nodes:
        down = _give_up_on(scene, name)
        if isinstance(down, str):
            against.append(down)
        else:
            return down
    return Wait(f"{scene.job_name} is COMPLETING: {'; '.join(against)}")


def _give_up_on(scene: Scene, node: str) -> Step | str:
    """Set one node DOWN, or why not."""
    view = scene.world.nodes.get(node)
    if view is None:
        return f"Slurm does not know node {node}"
    if "DOWN" in view.flags:
        return f"node {node} is DOWN already"
    refusal = guards.not_ours_to_hold(view, scene.policy) or guards.too_many_nodes(
        [node], (), scene.world, scene.policy
    )
    if refusal:
        return f"node {node} is not set DOWN: {refusal}"
    if view.gpus and not _keeps_gpus(scene):
        return (
            f"node {node} is not set DOWN: {_version(scene)} forgets a job's GPUs then; UnkillableStepTimeout frees it"
        )
    drained = "DRAIN" in view.flags
    reason = without_suffix(view.reason) if drained else with_action(scene.case.reason, "down")
    act = scene.attempt("set_down", node, "it alone keeps the job from starting; convicts nobody", reason=reason)
    return act or scene.failure("set_down", node)


def _keeps_gpus(scene: Scene) -> bool:
    version = scene.world.slurm_version
    return version is not None and version >= DOWN_KEEPS_GPUS_SINCE


def _version(scene: Scene) -> str:
    version = scene.world.slurm_version
    return "a Slurm of unknown version" if version is None else f"Slurm {version[0]}.{version[1]:02d}"


# -- PENDING ---------------------------------------------------------------------------------------------------------


def _start(scene: Scene, job: JobView) -> Step:
    """Exclude, start early, release: in this order, so that a held job is never let go without its exclusions."""
    exclude = _exclude(scene, job)
    if exclude is not None:
        return exclude
    first_restart = job.restarts == scene.case.restart + 1
    target = str(job.job_id)
    early = _start_early(scene, job) if first_restart else None
    if early is not None:
        return early
    if job.held:
        if not (first_restart and _held_by_us(scene, job)):
            return Finished("partly", f"{scene.job_name} was requeued and is held by others ({job.reason})")
        released = scene.attempt("release", target, f"{', '.join(scene.case.avoid)} excluded")
        stuck = f"{scene.failure('release', target)}; it stays held until: scontrol release {target}"
        return released or Finished("abandoned", stuck)
    waited_s = scene.waited_s()
    if waited_s <= scene.policy.limits.start_s_max:
        return Wait(f"{scene.job_name} is PENDING ({job.reason or 'no reason given'})")
    return Finished(
        "partly", f"{scene.job_name} was requeued and waits in the queue after {waited_s:.0f} s ({job.reason})"
    )


def _start_early(scene: Scene, job: JobView) -> Step | None:
    """Once. Where we died over it, Slurm's own delay still running (reason BeginTime) shows that it was not done."""
    tried = scene.records("start_in", str(job.job_id))
    if any(act.outcome == "ok" for act in tried):
        return None
    if any(act.outcome is None for act in tried) and job.reason != "BeginTime":
        return None
    why = "not to wait for the old credential"
    return scene.attempt("start_in", str(job.job_id), why, seconds=str(START_IN_S))


def _exclude(scene: Scene, job: JobView) -> Step | None:
    """What is to be avoided joins what the user excluded. None when it is done, or when drains do the same."""
    missing = [name for name in scene.case.avoid if name not in job.exclude and name in scene.world.nodes]
    if not missing:
        return None
    target = str(job.job_id)
    merged = sorted({*job.exclude, *missing})
    act = scene.attempt("set_exclude", target, f"not on {', '.join(missing)} again", nodes=",".join(merged))
    if act is not None or all(is_held(scene, name) for name in missing):
        return act
    held = f"; it stays held until: scontrol release {target}" if job.held else ""
    return Finished("abandoned", scene.failure("set_exclude", target) + held)


def _held_by_us(scene: Scene, job: JobView) -> bool:
    """A hold that a person set after ours was lifted has another reason."""
    asked = any(act.args.get("hold") == "true" for act in scene.records("requeue", str(job.job_id)))
    return asked and job.reason != "JobHeldUser"


# -- RUNNING ---------------------------------------------------------------------------------------------------------


def _arrive(scene: Scene, job: JobView) -> Step:
    wrong = sorted(set(job.nodes) & set(scene.case.avoid))
    if wrong:
        return Finished("abandoned", f"{scene.job_name} was requeued but runs on {', '.join(wrong)} again")
    where = f"{scene.job_name} runs on {len(job.nodes)} other nodes"
    if job.nodes:
        where = f"{scene.job_name} runs without {', '.join(scene.case.avoid)}"
    if scene.facts.stepping_elsewhere:
        return Finished("resolved", f"{where}, and its ranks advance")
    limits = scene.policy.limits
    if scene.waited_s() <= limits.start_s_max + limits.stepping_s_max:
        return Wait(f"{where}; its ranks have not been seen to advance yet")
    return Finished("partly", f"{where}, but its ranks were not seen to advance in {scene.waited_s():.0f} s")


# -- what was set DOWN -----------------------------------------------------------------------------------------------


def _undo_down(scene: Scene) -> Step | None:
    """Bring back one node that we set DOWN and that is still exactly so. None: there is none."""
    for record in scene.acts:
        if record.kind == "set_down" and _still_down(scene, record):
            return _bring_back(scene, record.target)
    return None


def _still_down(scene: Scene, record: ActRecord) -> bool:
    view = scene.world.nodes.get(record.target)
    return view is not None and "DOWN" in view.flags and is_exactly_ours(view.reason, record.args.get("reason", ""))


def _bring_back(scene: Scene, node: str) -> Step:
    gone = scene.facts.old_ranks_gone.get(node)
    if gone is True:
        act = scene.attempt("undown", node, "its old processes are gone")
        return act or Finished("partly", scene.failure("undown", node))
    state = "still live there" if gone is False else "may still live there"
    if scene.waited_s() <= scene.policy.limits.old_ranks_s_max:
        return Wait(f"node {node} is DOWN, old processes {state}")
    return Finished("partly", f"node {node} is left DOWN, old processes {state}: a person must look")
