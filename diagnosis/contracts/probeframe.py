"""The probe frame: what a training process tells, as fixed-size shared memory. The one definition of its layout.

A process owns one file: a header of 128 bytes, then 16 slots of 1,184 bytes, one per communicator (the size of
CCL-D's probing frame, PPoPP'26). The file never grows, whatever the scale of the job. `node_daemon/native/frame/
tocsin_frame.h` is generated from the tables below and a test compares both views byte by byte.

How it can be read while the writer is stopped in the middle of a write: there is no lock and no sequence lock.
Every field is naturally aligned, at most 8 bytes wide and written with one store, so each value alone is never
torn. Values that belong together are ordered instead: a writer bumps `enqueued` last when a round begins and `done`
last when it ends; a round's entry is written before `enqueued` admits it. A reader therefore reads the counters,
then the rounds, then the counters again, and drops rounds that may have been overwritten in between
(`rounds_of`). Cross-field doubts are resolved towards "unknown".

All times are CLOCK_MONOTONIC nanoseconds of the writer's node and mean nothing on another node.

A slot's parts:
* counters: rounds enqueued, started and done on this communicator since it was made. The number of a round (its
  `seq`, from 1) together with `comm_id` is CCL-D's trace id: every member counts alike without talking.
* operation type set of the newest round: op, dtype, algo, proto, count, root.
* `open`: progress of the rounds now executing (gloo runs two at once): transfer steps sent and received so far.
* `lanes`: 32 running totals; a lane is a peer (gloo: position in the communicator modulo 32). NCCL's frames hold
  `tocsin_channel` in the same bytes: one per channel, modulo 32 (`channels_of`).
* `rounds`: the newest 32 recorded rounds with their own time (`gap_us`: from when the process last left or entered
  any operation, of any communicator, to entering this one, so that gaps never add up to more than the time that
  passed), their duration, and a signature of the operation. Only rounds whose seq is a multiple of `stride` are
  recorded. The writer doubles `stride` where 32 entries span less than two seconds and halves it where a second
  passes without one; since it stays a power of two, any two ranks record common rounds, and a reader who looks
  once a second misses none. An entry is written in the order `dur_us` (open), `gap_us`, `signature`, `seq`.
* `unknown`: what this slot cannot tell at the moment, because the events that tell it are off (`Untold`).

The daemon writes one field, `control`: which further events a probe shall switch on, and until when. It lies in the
file, so a probe that is asked for more than is safe with its library declines by itself, and one whose daemon has
vanished returns to its standing events when the time is over.

Version 2 added `control`, `event_mask`, `library_version`, `unknown` and NCCL's channels, all in bytes that version 1
kept zero: a frame of version 1 is one of version 2 that says nothing in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Any, Final

import numpy as np

from diagnosis.contracts.errors import AgentFault

MAGIC: Final = 0x4E49_5343_4F54_0001  # "..TOCSIN" read as a little-endian word, never a valid text file
VERSION: Final = 2
VERSIONS_READ: Final = (1, 2)
HEADER_BYTES: Final = 128
SLOT_BYTES: Final = 1184
SLOT_COUNT: Final = 16
LANE_COUNT: Final = 32
ROUND_COUNT: Final = 32
OPEN_COUNT: Final = 2
FILE_BYTES: Final = HEADER_BYTES + SLOT_COUNT * SLOT_BYTES
DUR_OPEN: Final = 0xFFFF_FFFF
"""`dur_us` of a round that has not ended, `kernel_us` of a channel whose kernel runs."""
PEER_UNKNOWN: Final = 0xFFFF
WIDEN_S_MAX: Final = 120
"""A request in `control` that ends later than this is not followed."""
CONTROL_OFFSET: Final = 112
"""Of `control` in the file, for whoever writes it alone."""
SIGNATURE_UNKNOWN: Final = 0
WRITERS_MAX: Final = 2
"""Threads of one process that may enter rounds of one communicator at the same instant."""
GPU_UNKNOWN: Final = -1
ROOT_NONE: Final = -1

# (name, numpy type, C type, count); offsets follow from order and natural alignment, checked below.
Field = tuple[str, str, str, int]
OPEN_FIELDS: Final[tuple[Field, ...]] = (
    ("seq", "<u4", "uint32_t", 1),  # 0: free
    ("send_steps", "<u4", "uint32_t", 1),
    ("recv_steps", "<u4", "uint32_t", 1),
    ("signature", "<u4", "uint32_t", 1),  # as in `rounds`, which need not hold this round
)
LANE_FIELDS: Final[tuple[Field, ...]] = (
    ("send_steps", "<u4", "uint32_t", 1),
    ("recv_steps", "<u4", "uint32_t", 1),
    ("recv_wait_us", "<u4", "uint32_t", 1),  # time spent waiting for receives, wraps
    ("peer", "<u2", "uint16_t", 1),  # position of the peer in the communicator
    ("wait_state", "u1", "uint8_t", 1),  # WaitState, of the thread that began or ended a wait last
    ("used", "u1", "uint8_t", 1),  # 0: no step was ever counted here
)
CHANNEL_FIELDS: Final[tuple[Field, ...]] = (
    ("send_steps", "<u4", "uint32_t", 1),  # completed, as in a lane
    ("recv_steps", "<u4", "uint32_t", 1),
    ("kernel_us", "<u4", "uint32_t", 1),  # newest kernel here by the GPU's clock; DUR_OPEN: runs; 0: none, or untimed
    ("peer", "<u2", "uint16_t", 1),  # rank in the communicator that was sent to last; PEER_UNKNOWN
    ("send_state", "u1", "uint8_t", 1),  # StepState of the newest step each way
    ("recv_state", "u1", "uint8_t", 1),
)
ROUND_FIELDS: Final[tuple[Field, ...]] = (
    ("seq", "<u4", "uint32_t", 1),  # low 32 bits; 0: never used
    ("gap_us", "<u4", "uint32_t", 1),
    ("dur_us", "<u4", "uint32_t", 1),
    ("signature", "<u4", "uint32_t", 1),  # hash of op, dtype, count and root; equal on all members of a sound round
)
SLOT_FIELDS: Final[tuple[Field, ...]] = (
    ("comm_id", "<u8", "uint64_t", 1),  # 0: the slot is free
    ("comm_size", "<u4", "uint32_t", 1),
    ("comm_rank", "<u4", "uint32_t", 1),
    ("enqueued", "<u8", "uint64_t", 1),
    ("started", "<u8", "uint64_t", 1),
    ("done", "<u8", "uint64_t", 1),
    ("t_enqueued_ns", "<u8", "uint64_t", 1),
    ("t_started_ns", "<u8", "uint64_t", 1),
    ("t_done_ns", "<u8", "uint64_t", 1),
    ("dur_sum_ns", "<u8", "uint64_t", 1),
    ("gap_sum_ns", "<u8", "uint64_t", 1),
    ("bytes", "<u8", "uint64_t", 1),  # handed to the transport to send, where the library tells the size
    ("send_steps", "<u8", "uint64_t", 1),
    ("recv_steps", "<u8", "uint64_t", 1),
    ("count", "<u8", "uint64_t", 1),  # elements of the newest round; COUNT_UNKNOWN where the library does not tell
    ("open", "", "tocsin_open", OPEN_COUNT),
    ("root", "<i4", "int32_t", 1),
    ("stride", "<u4", "uint32_t", 1),
    ("errors", "<u2", "uint16_t", 1),  # rounds that ended with an exception, wraps
    ("unknown", "<u2", "uint16_t", 1),  # Untold
    ("op", "u1", "uint8_t", 1),
    ("dtype", "u1", "uint8_t", 1),
    ("algo", "u1", "uint8_t", 1),
    ("proto", "u1", "uint8_t", 1),
    ("lanes", "", "tocsin_lane", LANE_COUNT),
    ("rounds", "", "tocsin_round", ROUND_COUNT),
)
HEADER_FIELDS: Final[tuple[Field, ...]] = (
    ("magic", "<u8", "uint64_t", 1),  # written last: a reader sees a whole header or none
    ("version", "<u4", "uint32_t", 1),
    ("header_bytes", "<u4", "uint32_t", 1),
    ("slot_bytes", "<u4", "uint32_t", 1),
    ("slot_count", "<u4", "uint32_t", 1),
    ("pid", "<i4", "int32_t", 1),
    ("rank", "<i4", "int32_t", 1),  # global rank, -1 unknown
    ("pid_start_ticks", "<u8", "uint64_t", 1),  # field 22 of /proc/PID/stat: tells a reused pid
    ("world_size", "<i4", "int32_t", 1),  # -1 unknown
    ("local_rank", "<i4", "int32_t", 1),  # -1 unknown
    ("gpu", "<i4", "int32_t", 1),  # index on the node as the job claims it, -1 unknown
    ("step_id", "<i4", "int32_t", 1),  # Slurm step, -1 unknown
    ("created_ns", "<u8", "uint64_t", 1),
    ("last_leave_ns", "<u8", "uint64_t", 1),  # when the process last left any operation, point-to-point included
    ("slots_reused", "<u4", "uint32_t", 1),  # times a communicator lost its slot to another one, figures kept
    ("works_lost", "<u4", "uint32_t", 1),  # rounds not followed: too many in flight, or members unknown
    ("symbols_missing", "<u4", "uint32_t", 1),  # bit per hook that this library version lacks
    ("transport", "u1", "uint8_t", 1),
    ("reserved8", "u1", "uint8_t", 3),
    ("library", "S24", "char", 24),
    ("control", "<u8", "uint64_t", 1),  # the daemon writes it: `control_word`
    ("event_mask", "<u4", "uint32_t", 1),  # NCCL: the events that are on
    ("library_version", "<u4", "uint32_t", 1),  # NCCL: as ncclGetVersion tells it (23207 is 2.32.7); 0 unknown
)
COUNT_UNKNOWN: Final = 0xFFFF_FFFF_FFFF_FFFF


class Op(IntEnum):
    """Collective operations, one numbering for all libraries."""

    UNKNOWN = 0
    ALL_REDUCE = 1
    BROADCAST = 2
    REDUCE = 3
    ALL_GATHER = 4
    REDUCE_SCATTER = 5
    ALL_TO_ALL = 6
    GATHER = 7
    SCATTER = 8
    BARRIER = 9
    SEND = 10
    RECV = 11


class Dtype(IntEnum):
    """Element types, one numbering for all libraries."""

    UNKNOWN = 0
    INT8 = 1
    UINT8 = 2
    INT32 = 3
    INT64 = 4
    FLOAT16 = 5
    BFLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BOOL = 9
    OTHER = 15


class WaitState(IntEnum):
    """What a thread of the writer waits for on a lane."""

    NONE = 0
    SEND = 1
    RECV = 2


class StepState(IntEnum):
    """What the newest transfer step of an NCCL channel waits for."""

    NONE = 0
    OWN_GPU = 1
    PEER_CREDIT = 2
    FABRIC = 3


class Untold(IntFlag):
    """What a slot cannot tell while the events that tell it are off."""

    DONE = 1  # ends of rounds: `done` and `started` may stay behind (what they do tell is so)
    TIMES = 2  # `dur_us`, `dur_sum_ns`, `gap_us`, `gap_sum_ns`
    STEPS = 4  # `send_steps`, `recv_steps`, `bytes`, wait states
    GRAPHS = 8  # a collective was captured in a CUDA graph: its replays are no rounds
    ERRORS = 16  # `errors`


class Algo(IntEnum):
    """NCCL's algorithms."""

    UNKNOWN = 0
    TREE = 1
    RING = 2
    COLLNET_DIRECT = 3
    COLLNET_CHAIN = 4
    NVLS = 5
    NVLS_TREE = 6
    PAT = 7
    OTHER = 15


