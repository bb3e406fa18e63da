"""Two successive looks at a job's frames become the tables of a report. Pure: numbers in, numbers out.

Counters of a frame run since the communicator was made; a report tells differences to the previous look at the same
communicator of the same process. What cannot be known is null: the first look, a counter that went backwards (a slot
given to another communicator, or a job that writes nonsense), a difference too great for its column, and what the probe
says that it cannot tell (`Untold`: then a round that has ended looks like one that has not).

Every number here was written by a job. Nothing of it is used as an index or a size, sums cannot overflow into an
error, and ages are cut at zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from diagnosis.contracts import report as wire
from diagnosis.contracts.columns import Table, empty, null_of, pack
from diagnosis.contracts.probeframe import (
    DUR_OPEN,
    SIGNATURE_UNKNOWN,
    SLOT_COUNT,
    SLOT_DTYPE,
    Untold,
    channels_of,
    rounds_of,
    signatures,
)
from diagnosis.contracts.report import CommState, JobSample
from diagnosis.evidence.steps import Step
from node_daemon.collectors.event_mask import armed_since
from node_daemon.collectors.exits import End
from node_daemon.collectors.frames import FrameSample, JobFrames, Slots
from node_daemon.native.nccl.masks import Event, masks_for

ProcessKey = tuple[int, int]
"""(pid, start ticks)."""
Steps = Mapping[ProcessKey, Step]
Ends = Mapping[ProcessKey, End]
CommKey = tuple[int, int, int]
"""(pid, start ticks, comm_id): one communicator of one process."""
_COUNTERS: Final = ("done", "dur_sum_ns", "gap_sum_ns", "send_steps", "recv_steps")
_LOW: Final = 0xFFFF_FFFF
LOSES_NOTHING_SINCE: Final = 23100
"""The NCCL from which on every kernel's events arrive, as `library_version` tells it."""


@dataclass(frozen=True, slots=True)
class Told:
    """What the last report said of one communicator: its counters, its rounds' numbers, and what it left untold."""

    counters: tuple[int, ...]
    rounds: frozenset[int]
    unknown: int


Memory = dict[CommKey, Told]
"""All communicators of one job at its last look. A communicator that was not seen then starts anew."""


def summarise(
    job: JobFrames,
    before: Memory,
    rounds_max: int = wire.ROUND_ROWS_MAX,
    steps: Steps | None = None,
    since_ns: int | None = None,
    ends: Ends | None = None,
    now_ns: int = 0,
) -> tuple[JobSample, Memory]:
    """The job's part of a report, and what to remember for the next look. `since_ns`: when the last one was;
    `ends`: of its processes that have ended, told as ages at `now_ns`.

    At most RANKS_MAX frames are told, each with at most its 16 communicators and their 32 recorded rounds. Where that
    is more than `rounds_max`, each communicator tells its newest ones only, all as many.
    """
    frames = job.frames[: wire.RANKS_MAX]
    slots, again, rank_row = stack(frames)
    keys = [
        (frames[row].pid, frames[row].start_ticks, comm_id)
        for row, comm_id in zip(rank_row.tolist(), slots["comm_id"].tolist(), strict=True)
    ]
    known = [before.get(key) for key in keys]
    rounds, told = _new_rounds(slots, again, known, rounds_max)
    counters = np.stack([slots[name] for name in _COUNTERS], axis=1)
    before_untold = np.array([former.unknown if former else 0 for former in known], np.uint16)
    lately: NDArray[np.uint16] = np.bitwise_or(slots["unknown"], before_untold)
    after = {
        key: Told(tuple(row), numbers, unknown)
        for key, row, numbers, unknown in zip(keys, counters.tolist(), told, slots["unknown"].tolist(), strict=True)
    }
    comms = _comm_table(frames, slots, rank_row, _differences(counters, known), lately)
    ranks = _rank_table(frames, steps or {}, since_ns)
    _tell_ends(ranks, frames, ends or {}, now_ns)
    sample = JobSample(job.job_id, job.restart, job.uid, pack(ranks), pack(comms), pack(rounds))
    return sample, after


