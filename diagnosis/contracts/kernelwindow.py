"""A window over one process's GPU: how it is asked for, and what it leaves behind. Native code writes both.

Two files beside the process's frames, little-endian and laid out as the tables below; the C header is generated from
them.

**`<process>.cupti.control`**, for the life of the process, 256 bytes of shared memory. The process writes who it is and
in what state the collector is; the daemon writes a request and, last, its number `asked`. A request names its window by
rounds of one communicator (see `probeframe`), which all ranks count alike: make ready at `warm_round`, record while
rounds `first_round` to `end_round - 1` are the newest entered. Who is late begins with the next step of `step_rounds`
rounds, as the window then says (its own `first_round`). Without a communicator it begins at once and takes
`duration_ns`. Whatever happens it is over at `deadline_ns`, no more than `WINDOW_S_MAX` from when it is first seen: the
collector asks nobody and waits for nobody. Another number drops a request that has not begun, and is taken up after one
that has.

**`<process>.cupti.window`**, one a process, replaced by the next: the newest window, condensed. Header, rows (one a
function), cells (filled histogram buckets, row by row), names. A row's time is that inside the window. `critical_ns`
is how long it was the critical path by the rule of `evidence.critical_path`, taken over what the GPU and the
runtime's calls did; it is unknown where more executions ran than were kept (`Unseen.CRITICAL`). Rows beyond
`ROWS_MAX` names are added up, one a kind, without a name, and `functions` says how many names they stand for.

Both are the job's own word and hostile input.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum, IntFlag
from typing import Final

import numpy as np
from numpy.typing import NDArray

from diagnosis.contracts.errors import AgentFault
from diagnosis.contracts.histogram import BUCKETS
from diagnosis.contracts.summary import KINDS

MAGIC_CONTROL: Final = 0x4C52_5443_4F54_0001
MAGIC_WINDOW: Final = 0x444E_5743_4F54_0001
VERSION: Final = 1
CONTROL_BYTES: Final = 256
HEADER_BYTES: Final = 384
ROWS_MAX: Final = 4096
"""Of names; four more hold what did not fit."""
CELLS_MAX: Final = 1 << 18
NAME_BYTES_MAX: Final = 1024
"""Of one name: what is longer is cut, and `name_hash` still tells it from its like."""
NAMES_BYTES_MAX: Final = 1 << 20
EXECUTIONS_MAX: Final = 1 << 20
"""Whose beginnings and ends are kept until the window ends, for the critical path."""
WINDOW_S_MAX: Final = 300
COMM_NONE: Final = 0
_BITS_MAX: Final = 48
"""Of a row's number: three days in ns. All rows together stay below 2^61."""