class Proto(IntEnum):
    """NCCL's protocols."""

    UNKNOWN = 0
    LL = 1
    LL128 = 2
    SIMPLE = 3
    OTHER = 15


class Transport(IntEnum):
    """The library that wrote the frame."""

    UNKNOWN = 0
    GLOO = 1
    NCCL = 2


def _dtype(fields: tuple[Field, ...]) -> np.dtype[np.void]:
    """A packed numpy dtype of the fields; every field must already stand on its natural alignment."""
    parts: list[tuple[str, object, tuple[int, ...]]] = []
    offset = 0
    for name, code, ctype, count in fields:
        base = _NESTED[ctype] if ctype in _NESTED else np.dtype(code)
        align = base.itemsize if not base.fields and base.kind != "S" else (8 if base.fields else 1)
        if offset % align:
            raise ValueError(f"{name} is not aligned: offset {offset}, needs {align}")
        shape = () if count == 1 or base.kind == "S" else (count,)
        parts.append((name, base, shape))
        offset += base.itemsize * (1 if base.kind == "S" else count)
    return np.dtype(parts)


_NESTED: dict[str, np.dtype[np.void]] = {}
OPEN_DTYPE: Final = _dtype(OPEN_FIELDS)
LANE_DTYPE: Final = _dtype(LANE_FIELDS)
CHANNEL_DTYPE: Final = _dtype(CHANNEL_FIELDS)
ROUND_DTYPE: Final = _dtype(ROUND_FIELDS)
_NESTED.update(tocsin_open=OPEN_DTYPE, tocsin_lane=LANE_DTYPE, tocsin_round=ROUND_DTYPE)
SLOT_DTYPE: Final = _dtype(SLOT_FIELDS)
HEADER_DTYPE: Final = _dtype(HEADER_FIELDS)
STRUCTS: Final = (
    ("tocsin_open", OPEN_FIELDS, OPEN_DTYPE),
    ("tocsin_lane", LANE_FIELDS, LANE_DTYPE),
    ("tocsin_channel", CHANNEL_FIELDS, CHANNEL_DTYPE),
    ("tocsin_round", ROUND_FIELDS, ROUND_DTYPE),
    ("tocsin_slot", SLOT_FIELDS, SLOT_DTYPE),
    ("tocsin_header", HEADER_FIELDS, HEADER_DTYPE),
)


