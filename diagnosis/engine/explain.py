"""Verdicts in words: one sentence that an operator can act on."""

from __future__ import annotations

from typing import Final

from diagnosis.contracts.verdict import Culprit
from diagnosis.engine.hangs import Hang
from diagnosis.engine.slows import Slowdown

PROCESS_STATES: Final[dict[str, str]] = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep",
    "T": "stopped",
    "t": "stopped by a tracer",
    "Z": "a zombie",
    "X": "gone",
}
NAMES_MAX: Final = 8


def ranks(numbers: list[int]) -> str:
    """ "rank 5", "ranks 1, 2, 3", "ranks 1, 2, ... (40 in all)"."""
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    shown = ", ".join(str(number) for number in numbers[:NAMES_MAX])
    return f"ranks {shown}" + (f", ... ({len(numbers)} in all)" if len(numbers) > NAMES_MAX else "")


def place(culprit: Culprit) -> str:
    """ "rank 5 (GPU1 of gpu003)"."""
    gpu = f"GPU{culprit.gpu} of " if culprit.gpu is not None else ""
    return f"rank {culprit.rank} ({gpu}{culprit.node})"


def hang_sentence(hang: Hang, culprits: list[Culprit]) -> str:
    """The sentence of a hang."""
    quiet = f"The job has made no progress for {hang.quiet_s:.0f} s"
    if hang.class_ == "H2":
        names = ", ".join(place(culprit) for culprit in culprits[:NAMES_MAX])
        return f"{quiet}: {names} runs another operation than the other members of the round; the program diverges."
    if culprits:
        first = culprits[0]
        state = hang.roots[0].rank.process_state
        how = f"its process is {PROCESS_STATES.get(state, 'alive')}" if state else "its process state is unknown"
        more = f" and {len(culprits) - 1} more" if len(culprits) > 1 else ""
        where = "stopped inside the round" if hang.roots[0].entered else "never entered the round"
        return f"{quiet}: {place(first)}{more} {where} that {hang.roots[0].waiters} ranks wait in; {how}."
    return f"{quiet} and the evidence names nobody yet; collect {collect_for_hang(hang)}."


def collect_for_hang(hang: Hang) -> str:
    """What would decide an undecided hang."""
    if hang.tie:
        return "the call stacks of both halves: they run different operations and neither is the majority"
    if hang.cycle:
        return "the call stacks of all ranks: they wait for each other in a circle"
    if hang.missing:
        return f"a report from {', '.join(hang.missing[:NAMES_MAX])}"
    return "transfer steps, socket queues and NIC counters of all members: all have entered and all processes live"


def slow_sentence(slow: Slowdown, culprits: list[Culprit]) -> str:
    """The sentence of a slow-down."""
    rate = f"Rounds take {slow.period_ms:.0f} ms instead of {slow.base_ms:.0f} ms"
    if not culprits:
        return f"{rate}, and no rank's own time explains it."
    first = culprits[0]
    more = f" and {len(culprits) - 1} more" if len(culprits) > 1 else ""
    lost = f"{first.lost_ms_per_step:.0f} ms of that are {place(first)}'s own time{more}"
    if first.cause == "gpu_clock_throttle":
        return f"{rate}: {lost}; its GPU is throttled."
    return f"{rate}: {lost}; no second witness says why."