# (name, numpy type, C type, count), each on its natural alignment.
Field = tuple[str, str, str, int]
CONTROL_FIELDS: Final[tuple[Field, ...]] = (
    ("magic", "<u8", "uint64_t", 1),  # written last
    ("version", "<u4", "uint32_t", 1),
    ("bytes", "<u4", "uint32_t", 1),
    ("pid", "<i4", "int32_t", 1),
    ("rank", "<i4", "int32_t", 1),  # -1 unknown
    ("pid_start_ticks", "<u8", "uint64_t", 1),
    ("created_ns", "<u8", "uint64_t", 1),
    ("state", "<u4", "uint32_t", 1),  # State
    ("why", "<u4", "uint32_t", 1),  # Why, of a state OFF and of the newest window
    ("taken", "<u4", "uint32_t", 1),  # number of the request that was seen last
    ("done", "<u4", "uint32_t", 1),  # number of the request that is over; its window, or `why` there is none
    ("error", "<u4", "uint32_t", 1),  # CUPTI's result behind `why`
    ("cupti_version", "<u4", "uint32_t", 1),  # as cuptiGetVersion tells it; 0 before the first window
    ("reserved", "<u8", "uint64_t", 8),
    # from here on the daemon writes
    ("window", "<u8", "uint64_t", 1),  # the controller's number of it
    ("comm_id", "<u8", "uint64_t", 1),
    ("warm_round", "<u8", "uint64_t", 1),
    ("first_round", "<u8", "uint64_t", 1),
    ("end_round", "<u8", "uint64_t", 1),
    ("step_rounds", "<u8", "uint64_t", 1),  # 0: who is late has no window
    ("duration_ns", "<u8", "uint64_t", 1),  # where there is no communicator
    ("deadline_ns", "<u8", "uint64_t", 1),  # CLOCK_MONOTONIC
    ("collect", "<u4", "uint32_t", 1),  # Collect
    ("asked", "<u4", "uint32_t", 1),  # written last, another one each time; 0: nothing was asked
    ("reserved2", "<u8", "uint64_t", 7),
)
HEADER_FIELDS: Final[tuple[Field, ...]] = (
    ("magic", "<u8", "uint64_t", 1),
    ("version", "<u4", "uint32_t", 1),
    ("header_bytes", "<u4", "uint32_t", 1),
    ("row_bytes", "<u4", "uint32_t", 1),
    ("rows", "<u4", "uint32_t", 1),
    ("cells", "<u4", "uint32_t", 1),
    ("name_bytes", "<u4", "uint32_t", 1),
    ("pid", "<i4", "int32_t", 1),
    ("rank", "<i4", "int32_t", 1),
    ("pid_start_ticks", "<u8", "uint64_t", 1),
    ("window", "<u8", "uint64_t", 1),
    ("comm_id", "<u8", "uint64_t", 1),
    ("first_round", "<u8", "uint64_t", 1),  # newest entered when it began and when it ended, whatever was asked for
    ("end_round", "<u8", "uint64_t", 1),
    ("begin_ns", "<u8", "uint64_t", 1),  # CUPTI's clock
    ("end_ns", "<u8", "uint64_t", 1),
    ("begin_mono_ns", "<u8", "uint64_t", 1),  # CLOCK_MONOTONIC
    ("end_mono_ns", "<u8", "uint64_t", 1),
    ("unseen", "<u4", "uint32_t", 1),  # Unseen
    ("why", "<u4", "uint32_t", 1),  # Why: NONE or what ended it early
    ("cupti_version", "<u4", "uint32_t", 1),
    ("error", "<u4", "uint32_t", 1),
    ("records", "<u8", "uint64_t", 1),  # all that CUPTI delivered
    ("kernels", "<u8", "uint64_t", 1),
    ("copies", "<u8", "uint64_t", 1),
    ("sets", "<u8", "uint64_t", 1),
    ("calls", "<u8", "uint64_t", 1),  # of the runtime
    ("markers", "<u8", "uint64_t", 1),
    ("correlations", "<u8", "uint64_t", 1),
    ("overheads", "<u8", "uint64_t", 1),
    ("overhead_ns", "<u8", "uint64_t", 1),  # of the collection itself, as CUPTI says
    ("unknown", "<u8", "uint64_t", 1),  # of a kind that is not read
    ("untimed", "<u8", "uint64_t", 1),  # without a beginning or an end, or with them the wrong way round
    ("outside", "<u8", "uint64_t", 1),  # not in the window
    ("in_graphs", "<u8", "uint64_t", 1),  # of the kernels
    ("dropped", "<u8", "uint64_t", 1),  # by CUPTI, or for want of a buffer
    ("buffers", "<u8", "uint64_t", 1),
    ("condense_ns", "<u8", "uint64_t", 1),  # what reading them took
    ("compute_ns", "<u8", "uint64_t", 1),  # in which computation ran
    ("comm_ns", "<u8", "uint64_t", 1),
    ("both_ns", "<u8", "uint64_t", 1),
    ("critical_ns", "<u8", "uint64_t", 4),  # by kind
    ("reserved", "<u8", "uint64_t", 9),
)
ROW_FIELDS: Final[tuple[Field, ...]] = (
    ("count", "<u8", "uint64_t", 1),
    ("total_ns", "<u8", "uint64_t", 1),
    ("scatter", "<f8", "double", 1),  # sum of squared distances from the mean, ns^2
    ("max_ns", "<u8", "uint64_t", 1),
    ("critical_ns", "<u8", "uint64_t", 1),
    ("bytes", "<u8", "uint64_t", 1),  # copied or set
    ("name_hash", "<u8", "uint64_t", 1),  # of the whole name
    ("functions", "<u4", "uint32_t", 1),  # names that the row stands for
    ("cells", "<u4", "uint32_t", 1),  # of its histogram
    ("name_bytes", "<u4", "uint32_t", 1),  # 0: the row of those that did not fit
    ("kind", "u1", "uint8_t", 1),  # summary.KINDS
    ("cut", "u1", "uint8_t", 1),  # 1: the name was longer
    ("reserved", "<u2", "uint16_t", 1),
)
CELL_FIELDS: Final[tuple[Field, ...]] = (
    ("count", "<u4", "uint32_t", 1),
    ("bucket", "<u4", "uint32_t", 1),
)


