"""NVML's words about a GPU, judged. A fault is evidence here; whether it convicts is decided where the loss is known.

Clock event reasons (nvml.h, `nvmlClocksEventReason*`): a power cap set by software (0x4) and application clocks
(0x2) are normal on healthy nodes and never count; hardware slowdown (0x8), hardware thermal slowdown (0x40), power
brake (0x80) and software thermal slowdown (0x20) do.
"""

from __future__ import annotations

from typing import Final

from diagnosis.contracts.report import GpuFacts

SLOWDOWN_REASONS: Final[dict[int, str]] = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}


def slowdown_reasons(facts: GpuFacts) -> list[str]:
    """Names of the abnormal reasons for a low clock; empty when there are none or NVML did not tell."""
    mask = facts.clocks_event_reasons or 0
    return [name for bit, name in SLOWDOWN_REASONS.items() if mask & bit]


def clock_ratio(facts: GpuFacts) -> float | None:
    """SM clock as a share of its maximum, None when not told."""
    if not facts.sm_clock_mhz or not facts.sm_clock_max_mhz:
        return None
    return facts.sm_clock_mhz / facts.sm_clock_max_mhz
