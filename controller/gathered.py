"""What nodes gathered by themselves on suspicion of a hang, on its way from a report into an incident.

It may come before there is an incident (a node suspects on its own) or after; until then it is held, within bounds, and
dropped when the job moves on or its attempt ends. Each part is kept as its node sent it, under its kind; the verdict
reads the newest of them in the job's history.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec
import structlog

from controller.registry import Arrived, Attempt
from controller.store.base import Store
from diagnosis.contracts.errors import AgentFault
from diagnosis.contracts.gathered import Gathered
from diagnosis.engine.gathered import CLOCKS_S, PINGS_KEPT_S

HELD_BYTES_MAX: Final = 4 << 20
"""Of one attempt, RAS's answers apart; the oldest go first."""
RAS_HELD_MAX: Final = 8
ROWS_MAX: Final = 96
"""Of one incident: of a large job every node sends, and the stacks of the suspects must find room as well."""
_log = structlog.get_logger("gathered")


@dataclass(frozen=True, slots=True)
class _Piece:
    node: str
    kind: str
    at: float
    payload: bytes


@dataclass(slots=True)
class _Held:
    ras: deque[_Piece] = field(default_factory=lambda: deque(maxlen=RAS_HELD_MAX))
    others: deque[_Piece] = field(default_factory=deque)
    size_bytes: int = 0

    def add(self, piece: _Piece) -> None:
        if piece.kind == "ras":
            self.ras.append(piece)
            return
        self.others.append(piece)
        self.size_bytes += len(piece.payload)
        while self.size_bytes > HELD_BYTES_MAX:
            self.size_bytes -= len(self.others.popleft().payload)


class GatheredParts:
    """See the module."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._held: dict[Attempt, _Held] = {}
        self._rows: dict[Attempt, int] = {}

    def hold(self, arrived: Iterable[Arrived], live: Collection[Attempt]) -> None:
        """Take in what has come; forget attempts that are not `live`."""
        self._held = {attempt: held for attempt, held in self._held.items() if attempt in live}
        self._rows = {attempt: rows for attempt, rows in self._rows.items() if attempt in live}
        for one in arrived:
            if one.attempt in live:
                held = self._held.setdefault(one.attempt, _Held())
                for kind, payload in kinds_of(one.part):
                    held.add(_Piece(one.node, kind, one.at, payload))

    async def keep(
        self, attempt: Attempt, incident: str, suspected: Collection[str], quiet_since: float | None, now: float
    ) -> bool:
        """Put what is held of an attempt into its incident, RAS and the `suspected` nodes first; whether any was kept.

        What was gathered before the job last moved is dropped, but for pings: a job that is slow moves on. What the
        store refuses is logged.
        """
        held = self._held.pop(attempt, None)
        if held is None or quiet_since is None:
            return False
        pieces = [*held.ras, *sorted(held.others, key=lambda piece: piece.node not in suspected)]
        rows = self._rows.get(attempt, 0)
        before = rows
        for piece in pieces:
            since = now - PINGS_KEPT_S if piece.kind == "pings" else quiet_since - CLOCKS_S
            if rows >= ROWS_MAX or piece.at < since:
                continue
            try:
                await self._store.add_evidence(incident, piece.node, piece.kind, piece.payload, now)
                rows += 1
            except AgentFault as fault:
                _log.warning("evidence not kept", incident=incident, node=piece.node, kind=piece.kind, error=str(fault))
        self._rows[attempt] = rows
        return rows > before


def kinds_of(part: Gathered) -> Iterator[tuple[str, bytes]]:
    """(kind, JSON) of what a part holds. "processes" are the stacks that were asked for; these are "liveness"."""
    for kind, name in (("ras", "ras"), ("flights", "flights"), ("liveness", "processes"), ("pings", "pings")):
        content = getattr(part, name)
        if content:
            yield kind, msgspec.json.encode({"suspicion": part.suspicion, "quiet_ms": part.quiet_ms, name: content})