class State(IntEnum):
    """What the collector does. Only RECORDING costs the program anything."""

    OFF = 0
    DORMANT = 1
    WAITING = 2
    READY = 3
    RECORDING = 4
    CLOSING = 5


class Why(IntEnum):
    """Why there is no window, or less of one."""

    NONE = 0
    NO_CUPTI = 1  # no libcupti in this process's reach, or one that lacks what is needed
    OLD_CUPTI = 2  # before 12.6 detaching could crash programs with CUDA graphs
    OTHER_CLIENT = 3  # nsys, ncu, cuda-gdb or a profiler that is attached
    KINETO = 4  # the program was started with Kineto's own daemon client
    OTHER_INJECTION = 5  # CUDA_INJECTION64_PATH names another library
    REFUSED = 6  # CUPTI refused to record: `error`
    LATE = 7  # the last round was over before it could begin, or the time was
    NO_ROUNDS = 8  # the communicator's frame was not there, or its rounds did not come
    NO_FILE = 9  # the window could not be written
    REQUEST = 10  # it makes no sense
    DEADLINE = 11  # over before the last round
    ATTACHED = 12  # recorded, but CUPTI could not be detached: the program made no call in time
    REPLACED = 13  # by another request, before it began


class Collect(IntFlag):
    """What to record. Kernels, copies and sets always are."""

    NONE = 0
    CALLS = 1
    OVERHEAD = 2
    MARKERS = 4
    CORRELATIONS = 8


class Unseen(IntFlag):
    """What a window cannot tell."""

    NONE = 0
    CRITICAL = 1  # the critical path and the overlaps: more executions than are kept
    NAMES = 2  # some rows: too many names
    CELLS = 4  # some histograms
    RECORDS = 8  # some executions: dropped
    MEMORY = 16  # anything: no memory for it


def _dtype(fields: tuple[Field, ...]) -> np.dtype[np.void]:
    return np.dtype([(name, code) if count == 1 else (name, code, (count,)) for name, code, _, count in fields])


CONTROL_DTYPE: Final = _dtype(CONTROL_FIELDS)
HEADER_DTYPE: Final = _dtype(HEADER_FIELDS)
ROW_DTYPE: Final = _dtype(ROW_FIELDS)
CELL_DTYPE: Final = _dtype(CELL_FIELDS)
STRUCTS: Final = (
    ("tocsin_window_control", CONTROL_FIELDS, CONTROL_DTYPE),
    ("tocsin_window_header", HEADER_FIELDS, HEADER_DTYPE),
    ("tocsin_window_row", ROW_FIELDS, ROW_DTYPE),
    ("tocsin_window_cell", CELL_FIELDS, CELL_DTYPE),
)
REQUEST_OFFSET: Final = int(CONTROL_DTYPE.fields["window"][1]) if CONTROL_DTYPE.fields else 0
ASKED_OFFSET: Final = int(CONTROL_DTYPE.fields["asked"][1]) if CONTROL_DTYPE.fields else 0
ROW_COUNT_MAX: Final = ROWS_MAX + len(KINDS)
WINDOW_BYTES_MAX: Final = (
    HEADER_BYTES + ROW_COUNT_MAX * ROW_DTYPE.itemsize + CELLS_MAX * CELL_DTYPE.itemsize + NAMES_BYTES_MAX
)


@dataclass(frozen=True, slots=True)
class Request:
    """A window to be asked for; see the top of this file."""

    window: int
    deadline_ns: int
    comm_id: int = COMM_NONE
    warm_round: int = 0
    first_round: int = 0
    end_round: int = 0
    step_rounds: int = 0
    duration_ns: int = 0
    collect: Collect = Collect.OVERHEAD

    def packed(self) -> bytes:
        """What to write at REQUEST_OFFSET, before `asked` at ASKED_OFFSET (u32, another number than before, not 0)."""
        record = np.zeros(1, CONTROL_DTYPE)
        for field in fields(self):
            record[field.name] = int(getattr(self, field.name))
        return record.tobytes()[REQUEST_OFFSET:ASKED_OFFSET]


