"""`summaries.jsonl` as `Summaries`: one line per worker, from a profiling window."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

import numpy as np

from diagnosis.contracts.incident import WORLD_MAX, Floats, Summaries
from diagnosis.evidence.bundle.files import STATS, SUMMARIES, SummaryLine, mended_numbers, mended_operators
from diagnosis.evidence.limits import Limits, Names
from diagnosis.evidence.notes import Notes
from diagnosis.evidence.values import Decoder

_stats = attrgetter(*STATS)
_KINDS = ("compute", "comm", "memcpy", "host")
_PHASES_MAX = 256


class SummaryTable:
    """Collects lines; `build` makes the arrays. Operators of one name and different kinds are different operators."""

    def __init__(self, limits: Limits, notes: Notes) -> None:
        self._decoder = Decoder(SummaryLine, {"phases": mended_numbers, "operators": mended_operators})
        self._limits = limits
        self._notes = notes
        self._workers: list[tuple[int, float | None, float | None]] = []
        self._phases: list[tuple[int, int, float | None]] = []
        self._phase_names = Names(limits)
        self._operators: dict[tuple[str, str], int] = {}
        self._words: list[tuple[int, int]] = []
        self._values: list[tuple[float | None, ...]] = []
        self.rank_max = -1

    def read(self, file: str, lines: Iterable[tuple[int, bytes]]) -> None:
        """All lines of the file."""
        for at, content in lines:
            line = self._decoder.decode(file, at, content, self._notes)
            if line is None:
                continue
            if line.worker_rank is None or not 0 <= line.worker_rank < WORLD_MAX:
                self._notes.skip(file, "a summary without a possible rank is skipped", at)
            elif len(self._workers) >= self._limits.frames_max:
                self._notes.skip(file, "more summaries than the reader's limit: skipped", at)
            else:
                self._add(file, at, line, line.worker_rank)

    def _add(self, file: str, at: int, line: SummaryLine, rank: int) -> None:
        worker = len(self._workers)
        self._workers.append((rank, line.step_duration_ms, line.profiled_steps))
        self.rank_max = max(self.rank_max, rank)
        for name, value in (line.phases or {}).items():
            phase = self._phase_names.index(name)
            if 0 <= phase < _PHASES_MAX:
                self._phases.append((worker, phase, value))
            else:
                self._notes.add(file, "more phases than the reader's limit: skipped", at)
        for operator in line.operators or []:
            if operator is None or operator.operator_name is None:
                self._notes.add(file, "an operator without a name is skipped", at)
                continue
            kind = operator.kind if operator.kind in _KINDS else ""
            key = (operator.operator_name[: self._limits.name_chars_max], kind)
            if len(self._values) >= self._limits.rows_max or (
                key not in self._operators and len(self._operators) >= self._limits.names_max
            ):
                self._notes.add(file, "more operators than the reader's limit: skipped", at)
                continue
            self._words.append((worker, self._operators.setdefault(key, len(self._operators))))
            self._values.append(_stats(operator))

    def build(self, world: int) -> Summaries | None:
        """The columns, sorted by rank; None where there is no summary. A rank's later line stays behind its earlier."""
        if not self._workers:
            return None
        told = np.array(self._workers, np.float64).reshape(-1, 3)
        order = np.argsort(told[:, 0], kind="stable")
        order = order[told[order, 0] < world]
        beyond = len(told) - len(order)
        self._notes.add(SUMMARIES, "a summary of a rank beyond the world's size is left out", count=beyond)
        position = np.full(len(told), -1, np.int64)
        position[order] = np.arange(len(order))
        words = np.array(self._words, np.int64).reshape(-1, 2)
        values = self._sound("statistics", np.array(self._values, np.float64).reshape(-1, len(STATS)))
        worker = position[words[:, 0]] if len(words) else np.empty(0, np.int64)
        rows = np.flatnonzero(worker >= 0)
        rows = rows[np.argsort(worker[rows], kind="stable")]
        phases = np.full((min(len(self._phase_names), _PHASES_MAX), len(order)), np.nan)
        for at, phase, value in self._phases:
            if position[at] >= 0 and value is not None:
                phases[phase, position[at]] = value
        phases = self._sound("phases", phases)
        return Summaries(
            rank=told[order, 0].astype(np.int32),
            step_ms=self._sound("step_duration_ms", told[order, 1]),
            steps=self._sound("profiled_steps", told[order, 2]),
            phases=dict(zip(self._phase_names.all(), phases, strict=False)),
            worker=worker[rows].astype(np.int32),
            operator=words[rows, 1].astype(np.int32),
            operator_names=tuple(name for name, _ in self._operators),
            kind=tuple(kind for _, kind in self._operators),
            stats={name: np.ascontiguousarray(values[rows, at]) for at, name in enumerate(STATS)},
        )

    def _sound(self, what: str, values: Floats) -> Floats:
        with np.errstate(invalid="ignore"):
            bad = np.isinf(values) | (values < 0)
        self._notes.add(SUMMARIES, f"impossible {what} are taken as unknown", count=int(bad.sum()))
        return np.where(bad, np.nan, values)
