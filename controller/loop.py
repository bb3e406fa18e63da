"""One cycle of the controller: look at Slurm, judge each job, decide, carry out, tell.

    verdict ──► incident (opened once per attempt) ──► decision, asked again each cycle while the verdict stands
            ──► case ──► steps, until finished ──► closed

Everything lasting is in the store; what is kept here can be lost. After a restart the open incidents are read back and
go on from what Slurm shows. A cycle that fails does nothing further and says why; the next one starts afresh.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol, cast

import structlog

from controller.acting import Actor
from controller.captures import Captures
from controller.control.pause import Pause
from controller.control.status import LoopStatus
from controller.ended import Over, examine_running, is_just_slow
from controller.gathered import GatheredParts
from controller.gathering import Channels, Gathering
from controller.registry import Attempt, Registry, current
from controller.settings import Settings
from controller.store.base import Incident, OutcomeWord, Store
from diagnosis.contracts.control import Evidence
from diagnosis.contracts.errors import OperatorFault, SlurmFault
from diagnosis.contracts.verdict import Verdict, says_the_same, worth_an_incident
from diagnosis.engine.live import Judged, suspects, suspicion
from remediation.backends.base import SlurmBackend
from remediation.policy.case import Finished
from remediation.policy.decide import Decision, decide
from remediation.policy.facts import Finding
from remediation.policy.guards import DAY_S, held_by_us
from remediation.policy.rules import Policy
from remediation.policy.world import World

SUSPICION_SHARE: Final = 0.6
"""Share of the hang bound after which suspects are asked what they are doing."""
OPEN_MAX: Final = 1_000_000
"""Open incidents are read back without exception: one that was forgotten would leave a job held."""
LOOKED_BACK_MAX: Final = 1000
RECOVERED_AFTER_S: Final = 30.0
FAULT_LOG_PERIOD_S: Final = 60.0
"""A fault that lasts is logged so often, not in every cycle."""
_log = structlog.get_logger("loop")


class Teller(Protocol):
    """The part of the notifier that is used here."""

    async def tell(self, incident: Incident, change: str, at: float) -> None:
        """Each change of an incident is told once, however often it is asked for."""


class ControlLoop:
    """See the module. `policy_source` gives the policy in force."""

    def __init__(
        self,
        *,
        store: Store,
        registry: Registry,
        backend: SlurmBackend,
        channels: Channels,
        pause: Pause,
        notifier: Teller,
        policy_source: Callable[[], Policy],
        settings: Settings,
        clock: Callable[[], float] = time.time,
        new_id: Callable[[], str] = lambda: secrets.token_hex(3),
    ) -> None:
        self._store = store
        self._registry = registry
        self._backend = backend
        self._pause = pause
        self._notifier = notifier
        self._policy = policy_source
        self._snapshot_period_s = settings.slurm.snapshot_period_s
        self._clock = clock
        self._gathering = Gathering(store, channels, new_id)
        self._parts = GatheredParts(store)
        self._captures = Captures(store)
        self._actor = Actor(store, registry, backend, pause, policy_source, self._look, clock)
        self._world: World | None = None
        self._open: dict[Attempt, Incident] = {}
        self._since: dict[Attempt, tuple[object, float]] = {}
        self._well_since: dict[Attempt, float] = {}
        self._given_up: dict[Attempt, str] = {}
        self._bugs: list[str] = []
        self.verdicts: dict[Attempt, Verdict] = {}
        self._judged: dict[Attempt, Judged] = {}
        self._read = False
        self._status = LoopStatus(mode=policy_source().mode)
        self._fault_logged_at = 0.0

    async def _read_back(self) -> None:
        """What was open when the controller ended goes on; what was to be told then is told, once."""
        for incident in await self._store.incidents(limit=LOOKED_BACK_MAX):
            if incident.outcome == "abandoned":
                self._given_up[(incident.job_id, incident.restart)] = incident.id
        for incident in await self._store.incidents(limit=OPEN_MAX, open_only=True):
            self._open[(incident.job_id, incident.restart)] = incident
            await self._notifier.tell(incident, "opened", self._clock())
            _log.info("resumed", incident=incident.id, phase=incident.phase, job=incident.job_id)
        self._read = True

    def status(self) -> LoopStatus:
        """How the newest cycle went."""
        return self._status

    async def accept_evidence(self, evidence: Evidence) -> None:
        """An answer of a node. Raises AgentFault where it was not asked."""
        await self._gathering.accept(evidence, self._clock())

    async def cycle(self) -> None:
        """One cycle. Never raises: what went wrong is in the status and the log."""
        began = time.monotonic()
        fault: str | None = None
        sentence = ""
        self._bugs = []
        try:
            with self._guarded("all jobs"):
                sentence = await self._cycle()
        except SlurmFault as error:
            fault = f"Slurm: {error}"
        except OperatorFault as error:
            fault = str(error)
        if fault is None and self._bugs:
            fault = f"bug in tocsin, please report it: {self._bugs[0]}"
        self._log_fault(fault)
        world = self._world
        self._status = LoopStatus(
            mode=self._policy().mode,
            cycles=self._status.cycles + 1,
            cycle_at=self._clock(),
            cycle_ms=round((time.monotonic() - began) * 1000, 1),
            sentence=sentence,
            fault=fault,
            world_at=world.taken_at if world else None,
            nodes_held=len(held_by_us(world)) if world else None,
            nodes_known=len(world.nodes) if world else None,
        )

    @contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """A bug must not silence the alarm: it is told, and only what it is about is left out of this cycle."""
        try:
            yield
        except (SlurmFault, OperatorFault):
            raise
        except Exception as error:  # noqa: BLE001 - the shell of the loop, and of each job in it
            if not self._bugs:
                _log.exception("bug", about=what)
            self._bugs.append(f"{what}: {type(error).__name__}: {error}")

    def _log_fault(self, fault: str | None) -> None:
        """A new fault at once, one that lasts once in a while, and its end."""
        now, before = self._clock(), self._status.fault
        if fault is None and before is not None:
            _log.info("cycle succeeds again")
        elif fault is not None and (before is None or now - self._fault_logged_at >= FAULT_LOG_PERIOD_S):
            self._fault_logged_at = now
            _log.warning("cycle failed", fault=fault)

    async def _cycle(self) -> str:
        if not self._read:
            await self._read_back()
        now = self._clock()
        world = self._world
        acting = any(incident.phase == "acting" for incident in self._open.values())
        due = world is None or now - world.taken_at >= self._snapshot_period_s
        if world is None or due or acting or self._registry.unconfirmed:
            world = await self._look()
        self._judge(world, now)
        for attempt, verdict in self.verdicts.items():
            with self._guarded(f"job {attempt[0]}"):
                self._suspect(attempt, now)
                await self._consider(attempt, verdict, world)
        for over in self._registry.ended.due(self._registry.heard(), now):
            with self._guarded(f"job {over.attempt[0]}"):
                await self._conclude(over, world, now)
        self._parts.hold(self._registry.arrivals(), self._registry.histories.keys())
        for attempt, incident in list(self._open.items()):
            with self._guarded(f"incident {incident.id}"):
                await self._keep_parts(attempt, incident, now)
                if incident.phase == "acting":
                    await self._advance(incident)
                elif attempt not in self.verdicts and attempt not in self._registry.ended:
                    await self._leave(attempt, incident, world)
        return self._sentence()

    def _judge(self, world: World, now: float) -> None:
        """A verdict on each attempt that runs."""
        self.verdicts, self._judged, gpus = {}, {}, self._registry.gpus(now)
        for attempt, history in self._registry.histories.items():
            if current(world.jobs.get(attempt[0]), attempt):
                with self._guarded(f"job {attempt[0]}"):
                    judged = self._judged[attempt] = examine_running(history, gpus, world, now)
                    self.verdicts[attempt] = judged.verdict

    async def _look(self) -> World:
        world = self._world = await self._backend.snapshot()
        self._registry.confirm(world)
        restarts = {job.job_id: job.restarts for job in world.jobs.values()}
        self._given_up = {key: number for key, number in self._given_up.items() if restarts.get(key[0]) == key[1]}
        return world

    def _suspect(self, attempt: Attempt, now: float) -> None:
        """Ask early, since afterwards there is nothing left to ask."""
        history = self._registry.histories[attempt]
        if self.verdicts[attempt].anomaly == "slow":
            self._gathering.arm(history, now)
        hang = suspicion(history, now, SUSPICION_SHARE)
        if hang is not None:
            self._gathering.ask(history, suspects(history, hang), now)
        elif attempt not in self._open:
            self._gathering.forget(attempt)
        self._gathering.ping(history, hang or self.verdicts[attempt], now)

    async def _consider(self, attempt: Attempt, verdict: Verdict, world: World) -> None:
        now = self._clock()
        incident = self._open.get(attempt)
        if not worth_an_incident(verdict):
            if incident is not None and incident.phase == "open" and self._is_well(attempt, incident):
                await self._maybe_recovered(attempt, incident, now)
            self._since.pop(attempt, None)
            return
        self._well_since.pop(attempt, None)
        since = self._stands_since(attempt, verdict, now)
        if incident is None:
            incident = await self._open_incident(attempt, verdict, world, since)
        elif incident.phase == "open":
            await self._decide_again(attempt, incident, verdict, world, since)

    async def _conclude(self, over: Over, world: World, now: float) -> None:
        """The verdict on an attempt that is over. An open incident says already why, unless it was just slow."""
        attempt, incident = over.attempt, self._open.get(over.attempt)
        if attempt[0] not in world.jobs or (incident is not None and not is_just_slow(incident)):
            return
        judged = self._judged[attempt] = over.examine(self._registry.gpus(now), now)
        if worth_an_incident(judged.verdict):
            if incident is not None:
                await self._leave(attempt, incident, world)
            await self._open_incident(attempt, judged.verdict, world, now)

    def _stands_since(self, attempt: Attempt, verdict: Verdict, now: float) -> float:
        names = (verdict.class_, tuple(sorted((c.kind, c.rank, c.node, c.cause) for c in verdict.culprits)))
        known = self._since.get(attempt)
        if known is None or known[0] != names:
            known = self._since[attempt] = (names, now)
        return known[1]

    async def _decision(self, attempt: Attempt, number: str, verdict: Verdict, world: World, since: float) -> Decision:
        now = self._clock()
        job = world.jobs.get(attempt[0])
        policy = self._policy()
        if self._pause.state() is not None:
            policy = policy.model_copy(update={"paused": True})
        finding = Finding(
            incident=number,
            submit_time=job.submit_time if job else "",
            restart=attempt[1],
            since=since,
            open_cases=tuple(one.case for one in self._open.values() if one.phase == "acting" and one.case),
            recent=tuple(await self._store.acts_since(now - DAY_S)),
            given_up=self._given_up.get(attempt),
        )
        return decide(verdict, job, world, finding, policy, now)

    async def _open_incident(self, attempt: Attempt, verdict: Verdict, world: World, since: float) -> Incident:
        now = self._clock()
        number = self._gathering.number(attempt)
        while await self._store.incident(number) is not None:  # six digits meet again some day
            self._gathering.forget(attempt)
            number = self._gathering.number(attempt)
        decision = await self._decision(attempt, number, verdict, world, since)
        job = world.jobs[attempt[0]]
        incident = Incident(
            id=number,
            job_id=job.job_id,
            submit_time=job.submit_time,
            restart=attempt[1],
            user=job.user,
            nodes=list(job.nodes),
            opened_at=now,
            mode=self._policy().mode,
            verdict=verdict,
            timeline=[(now, verdict.summary)],
        )
        await self._store.add_incident(incident)
        self._open[attempt] = incident
        await self._gathering.opened(number, now)
        _log.info("incident", incident=number, job=job.job_id, summary=verdict.summary, decision=decision.why)
        await self._take(incident, verdict, decision)
        await self._notifier.tell(incident, "opened", now)
        await self._keep_inputs(attempt, incident)
        return incident

    async def _decide_again(
        self, attempt: Attempt, incident: Incident, verdict: Verdict, world: World, since: float
    ) -> None:
        """A wait may be over, a witness may have come, a person may have resumed."""
        decision = await self._decision(attempt, incident.id, verdict, world, since)
        stronger = len(verdict.culprits) > 0 and (
            not incident.verdict.culprits or verdict.action.kind != incident.verdict.action.kind
        )
        if decision.verb == "act" or stronger:
            incident.mode = self._policy().mode
            await self._take(incident, verdict, decision)
            await self._notifier.tell(
                incident, "acting" if decision.verb == "act" else verdict.action.kind, self._clock()
            )
            await self._keep_inputs(attempt, incident)

    async def _keep_inputs(self, attempt: Attempt, incident: Incident) -> None:
        """After everything else, so that nothing waits for it."""
        judged = self._judged[attempt]
        if judged.incident is not None:
            await self._captures.keep(incident.id, judged.incident, judged.verdict, self._clock())

    async def _keep_parts(self, attempt: Attempt, incident: Incident, now: float) -> None:
        """What nodes gathered by themselves goes into the incident; a verdict that it does not change then cites it."""
        history, judged = self._registry.histories.get(attempt), self._judged.get(attempt)
        suspected = {culprit.node for culprit in incident.verdict.culprits if culprit.node is not None}
        quiet_since = history.quiet_since if history is not None else None
        kept = await self._parts.keep(attempt, incident.id, suspected, quiet_since, now)
        if not kept or judged is None:
            return
        if says_the_same(judged.verdict, incident.verdict):
            incident.verdict = judged.verdict
            await self._store.save_incident(incident)
            await self._keep_inputs(attempt, incident)

    async def _take(self, incident: Incident, verdict: Verdict, decision: Decision) -> None:
        incident.verdict, incident.decision = verdict, decision.why
        if decision.verb == "act":
            incident.phase, incident.case = "acting", decision.case
        await self._store.save_incident(incident)
        await self._store.add_line(incident.id, self._clock(), f"{decision.verb}: {decision.why}")

    async def _advance(self, incident: Incident) -> None:
        now = self._clock()
        if self._gathering.waiting(incident.id, now):
            return
        world = self._world if self._world is not None else await self._look()
        step = await self._actor.advance(incident, world)
        if isinstance(step, Finished):
            await self._close(incident, cast(OutcomeWord, step.outcome), step.text)
        elif not incident.timeline or incident.timeline[-1][1] != step.why:
            at = self._clock()  # after the acts that led here, as it stands in the timeline
            incident.timeline.append((at, step.why))
            await self._store.add_line(incident.id, at, step.why)

    def _is_well(self, attempt: Attempt, incident: Incident) -> bool:
        """Whether no fault means that it is over. After a restart, or with a job watched anew, it may mean that nothing
        is known yet: a job that was slow before has no healthy past then, and one that hangs has made no round."""
        if incident.verdict.anomaly == "hang":
            return self._registry.moved_since(attempt, incident.opened_at)
        return self._registry.histories[attempt].first_seen_at < incident.opened_at

    async def _maybe_recovered(self, attempt: Attempt, incident: Incident, now: float) -> None:
        since = self._well_since.setdefault(attempt, now)
        if now - since >= RECOVERED_AFTER_S:
            await self._close(incident, "recovered", "the job makes progress again by itself")

    async def _leave(self, attempt: Attempt, incident: Incident, world: World) -> None:
        """An incident that nobody acts on ends with its attempt."""
        job = world.jobs.get(attempt[0])
        if job is None or job.ended or job.restarts != attempt[1]:
            state = "is no longer known to Slurm" if job is None else f"is now {job.state}"
            await self._close(incident, "observed", f"the attempt ended without us: the job {state}")

    async def _close(self, incident: Incident, outcome: OutcomeWord, text: str) -> None:
        now = self._clock()
        incident.phase, incident.outcome, incident.outcome_text, incident.closed_at = "closed", outcome, text, now
        await self._store.add_line(incident.id, now, f"{outcome}: {text}")
        await self._notifier.tell(incident, "closed", now)  # before it is saved: a crash between tells again, not never
        await self._store.save_incident(incident)
        attempt = (incident.job_id, incident.restart)
        if outcome == "abandoned":
            self._given_up[attempt] = incident.id
        self._open.pop(attempt, None)
        self._since.pop(attempt, None)
        self._well_since.pop(attempt, None)
        self._gathering.forget(attempt)
        _log.info("closed", incident=incident.id, outcome=outcome, text=text)

    def _sentence(self) -> str:
        acting = sum(incident.phase == "acting" for incident in self._open.values())
        sick = sum(verdict.anomaly != "none" for verdict in self.verdicts.values())
        paused = "PAUSE: " if self._pause.state() is not None or self._policy().paused else ""
        watched = f"{len(self.verdicts)} job{'s' if len(self.verdicts) != 1 else ''} watched"
        return f"{paused}{watched}, {sick} with an anomaly, {acting} being acted on"
