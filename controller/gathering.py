"""Evidence on suspicion: what the suspects' processes are doing, asked before anybody ends them.

A suspicion is earlier than a verdict. The incident's number is given out with the first question, so that the answers
find their incident when it is opened; if the job moves on, number and answers are forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec
import structlog

from controller.registry import Attempt
from controller.store.base import Store
from diagnosis.contracts.control import ArmEvent, CollectEvent, ControlEvent, Evidence, GatherEvent, PingEvent
from diagnosis.contracts.errors import AgentFault
from diagnosis.contracts.verdict import Verdict
from diagnosis.engine.history import JobHistory
from diagnosis.engine.probes import pairs_to_ping

WAIT_S: Final = 5.0
"""How long an act waits for answers that were asked for."""
ANSWERS_MAX: Final = 64
RAS_NODES_MAX: Final = 8
ARM_AGAIN_S: Final = 60.0
"""A daemon that was asked too early drops the request, and will be asked again."""
PING_AGAIN_S: Final = 60.0
PINGS_MAX: Final = 3
"""So often the paths of an attempt are pinged that stays suspected."""
PINGS_FORGET_S: Final = 600.0
PATH_DOUBTED: Final = {"hang": ("H3", None), "slow": ("S2", "S3")}
"""By kind of anomaly, the classes that may be a path's doing."""
KIND: Final = "processes"
_log = structlog.get_logger("gathering")


class Channels(Protocol):
    """The part of the control streams that is used here."""

    def send(self, node: str, event: ControlEvent) -> bool:
        """False: the node's daemon does not listen now."""


@dataclass(slots=True)
class _Question:
    incident: str
    asked_at: float
    asked: set[str] = field(default_factory=set)
    answered: set[str] = field(default_factory=set)
    answers: list[Evidence] = field(default_factory=list)
    stored: bool = False
    ras_asked: bool = False


class Gathering:
    """One question per suspected attempt. `new_id` makes incident numbers."""

    def __init__(self, store: Store, channels: Channels, new_id: Callable[[], str]) -> None:
        self._store = store
        self._channels = channels
        self._new_id = new_id
        self._questions: dict[Attempt, _Question] = {}
        self._armed_at: dict[Attempt, float] = {}
        self._pinged: dict[Attempt, tuple[int, float]] = {}

    def arm(self, history: JobHistory, now: float) -> None:
        """Let the probes of a job that is slow tell more for a while. How often that may be the nodes see to."""
        self._armed_at = {attempt: at for attempt, at in self._armed_at.items() if now - at < ARM_AGAIN_S}
        attempt = (history.job_id, history.restart)
        if attempt not in self._armed_at:
            self._armed_at[attempt] = now
            for node in history.nodes():
                self._channels.send(node, ArmEvent(job_id=history.job_id, restart=history.restart))

    def ping(self, history: JobHistory, verdict: Verdict, now: float) -> None:
        """Ask the nodes at the ends of suspected paths for their round trips to each other, and some others."""
        if verdict.class_ not in PATH_DOUBTED.get(verdict.anomaly, ()):
            return
        self._pinged = {one: pinged for one, pinged in self._pinged.items() if now - pinged[1] < PINGS_FORGET_S}
        attempt = (history.job_id, history.restart)
        times, pinged_at = self._pinged.get(attempt, (0, now - PING_AGAIN_S))
        if times >= PINGS_MAX or now - pinged_at < PING_AGAIN_S:
            return
        suspected = {culprit.node for culprit in verdict.culprits if culprit.node is not None}
        question = self._questions.get(attempt)
        asked = []
        for node, pairs in pairs_to_ping(history.network, suspected).items():
            event = PingEvent(
                incident=question.incident if question is not None else None,
                job_id=history.job_id,
                restart=history.restart,
                pairs=pairs,
            )
            if self._channels.send(node, event):
                asked.append(node)
        if asked:
            self._pinged[attempt] = (times + 1, now)
            _log.info("asked for round trips", job=history.job_id, restart=history.restart, nodes=asked)

    def ask(self, history: JobHistory, ranks: list[int], now: float) -> None:
        """Ask the suspects' nodes once."""
        attempt = (history.job_id, history.restart)
        question = self._questions.get(attempt)
        if question is None:
            question = self._questions[attempt] = _Question(self._new_id(), now)
        of_node: dict[str, list[int]] = {}
        for rank in ranks:
            of_node.setdefault(history.ranks[rank].node, []).append(rank)
        for node, suspects in of_node.items():
            if node in question.asked:
                continue
            event = CollectEvent(
                incident=question.incident, job_id=history.job_id, restart=history.restart, ranks=suspects
            )
            if self._channels.send(node, event):
                question.asked.add(node)
                _log.info("asked", incident=question.incident, node=node, ranks=suspects)
                self._send_gather(history, question.incident, node, ras=False)
        if not question.ras_asked:
            question.ras_asked = self._ask_ras(history, question, set(of_node))

    def _send_gather(self, history: JobHistory, incident: str, node: str, *, ras: bool) -> bool:
        event = GatherEvent(incident=incident, job_id=history.job_id, restart=history.restart, ras=ras)
        return self._channels.send(node, event)

    def _ask_ras(self, history: JobHistory, question: _Question, suspected: set[str]) -> bool:
        """One node asks for the whole job. Rather one without suspects: where a process is stopped, nobody may answer;
        none, where an answer of this standstill is there."""
        if history.witnessed.ras_since(history.quiet_since) is not None:
            return True
        first_ranks = [history.ranks[rank].node for rank in sorted(history.ranks)]
        nodes = sorted(dict.fromkeys(first_ranks), key=lambda node: node in suspected)
        return any(self._send_gather(history, question.incident, node, ras=True) for node in nodes[:RAS_NODES_MAX])

    def number(self, attempt: Attempt) -> str:
        """The number for an incident of this attempt: the one that was asked with, or a new one."""
        question = self._questions.get(attempt)
        return question.incident if question and not question.stored else self._new_id()

    def waiting(self, incident: str, now: float) -> bool:
        """Whether an act should still wait for answers."""
        question = self._of(incident)
        if question is None or now - question.asked_at > WAIT_S:
            return False
        return bool(question.asked - question.answered)

    async def accept(self, evidence: Evidence, now: float) -> None:
        """An answer from a node. Raises AgentFault (reason `incident`) where nobody asked it."""
        question = self._of(evidence.incident)
        if question is None or evidence.node not in question.asked or len(question.answers) >= ANSWERS_MAX:
            raise AgentFault(f"nobody asked {evidence.node} about incident {evidence.incident}", reason="incident")
        if evidence.node in question.answered:
            return  # its answer is here; it did not hear so
        question.answered.add(evidence.node)
        question.answers.append(evidence)
        if question.stored:
            await self._keep(evidence, now)

    async def opened(self, incident: str, now: float) -> None:
        """The incident exists now: keep what came before it."""
        question = self._of(incident)
        if question is not None and not question.stored:
            question.stored = True
            for evidence in question.answers:
                await self._keep(evidence, now)

    def forget(self, attempt: Attempt) -> None:
        """The suspicion is over, or the attempt is."""
        self._questions.pop(attempt, None)

    async def _keep(self, evidence: Evidence, now: float) -> None:
        try:
            await self._store.add_evidence(evidence.incident, evidence.node, KIND, msgspec.json.encode(evidence), now)
        except AgentFault as fault:
            _log.warning("evidence not kept", incident=evidence.incident, node=evidence.node, error=str(fault))

    def _of(self, incident: str) -> _Question | None:
        return next((question for question in self._questions.values() if question.incident == incident), None)
