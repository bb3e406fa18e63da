"""`ras.json`, `flights.jsonl` and `processes.jsonl`: what was gathered on suspicion. Broken or beyond bounds: noted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Generic, TypeVar

import msgspec

from diagnosis.contracts.exits import ExitFacts
from diagnosis.contracts.gathered import FlightFacts, ProcessFacts, RasFacts, RasProcess, RasRank, ras_within_limits
from diagnosis.contracts.incident import WORLD_MAX
from diagnosis.evidence.notes import Notes
from diagnosis.evidence.ras.answer import map_ranks
from diagnosis.evidence.values import MALFORMED

Line = TypeVar("Line", FlightFacts, ProcessFacts, ExitFacts)
_RAS: Final = msgspec.json.Decoder(RasFacts)


def read_ras(file: str, content: bytes, notes: Notes) -> RasFacts | None:
    """The facts; None (noted) where the file is none or holds more than it may."""
    try:
        facts = _RAS.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        notes.add(file, "it holds no facts of NCCL's RAS")
        return None
    if not ras_within_limits(facts):
        notes.add(file, "more facts than the reader's limit: left out")
        return None
    return facts


def within_world(facts: RasFacts, world: int) -> RasFacts:
    """The facts without ranks that the job does not have."""

    def place(_: str, rank: RasRank) -> RasRank:
        return rank if _is_in(rank.world_rank, world) else msgspec.structs.replace(rank, world_rank=None)

    def who(process: RasProcess) -> int | None:
        return process.world_rank if _is_in(process.world_rank, world) else None

    return map_ranks(facts, place, who)


def _is_in(rank: int | None, world: int) -> bool:
    return rank is not None and 0 <= rank < world


class RankLines(Generic[Line]):
    """Lines of which each is about one rank; the last of a rank counts."""

    def __init__(self, kind: type[Line], lines_max: int, notes: Notes) -> None:
        self._decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(kind)
        self._lines_max = lines_max
        self._notes = notes
        self._of_rank: dict[int, Line] = {}

    def read(self, file: str, lines: Iterable[tuple[int, bytes]]) -> None:
        """All lines of the file."""
        for at, content in lines:
            try:
                line = self._decoder.decode(content)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                self._notes.skip(file, MALFORMED, at)
                continue
            if not 0 <= line.world_rank < WORLD_MAX or len(self._of_rank) >= self._lines_max:
                self._notes.skip(file, "a rank that is impossible, or one too many: skipped", at)
            else:
                self._of_rank[line.world_rank] = line

    def build(self, file: str, world: int) -> tuple[Line, ...]:
        """By rank."""
        known = tuple(line for rank, line in sorted(self._of_rank.items()) if rank < world)
        beyond = len(self._of_rank) - len(known)
        self._notes.add(file, "a rank beyond the world's size is left out", count=beyond)
        return known
