"""Verdicts in words: one sentence that an operator can act on."""

from __future__ import annotations

import math
from typing import Final

from diagnosis.contracts.verdict import Action, Culprit

PROCESS_STATES: Final[dict[str, str]] = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep",
    "T": "stopped",
    "t": "stopped by a tracer",
    "Z": "a zombie",
    "X": "gone",
}
CAUSES: Final[dict[str, str]] = {
    "gpu_clock_throttle": "its GPU is throttled",
    "hbm_degraded": "its GPU's memory is degraded",
    "gpu_fault": "its GPU is broken",
    "nvlink_fault": "its NVLink is broken",
    "pcie_degraded": "its PCIe link is degraded",
    "nic_fault": "its NIC is broken",
    "nic_degraded": "its NIC is degraded",
    "transceiver_errors": "its transceiver makes errors",
    "pfc_storm": "it floods the network with pause frames",
    "ecmp_polarization": "too many flows were hashed onto one path while others idle",
    "link_fault": "the link is broken",
    "link_congestion": "the link is congested",
    "allocator_stall": "its memory allocator stalls",
    "dataloader_starvation": "its data loader starves it",
    "gc_stall": "garbage collection stalls it",
    "host_contention": "its host is overloaded",
    "storage_stall": "its storage is slow",
    "process_stuck": "its process is stuck",
    "process_exit": "its process has ended",
    "program_divergence": "the program diverges there",
    "workload_imbalance": "the work is divided unevenly",
    "workload_change": "the work itself changed on all ranks",
    "unknown": "no second witness says why",
}
NAMES_MAX: Final = 8


def ranks(numbers: list[int]) -> str:
    """ "rank 5", "ranks 1, 2, 3", "ranks 1, 2, ... (40 in all)"."""
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    shown = ", ".join(str(number) for number in numbers[:NAMES_MAX])
    return f"ranks {shown}" + (f", ... ({len(numbers)} in all)" if len(numbers) > NAMES_MAX else "")


def place(culprit: Culprit) -> str:
    """ "rank 5 (GPU1 of gpu003)", "mlx5_3 of gpu006", "switch spine2", "node gpu004", "the whole job"."""
    if culprit.kind == "job":
        return "the whole job"
    if culprit.kind == "nic" and culprit.nic is not None:
        return f"{culprit.nic} of {culprit.node}" + (f" (rank {culprit.rank})" if culprit.rank is not None else "")
    if culprit.rank is not None:
        gpu = f"GPU{culprit.gpu} of " if culprit.gpu is not None else ""
        return f"rank {culprit.rank} ({gpu}{culprit.node or 'an unknown node'})"
    name = culprit.node or culprit.link or culprit.switch or "unknown"
    return f"{culprit.kind} {name}"


def _who(culprits: list[Culprit]) -> str:
    first = f"{place(culprits[0])}: {CAUSES[culprits[0].cause]}"
    others = "; ".join(f"{place(c)}: {CAUSES[c.cause]}" for c in culprits[1:3])
    more = f"; and {len(culprits) - 3} more" if len(culprits) > 3 else ""
    return first + (f"; {others}" if others else "") + more


def hang_summary(class_: str | None, culprits: list[Culprit], action: Action, quiet_ms: float) -> str:
    """The sentence of a hang."""
    since = f"for {quiet_ms / 1000:.0f} s" if math.isfinite(quiet_ms) else "for an unknown time"
    quiet = f"The job has made no progress {since}"
    if not culprits:
        return f"{quiet} and the evidence names nobody yet; collect {action.collect or 'more'}."
    how = {
        "H1": "never entered the round that the others wait in",
        "H2": "runs another operation than the other members of the round",
        "H3": "stopped inside a round that all have entered",
    }.get(class_ or "", "is at fault")
    return f"{quiet}: {_who(culprits)} ({how})."


def failed_summary(culprits: list[Culprit], action: Action, why: str) -> str:
    """The sentence of a job that ended by itself."""
    if not culprits:
        return f"The job ended by itself and the evidence names nobody; collect {action.collect or 'more'}."
    return f"The job ended by itself: {_who(culprits)}{f' ({why})' if why else ''}."


def slow_summary(ratio: float, lost_ms: float, culprits: list[Culprit], action: Action) -> str:
    """The sentence of a slow-down."""
    rate = f"Steps take {ratio:.2f} times as long as before ({lost_ms:.0f} ms lost a step)"
    if not culprits:
        return f"{rate} and the evidence names nobody; collect {action.collect or 'more'}."
    return f"{rate}. {_who(culprits)}."
