"""Durations as counts in fixed buckets: 16 per octave of nanoseconds, equal on every node and in every language.

Bucket 0 holds zero. Bucket `1 + 16 e + j` holds the whole v with 2**(e + j/16) <= v < 2**(e + (j + 1)/16), up to
2**OCTAVES ns (about five hours); what is longer is in the last one. Equal buckets make merging an addition, of ranks,
windows or names. A quantile is answered with the geometric middle of its bucket, which no value of the bucket is
further from than a factor 2**(1/32): 2.19 %.

The borders are irrational, so floating point would decide differently here and there near them. Both sides therefore
compare integers. Here: v >= 2**(k/16) is v >= BORDERS[k], the power rounded up. In C++, which has no time to search:
let e be the place of v's highest bit and m = v << (63 - e); then v >= 2**(e + j/16) is m >= MANTISSA_BORDERS[j], the
power 2**(63 + j/16) rounded up. Cut the octave into 32 equal cells, each narrower than the narrowest bucket: none has
two borders inside, so `CELL_BUCKETS[m >> 58 & 31]`, the bucket at the cell's left end, is right or one too low, and one
comparison with the next border tells.

On the wire, many histograms are one string of varints (LEB128): per row how many buckets are filled, then all rows'
buckets as distances (the first of a row from -1, so that none is zero), then all counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from diagnosis.contracts.errors import AgentFault

OCTAVE_BUCKETS: Final = 16
OCTAVES: Final = 44
BUCKETS: Final = 1 + OCTAVES * OCTAVE_BUCKETS + 1
OVER: Final = BUCKETS - 1
CELLS: Final = 32
COUNT_MAX: Final = 1 << 40
"""Of one bucket on the wire."""

_VARINT_BYTES_MAX: Final = 6  # 42 bits


def _root_up(octaves_16th: int) -> int:
    """2**(octaves_16th / 16) rounded up: the least n with n**16 >= 2**octaves_16th."""
    low, high = 1, 1 << (octaves_16th // OCTAVE_BUCKETS + 1)
    while low < high:
        middle = (low + high) // 2
        if middle**OCTAVE_BUCKETS >= 1 << octaves_16th:
            high = middle
        else:
            low = middle + 1
    return low


BORDERS: Final = tuple(_root_up(k) for k in range(OCTAVES * OCTAVE_BUCKETS + 1))
"""Least duration of buckets 1 to OVER, ns. Where two are equal, the bucket of the first holds no whole number."""

MANTISSA_BORDERS: Final = tuple(_root_up(63 * OCTAVE_BUCKETS + j) for j in range(OCTAVE_BUCKETS))
"""Borders within an octave whose lowest is 2**63. For j = 16 there is none: 2**64 does not fit and is not reached."""

CELL_BUCKETS: Final = tuple(
    sum(border <= (1 << 63) + (cell << 58) for border in MANTISSA_BORDERS) - 1 for cell in range(CELLS)
)
"""j of the bucket at the left end of each of the octave's cells."""

MIDDLES_NS: Final = np.concatenate(
    [[0.0], np.exp2((np.arange(OCTAVES * OCTAVE_BUCKETS) + 0.5) / OCTAVE_BUCKETS), [float(BORDERS[-1])]]
)
"""What a value of each bucket is taken to be: the geometric middle. Of the last only its lower end is known."""

