"""`communicators.jsonl` as `Communicators`: who belongs to which, in the communicator's own order."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from diagnosis.contracts.incident import Communicators, Ints, Kind
from diagnosis.evidence.bundle.files import COMMUNICATORS, KINDS, CommunicatorLine, whole_numbers
from diagnosis.evidence.limits import Limits, Names
from diagnosis.evidence.notes import Notes
from diagnosis.evidence.values import Decoder

_RANK_MAX = 1 << 31


class CommunicatorTable:
    """Collects lines; `build` makes the arrays when the size of the world is known.

    `names` is shared with whatever else names communicators: a communicator that was never declared, but that ranks
    report on, has exactly those ranks as its members.
    """

    def __init__(self, names: Names, limits: Limits, notes: Notes) -> None:
        self._decoder = Decoder(CommunicatorLine, {"ranks": whole_numbers})
        self._names = names
        self._limits = limits
        self._notes = notes
        self._members: dict[int, Ints] = {}
        self._lines: dict[int, CommunicatorLine] = {}
        self._total = 0
        self.rank_max = -1

    def read(self, file: str, lines: Iterable[tuple[int, bytes]]) -> None:
        """All lines of the file."""
        for at, content in lines:
            line = self._decoder.decode(file, at, content, self._notes)
            if line is not None:
                self._add(file, at, line)

    def _add(self, file: str, at: int, line: CommunicatorLine) -> None:
        index = self._names.index(line.comm)
        ranks = line.ranks or []
        line.ranks = None  # held as an array from here on
        if index < 0 or not ranks:
            self._notes.skip(file, "a communicator without an id or without ranks is skipped", at)
        elif index in self._lines:
            self._notes.skip(file, "the communicator is told twice; the first time counts", at)
        elif self._total + len(ranks) > self._limits.members_max:
            self._notes.skip(file, "more members than the reader's limit: the communicator is skipped", at)
        else:
            self._total += len(ranks)
            self._lines[index] = line
            self._members[index] = self._members_of(file, at, ranks)
            self.rank_max = max(self.rank_max, int(self._members[index].max(initial=-1)))

    def _members_of(self, file: str, at: int, ranks: list[int]) -> Ints:
        sound = [rank for rank in ranks if 0 <= rank < _RANK_MAX]
        unique = list(dict.fromkeys(sound))
        if len(unique) != len(ranks):
            self._notes.add(file, "impossible ranks, and ranks named twice, are left out of the communicator", at)
        return np.array(unique, np.int32)

    def build(self, world: int, used: Ints, rank_of_use: Ints) -> tuple[Communicators, Ints]:
        """The communicators, and the new index of each name (its old index is the position; -1: left out).

        `used`, `rank_of_use` (rows of frames): which communicator, by its name's index, and which rank spoke of it.
        Declared ones come first, in the order of the file.
        """
        order = list(self._lines)
        inferred = sorted(set(np.unique(used).tolist()) - set(order) - {-1})
        if inferred and order:
            self._notes.add(COMMUNICATORS, "a communicator that frames speak of is missing", count=len(inferred))
        new_index = np.full(max(len(self._names), 1), -1, np.int32)
        members = []
        names = self._names.all()
        by_comm = np.argsort(used, kind="stable")
        bounds = np.searchsorted(used[by_comm], np.arange(len(names) + 1, dtype=used.dtype))
        for position, index in enumerate(order + inferred):
            new_index[index] = position
            if index in self._members:
                mine = self._members[index]
                beyond = int(np.count_nonzero(mine >= world))
                self._notes.add(COMMUNICATORS, "a member rank is beyond the world's size and left out", count=beyond)
                members.append(mine[mine < world])
            else:
                members.append(np.unique(rank_of_use[by_comm[bounds[index] : bounds[index + 1]]]))
        lines = [self._lines.get(index, CommunicatorLine()) for index in order + inferred]
        return Communicators(
            ids=tuple(names[index] for index in order + inferred),
            start=np.concatenate([[0], np.cumsum([len(one) for one in members], dtype=np.int64)]).astype(np.int64),
            member=np.concatenate(members).astype(np.int32) if members else np.empty(0, np.int32),
            kind=np.array([KINDS.get(line.kind or "", Kind.UNKNOWN) for line in lines], np.uint8),
            algo=tuple(line.algo or "" for line in lines),
            transport=tuple(line.transport or "" for line in lines),
        ), new_index
