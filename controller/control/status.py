"""How the controller stands, in one value that the page, the socket and the command line show."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from importlib import metadata
from typing import Final, Protocol

import msgspec

from controller.control.pause import Pause, PauseState
from controller.gathered_words import lines_of
from controller.registry import JobStatus, NodeStatus
from controller.store.base import EvidenceRow, Incident, OutboxCounts, Store
from diagnosis.contracts.control import Evidence
from remediation.policy.case import ActRecord

_EVIDENCE: Final = msgspec.json.Decoder(Evidence)


class LoopStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The control loop's own health. Times are seconds since the epoch; None: not yet, or not known.

    `sentence`: what the newest cycle did and why. `fault`: what keeps the loop from its work, such as a silent Slurm.
    `nodes_known`: nodes that Slurm has, whether a daemon reports from them or not.
    """

    mode: str
    cycles: int = 0
    cycle_at: float | None = None
    cycle_ms: float | None = None
    sentence: str = ""
    fault: str | None = None
    world_at: float | None = None
    nodes_held: int | None = None
    nodes_known: int | None = None


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `GET /status` ("tocsin.status/1"). `requests`: of node daemons, by how they ended."""

    now: float
    started_at: float
    version: str
    paused: PauseState | None
    loop: LoopStatus
    jobs: list[JobStatus]
    nodes: list[NodeStatus]
    incidents_open: int
    listening: int
    requests: dict[str, int]
    outbox: OutboxCounts
    config_fault: str | None = None  # why the newest reload was refused
    schema: str = "tocsin.status/1"


class NodeEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What one node sent for an incident. `told` None: of another kind than process evidence, or unreadable. `lines`:
    in words, of what nodes gather by themselves."""

    node: str
    kind: str
    at: float
    size_bytes: int
    told: Evidence | None
    lines: list[str] = []


class IncidentDetail(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `GET /incidents/{id}` ("tocsin.incident/1")."""

    incident: Incident
    acts: list[ActRecord]
    evidence: list[NodeEvidence]
    schema: str = "tocsin.incident/1"


class LoopSide(Protocol):
    """The part of the control loop that is asked here."""

    def status(self) -> LoopStatus: ...


class RegistrySide(Protocol):
    """The part of the registry that is asked here."""

    def status(self, now: float) -> list[JobStatus]: ...

    def node_status(self, now: float) -> list[NodeStatus]: ...


def version() -> str:
    """Of the installed distribution; "uninstalled" when run from a bare source tree."""
    try:
        return metadata.version("tocsin")
    except metadata.PackageNotFoundError:
        return "uninstalled"


class View:
    """All that may be read. It changes nothing."""

    def __init__(
        self,
        store: Store,
        pause: Pause,
        loop: LoopSide,
        registry: RegistrySide,
        *,
        requests: Counter[str],
        listening: Callable[[], int],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._pause = pause
        self._loop = loop
        self._registry = registry
        self._requests = requests
        self._listening = listening
        self._clock = clock
        self._started_at = clock()
        self._version = version()
        self.config_fault: str | None = None

    async def status(self) -> Status:
        """The state of this moment."""
        now = self._clock()
        return Status(
            now=now,
            started_at=self._started_at,
            version=self._version,
            paused=self._pause.state(),
            loop=self._loop.status(),
            jobs=self._registry.status(now),
            nodes=self._registry.node_status(now),
            incidents_open=await self._store.incidents_open(),
            listening=self._listening(),
            requests=dict(self._requests),
            outbox=await self._store.outbox_counts(),
            config_fault=self.config_fault,
        )

    async def incidents(self, limit: int, open_only: bool = False) -> list[Incident]:
        """Newest first."""
        return await self._store.incidents(limit, open_only)

    async def incident(self, incident_id: str) -> IncidentDetail | None:
        """One incident with its acts and what nodes sent. None: not known."""
        incident = await self._store.incident(incident_id)
        if incident is None:
            return None
        evidence = [_of_node(row) for row in await self._store.evidence(incident_id)]
        return IncidentDetail(incident=incident, acts=await self._store.acts(incident_id), evidence=evidence)


def _of_node(row: EvidenceRow) -> NodeEvidence:
    told = _read(row.payload)
    lines = lines_of(row.payload) if told is None else []
    return NodeEvidence(node=row.node, kind=row.kind, at=row.at, size_bytes=len(row.payload), told=told, lines=lines)


def _read(payload: bytes) -> Evidence | None:
    try:
        return _EVIDENCE.decode(payload)
    except (msgspec.DecodeError, RecursionError):
        return None