_BORDERS = np.array(BORDERS, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Histograms:
    """Many histograms, only filled buckets: those of row i are `[start[i]:start[i + 1]]` of `bucket` and `count`.

    Shapes: `start` (R + 1,) int64, `bucket` (N,) int64, rising within a row, `count` (N,) int64, all > 0.
    """

    start: NDArray[np.int64]
    bucket: NDArray[np.int64]
    count: NDArray[np.int64]

    @property
    def rows(self) -> int:
        """How many histograms."""
        return len(self.start) - 1

    def row_of(self) -> NDArray[np.int64]:
        """Row of each filled bucket (N,)."""
        return np.repeat(np.arange(self.rows), np.diff(self.start))

    def totals(self) -> NDArray[np.int64]:
        """Values counted per row (R,)."""
        sums = np.concatenate([[0], np.cumsum(self.count)])
        totals: NDArray[np.int64] = sums[self.start[1:]] - sums[self.start[:-1]]
        return totals


def bucket_of(duration_ns: int) -> int:
    """The bucket of one duration, in the way of the C++ side. What is negative counts as zero."""
    if duration_ns <= 0:
        return 0
    if duration_ns >= BORDERS[-1]:
        return OVER
    octave = duration_ns.bit_length() - 1
    mantissa = duration_ns << (63 - octave)
    j = CELL_BUCKETS[mantissa >> 58 & (CELLS - 1)]
    if j + 1 < OCTAVE_BUCKETS and mantissa >= MANTISSA_BORDERS[j + 1]:
        j += 1
    return 1 + octave * OCTAVE_BUCKETS + j


def buckets_of(durations_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """The buckets of many durations."""
    found: NDArray[np.int64] = np.searchsorted(_BORDERS, durations_ns, side="right").astype(np.int64)
    return found


def from_cells(row: NDArray[np.int64], bucket: NDArray[np.int64], count: NDArray[np.int64], rows: int) -> Histograms:
    """Histograms of any cells (N,), each a row, a bucket and a count; equal ones are added, in whatever order."""
    key = row * BUCKETS + bucket
    order = np.argsort(key, kind="stable")
    key = key[order]
    first = np.flatnonzero(np.diff(key, prepend=-1))
    key, added = key[first], np.add.reduceat(count[order], first) if len(first) else count[:0]
    key, added = key[added > 0], added[added > 0]
    start = np.searchsorted(key, np.arange(rows + 1) * BUCKETS).astype(np.int64)
    return Histograms(start, key % BUCKETS, added)


def from_durations(row: NDArray[np.int64], durations_ns: NDArray[np.int64], rows: int) -> Histograms:
    """Histograms of durations (N,), each of the row that `row` (N,) says."""
    return from_cells(row, buckets_of(durations_ns), np.ones(len(row), np.int64), rows)


def merge(histograms: Histograms, into: NDArray[np.int64], rows: int) -> Histograms:
    """Row i is added to row `into[i]` of `rows` new ones."""
    return from_cells(into[histograms.row_of()], histograms.bucket, histograms.count, rows)


def quantiles(histograms: Histograms, parts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Quantiles in ns, shape (R, len(parts)): the value with rank ceil(part * n) of n. NaN where nothing is counted."""
    totals = histograms.totals()
    sums = np.cumsum(histograms.count)
    before = np.concatenate([[0], sums])[histograms.start[:-1]]
    rank = np.clip(np.ceil(totals[:, None] * parts[None, :]).astype(np.int64), 1, None)
    place = np.searchsorted(sums, before[:, None] + rank, side="left")
    filled = totals > 0
    answer = np.full(rank.shape, np.nan)
    answer[filled] = MIDDLES_NS[histograms.bucket[place[filled]]]
    return answer


def encode(histograms: Histograms) -> bytes:
    """All rows as they travel. Counts above COUNT_MAX are cut down to it."""
    first = np.zeros(len(histograms.bucket), bool)
    filled = np.diff(histograms.start)
    first[histograms.start[:-1][filled > 0]] = True
    distance = np.diff(histograms.bucket, prepend=-1)
    distance[first] = histograms.bucket[first] + 1
    return _varints(np.concatenate([filled, distance, np.minimum(histograms.count, COUNT_MAX)]))


def decode(packed: bytes, rows: int) -> Histograms:
    """The `rows` histograms of a string that anybody may have written.

    Raises AgentFault (reason `histogram`) where it is none of so many rows. What it takes is bounded by its length.
    """
    return decode_all([packed], [rows])


def decode_all(packed: Sequence[bytes], rows: Sequence[int]) -> Histograms:
    """The histograms of many strings, one after the other, in one pass. `rows`: how many each holds.

    Raises AgentFault (reason `histogram`) where one of them is none of so many rows.
    """
    octets = np.frombuffer(b"".join(packed), np.uint8)
    last = np.cumsum([len(one) for one in packed], dtype=np.int64)
    if any(one and one[-1] >= 0x80 for one in packed):
        raise AgentFault("histograms that break off within a number", reason="histogram")
    numbers = _from_varints(octets)
    told = np.concatenate([[0], np.cumsum(octets < 0x80)])[last]  # numbers up to the end of each string
    many = np.array(rows, np.int64)
    begin = np.concatenate([[0], told[:-1]]).astype(np.int64)
    cells, odd = np.divmod(told - begin - many, 2)
    if (cells < 0).any() or odd.any():
        raise AgentFault(f"{len(numbers)} numbers are no histograms of {many.sum()} rows", reason="histogram")
    filled = numbers[_ranges(begin, many)]
    row_sums = np.concatenate([[0], np.cumsum(filled)]).astype(np.int64)
    ends = np.cumsum(many)
    if (len(filled) and filled.max() > BUCKETS) or (row_sums[ends] - row_sums[ends - many] != cells).any():
        raise AgentFault("histograms with more or fewer buckets than they say", reason="histogram")
    return _walked(row_sums, numbers[_ranges(begin + many, cells)], numbers[_ranges(begin + many + cells, cells)])


def _walked(start: NDArray[np.int64], distance: NDArray[np.int64], count: NDArray[np.int64]) -> Histograms:
    if len(count) and not (
        0 < distance.min() <= distance.max() <= BUCKETS and 0 < count.min() <= count.max() <= COUNT_MAX
    ):
        raise AgentFault("a histogram with an impossible distance or count", reason="histogram")
    walked = np.concatenate([[0], np.cumsum(distance)]).astype(np.int64)
    bucket = walked[1:] - 1 - np.repeat(walked[start[:-1]], np.diff(start))
    if len(bucket) and bucket.max() >= BUCKETS:
        raise AgentFault("a histogram with more buckets than there are", reason="histogram")
    return Histograms(start, bucket, count)


def _ranges(begin: NDArray[np.int64], length: NDArray[np.int64]) -> NDArray[np.int64]:
    """begin[0], begin[0] + 1, ... (length[0] of them), begin[1], ..."""
    ends = np.cumsum(length)
    places: NDArray[np.int64] = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(begin - ends + length, length)
    return places


def _varints(numbers: NDArray[np.int64]) -> bytes:
    """Seven bits a byte, lowest first; the top bit says that more follow."""
    used = np.ones(len(numbers), np.int64)
    for more in range(1, _VARINT_BYTES_MAX):
        used += numbers >= 1 << (7 * more)
    end = np.cumsum(used)
    place = np.arange(int(end[-1]) if len(end) else 0) - np.repeat(end - used, used)
    digits = np.repeat(numbers, used) >> (7 * place) & 0x7F
    return (digits | np.where(place + 1 < np.repeat(used, used), 0x80, 0)).astype(np.uint8).tobytes()


def _from_varints(octets: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The numbers of octets of which the last ends one."""
    end = np.flatnonzero(octets < 0x80) + 1
    start = np.concatenate([[0], end[:-1]]).astype(np.int64) if len(end) else end.astype(np.int64)
    used = end - start
    if len(used) and used.max() > _VARINT_BYTES_MAX:
        raise AgentFault("a number too large for a histogram", reason="histogram")
    place = np.arange(len(octets)) - np.repeat(start, used)
    digits = (octets & 0x7F).astype(np.int64) << (7 * place)
    return np.add.reduceat(digits, start) if len(start) else np.empty(0, np.int64)
