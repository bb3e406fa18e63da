"""Control events, controller to node daemon, and the evidence that comes back.

Events travel as server-sent events: `event:` is the kind, `data:` the JSON of the struct below. A daemon ignores
kinds it does not know.
"""

from __future__ import annotations

from typing import Final

import msgspec

TEXT_BYTES_MAX: Final = 64 << 10
PROCESSES_MAX: Final = 64
EVIDENCE_BYTES_MAX: Final = 2 << 20
PAIRS_MAX: Final = 8


class CollectEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Gather what the processes of a job are doing, before anybody ends them."""

    incident: str
    job_id: int
    restart: int
    ranks: list[int]  # the suspects on this node
    stacks: bool = True
    deadline_ms: int = 5000


class GatherEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Gather what tells of a hang beside the frames; the answer travels in the next reports (`contracts.gathered`).
    `ras`: ask NCCL's RAS too, which knows the whole job, so that one node of it is enough."""

    incident: str
    job_id: int
    restart: int
    ras: bool = False


class ArmEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Let a job's probes tell more for some seconds, as far as that is safe and was not done lately. What it tells
    travels in the reports, where `armed` marks the ranks that told it."""

    job_id: int
    restart: int


class PingEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Ping the far ends of connections of a job: (address here, address there), at most PAIRS_MAX. A daemon pings only
    where a connection of the job leads. The answer travels in the next reports (`contracts.gathered`)."""

    incident: str | None
    job_id: int
    restart: int
    pairs: list[tuple[str, str]]


class HelloEvent(msgspec.Struct, frozen=True, kw_only=True):
    """First event of each stream: how often to report."""

    period_ms: int


ControlEvent = HelloEvent | CollectEvent | GatherEvent | ArmEvent | PingEvent
EVENT_KINDS: Final[dict[str, type[ControlEvent]]] = {
    "hello": HelloEvent,
    "collect": CollectEvent,
    "gather": GatherEvent,
    "arm": ArmEvent,
    "ping": PingEvent,
}
"""By the name in `event:`."""


class ProcessEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """One process as the daemon sees it. None: could not be read; `notes` say why."""

    rank: int
    pid: int
    state: str | None = None  # letter of /proc/PID/stat, X: gone
    wchan: str | None = None
    kernel_stack: str | None = None
    python_stack: str | None = None
    notes: list[str] = []


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a CollectEvent, posted as JSON."""

    incident: str
    node: str
    job_id: int
    restart: int
    processes: list[ProcessEvidence]
