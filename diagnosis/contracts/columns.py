"""Tables on the wire: one little-endian byte string per column, by name, so that columns may come and go.

Null is a value of its own: the greatest value of an unsigned column, the least of a signed one. A column that the
sender did not know is filled with null, never with zero; a column that the receiver does not know is passed over.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from diagnosis.contracts.errors import AgentFault

Table = np.ndarray[tuple[int], np.dtype[np.void]]
Columns = dict[str, bytes]


def null_of(dtype: np.dtype[Any]) -> int:
    """The value that stands for "unknown" in an integer column of `dtype`."""
    info = np.iinfo(dtype)
    return int(info.min if info.min < 0 else info.max)


def empty(dtype: np.dtype[np.void], rows: int) -> Table:
    """A table of `rows` rows in which everything is null."""
    table = np.empty(rows, dtype)
    for name in dtype.names or ():
        table[name] = null_of(dtype[name])
    return table


def pack(table: Table) -> Columns:
    """The table as columns. Shapes: one dimension, `table.dtype` with plain little-endian integer fields."""
    return {name: table[name].tobytes() for name in table.dtype.names or ()}


def rows_of(columns: Columns, dtype: np.dtype[np.void]) -> int:
    """How many rows the columns claim, by the first that is known; the others are compared with it by `unpack`."""
    first = next((name for name in dtype.names or () if name in columns), None)
    return 0 if first is None else len(columns[first]) // dtype[first].itemsize


def unpack(columns: Columns, dtype: np.dtype[np.void], rows_max: int) -> Table:
    """Columns as a table of `dtype`.

    Raises AgentFault (reason `columns`) where known columns differ in length or exceed `rows_max` rows.
    """
    names = [name for name in dtype.names or () if name in columns]
    rows = rows_of(columns, dtype)
    if rows > rows_max:
        raise AgentFault(f"{rows} rows, at most {rows_max} are taken", reason="columns")
    table = empty(dtype, rows)
    for name in names:
        if len(columns[name]) != rows * dtype[name].itemsize:
            raise AgentFault(f"column {name} has {len(columns[name])} bytes for {rows} rows", reason="columns")
        table[name] = np.frombuffer(columns[name], dtype[name])
    return table
