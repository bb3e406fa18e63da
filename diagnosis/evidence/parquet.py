"""Columns of a parquet file as arrays, within limits. Needs the extra `parquet` (pyarrow), which is imported when
asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from diagnosis.contracts.errors import AgentFault, OperatorFault

MAGIC: Final = b"PAR1"
ROWS_MAX: Final = 8_000_000
BYTES_MAX: Final = 1 << 30
BATCH_ROWS: Final = 1 << 16
_NUMBERS = frozenset(
    {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float", "double", "bool"}
)


def read_columns(content: bytes, names: Sequence[str], words: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Those of the columns `names` that are there; the ones of `words` hold words, the others numbers (null: NaN).

    Raises: OperatorFault (pyarrow is not installed), AgentFault (no parquet, too large, or a column of another type).
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise OperatorFault("parquet files need pyarrow: install tocsin with the extra parquet") from None
    try:
        file = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(content), read_dictionary=list(words))
        there = [name for name in names if name in file.schema_arrow.names]
        claimed = sum(file.metadata.row_group(at).total_byte_size for at in range(file.metadata.num_row_groups))
        if file.metadata.num_rows > ROWS_MAX or claimed > BYTES_MAX:
            raise AgentFault("it is larger than the reader's limit", reason="size")
        parts: dict[str, list[NDArray[Any]]] = {name: [] for name in there}
        rows = 0
        for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=there):
            rows += batch.num_rows
            if rows > ROWS_MAX:
                raise AgentFault("it is larger than the reader's limit", reason="size")
            for name in there:
                parts[name].append(_array(name, batch.column(name), name in words))
    except (pyarrow.ArrowException, OSError, ValueError, TypeError, KeyError) as error:
        raise AgentFault(f"it is broken: {error}"[:200], reason="parquet_broken") from None
    return {name: np.concatenate(part) if part else np.empty(0) for name, part in parts.items()}


def _array(name: str, column: Any, is_words: bool) -> NDArray[Any]:
    """One batch of a column. Words become short fixed strings: a long one cannot be one that is looked for."""
    if is_words:
        codes = np.nan_to_num(column.indices.cast("float64").to_numpy(zero_copy_only=False), nan=-1.0).astype(np.int64)
        table = np.array([str(word)[:64] for word in column.dictionary.to_pylist()] or [""])
        known = (codes >= 0) & (codes < len(table))  # a broken file may point beyond its own dictionary
        return np.where(known, table[np.where(known, codes, 0)], "")
    if str(column.type) not in _NUMBERS:
        raise AgentFault(f"column {name} does not hold numbers", reason="columns")
    return np.asarray(column.cast("float64").to_numpy(zero_copy_only=False), np.float64)
