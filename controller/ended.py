"""Attempts that are over: kept until the last words of their nodes are in, then judged, once.

A job may end within a second of its first fault, between two reports. Its frames stay on the nodes, so what counts
comes afterwards: each node's next report tells the last state of its ranks and how they ended. It is waited for since
Slurm said that the attempt is over, but no longer than GRACE_S, for a node that was lost never reports.

Judged is what Slurm says has failed. What somebody cancelled, what was preempted, what reached its time limit or its
end, is forgotten at once. A job that Slurm takes for running while all its ranks have gone is judged as it stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from controller.store.base import Incident
from diagnosis.contracts.exits import ENDED_BADLY, GONE, REQUEUED
from diagnosis.contracts.verdict import Verdict
from diagnosis.engine.history import JobHistory
from diagnosis.engine.live import GpusOfNode, Judged, examine, examine_ended
from remediation.policy.world import JobView, World

GRACE_S: Final = 15.0
"""More than the longest period of reports."""
GONE_AFTER_S: Final = 3.0
"""Slurm ends a job only after it has said so. A picture of it taken so long after the last rank went, in which the job
still runs, tells that Slurm had no hand in that."""
OVER_MAX: Final = 1024
Attempt = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Over:
    """An attempt that is over. `since`: when Slurm said so; `ended`, `lost_nodes` as in `Incident`."""

    history: JobHistory
    ended: str
    lost_nodes: tuple[str, ...]
    since: float

    @property
    def attempt(self) -> Attempt:
        """(job_id, restart)."""
        return self.history.job_id, self.history.restart

    def examine(self, gpus: GpusOfNode, now: float) -> Judged:
        """The verdict on it."""
        return examine_ended(self.history, gpus, now, self.ended, self.lost_nodes)


class EndedAttempts:
    """See the module. At most OVER_MAX; the oldest go first."""

    def __init__(self) -> None:
        self._over: dict[Attempt, Over] = {}

    def __contains__(self, attempt: Attempt) -> bool:
        return attempt in self._over

    def take(self, history: JobHistory, job: JobView | None, world: World) -> None:
        """An attempt that no longer runs, and its job as Slurm shows it now."""
        word = _word(history, job)
        if not word:
            return
        names = history.nodes()
        lost = {name for name in names if name in world.nodes and world.nodes[name].flags & {"DOWN", "NOT_RESPONDING"}}
        over = Over(history, word, tuple(sorted(lost)), world.taken_at)
        self._over[over.attempt] = over
        while len(self._over) > OVER_MAX:
            del self._over[next(iter(self._over))]

    def history(self, attempt: Attempt, node: str, uid: int) -> JobHistory | None:
        """Where the last words of `node` about an attempt go; None where nobody waits for them from it."""
        over = self._over.get(attempt)
        known = over is not None and over.history.uid == uid and node in over.history.nodes()
        return over.history if over is not None and known else None

    def due(self, heard: Mapping[str, float], now: float) -> list[Over]:
        """Those to be judged now; they are then forgotten. `heard`: when each node's newest report was made."""
        due = [
            over
            for over in self._over.values()
            if now - over.since >= GRACE_S or all(heard.get(node, 0.0) >= over.since for node in over.history.nodes())
        ]
        for over in due:
            del self._over[over.attempt]
        return due


def is_just_slow(incident: Incident) -> bool:
    """Whether an incident does not tell why its attempt ended: nobody acted on it, and slow is not stuck."""
    return incident.phase == "open" and incident.verdict.anomaly == "slow"


def _word(history: JobHistory, job: JobView | None) -> str:
    """How the attempt ended; "" where that is nobody's fault or not known."""
    if job is None or job.restarts is None:
        return ""
    if job.restarts != history.restart:
        return REQUEUED if job.restarts > history.restart else ""
    return job.state if job.state in ENDED_BADLY else ""


def examine_running(history: JobHistory, gpus: GpusOfNode, world: World, now: float) -> Judged:
    """The verdict on an attempt that runs in this picture of Slurm. Where no rank is left nothing can hang."""
    if not history.all_gone():
        return examine(history, gpus, now)
    if world.taken_at - _gone_at(history, now) >= GONE_AFTER_S:
        return examine_ended(history, gpus, now, GONE)
    return Judged(Verdict(job_id=history.job_id, anomaly="none"), None)


def _gone_at(history: JobHistory, now: float) -> float:
    """When the last rank ended."""
    ends = [rank.end.ended_ms for rank in history.ranks.values() if rank.end is not None]
    told = [at / 1000 for at in ends if at is not None] or [history.quiet_since or now]
    return max(told)