def stack(frames: list[FrameSample]) -> tuple[Slots, Slots, NDArray[np.intp]]:
    """The slots of all frames under one another, as read first and again, and each one's row in the rank table."""
    # By way of bytes: numpy's own concatenation compares nested types field by field, which takes longer than the rest.
    slots = np.frombuffer(b"".join(frame.slots.tobytes() for frame in frames), SLOT_DTYPE)
    again = np.frombuffer(b"".join(frame.again.tobytes() for frame in frames), SLOT_DTYPE)
    return slots, again, np.repeat(np.arange(len(frames)), [len(frame.slots) for frame in frames])


def _rank_table(frames: list[FrameSample], steps: Steps, since_ns: int | None) -> Table:
    table = empty(wire.RANK_DTYPE, len(frames))
    for name in ("rank", "world_size", "local_rank", "gpu", "step_id"):
        values = np.array([frame.header[name] for frame in frames], "<i4")
        table[name] = np.where(values >= 0, values, null_of(wire.RANK_DTYPE[name]))
    table["pid"] = [frame.pid for frame in frames]
    table["process_state"] = [frame.state for frame in frames]
    for row, frame in enumerate(frames):
        step = steps.get((frame.pid, frame.start_ticks))
        if step is not None:
            _tell_step(table, row, step)
        if int(frame.header["library_version"]) or int(frame.header["event_mask"]):
            table["armed"][row] = armed_since(frame.header, frame.read_ns if since_ns is None else since_ns)
    return table


def _tell_ends(table: Table, frames: list[FrameSample], ends: Ends, now_ns: int) -> None:
    """One moment for all of a node, so that who ended first stays as it was."""
    for row, frame in enumerate(frames):
        end = ends.get((frame.pid, frame.start_ticks))
        if end is None:
            continue
        table["ended_us"][row] = max(0, now_ns - end.at_ns) // 1000
        for name, value in (("exit_code", end.exit_code), ("exit_signal", end.signal), ("oom_kills", end.oom_kills)):
            if value is not None:
                table[name][row] = min(value, null_of(wire.RANK_DTYPE[name]) - 1)


