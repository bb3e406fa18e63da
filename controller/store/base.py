"""What the controller remembers, and the one way to it: `Store`. Times are seconds since the epoch.

Incidents hold what was concluded and decided; the ledger holds acts, each written before it is done and concluded
after it; evidence is what nodes sent for an incident, inputs are what its verdict was given on; the outbox holds
messages until they are delivered; node marks make sure that no request of a node is taken twice.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, Protocol

import msgspec

from diagnosis.contracts.control import EVIDENCE_BYTES_MAX
from diagnosis.contracts.verdict import Verdict
from remediation.policy.case import ActRecord, Case

LINES_MAX: Final = 500
"""Timeline lines of one incident; later ones are dropped."""
TEXT_CHARS_MAX: Final = 2000
EVIDENCE_ROWS_MAX: Final = 256
EVIDENCE_TOTAL_BYTES_MAX: Final = 16 * EVIDENCE_BYTES_MAX
INPUTS_BYTES_MAX: Final = 8 << 20
OUTBOX_WAITING_MAX: Final = 10_000
REPLAY_WINDOW: Final = 32

Phase = Literal["open", "acting", "closed"]
Mode = Literal["observe", "act"]
OutcomeWord = Literal["resolved", "partly", "abandoned", "observed", "recovered", "withdrawn"]
Line = tuple[float, str]


class Incident(msgspec.Struct, kw_only=True):
    """One fault of one attempt of one job. `decision` and `outcome_text` are sentences for people.

    `case` None: nothing is to be done about it. `outcome`: resolved, partly or abandoned after acting; observed: the
    policy did not act; recovered: the job went on by itself; withdrawn: the evidence no longer holds.
    """

    id: str  # six hexadecimal digits
    job_id: int
    submit_time: str
    restart: int
    user: str | None
    nodes: list[str]
    opened_at: float
    closed_at: float | None = None
    phase: Phase = "open"
    mode: Mode = "observe"
    verdict: Verdict
    case: Case | None = None
    decision: str = ""
    outcome: OutcomeWord | None = None
    outcome_text: str = ""
    timeline: list[Line] = []


class EvidenceRow(msgspec.Struct, frozen=True, kw_only=True):
    """What one node sent for one incident; `payload` as it came, hostile."""

    node: str
    kind: str
    at: float
    payload: bytes


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message for one target, waiting in the outbox. `attempts` so far failed."""

    id: int
    key: str
    incident: str
    target: str
    body: bytes
    at: float
    attempts: int


class OutboxCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How the outbox stands. `dead`: given up; `last_error` of the newest message that failed."""

    waiting: int
    sent: int
    dead: int
    last_error: str


class NodeMark(NamedTuple):
    """The newest request taken from a node. `seen`: bit n stands for counter - n, so that requests of two
    connections may overtake each other by up to REPLAY_WINDOW and none is ever taken twice (RFC 4303, 3.4.3)."""

    epoch: int
    counter: int
    seen: int = 1
    at: float = 0.0


class Store(Protocol):
    """Every call that returns has been written to disk. Raises OperatorFault (reason `store`) where the disk fails."""

    async def add_incident(self, incident: Incident) -> None:
        """A new incident, with the lines it has. Raises ValueError when its id is taken."""

    async def save_incident(self, incident: Incident) -> None:
        """The whole incident anew, but for its timeline, which only grows by `add_line`."""

    async def incident(self, incident_id: str) -> Incident | None: ...

    async def incidents(self, limit: int, open_only: bool = False) -> list[Incident]:
        """Newest first; `open_only`: those that are not closed."""

    async def incidents_open(self) -> int:
        """How many are not closed."""

    async def add_line(self, incident_id: str, at: float, text: str) -> None:
        """One more line of the timeline."""

    async def intend(self, incident: str, kind: str, target: str, args: dict[str, str], why: str, at: float) -> int:
        """Write down an act before it is done. Returns its number in the ledger."""

    async def conclude(self, seq: int, outcome: Literal["ok", "failed"], detail: str, at: float) -> None:
        """What became of an act. Raises ValueError when it has been concluded before or is not known."""

    async def acts(self, incident: str) -> list[ActRecord]:
        """In the order of their intents."""

    async def acts_since(self, at: float) -> list[ActRecord]:
        """All acts intended at or after `at`, in that order."""

    async def add_evidence(self, incident: str, node: str, kind: str, payload: bytes, at: float) -> None:
        """Raises AgentFault (reason `limits` or `incident`) when it is too much or no such incident is known."""

    async def evidence(self, incident: str) -> list[EvidenceRow]:
        """In the order of arrival."""

    async def keep_inputs(self, incident: str, payload: bytes, at: float) -> None:
        """Keep a bundle (`controller.captures`) instead of the one before. Raises AgentFault (reason `limits` or
        `incident`) when it is larger than `INPUTS_BYTES_MAX` or no such incident is known."""

    async def inputs(self, incident: str) -> bytes | None:
        """The bundle that was kept of an incident. None: there is none."""

    async def enqueue(self, key: str, incident: str, body: bytes, at: float, *, target: str = "") -> bool:
        """Put a message into the outbox. False: a message with this key has been there before, or the box is full."""

    async def due(self, now: float, limit: int) -> list[Message]:
        """Waiting messages whose time has come, oldest first, at most `limit` of each target: none holds up another."""

    async def sent(self, message_id: int, at: float) -> None: ...

    async def failed(self, message_id: int, next_at: float | None, error: str, at: float) -> None:
        """One more failed attempt; `next_at` None: it is given up and stays visible as dead."""

    async def outbox_counts(self) -> OutboxCounts: ...

    async def node_seen(self, node: str) -> NodeMark | None: ...

    async def nodes_seen(self) -> dict[str, NodeMark]:
        """The marks of all nodes."""

    async def see_node(self, node: str, mark: NodeMark) -> None:
        """Remember the mark. Many calls at once share one write."""

    async def prune(self, *, evidence_before: float, incidents_before: float) -> int:
        """Forget evidence, inputs and ended messages, then whole incidents, closed before these times.

        Returns rows deleted.
        """

    async def close(self) -> None: ...
