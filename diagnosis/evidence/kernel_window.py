"""A window over one process's GPU, as the collector in the process condensed it, as that rank's summary.

Kernels, copies and the runtime's calls: no phases of a step, since nothing here says what a kernel serves, and no use
of hardware. What the hardware did is added by whoever sampled it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from diagnosis.contracts.histogram import from_cells
from diagnosis.contracts.kernelwindow import KernelWindow, Unseen, Why
from diagnosis.contracts.summary import COMM, COMPUTE, KINDS, MEMCPY, OTHERS, Overlap, Range, RankSummary
from diagnosis.evidence.condense import NS_PER_MS, Condensed
from diagnosis.evidence.functions import Functions, fitted, sums, with_functions

SOURCE: Final = "cupti"
_UNSEEN: Final = {
    Unseen.CRITICAL: "the critical path: more executions than are kept",
    Unseen.NAMES: "some functions by name: too many",
    Unseen.CELLS: "how some functions' times are spread: too many",
    Unseen.RECORDS: "some executions: dropped in the process",
    Unseen.MEMORY: "part of the window: no memory",
}
_WHY: Final = {
    Why.DEADLINE: "the end of the window: its time was over",
    Why.ATTACHED: "nothing, but CUPTI stays attached: the program made no call in time",
    Why.REFUSED: "the last executions: CUPTI did not deliver them",
}


def functions_of(window: KernelWindow) -> Functions:
    """The window's functions; rows of equal name and kind are added."""
    rows = window.rows
    names = [
        fitted(f"{name}...#{int(row['name_hash']):016x}" if row["cut"] else name) if name else OTHERS[int(row["kind"])]
        for name, row in zip(window.names, rows, strict=True)
    ]
    keys: dict[tuple[int, str], int] = {}
    into = np.array(
        [keys.setdefault(key, len(keys)) for key in zip(rows["kind"].tolist(), names, strict=True)], np.int64
    )
    many = len(keys)

    def whole(field: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        added = np.zeros(many, np.int64)
        np.add.at(added, into, rows[field].astype(np.int64))
        return added

    count, total, longest = whole("count"), whole("total_ns"), np.zeros(many, np.int64)
    np.maximum.at(longest, into, rows["max_ns"].astype(np.int64))
    means = rows["total_ns"] / np.maximum(rows["count"], 1)
    apart = rows["count"] * (means - (total / np.maximum(count, 1))[into]) ** 2
    length_ns = max(int(window.header["end_ns"]) - int(window.header["begin_ns"]), 1)
    known = not int(window.header["unseen"]) & Unseen.CRITICAL
    nothing = np.full(many, np.nan)
    kind = np.array([key[0] for key in keys], np.int64)
    row_of_cell = np.repeat(into, np.diff(window.start))
    return Functions(
        name=tuple(key[1] for key in keys),
        kind=kind,
        functions=np.maximum(whole("functions"), 1),
        count=count,
        total_ns=total,
        scatter=sums(into, rows["scatter"] + apart, many),
        max_ns=longest,
        beta=whole("critical_ns") / length_ns if known else nothing,
        mu=nothing,
        sigma=nothing,
        bytes=np.where(kind == MEMCPY, whole("bytes").astype(np.float64), np.nan),
        members=nothing,
        histograms=from_cells(
            row_of_cell, window.cells["bucket"].astype(np.int64), window.cells["count"].astype(np.int64), many
        ),
    )


def summary_of(
    window: KernelWindow,
    rank: int,
    steps: int | None,
    *,
    first_step: int | None = None,
    hardware: Mapping[str, Range] | None = None,
) -> Condensed:
    """The summary of the rank that this window is of. `steps`: how many the window's rounds make, None if unknown."""
    header = window.header
    length_ms = max(int(header["end_ns"]) - int(header["begin_ns"]), 0) / NS_PER_MS
    per = max(steps or 1, 1)
    unseen = Unseen(int(header["unseen"]) & sum(Unseen))
    known = not unseen & Unseen.CRITICAL
    bare = RankSummary(
        rank=rank,
        first_step=first_step,
        last_step=first_step + steps - 1 if first_step is not None and steps else None,
        steps=steps,
        window_ms=length_ms,
        step_ms=length_ms / per if steps else None,
        sources=[SOURCE],
        unseen=_notes(window, unseen),
        phases=_phases(window, length_ms, per) if known else {},
        overlap=_overlap(window, per) if known else None,
        hardware=dict(hardware or {}),
    )
    return Condensed(*with_functions(bare, functions_of(window)))


def _phases(window: KernelWindow, length_ms: float, steps: int) -> dict[str, float]:
    """Who owned the step, ms: what kinds of work, since their phases are not known."""
    owned = window.header["critical_ns"] / NS_PER_MS / steps
    names = {COMPUTE: "compute_ms", MEMCPY: "copy_ms", COMM: "comm_barrier_wait_ms"}
    spent = {names.get(kind, "host_ms"): round(float(owned[kind]), 6) for kind in range(len(KINDS))}
    return {**spent, "idle_ms": round(max(length_ms / steps - sum(spent.values()), 0.0), 6)}


def _overlap(window: KernelWindow, steps: int) -> Overlap:
    parts = (int(window.header[name]) / NS_PER_MS / steps for name in ("compute_ns", "comm_ns", "both_ns"))
    return Overlap(*(round(part, 6) for part in parts))


def _notes(window: KernelWindow, unseen: Unseen) -> list[str]:
    header = window.header
    notes = [text for flag, text in _UNSEEN.items() if unseen & flag]
    why = int(header["why"])
    if why in _WHY:
        notes.append(_WHY[Why(why)])
    if int(header["untimed"]):
        notes.append(f"{int(header['untimed'])} executions without a time")
    if int(header["dropped"]):
        notes.append(f"{int(header['dropped'])} executions: dropped")
    return notes