def _tell_step(table: Table, row: int, step: Step) -> None:
    told = (
        ("step_us", step.step_ns // 1000),
        ("step_jitter_us", None if step.jitter_ns is None else step.jitter_ns // 1000),
        ("step_rounds", step.rounds),
        ("step_round", step.round),
    )
    for name, value in told:
        if value is not None and 0 <= value < null_of(wire.RANK_DTYPE[name]):
            table[name][row] = value


def _comm_table(
    frames: list[FrameSample],
    slots: Slots,
    rank_row: NDArray[np.intp],
    window: NDArray[np.uint64],
    lately: NDArray[np.uint16],
) -> Table:
    """`window`: differences of the counters; `lately`: what could not be told at some time in it."""
    table = empty(wire.COMM_DTYPE, len(slots))
    table["rank_row"] = rank_row
    for name in ("comm_id", "comm_size", "comm_rank", "op", "dtype", "algo", "proto", "count", "root"):
        table[name] = slots[name]
    _fill(table, "errors", slots["errors"], slots["unknown"] & Untold.ERRORS)
    entered, done = slots["enqueued"], np.minimum(slots["done"], slots["enqueued"])
    running = done < entered
    told = _is_told(slots, np.array([frame.header["library_version"] for frame in frames], "<u4")[rank_row])
    waits = slots["started"] == done  # the newest round has not begun, and no other is open
    state = np.where(running, np.where(waits, CommState.ENQUEUED, CommState.RUNNING), CommState.DONE)
    table["state"] = np.where(entered == 0, CommState.NONE, np.where(told, state, null_of(wire.COMM_DTYPE["state"])))
    table["seq"], table["done_seq"] = entered, np.where(told, done, _NULL)
    last_leave_ns = np.array([frame.header["last_leave_ns"] for frame in frames], "<u8")[rank_row]
    read_ns = np.array([frame.read_ns for frame in frames], "<u8")[rank_row]
    moved_ns = np.maximum(slots["t_enqueued_ns"], last_leave_ns)
    since_ns = np.where(running, slots["t_enqueued_ns"], last_leave_ns)
    table["age_us"] = _age_us(read_ns, np.where(told, since_ns, moved_ns))
    rounds, dur_ns, gap_ns, send, recv = window.T
    open_send, open_recv = _open_steps(slots)
    _fill(table, "send", np.where(running, open_send, send), lately & Untold.STEPS)
    _fill(table, "recv", np.where(running, open_recv, recv), lately & Untold.STEPS)
    _fill(table, "rounds", rounds, lately & Untold.DONE)
    _fill(table, "dur_us", _to_us(dur_ns), lately & Untold.TIMES)
    _fill(table, "gap_us", _to_us(gap_ns), lately & Untold.TIMES)
    table["signature"] = newest_signature(slots)
    table["idle_seq"] = _idle_seq(frames, slots, rank_row)
    return table


def _is_told(slots: Slots, library_version: NDArray[np.uint32]) -> NDArray[np.bool_]:
    """Whether it is known where each communicator's newest round is.

    That it is over is certain. That it has begun and is not over is certain too where the network's transfers say so.
    NCCL before 2.31 loses kernel events now and then (its issue 2221), and a round whose end was lost must not pass for
    one that hangs: there a kernel must be seen running.
    """
    over = slots["done"] >= slots["enqueued"]
    begun = slots["started"] >= slots["enqueued"]
    some_begun = slots["started"] > slots["done"]  # where the program is ahead of the GPU, that is not the newest
    kernels = (slots["unknown"] & Untold.DONE) == 0
    loses = (slots["unknown"] & Untold.ERRORS != 0) & (
        library_version < LOSES_NOTHING_SINCE
    )  # NCCL alone tells no errors
    runs = (channels_of(slots)["kernel_us"] == DUR_OPEN).any(axis=-1)
    told: NDArray[np.bool_] = over | np.where(kernels, ~loses | (some_begun & runs), begun)
    return told


def _idle_seq(frames: list[FrameSample], slots: Slots, rank_row: NDArray[np.intp]) -> NDArray[np.uint64]:
    """The newest round of each communicator that a kernel of NCCL's began, where none runs in the process.

    Null where a kernel runs, and where one may run unseen: of a communicator without a slot or without kernel events,
    or out of a CUDA graph. Kernels of point-to-point operations count, for they wait for others as well.
    """
    nccl = (slots["unknown"] & Untold.ERRORS) != 0  # NCCL alone tells no errors
    runs = (channels_of(slots)["kernel_us"] == DUR_OPEN).any(axis=-1)
    blind = (slots["unknown"] & (Untold.DONE | Untold.GRAPHS)) != 0
    standing = np.array([_has_kernels(int(frame.header["library_version"])) for frame in frames], bool)[rank_row]
    blind |= (slots["enqueued"] == 0) & ~standing  # it has point-to-point operations alone, which widen no mask
    busy = np.array([len(frame.slots) >= SLOT_COUNT or int(frame.header["slots_reused"]) > 0 for frame in frames], bool)
    np.logical_or.at(busy, rank_row, runs | blind)
    return np.where(nccl & ~busy[rank_row], np.minimum(slots["started"], slots["enqueued"]), _NULL)


def _has_kernels(library_version: int) -> bool:
    row = masks_for(library_version)
    return row is not None and Event.KERNEL_CH in row.standing


_NULL: Final = np.uint64(null_of(np.dtype("<u8")))


def _fill(table: Table, name: str, values: NDArray[np.unsignedinteger[Any]], untold: NDArray[np.integer[Any]]) -> None:
    """Values into a column; what does not fit, or is marked in `untold`, is unknown."""
    null = null_of(table.dtype[name])
    table[name] = np.where((values < null) & (untold == 0), values.astype(np.uint64), np.uint64(null))


def _to_us(values_ns: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return np.where(values_ns == _NULL, _NULL, values_ns // np.uint64(1000))


def _age_us(now_ns: NDArray[np.uint64], then_ns: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Time since `then_ns`, zero where that lies ahead, null where it never was."""
    return np.where(then_ns == 0, _NULL, np.where(then_ns < now_ns, now_ns - then_ns, 0) // np.uint64(1000))


def _differences(counters: NDArray[np.uint64], known: list[Told | None]) -> NDArray[np.uint64]:
    """Counters minus those of the last look, null for a communicator that was not there or ran backwards."""
    new = tuple([int(_NULL)] * len(_COUNTERS))
    former = np.array([told.counters if told else new for told in known], np.uint64).reshape(counters.shape)
    sound = (counters >= former).all(axis=1) & np.array([told is not None for told in known], bool)
    return np.where(sound[:, None], counters - former, _NULL)


def _open_steps(slots: Slots) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Transfer steps of the oldest open round; null where the frame shows no open round."""
    seq = slots["open"]["seq"].astype(np.uint64)
    seq[seq == 0] = _NULL
    oldest = seq.argmin(axis=1, keepdims=True)
    none = seq.min(axis=1) == _NULL

    def steps(name: str) -> NDArray[np.uint64]:
        values = np.take_along_axis(slots["open"][name], oldest, axis=1)[:, 0].astype(np.uint64)
        return np.where(none, _NULL, values)

    return steps("send_steps"), steps("recv_steps")


def newest_signature(slots: Slots) -> NDArray[np.uint32]:
    """Signature of the round entered last: as written while it executes or where it was recorded, else worked out."""
    newest = (slots["enqueued"] & _LOW)[:, None]
    seq = np.concatenate([slots["open"]["seq"], slots["rounds"]["seq"]], axis=1)
    written = np.concatenate([slots["open"]["signature"], slots["rounds"]["signature"]], axis=1)
    match = (seq == newest) & (seq != 0) & (written != SIGNATURE_UNKNOWN)
    found = np.take_along_axis(written, match.argmax(axis=1)[:, None], axis=1)[:, 0]
    worked_out = signatures(slots["op"], slots["dtype"], slots["count"], slots["root"])
    worked_out[slots["enqueued"] == 0] = null_of(wire.COMM_DTYPE["signature"])
    return np.where(match.any(axis=1), found, worked_out)


def _new_rounds(
    slots: Slots, again: Slots, known: list[Told | None], rounds_max: int
) -> tuple[Table, list[frozenset[int]]]:
    """Finished rounds that no report has told yet, and per communicator the numbers of those told so far."""
    fresh: list[list[tuple[int, ...]]] = []
    told: list[frozenset[int]] = []
    for row, (slot, after, former) in enumerate(zip(slots, again, known, strict=True)):
        if former is not None and former.counters[0] == int(slot["done"]):
            told.append(former.rounds)
            continue
        rounds = _settled(slot, after)
        before = former.rounds if former is not None else frozenset[int]()
        fresh.append([(row, *entry) for entry in rounds if entry[0] not in before])
        told.append(frozenset(entry[0] for entry in rounds))
    if sum(map(len, fresh)) > rounds_max:
        each = rounds_max // len(fresh)
        fresh = [entries[len(entries) - each :] if len(entries) > each else entries for entries in fresh]
    columns = np.array([entry for entries in fresh for entry in entries], np.uint64).reshape(-1, 5).T
    table = empty(wire.ROUND_DTYPE, columns.shape[1])
    for name, values in zip(("comm_row", "seq", "gap_us", "dur_us", "signature"), columns, strict=True):
        table[name] = values
    return table, told


def _settled(slot: np.void, again: np.void) -> list[tuple[int, int, int, int]]:
    """(seq, gap_us, dur_us, signature) of rounds that were not overwritten while read, and that both readings show.

    A frame keeps the low half of a round's number; the whole follows from its distance to the newest.
    """
    entered = int(slot["enqueued"])
    shown_again = set(again["rounds"].tolist())
    rounds = [entry for entry in rounds_of(slot, int(again["enqueued"])).tolist() if entry in shown_again]
    whole = [(entered - ((entered - low) & _LOW), gap, dur, mark) for low, gap, dur, mark in rounds]
    unknown = null_of(wire.ROUND_DTYPE["signature"])
    return [(seq, gap, dur, unknown if mark == SIGNATURE_UNKNOWN else mark) for seq, gap, dur, mark in whole if seq > 0]
