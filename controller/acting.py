"""Carrying a case out: one step at a time, the intent in the ledger before each act and the outcome after it.

The plan (`remediation.policy.plan`) is asked with what Slurm shows now; nothing is remembered here. Slurm is looked at
again after every act, and the pause file and the policy are read again before every act.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Final, Literal

import structlog

from controller.control.pause import Pause
from controller.registry import Registry
from controller.store.base import Incident, Store
from diagnosis.contracts.errors import SlurmFault
from remediation.backends.base import SlurmBackend
from remediation.backends.perform import perform
from remediation.policy.case import Act, Case, Finished, Wait
from remediation.policy.facts import Facts
from remediation.policy.plan import next_step
from remediation.policy.rules import Policy
from remediation.policy.world import World

STEPS_PER_CYCLE_MAX: Final = 12
_log = structlog.get_logger("acting")


class Actor:
    """`look` takes a fresh snapshot of Slurm. Raises nothing of Slurm's: a failed act is written down as failed."""

    def __init__(
        self,
        store: Store,
        registry: Registry,
        backend: SlurmBackend,
        pause: Pause,
        policy_source: Callable[[], Policy],
        look: Callable[[], Awaitable[World]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._registry = registry
        self._backend = backend
        self._pause = pause
        self._policy = policy_source
        self._look = look
        self._clock = clock

    async def advance(self, incident: Incident, world: World) -> Finished | Wait:
        """Do what can be done now for an incident's case. Raises SlurmFault when Slurm cannot be looked at."""
        case = incident.case
        assert case is not None
        for _ in range(STEPS_PER_CYCLE_MAX):
            now = self._clock()
            acts = await self._store.acts(incident.id)
            step = next_step(case, acts, world, self._facts(case, world, now), self._policy_now(), now)
            if not isinstance(step, Act):
                return step
            await self._do(incident, step)
            world = await self._look()
        return Wait("there is more to do in the next cycle")

    def _policy_now(self) -> Policy:
        policy = self._policy()
        return policy.model_copy(update={"paused": True}) if self._pause.state() is not None else policy

    def _facts(self, case: Case, world: World, now: float) -> Facts:
        job = world.jobs.get(case.job_id)
        later = job.restarts if job and job.restarts is not None and job.restarts > case.restart else None
        attempt = (case.job_id, case.restart)
        return Facts(
            stepping_elsewhere=later is not None and self._registry.stepping(case.job_id, later),
            recovered=case.anomaly == "hang" and self._registry.moved_since(attempt, case.decided_at),
            old_ranks_gone={node: self._registry.ranks_gone(node, attempt, now) for node in case.avoid},
        )

    async def _do(self, incident: Incident, act: Act) -> None:
        began = self._clock()
        seq = await self._store.intend(incident.id, act.kind, act.target, act.args, act.why, began)
        outcome: Literal["ok", "failed"] = "ok"
        detail = ""
        try:
            await perform(self._backend, act)
        except SlurmFault as fault:
            outcome, detail = "failed", str(fault)
        done = self._clock()
        await self._store.conclude(seq, outcome, detail, done)
        words = f"{act.kind} {act.target}: {outcome}{f': {detail}' if detail else ''} ({act.why})"
        await self._store.add_line(incident.id, done, words)
        _log.info("act", incident=incident.id, kind=act.kind, target=act.target, outcome=outcome, detail=detail)
