"""The cluster as observed at one moment: plain values that a backend fills and the policy reads.

Unknown is a value: a field that Slurm did not tell is None, and a `World` that could not be read does not exist (the
backend raises SlurmFault instead of returning an empty one).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

Version = tuple[int, int]
JOB_ENDED: Final = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "REVOKED",
        "TIMEOUT",
    }
)


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node. `flags`: Slurm's state words in upper case (`IDLE`, `DRAIN`, `DOWN`, `NOT_RESPONDING`, ...).

    `reason` is the reason alone (without `[user@time]`), "" when there is none; `reason_user` who set it.
    `gpus`: configured GPU count, 0 for a CPU node. `version`: of its slurmd, such as (22, 5).
    """

    name: str
    flags: frozenset[str]
    reason: str = ""
    reason_user: str | None = None
    gpus: int = 0
    partitions: tuple[str, ...] = ()
    boot_time: str | None = None
    slurmd_start_time: str | None = None
    version: Version | None = None

    @property
    def held(self) -> bool:
        """True while Slurm starts nothing on it: drained, draining, down or failing."""
        return bool(self.flags & {"DRAIN", "DOWN", "FAIL"})


@dataclass(frozen=True, slots=True)
class JobView:
    """One job. Identity is (`job_id`, `submit_time`): Slurm re-uses ids after a crash. Times as Slurm prints them.

    `state` is Slurm's long state word; a job being torn down is `COMPLETING`. `restarts` counts attempts before this.
    `nodes`, `exclude`: host names, expanded. `held`: priority zero, will not start until released.
    """

    job_id: int
    submit_time: str
    state: str
    reason: str = ""
    nodes: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    restarts: int | None = None
    uid: int | None = None
    user: str | None = None
    partition: str | None = None
    requeueable: bool | None = None
    batch: bool | None = None
    held: bool = False

    @property
    def ended(self) -> bool:
        """True when the job will not run again by itself."""
        return self.state in JOB_ENDED


@dataclass(frozen=True, slots=True)
class World:
    """One consistent-enough snapshot. `taken_at`: controller's clock, seconds since the epoch."""

    taken_at: float
    nodes: dict[str, NodeView] = field(default_factory=dict)
    jobs: dict[int, JobView] = field(default_factory=dict)

    @property
    def slurm_version(self) -> Version | None:
        """slurmctld's version at least: none of its nodes may be newer. None where no node tells."""
        return max((view.version for view in self.nodes.values() if view.version), default=None)
