"""`frames.jsonl` as `Frames`: columns, sorted by rank and then by sample."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from diagnosis.contracts.incident import UNKNOWN, WORLD_MAX, Communicators, Floats, Frames, Ints, State
from diagnosis.evidence.bundle.files import FRAMES, ROW_NUMBERS, STATES, FrameLine, mended_rows
from diagnosis.evidence.limits import Limits, Names
from diagnosis.evidence.notes import Notes
from diagnosis.evidence.signatures import Signature, signature_text
from diagnosis.evidence.values import Decoder

_numbers = attrgetter(*ROW_NUMBERS)
_PACK_ROWS = 1 << 14
_STATES: Mapping[str | None, int] = {None: State.UNKNOWN, **dict[str | None, int](STATES.items())}
_Operation = tuple[str | None, str | None, int | None, int | None]
_FRAME_NUMBERS = ("rank", "t_ms", "window_ms")


class FrameTable:
    """Collects lines; `build` makes the arrays when world and communicators are known."""

    def __init__(self, comms: Names, limits: Limits, notes: Notes) -> None:
        self._decoder = Decoder(FrameLine, {"comms": mended_rows})
        self._comms = comms
        self._signatures = Names(limits)
        self._signature_of: dict[_Operation, int] = {}
        self._limits = limits
        self._notes = notes
        self._frames: list[tuple[int, float | None, float | None]] = []
        self._words: list[tuple[int, int, int, int, int]] = []
        self._values: list[tuple[float | None, ...]] = []
        self._packed: list[tuple[NDArray[np.int64], Floats]] = []
        self._rows = 0
        self.rank_max = -1

    def read(self, file: str, lines: Iterable[tuple[int, bytes]]) -> None:
        """All lines of the file."""
        for at, content in lines:
            line = self._decoder.decode(file, at, content, self._notes)
            if line is None:
                continue
            if line.rank is None or not 0 <= line.rank < WORLD_MAX:
                self._notes.skip(file, "a frame without a possible rank is skipped", at)
            elif len(self._frames) >= self._limits.frames_max:
                self._notes.skip(file, "more frames than the reader's limit: skipped", at)
            else:
                self._add(file, at, line, line.rank)

    def _add(self, file: str, at: int, line: FrameLine, rank: int) -> None:
        rows = line.comms or []
        if len(rows) > self._limits.rows_per_frame_max or self._rows + len(rows) > self._limits.rows_max:
            self._notes.skip(file, "more communicators than the reader's limit: the frame is skipped", at)
            return
        frame = len(self._frames)
        self._frames.append((rank, line.t_ms, line.window_ms))
        self.rank_max = max(self.rank_max, rank)
        comm_of, words, values, signatures = self._comms.index, self._words, self._values, self._signature_of
        for row in rows:
            comm = UNKNOWN if row is None else comm_of(row.comm)
            if row is None or comm == UNKNOWN:
                self._notes.add(file, "a row without a communicator is skipped", at)
                continue
            state = _STATES.get(row.state)
            if state is None:
                self._notes.add(file, "a state that is none of the four is taken as unknown", at)
                state = State.UNKNOWN
            key = (row.op, row.dtype, row.count, row.root)
            signature = signatures.get(key)
            if signature is None:
                signature = self._new_signature(key)
            peer = UNKNOWN if row.peer is None or not 0 <= row.peer < WORLD_MAX else row.peer
            words.append((frame, comm, peer, state, signature))
            values.append(_numbers(row))
        self._rows += len(rows)
        if len(values) >= _PACK_ROWS:
            self._pack()

    def _new_signature(self, key: _Operation) -> int:
        index = self._signatures.index(signature_text(Signature(*key)))
        if len(self._signature_of) < self._limits.names_max:
            self._signature_of[key] = index
        return index

    def _pack(self) -> None:
        words = np.array(self._words, np.int64).reshape(-1, 5)
        values = np.array(self._values, np.float64).reshape(-1, len(ROW_NUMBERS))
        self._packed.append((words, values))
        self._words, self._values = [], []

    def uses(self) -> tuple[Ints, Ints]:
        """Per row: the communicator, by its name's index, and the rank."""
        self._pack()
        self._packed = [
            (np.concatenate([words for words, _ in self._packed]), np.concatenate([one for _, one in self._packed]))
        ]
        words = self._packed[0][0]
        ranks = np.array([frame[0] for frame in self._frames], np.int32)
        return words[:, 1].astype(np.int32), ranks[words[:, 0]] if len(words) else np.empty(0, np.int32)

    def build(self, world: int, comms: Communicators, new_index: Ints) -> Frames:
        """The columns. Rows of ranks beyond the world, and of ranks that are no member of what they speak of, are noted
        and left out. Call `uses` before."""
        words, values = self._packed[0]
        told = np.array(self._frames, np.float64).reshape(-1, len(_FRAME_NUMBERS))
        rank = told[:, 0].astype(np.int64)
        times = self._sound(told[:, 1:], ("t_ms", "window_ms"))
        keep = rank < world
        self._notes.add(FRAMES, "a frame of a rank beyond the world's size is left out", count=int((~keep).sum()))
        order = _by_rank_and_time(rank, times[:, 0])
        order = order[keep[order]]
        position = np.full(len(rank), UNKNOWN, np.int64)
        position[order] = np.arange(len(order))
        frame, comm, peer = position[words[:, 0]], new_index[words[:, 1]], words[:, 2]
        stranger = (frame >= 0) & ~_is_member(comms, comm, rank[words[:, 0]])
        self._notes.add(FRAMES, "a row of a rank that is no member is left out", count=int(stranger.sum()))
        rows = np.flatnonzero((frame >= 0) & ~stranger)
        rows = rows[np.argsort(frame[rows], kind="stable")]
        numbers = self._sound(values[rows], ROW_NUMBERS)
        return Frames(
            rank=rank[order].astype(np.int32),
            t_ms=times[order, 0],
            window_ms=times[order, 1],
            frame=frame[rows].astype(np.int32),
            comm=comm[rows].astype(np.int32),
            peer=np.where(peer[rows] < world, peer[rows], UNKNOWN).astype(np.int32),
            state=words[rows, 3].astype(np.uint8),
            signature=words[rows, 4].astype(np.int32),
            signatures=self._signatures.all(),
            **{name: np.ascontiguousarray(numbers[:, at]) for at, name in enumerate(ROW_NUMBERS)},
        )

    def _sound(self, values: Floats, names: tuple[str, ...]) -> Floats:
        """The same with what cannot be measured (infinite, below zero) as unknown."""
        with np.errstate(invalid="ignore"):
            bad = np.isinf(values) | (values < 0)
        for at, name in enumerate(names):
            self._notes.add(FRAMES, f"an impossible {name} is taken as unknown", count=int(bad[:, at].sum()))
        return np.where(bad, np.nan, values)


def _by_rank_and_time(rank: NDArray[np.int64], t_ms: Floats) -> NDArray[np.int64]:
    """Order of the frames. One without a time stays behind the one that arrived before it."""
    arrived = np.argsort(rank, kind="stable")
    t, rank = t_ms[arrived], rank[arrived]
    last_told = np.maximum.accumulate(np.where(np.isnan(t), -1, np.arange(len(t))))
    key = np.where((last_told >= 0) & (rank[last_told] == rank), t[last_told], -np.inf)
    return arrived[np.lexsort((key, rank))]


def _is_member(comms: Communicators, comm: Ints, rank: NDArray[np.int64]) -> NDArray[np.bool_]:
    of_member = np.repeat(np.arange(len(comms.ids), dtype=np.int64), np.diff(comms.start))
    return np.isin(comm.astype(np.int64) * WORLD_MAX + rank, of_member * WORLD_MAX + comms.member)
