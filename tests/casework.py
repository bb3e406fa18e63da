"""A case carried out against a backend, as a control loop does it, with the ledger in memory and crashes on demand."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from diagnosis.contracts.errors import SlurmFault
from remediation.backends.base import SlurmBackend
from remediation.backends.perform import perform
from remediation.policy.case import Act, ActRecord, Case, Finished, Step
from remediation.policy.facts import Facts
from remediation.policy.plan import next_step
from remediation.policy.rules import Policy
from remediation.policy.world import World

STEPS_MAX = 2000


class Died(Exception):
    """The controller was killed here."""


@dataclass(slots=True)
class Casework:
    """One controller's life after another. `look`: what the node daemons see; `clock`: seconds; `rest`: let time pass.

    `die_before`, `die_after`: ordinals of acts (from 0) before or after whose call the controller is killed; in either
    case the intent has been written and no outcome follows.
    """

    case: Case
    policy: Policy
    backend: SlurmBackend
    look: Callable[[World], Facts]
    clock: Callable[[], float]
    rest: Callable[[], Awaitable[None]]
    die_before: frozenset[int] = frozenset()
    die_after: frozenset[int] = frozenset()
    acts: list[ActRecord] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)

    async def step(self) -> Step:
        """Look, ask, and do it."""
        world = await self.backend.snapshot()
        step = next_step(self.case, self.acts, world, self.look(world), self.policy, self.clock())
        if isinstance(step, Act):
            await self._do(step)
        return step

    async def run(self) -> Finished:
        """Until the end, whoever dies on the way."""
        for _ in range(STEPS_MAX):
            try:
                step = await self.step()
            except Died:
                continue
            if isinstance(step, Finished):
                return step
            if not isinstance(step, Act):
                self.waits.append(step.why)
                await self.rest()
        raise AssertionError(f"no end after {STEPS_MAX} steps: {self.waits[-3:]}")

    async def _do(self, act: Act) -> None:
        ordinal = len(self.acts)
        record = ActRecord(ordinal + 1, self.case.incident, act.kind, act.target, act.args, self.clock(), why=act.why)
        self.acts.append(record)
        if ordinal in self.die_before:
            raise Died
        try:
            await perform(self.backend, act)
            outcome, detail = "ok", ""
        except SlurmFault as fault:
            outcome, detail = "failed", str(fault)
        if ordinal in self.die_after:
            raise Died
        self.acts[-1] = replace(record, outcome=outcome, detail=detail, concluded_at=self.clock())

    def kinds(self) -> list[str]:
        """The acts in their order, by kind."""
        return [act.kind for act in self.acts]


def look_at(job_id: int, restart: int, *, gone: bool | None = True) -> Callable[[World], Facts]:
    """Node daemons that see ranks advance wherever a later attempt runs."""

    def look(world: World) -> Facts:
        job = world.jobs.get(job_id)
        stepping = job is not None and job.state == "RUNNING" and (job.restarts or 0) > restart
        return Facts(stepping_elsewhere=stepping, old_ranks_gone=dict.fromkeys(world.nodes, gone))

    return look
