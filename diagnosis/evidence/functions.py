"""Functions of one rank's window as numbers, and as the rows that travel.

Whoever saw them makes this table: the readers of traces here, or the native condenser that has never held an event. It
is brought under the limit of the wire by one rule: the functions that took least, taken together by kind, become one
row. The receiver sees in `functions` how many; what single one of them took is at most that row's `max_ns`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from diagnosis.contracts import histogram
from diagnosis.contracts.columns import empty, null_of, pack
from diagnosis.contracts.histogram import Histograms
from diagnosis.contracts.summary import (
    FUNCTION_DTYPE,
    FUNCTIONS_MAX,
    KINDS,
    NAME_CHARS_MAX,
    OTHERS,
    PARTS,
    RANK_BYTES_MAX,
    RankSummary,
    name_hash,
    rank_bytes,
)

Longs = NDArray[np.int64]
Floats = NDArray[np.float64]
_SHRINK: Final = 0.8
_TAG_BYTES: Final = 4


@dataclass(frozen=True, slots=True, eq=False)
class Functions:
    """Shapes (N,), no two alike in name and kind. `functions`: how many a row stands for; `scatter`: sum of squared
    distances from the mean, ns^2. NaN: not told, in `beta`, `mu`, `sigma` (shares of 1), `bytes` and `members`."""

    name: tuple[str, ...]
    kind: Longs
    functions: Longs
    count: Longs
    total_ns: Longs
    scatter: Floats
    max_ns: Longs
    beta: Floats
    mu: Floats
    sigma: Floats
    bytes: Floats
    members: Floats
    histograms: Histograms


def sums(group: Longs, values: NDArray[np.number[Any]], groups: int) -> Floats:
    """The sum of each group (G,) of values (N,); NaN where one of its values is."""
    return np.bincount(group, values.astype(np.float64), groups).astype(np.float64)


def fitted(name: str) -> str:
    """The name as it may travel: a long one is cut, and tagged so that two such names stay two."""
    if len(name) <= NAME_CHARS_MAX:
        return name
    tag = f"...#{name_hash(0, name) % (1 << 8 * _TAG_BYTES):0{2 * _TAG_BYTES}x}"
    return name[: NAME_CHARS_MAX - len(tag)] + tag


def with_functions(summary: RankSummary, functions: Functions) -> tuple[RankSummary, dict[int, tuple[int, str]]]:
    """The summary with as many functions as fit, and their names: (kind, text) by hash."""
    rows_max = FUNCTIONS_MAX
    while True:
        kept = merged(functions, rows_max)
        names = {name_hash(kind, name): (kind, name) for name, kind in zip(kept.name, kept.kind.tolist(), strict=True)}
        packed = msgspec.structs.replace(
            summary, functions=pack(_rows(kept)), histograms=histogram.encode(kept.histograms)
        )
        if rank_bytes(packed) <= RANK_BYTES_MAX or rows_max <= len(KINDS):
            return packed, names
        rows_max = max(int(min(rows_max, len(kept.name)) * _SHRINK), len(KINDS))


def merged(functions: Functions, rows_max: int) -> Functions:
    """At most `rows_max` rows (no fewer than there are kinds), the greatest by total; the others one row a kind."""
    if len(functions.name) <= rows_max:
        return functions
    order = np.lexsort((functions.kind, -functions.total_ns))
    kept, rest = order[: rows_max - len(KINDS)], order[rows_max - len(KINDS) :]
    tails = np.unique(functions.kind[rest])
    rows = len(kept) + len(tails)
    into = np.empty(len(order), np.int64)
    into[kept] = np.arange(len(kept))
    into[rest] = len(kept) + np.searchsorted(tails, functions.kind[rest])
    return _added(functions, kept, tails, into, rows)


def _added(one: Functions, kept: Longs, tails: Longs, into: Longs, rows: int) -> Functions:
    def whole(values: Longs) -> Longs:
        added = np.zeros(rows, np.int64)
        np.add.at(added, into, values)
        return added

    def told(values: Floats) -> Floats:
        """Their sum, of those that are told; unknown where none is."""
        known = np.isfinite(values)
        added = sums(into, np.where(known, values, 0.0), rows)
        return np.where(np.bincount(into[known], minlength=rows) > 0, added, np.nan)

    def alone(values: Floats) -> Floats:
        return np.concatenate([values[kept], np.full(len(tails), np.nan)])

    count, total, longest = whole(one.count), whole(one.total_ns), np.zeros(rows, np.int64)
    np.maximum.at(longest, into, one.max_ns)
    means = total / np.maximum(count, 1)
    apart = one.count * (one.total_ns / np.maximum(one.count, 1) - means[into]) ** 2
    return Functions(
        name=(*(one.name[at] for at in kept.tolist()), *(OTHERS[kind] for kind in tails.tolist())),
        kind=np.concatenate([one.kind[kept], tails]),
        functions=whole(one.functions),
        count=count,
        total_ns=total,
        scatter=sums(into, one.scatter + apart, rows),
        max_ns=longest,
        beta=told(one.beta),
        mu=alone(one.mu),
        sigma=alone(one.sigma),
        bytes=told(one.bytes),
        members=alone(one.members),
        histograms=histogram.merge(one.histograms, into, rows),
    )


def _rows(functions: Functions) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    rows = empty(FUNCTION_DTYPE, len(functions.name))
    rows["name"] = [name_hash(kind, name) for name, kind in zip(functions.name, functions.kind.tolist(), strict=True)]
    rows["kind"] = functions.kind
    for name in ("functions", "count", "total_ns", "max_ns"):
        rows[name] = _whole(getattr(functions, name).astype(np.float64), FUNCTION_DTYPE[name])
    deviation = np.sqrt(functions.scatter / np.maximum(functions.count, 1))
    rows["deviation_ns"] = _whole(deviation, FUNCTION_DTYPE["deviation_ns"])
    for name in ("beta", "mu", "sigma"):
        rows[name] = _whole(getattr(functions, name) * PARTS, FUNCTION_DTYPE[name])
    for name in ("bytes", "members"):
        rows[name] = _whole(getattr(functions, name), FUNCTION_DTYPE[name])
    return rows


def _whole(values: Floats, dtype: np.dtype[np.void]) -> NDArray[np.uint64]:
    """Rounded; null where unknown, at most the greatest value that is not null."""
    null = null_of(dtype)
    known = np.isfinite(values)
    limit = float(min(null - 1, 1 << 53)) if null else inf
    whole = np.round(np.clip(np.where(known, values, 0.0), 0.0, limit)).astype(np.uint64)
    whole[~known] = null
    return whole
