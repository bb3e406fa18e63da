"""Summaries that have travelled, as the columns that the engine reads.

A row that stands for many functions keeps only its sums: which functions are in it differs from rank to rank, so its
mean, quantiles and behaviour are those of nothing. A hash whose text nobody sent stays a function, under its number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from diagnosis.contracts import histogram
from diagnosis.contracts.columns import null_of
from diagnosis.contracts.errors import AgentFault
from diagnosis.contracts.histogram import Histograms
from diagnosis.contracts.incident import WORLD_MAX, Floats, Ints, Summaries
from diagnosis.contracts.summary import FUNCTION_DTYPE, KINDS, OTHER_HASHES, OTHERS, PARTS, RankSummary, table, tables
from diagnosis.evidence.notes import Notes

SOURCE: Final = "summaries"
_QUANTILES: Final = {"p50_us": 0.5, "p90_us": 0.9, "p95_us": 0.95, "p99_us": 0.99}
_KIND_STRIDE: Final = np.uint64(0x9E3779B97F4A7C15)
_AT_ONCE: Final = 1024
_NS_PER_US: Final = 1e3
_NS_PER_MS: Final = 1e6
_PHASES_MAX: Final = 256


def columns_of(
    summaries: Iterable[RankSummary], names: Mapping[int, tuple[int, str]], notes: Notes
) -> Summaries | None:
    """All ranks of one window. `names`: (kind, text) by hash. None where there is no summary.

    A summary that cannot be read, or is a rank's second, is left out and noted.
    """
    by_rank: dict[int, RankSummary] = {}
    for one in summaries:
        if not 0 <= one.rank < WORLD_MAX:
            notes.add(SOURCE, "a summary without a possible rank is left out")
        elif one.rank in by_rank:
            notes.add(SOURCE, "a second summary of a rank is left out")
        else:
            by_rank[one.rank] = one
    some = [_some(part, notes) for part in _batches([by_rank[rank] for rank in sorted(by_rank)])]
    told = [one for part in some for one in part.told]
    if not told:
        return None
    known = {function: at for at, function in enumerate(sorted({one for part in some for one in part.known}))}
    operator = [np.array([known[one] for one in part.known], np.int32)[part.function] for part in some]
    texts = {**names, **{hashed: (kind, OTHERS[kind]) for kind, hashed in enumerate(OTHER_HASHES)}}
    named = [_named(hashed, kind, texts) for hashed, kind in known]
    notes.add(SOURCE, "a function whose name has not come", count=sum(text.startswith("(unnamed") for text in named))
    return Summaries(
        rank=np.array([one.rank for one in told], np.int32),
        step_ms=np.array([np.nan if one.step_ms is None else _sound(one.step_ms) for one in told]),
        steps=np.array([np.nan if one.steps is None else _sound(one.steps) for one in told]),
        phases=_phases(told, notes),
        worker=np.repeat(np.arange(len(told)), [rows for part in some for rows in part.rows]).astype(np.int32),
        operator=np.concatenate(operator),
        operator_names=tuple(named),
        kind=tuple(KINDS[kind] for _, kind in known),
        stats={name: np.concatenate([part.stats.pop(name) for part in some]) for name in tuple(some[0].stats)},
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Some:
    """A part of the summaries: those that can be read, rows of each, and of each row which of `known` (hash, kind) it
    is, and `_stats`."""

    told: list[RankSummary]
    rows: list[int]
    known: list[tuple[int, int]]
    function: Ints
    stats: dict[str, Floats]


def _some(summaries: Sequence[RankSummary], notes: Notes) -> _Some:
    told = list(summaries)
    try:
        functions, histograms, rows = tables(told)
    except AgentFault:
        told = [one for one in told if _readable(one, notes)]
        functions, histograms, rows = tables(told)
    key = functions["name"] + functions["kind"] * _KIND_STRIDE  # a row may have another kind than its name
    _, first, function = np.unique(key, return_index=True, return_inverse=True)
    known = zip(functions["name"][first].tolist(), functions["kind"][first].tolist(), strict=True)
    return _Some(told, rows, list(known), function.astype(np.int32), _stats(functions, histograms))


def _batches(summaries: list[RankSummary]) -> Iterator[list[RankSummary]]:
    for at in range(0, len(summaries), _AT_ONCE):
        yield summaries[at : at + _AT_ONCE]


def _readable(one: RankSummary, notes: Notes) -> bool:
    try:
        table(one)
    except AgentFault as fault:
        notes.add(SOURCE, f"a summary cannot be read: {fault}")
        return False
    return True


def _named(hashed: int, kind: int, texts: Mapping[int, tuple[int, str]]) -> str:
    text = texts.get(hashed)
    return text[1] if text is not None and text[0] == kind else f"(unnamed {hashed:016x})"


def _sound(value: float) -> float:
    return float(value) if value >= 0 else np.nan


def _phases(told: list[RankSummary], notes: Notes) -> dict[str, Floats]:
    phases: dict[str, Floats] = {}
    for worker, one in enumerate(told):
        for name, value in one.phases.items():
            if name not in phases and len(phases) >= _PHASES_MAX:
                notes.add(SOURCE, "more phases than the reader's limit: left out")
                continue
            phases.setdefault(name, np.full(len(told), np.nan))[worker] = _sound(value)
    return phases


def _stats(rows: NDArray[np.void], histograms: Histograms) -> dict[str, Floats]:
    def column(name: str, unit: float = 1.0) -> Floats:
        values = rows[name]
        told: Floats = np.where(values == null_of(FUNCTION_DTYPE[name]), np.nan, values.astype(np.float64) / unit)
        return told

    count, total = column("count"), column("total_ns")
    longest = column("max_ns", _NS_PER_US)
    quantiles = histogram.quantiles(histograms, np.array(list(_QUANTILES.values()))) / _NS_PER_US
    shares = {name: column(name, PARTS) for name in ("beta", "mu", "sigma")}
    stats: dict[str, Floats] = {
        "mean_us": np.divide(total, count, out=np.full(len(rows), np.nan), where=count > 0) / _NS_PER_US,
        **{name: np.fmin(quantiles[:, at], longest) for at, name in enumerate(_QUANTILES)},
        "max_us": longest,
        "variance_us2": column("deviation_ns", _NS_PER_US) ** 2,
        **{name: np.where(values <= 1.0, values, np.nan) for name, values in shares.items()},
    }
    several = rows["functions"] != 1
    for values in stats.values():
        values[several] = np.nan
    return {"invocation_count": count, "total_time_ms": total / _NS_PER_MS, **stats}
