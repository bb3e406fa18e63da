"""The backend that every Slurm has: its own commands.

One snapshot is one `scontrol show node -o` and two `squeue`; an act is one `scontrol update` of one object, since an
update of several nodes changes those before an unknown one and then fails. Before a node is written to it is read once
more: what somebody else holds by then is left alone. Slurm has no compare-and-set, so a hand that comes within those
milliseconds is not seen.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from diagnosis.contracts.errors import SlurmFault
from remediation.backends import command, parse
from remediation.policy import reason as reasons
from remediation.policy.world import NodeView, World

SNAPSHOT_BYTES_MAX: Final = 256 << 20
ANSWER_BYTES_MAX: Final = 1 << 20
START_IN_S_MIN: Final = 2
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_SIGNAL: Final = re.compile(r"[A-Z][A-Z0-9]{1,9}", re.ASCII)


class ScontrolBackend:
    """Implements `SlurmBackend`. `path`: the directory of Slurm's commands, None: found on PATH.

    Every method raises SlurmFault (see `command.run` for its reasons; also `unreadable`, `foreign`: the node is
    somebody else's) and ValueError for a name that no node, job or signal can have.
    """

    def __init__(
        self, *, path: Path | None = None, deadline_s: float = 10.0, clock: Callable[[], float] = time.time
    ) -> None:
        self._path = path
        self._deadline_s = deadline_s
        self._clock = clock

    # -- looking -----------------------------------------------------------------------------------------------------

    async def snapshot(self) -> World:
        """All nodes and all jobs, those that ended a while ago too. `taken_at`: before the first was asked."""
        taken_at = self._clock()
        squeue = ("squeue", "--noheader", "--all", "--states=all", "--local")
        nodes, jobs, excludes = await asyncio.gather(
            self._run("scontrol", "show", "node", "-o", bytes_max=SNAPSHOT_BYTES_MAX),
            self._run(*squeue, "-O", parse.JOB_FORMAT, bytes_max=SNAPSHOT_BYTES_MAX),
            self._run(*squeue, "-o", parse.EXCLUDE_FORMAT, bytes_max=SNAPSHOT_BYTES_MAX),
        )
        # In a thread: a big cluster takes tenths of a second, and the nodes' reports must not wait for that.
        return await asyncio.to_thread(lambda: World(taken_at, parse.nodes(nodes), parse.jobs(jobs, excludes)))

    async def _node(self, name: str) -> NodeView:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a node name")
        found = parse.nodes(await self._run("scontrol", "show", "node", "-o", name))
        if name not in found:
            raise SlurmFault(f"Slurm does not know node {name}", reason="unknown_node")
        return found[name]

    async def _job_name(self, job_id: int) -> str:
        """What to call the job so that nothing but it is meant; see `parse.names`."""
        listing = ("squeue", "--noheader", "--all", "--states=all", "--local", f"--jobs={job_id:d}")
        found = parse.names(await self._run(*listing, "-O", parse.NAME_FORMAT))
        for job in found:
            if job.job_id == job_id and job.text is not None:
                return job.text
        if any(job.job_id == job_id for job in found):
            raise SlurmFault(f"job {job_id} is part of a larger one and cannot be acted upon alone", reason="refused")
        raise SlurmFault(f"Slurm does not know job {job_id}", reason="unknown_job")

    # -- nodes -------------------------------------------------------------------------------------------------------

    async def drain(self, node: str, reason: str) -> None:
        """State=DRAIN. A node that is DOWN stays DOWN as well."""
        _check_reason(reason)
        await self._ours_or_free(node)
        await self._set_node(node, "DRAIN", reason)

    async def set_down(self, node: str, reason: str) -> None:
        """State=DOWN. A node that is drained stays drained as well."""
        _check_reason(reason)
        await self._ours_or_free(node)
        await self._set_node(node, "DOWN", reason)

    async def resume(self, node: str) -> None:
        """Undo drain and down."""
        view = await self._ours_or_free(node)
        if not view.held:
            raise SlurmFault(f"node {node} is neither drained nor down", reason="refused")
        await self._set_node(node, "RESUME")

    async def undown(self, node: str) -> None:
        """Undo DOWN alone.

        No state of 22.05 takes DOWN away and leaves DRAIN: RESUME and IDLE clear both, UNDRAIN the wrong one. So the
        drain is set again at once. Nothing is started there in between: a node that was DOWN does not count as
        responding until slurmctld has reached it.
        """
        view = await self._ours_or_free(node)
        if "DOWN" not in view.flags:
            raise SlurmFault(f"node {node} is not DOWN", reason="refused")
        await self._set_node(node, "RESUME")
        if "DRAIN" in view.flags:
            await self._set_node(node, "DRAIN", view.reason)

    async def _ours_or_free(self, node: str) -> NodeView:
        view = await self._node(node)
        if (view.reason or view.held) and not reasons.is_ours(view.reason):
            why = view.reason or "no reason given"
            raise SlurmFault(f"node {node} is held by somebody else: {why}", reason="foreign")
        return view

    async def _set_node(self, node: str, state: str, reason: str | None = None) -> None:
        words = [f"NodeName={node}", f"State={state}"]
        words += [f"Reason={reason}"] if reason is not None else []
        await self._run("scontrol", "update", *words)

    # -- jobs --------------------------------------------------------------------------------------------------------

    async def requeue(self, job_id: int, *, hold: bool) -> None:
        """Put a running batch job back into the queue. One that ended meanwhile is left alone.

        Without the word `Incomplete` a job that its user has just cancelled would be started again.
        """
        name = await self._job_name(job_id)
        await self._run("scontrol", "requeuehold" if hold else "requeue", "Incomplete", name)

    async def set_exclude(self, job_id: int, nodes: tuple[str, ...]) -> None:
        """ExcNodeList of a pending job; no nodes: it excludes none."""
        for node in nodes:
            if not _NAME.fullmatch(node):
                raise ValueError(f"{node!r} is not a node name")
        await self._set_job(job_id, f"ExcNodeList={parse.host_list(nodes)}")

    async def start_in(self, job_id: int, seconds: int) -> None:
        """StartTime of a pending job, so many seconds from now."""
        if seconds < START_IN_S_MIN:
            raise ValueError(f"a job starts {START_IN_S_MIN} seconds from now at the earliest")
        await self._set_job(job_id, f"StartTime=now+{seconds:d}")

    async def release(self, job_id: int) -> None:
        """Let a held job start."""
        await self._run("scontrol", "release", await self._job_name(job_id))

    async def signal(self, job_id: int, name: str) -> None:
        """A signal to the processes of all steps, not to the batch shell."""
        if not _SIGNAL.fullmatch(name):
            raise ValueError(f"{name!r} is not a signal")
        await self._run("scancel", f"--signal={name}", await self._job_name(job_id))

    async def _set_job(self, job_id: int, change: str) -> None:
        await self._run("scontrol", "update", f"JobId={await self._job_name(job_id)}", change)

    async def _run(self, name: str, *words: str, bytes_max: int = ANSWER_BYTES_MAX) -> str:
        program = name if self._path is None else str(self._path / name)
        return await command.run([program, *words], deadline_s=self._deadline_s, output_bytes_max=bytes_max)


def _check_reason(reason: str) -> None:
    parts = reasons.parse(reason)
    if parts is None or str(parts) != reason:
        raise ValueError(f"{reason!r} is not a reason of tocsin")
