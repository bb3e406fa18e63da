"""Slurm in memory: nodes and batch jobs as far as a case touches them, on a clock that the test moves.

It obeys the backend's Protocol and imitates what was measured of the real one (22.05): a requeue counts the restart at
once, leaves the job COMPLETING until its nodes let go, then PENDING with a delay of the credential's life; a node set
DOWN is given up on, and a plainly requeued job then starts at once; before 24.11 a job whose last node was given up on
has lost its GPUs and fails when it starts; RESUME of a node in service is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from diagnosis.contracts.errors import SlurmFault
from remediation.policy.reason import is_ours
from remediation.policy.world import JobView, NodeView, World

LET_GO_S: Final = 0.1
REQUEUED_HELD: Final = "job requeued in held state"


@dataclass(slots=True)
class FakeJob:
    """One job. `begin_at`: not before; `let_go_at`: when its old nodes (`view.nodes`, COMPLETING) are free."""

    view: JobView
    size: int
    begin_at: float = 0.0
    let_go_at: float | None = None
    gpus_forgotten: bool = False
    signals: list[str] = field(default_factory=list)


class FakeSlurm:
    """See the module. `frozen`: nodes whose processes do not end; `failures`: the next calls of a method that fail.

    `version` is what it says of itself, and whether it has the fault that 24.11 has not.
    """

    def __init__(self, nodes: int = 8, *, now: float = 1_000_000.0, credential_s: float = 120.0) -> None:
        self.now = now
        self.credential_s = credential_s
        self.nodes = {
            name: NodeView(name, frozenset({"IDLE"}), gpus=8, partitions=("main",))
            for name in (f"gpu{number:03d}" for number in range(1, nodes + 1))
        }
        self.jobs: dict[int, FakeJob] = {}
        self.version = (24, 11)
        self.frozen: set[str] = set()
        self.failures: dict[str, int] = {}
        self.calls: list[tuple[str, str]] = []

    # -- what a test does --------------------------------------------------------------------------------------------

    def submit(
        self,
        *nodes: str,
        job_id: int = 42,
        exclude: tuple[str, ...] = (),
        batch: bool = True,
        requeueable: bool = True,
    ) -> JobView:
        """A job that runs on these nodes."""
        view = JobView(
            job_id=job_id,
            submit_time=self._clock(),
            state="RUNNING",
            nodes=nodes,
            exclude=exclude,
            restarts=0,
            uid=1000,
            user="ada",
            partition="main",
            requeueable=requeueable,
            batch=batch,
        )
        self.jobs[job_id] = FakeJob(view, len(nodes))
        return view

    def advance(self, seconds: float) -> None:
        """Let time pass: nodes let go, jobs become pending and start."""
        self.now += seconds
        for job in self.jobs.values():
            self._let_go(job)
            self._start(job)

    def change_node(self, name: str, *, add: str = "", remove: str = "", reason: str | None = None) -> None:
        """Somebody else's hand on a node: flags separated by spaces."""
        view = self.nodes[name]
        flags = (view.flags | set(add.split())) - set(remove.split())
        self.nodes[name] = replace(view, flags=frozenset(flags), reason=view.reason if reason is None else reason)

    def cancel(self, job_id: int) -> None:
        """What its user does."""
        self.change_job(job_id, lambda view: replace(view, state="CANCELLED", held=False))

    def requeue_by_user(self, job_id: int) -> None:
        """What its user does, too."""
        if self.jobs[job_id].view.state == "RUNNING":
            self._requeue(self.jobs[job_id], hold=False)

    def change_job(self, job_id: int, change: Callable[[JobView], JobView]) -> None:
        """Somebody else's hand on a job."""
        self.jobs[job_id].view = change(self.jobs[job_id].view)

    # -- the Protocol ------------------------------------------------------------------------------------------------

    async def snapshot(self) -> World:
        self._may_fail("snapshot", "")
        nodes = {name: replace(view, version=self.version) for name, view in self.nodes.items()}
        return World(self.now, nodes, {number: job.view for number, job in self.jobs.items()})

    async def drain(self, node: str, reason: str) -> None:
        self._may_fail("drain", node)
        self._own(node, held_only=False)
        self.change_node(node, add="DRAIN", reason=reason)

    async def set_down(self, node: str, reason: str) -> None:
        self._may_fail("set_down", node)
        self._own(node, held_only=False)
        self.change_node(node, add="DOWN", remove="IDLE", reason=reason)
        for job in self.jobs.values():
            if job.view.state == "RUNNING" and node in job.view.nodes:
                self._requeue(job, hold=False)
            if job.view.state == "COMPLETING" and node in job.view.nodes:
                job.view = replace(job.view, nodes=tuple(name for name in job.view.nodes if name != node))
                job.begin_at = self.now
                job.gpus_forgotten = not job.view.nodes and self.version < (24, 11)
            self._let_go(job)

    async def resume(self, node: str) -> None:
        self._may_fail("resume", node)
        self._own(node, held_only=True)
        self.change_node(node, add="IDLE", remove="DOWN DRAIN", reason="")

    async def undown(self, node: str) -> None:
        self._may_fail("undown", node)
        self._own(node, held_only=True)
        if "DOWN" not in self.nodes[node].flags:
            raise SlurmFault(f"node {node} is not DOWN", reason="refused")
        reason = self.nodes[node].reason if "DRAIN" in self.nodes[node].flags else ""
        self.change_node(node, add="IDLE", remove="DOWN", reason=reason)

    async def requeue(self, job_id: int, *, hold: bool) -> None:
        self._may_fail("requeue", str(job_id))
        job = self._job(job_id)
        if not job.view.batch:
            raise SlurmFault(f"Only batch jobs are accepted or processed for job {job_id}", reason="refused")
        if not job.view.requeueable:
            raise SlurmFault(f"Requested operation is presently disabled for job {job_id}", reason="refused")
        if job.view.state == "RUNNING":
            self._requeue(job, hold=hold)

    async def set_exclude(self, job_id: int, nodes: tuple[str, ...]) -> None:
        self._may_fail("set_exclude", str(job_id))
        job = self._pending(job_id)
        if unknown := sorted(set(nodes) - set(self.nodes)):
            raise SlurmFault(f"Invalid node name specified for job {job_id}: {unknown[0]}", reason="unknown_node")
        job.view = replace(job.view, exclude=nodes)

    async def start_in(self, job_id: int, seconds: int) -> None:
        self._may_fail("start_in", str(job_id))
        if seconds < 2:
            raise ValueError("a job starts 2 seconds from now at the earliest")
        self._pending(job_id).begin_at = self.now + seconds

    async def release(self, job_id: int) -> None:
        self._may_fail("release", str(job_id))
        job = self._job(job_id)
        waits = "BeginTime" if self.now < job.begin_at else "None"
        job.view = replace(job.view, held=False, reason=waits if job.view.held else job.view.reason)

    async def signal(self, job_id: int, name: str) -> None:
        self._may_fail("signal", str(job_id))
        self._job(job_id).signals.append(name)

    # -- how it works ------------------------------------------------------------------------------------------------

    def _may_fail(self, method: str, target: str) -> None:
        self.calls.append((method, target))
        if self.failures.get(method, 0) > 0:
            self.failures[method] -= 1
            raise SlurmFault("slurm_update error: Unable to contact slurm controller", reason="unreachable")

    def _own(self, node: str, *, held_only: bool) -> None:
        view = self.nodes.get(node)
        if view is None:
            raise SlurmFault("Invalid node name specified", reason="unknown_node")
        if view.reason and not is_ours(view.reason):
            raise SlurmFault(f"node {node} is held by somebody else: {view.reason}", reason="foreign")
        if held_only and not view.held:
            raise SlurmFault("Invalid node state specified", reason="refused")

    def _job(self, job_id: int) -> FakeJob:
        if job_id not in self.jobs:
            raise SlurmFault(f"Invalid job id specified for job {job_id}", reason="unknown_job")
        return self.jobs[job_id]

    def _pending(self, job_id: int) -> FakeJob:
        job = self._job(job_id)
        if job.view.state != "PENDING":
            raise SlurmFault(f"Job is no longer pending execution for job {job_id}", reason="refused")
        return job

    def _requeue(self, job: FakeJob, *, hold: bool) -> None:
        job.let_go_at = self.now + LET_GO_S
        job.begin_at = self.now + self.credential_s
        job.view = replace(
            job.view,
            state="COMPLETING",
            restarts=(job.view.restarts or 0) + 1,
            held=hold,
            reason=REQUEUED_HELD if hold else "None",
        )

    def _let_go(self, job: FakeJob) -> None:
        if job.view.state != "COMPLETING" or job.let_go_at is None:
            return
        left = job.view.nodes
        if self.now >= job.let_go_at:
            left = tuple(name for name in left if name in self.frozen)
        job.view = replace(job.view, nodes=left)
        if not left:
            reason = job.view.reason if job.view.held else "BeginTime"
            job.view = replace(job.view, state="PENDING", submit_time=self._clock(), reason=reason)

    def _start(self, job: FakeJob) -> None:
        view = job.view
        if view.state != "PENDING" or view.held or self.now < job.begin_at:
            return
        busy = {name for other in self.jobs.values() if other is not job for name in other.view.nodes}
        free = [
            name
            for name, node in sorted(self.nodes.items())
            if not node.held and name not in view.exclude and name not in busy and name not in self.frozen
        ]
        if len(free) < job.size:
            job.view = replace(view, reason="Resources")
            return
        state = "FAILED" if job.gpus_forgotten else "RUNNING"
        job.view = replace(view, state=state, nodes=tuple(free[: job.size]), reason="None")

    def _clock(self) -> str:
        return f"T{self.now:.3f}"
