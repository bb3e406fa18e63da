"""What a Slurm backend must do. One Protocol, one conformance suite against a real slurmctld.

Every call has a deadline and raises SlurmFault when Slurm refuses, fails or stays silent; nothing is ever assumed.
Names are validated before they leave this process. A backend remembers nothing: what it says is what Slurm says now.
"""

from __future__ import annotations

from typing import Protocol

from remediation.policy.world import World


class SlurmBackend(Protocol):
    """Reads one snapshot and performs single acts. All acts are idempotent on Slurm's side or checked by the caller."""

    async def snapshot(self) -> World:
        """All nodes and all jobs that are not long gone."""

    async def drain(self, node: str, reason: str) -> None:
        """State=DRAIN with the reason. The node finishes what it runs and gets nothing new."""

    async def set_down(self, node: str, reason: str) -> None:
        """State=DOWN with the reason. Slurm gives up on what still runs there."""

    async def resume(self, node: str) -> None:
        """Undo DRAIN or DOWN. The caller has checked that the reason is exactly ours."""

    async def undown(self, node: str) -> None:
        """Undo DOWN alone; a drain stays."""

    async def requeue(self, job_id: int, *, hold: bool) -> None:
        """Put a batch job back into the queue; `hold`: it will not start before `release`."""

    async def set_exclude(self, job_id: int, nodes: tuple[str, ...]) -> None:
        """Replace the job's ExcNodeList by `nodes` (the caller merges)."""

    async def start_in(self, job_id: int, seconds: int) -> None:
        """Make a pending job eligible `seconds` from now instead of after Slurm's own delay. At least 2.

        `StartTime=now` in the second of the requeue destroys the job: "Job credential revoked" (whole seconds).
        """

    async def release(self, job_id: int) -> None:
        """Release a held job."""

    async def signal(self, job_id: int, name: str) -> None:
        """Send a signal ("USR1") to the processes of the job's steps, not to the batch shell."""