@dataclass(frozen=True, slots=True)
class Frame:
    """One process's frame as read: `header` a record of HEADER_DTYPE, `slots` the used slots (SLOT_DTYPE)."""

    header: np.void
    slots: np.ndarray[tuple[int], np.dtype[np.void]]


def parse(data: bytes) -> Frame:
    """Check and view the bytes of a frame file.

    Raises AgentFault (reason `short`, `magic`, `version` or `sizes`) where the file is not a frame of ours or lies
    about itself. Nothing that a job wrote is used as a size, an index or an address.
    """
    if len(data) < HEADER_BYTES:
        raise AgentFault(f"{len(data)} bytes are no frame header", reason="short")
    header = np.frombuffer(data, HEADER_DTYPE, 1)[0]
    if int(header["magic"]) != MAGIC:
        raise AgentFault("no frame: the magic word is missing", reason="magic")
    if int(header["version"]) not in VERSIONS_READ:
        raise AgentFault(f"frame version {header['version']}; this side reads up to {VERSION}", reason="version")
    claimed = (int(header["header_bytes"]), int(header["slot_bytes"]), int(header["slot_count"]))
    if claimed != (HEADER_BYTES, SLOT_BYTES, SLOT_COUNT):
        raise AgentFault(f"frame claims sizes {claimed}", reason="sizes")
    if len(data) != FILE_BYTES:
        raise AgentFault(f"frame of {len(data)} bytes, {FILE_BYTES} expected", reason="sizes")
    slots = np.frombuffer(data, SLOT_DTYPE, SLOT_COUNT, HEADER_BYTES)
    used = slots[(slots["comm_id"] != 0) & (slots["comm_size"] > 0) & (slots["comm_rank"] < slots["comm_size"])]
    return Frame(header, used)