@dataclass(frozen=True, slots=True, eq=False)
class KernelWindow:
    """One window as read. `header`: of HEADER_DTYPE; `rows` (N,) ROW_DTYPE with their N `names`; `start` (N + 1,): the
    cells of row i are `cells[start[i]:start[i + 1]]`."""

    header: np.void
    rows: NDArray[np.void]
    names: tuple[str, ...]
    start: NDArray[np.int64]
    cells: NDArray[np.void]


def parse_control(data: bytes) -> np.void:
    """The control file's record (CONTROL_DTYPE).

    Raises AgentFault (reason `short`, `magic`, `version` or `sizes`).
    """
    record = _header(data, CONTROL_DTYPE, MAGIC_CONTROL)
    if len(data) != CONTROL_BYTES or int(record["bytes"]) != CONTROL_BYTES:
        raise AgentFault(f"control of {len(data)} bytes", reason="sizes")
    return record


def parse_window(data: bytes) -> KernelWindow:
    """Check and view the bytes of a window's file.

    Raises AgentFault (reason `short`, `magic`, `version`, `sizes` or `limits`). Nothing in it is used as a size or an
    index before it was checked, and every number that is left can be added up without running over.
    """
    header = _header(data, HEADER_DTYPE, MAGIC_WINDOW)
    rows, cells, name_bytes = (int(header[name]) for name in ("rows", "cells", "name_bytes"))
    if rows > ROW_COUNT_MAX or cells > CELLS_MAX or name_bytes > NAMES_BYTES_MAX:
        raise AgentFault(f"a window of {rows} rows, {cells} cells, {name_bytes} bytes of names", reason="limits")
    sizes = (rows * ROW_DTYPE.itemsize, cells * CELL_DTYPE.itemsize, name_bytes)
    told = (int(header["header_bytes"]), int(header["row_bytes"]), len(data))
    if told != (HEADER_BYTES, ROW_DTYPE.itemsize, HEADER_BYTES + sum(sizes)):
        raise AgentFault(f"a window of sizes {told}", reason="sizes")
    table = np.frombuffer(data, ROW_DTYPE, rows, HEADER_BYTES)
    counted = np.frombuffer(data, CELL_DTYPE, cells, HEADER_BYTES + sizes[0])
    start = np.concatenate([[0], np.cumsum(table["cells"].astype(np.int64))])
    ends = np.concatenate([[0], np.cumsum(table["name_bytes"].astype(np.int64))])
    if int(start[-1]) != cells or int(ends[-1]) != name_bytes:
        raise AgentFault("rows that do not add up to their table", reason="limits")
    if rows and (int(table["kind"].max()) >= len(KINDS) or not np.isfinite(table["scatter"]).all()):
        raise AgentFault("a row of an unknown kind, or with a number that is none", reason="limits")
    if any(
        rows and int(table[name].max()) >> _BITS_MAX for name in ("count", "total_ns", "max_ns", "critical_ns", "bytes")
    ):
        raise AgentFault("a row with an impossible number", reason="limits")
    if cells and int(counted["bucket"].max()) >= BUCKETS:
        raise AgentFault("a bucket that there is not", reason="limits")
    text = data[len(data) - name_bytes :]
    names = tuple(
        text[begin:end].decode(errors="replace")
        for begin, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
    )
    return KernelWindow(header, table, names, start, counted)


def _header(data: bytes, dtype: np.dtype[np.void], magic: int) -> np.void:
    if len(data) < dtype.itemsize:
        raise AgentFault(f"{len(data)} bytes are no header", reason="short")
    record: np.void = np.frombuffer(data, dtype, 1)[0]
    if int(record["magic"]) != magic:
        raise AgentFault("the magic word is missing", reason="magic")
    if int(record["version"]) != VERSION:
        raise AgentFault(f"version {record['version']}; this side reads {VERSION}", reason="version")
    return record
