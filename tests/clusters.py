"""One face for Slurm in memory and for the lab's real Slurm, so that one suite holds both to the same behaviour."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from remediation.backends.base import SlurmBackend
from remediation.backends.fake import FakeSlurm
from remediation.backends.scontrol import ScontrolBackend
from remediation.policy.world import JobView, World
from tests.lab.cluster import Lab

COMMANDS = ("scontrol", "squeue", "scancel")
WITHIN_S = 45.0


class Cluster(Protocol):
    """Six nodes `gpu001` to `gpu006`, and a hand on them that is not the backend's."""

    backend: SlurmBackend

    def submit(self, nodes: int, *, exclude: str = "", batch: bool = True, requeue: bool = True) -> int:
        """A job that runs for long; returns its id."""

    def cancel(self, job_id: int) -> None:
        """What its user does."""

    def hold_node(self, node: str, reason: str) -> None:
        """What an administrator does: drain it."""

    def freeze(self, node: str) -> None:
        """The node lets go of nothing any more."""

    def thaw(self, node: str) -> None:
        """And is well again."""

    def now(self) -> float: ...

    async def rest(self) -> None:
        """Let a little time pass."""


async def until(cluster: Cluster, true: Callable[[World], bool], within_s: float = WITHIN_S) -> World:
    """The first picture of which it is true. Raises AssertionError after `within_s` of the cluster's own time."""
    deadline = cluster.now() + within_s
    while True:
        world = await cluster.backend.snapshot()
        if true(world):
            return world
        assert cluster.now() < deadline, f"not within {within_s} s: {world.jobs} {world.nodes}"
        await cluster.rest()


async def until_job(cluster: Cluster, job_id: int, state: str, restarts: int | None = None) -> JobView:
    """The job once it is in that state, in that attempt."""

    def there(world: World) -> bool:
        job = world.jobs.get(job_id)
        return job is not None and job.state == state and restarts in (None, job.restarts)

    return (await until(cluster, there)).jobs[job_id]


class FakeCluster:
    """Slurm in memory. Its backend is Slurm itself."""

    def __init__(self) -> None:
        self.slurm = FakeSlurm(6)
        self.backend: SlurmBackend = self.slurm
        self._next = 1

    def submit(self, nodes: int, *, exclude: str = "", batch: bool = True, requeue: bool = True) -> int:
        excluded = tuple(exclude.split(",")) if exclude else ()
        free = [name for name in self.slurm.nodes if name not in excluded][:nodes]
        job_id = self._next
        self._next += 1
        self.slurm.submit(*free, job_id=job_id, exclude=excluded, batch=batch, requeueable=requeue)
        return job_id

    def cancel(self, job_id: int) -> None:
        self.slurm.cancel(job_id)

    def hold_node(self, node: str, reason: str) -> None:
        self.slurm.change_node(node, add="DRAIN", reason=reason)

    def freeze(self, node: str) -> None:
        self.slurm.frozen.add(node)

    def thaw(self, node: str) -> None:
        self.slurm.frozen.discard(node)

    def now(self) -> float:
        return self.slurm.now

    async def rest(self) -> None:
        self.slurm.advance(0.25)


class LabCluster:
    """The lab's Slurm, reached through commands of the controller's machine."""

    def __init__(self, lab: Lab, directory: Path) -> None:
        self.lab = lab
        self.backend: SlurmBackend = ScontrolBackend(path=enter_commands(lab, directory), deadline_s=20)
        self.script = directory / "job.sh"
        self.script.write_text("#!/bin/bash\nsrun sleep 1000\nsleep 1000\n")
        self._frozen: set[str] = set()

    def submit(self, nodes: int, *, exclude: str = "", batch: bool = True, requeue: bool = True) -> int:
        if batch:
            excluded = exclude or False
            return self.lab.submit(self.script, nodes=nodes, exclude=excluded, requeue=requeue, no_requeue=not requeue)
        before = self._job_ids()
        self.lab.popen_controller(["srun", f"-N{nodes}", "sleep", "1000"], name="srun")
        deadline = time.monotonic() + WITHIN_S
        while not (new := self._job_ids() - before):
            assert time.monotonic() < deadline, "srun got no job"
        return new.pop()

    def cancel(self, job_id: int) -> None:
        self.lab.run("scancel", str(job_id))

    def hold_node(self, node: str, reason: str) -> None:
        self.lab.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}")

    def freeze(self, node: str) -> None:
        self.lab.node(node).kill_slurmd()
        self._frozen.add(node)

    def thaw(self, node: str) -> None:
        self.lab.node(node).start_slurmd()
        self._frozen.discard(node)

    def now(self) -> float:
        return time.time()

    async def rest(self) -> None:
        await asyncio.sleep(0.1)

    def restart_slurmctld(self) -> None:
        """Stop it in order, so that it saves its state, and start it again."""
        self.lab.run("scontrol", "shutdown", "slurmctld")
        self.lab._daemons["slurmctld"].wait(20)
        self.lab.start_slurmctld()

    def tidy(self) -> None:
        """Everything as it was: no job, every node in service."""
        for node in sorted(self._frozen):
            self.thaw(node)
        self.lab.cancel_all()
        for node in self.lab.node_names:
            self.lab.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
        self.lab.wait_idle(self.lab.node_names)

    def _job_ids(self) -> set[int]:
        return {int(number) for number in self.lab.run("squeue", "-h", "-o", "%A").stdout.split()}


def enter_commands(lab: Lab, directory: Path, names: Iterable[str] = COMMANDS) -> Path:
    """A directory with Slurm's commands that run on the controller's machine and know no other cluster."""
    place = directory / "commands"
    place.mkdir(exist_ok=True)
    before = " ".join(lab.network.enter(None))
    for name in names:
        path = place / name
        path.write_text(f'#!/bin/sh\nexport SLURM_CONF={lab.slurm_conf}\nexec {before} {name} "$@"\n')
        path.chmod(0o755)
    return place