def rounds_of(slot: np.void, enqueued_after: int) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    """The finished rounds of a slot in ascending seq, without any that may have been overwritten while reading.

    `enqueued_after` is the slot's `enqueued` counter read again after the rounds were copied. Whatever the stride, no
    more entries than rounds can have been written meanwhile, and they replace unused entries, then the oldest.
    """
    rounds = slot["rounds"]
    newest = int(slot["enqueued"]) & 0xFFFF_FFFF
    age = (newest - rounds["seq"].astype(np.int64)) & 0xFFFF_FFFF  # in rounds; the numbers' low halves wrap
    admitted = (rounds["seq"] != 0) & (age < 1 << 31)
    oldest_first = np.argsort(np.where(admitted, -age, -(1 << 32)), kind="stable")
    written = max(0, enqueued_after - int(slot["enqueued"])) + WRITERS_MAX
    settled = oldest_first[min(written, ROUND_COUNT) :]
    kept = rounds[settled]
    finished: np.ndarray[tuple[int], np.dtype[np.void]] = kept[admitted[settled] & (kept["dur_us"] != DUR_OPEN)]
    return finished


def channels_of(slots: np.ndarray[Any, np.dtype[np.void]]) -> np.ndarray[Any, np.dtype[np.void]]:
    """The channels of slots that NCCL's probe wrote (CHANNEL_DTYPE, one more axis of LANE_COUNT)."""
    lanes: np.ndarray[Any, np.dtype[np.void]] = np.ascontiguousarray(slots["lanes"])
    return lanes.view(CHANNEL_DTYPE)


def control_word(events: int, until_s: int) -> int:
    """`control` for a request: these NCCL events in addition, until that second of CLOCK_MONOTONIC."""
    return (until_s & 0xFFFF_FFFF) << 32 | (events & 0xFFFF_FFFF)


def signatures(
    op: np.ndarray[Any, np.dtype[Any]],
    dtype: np.ndarray[Any, np.dtype[Any]],
    count: np.ndarray[Any, np.dtype[np.uint64]],
    root: np.ndarray[Any, np.dtype[np.int32]],
) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """The signature of each round with these figures, as the writers compute it (arrays of one shape).

    Equal on all members of a sound round, hence without the count of an all-to-all, which each member may choose.
    """
    words = (
        op.astype(np.uint64),
        dtype.astype(np.uint64),
        np.where(op == Op.ALL_TO_ALL, np.uint64(0), count.astype(np.uint64)),
        root.astype(np.int64).astype(np.uint64),
    )
    mixed = np.full(op.shape, 0x9E37_79B9_7F4A_7C15, np.uint64)
    for word in words:
        mixed = (mixed ^ word) * np.uint64(0xD6E8_FEB8_6659_FD93)
        mixed ^= mixed >> np.uint64(32)
    low = (mixed & np.uint64(0xFFFF_FFFF)).astype(np.uint32)
    return np.where(low == SIGNATURE_UNKNOWN, np.uint32(1), low)
