"""Numbers and times as people read them on the page. Pure; unknown is a dash, never a zero."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

UNKNOWN: Final = "–"
_UNITS: Final = (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))


def duration(seconds: float | None) -> str:
    """ "0.4 s", "12 s", "3 min", "2 h", "5 d"."""
    if seconds is None:
        return UNKNOWN
    if abs(seconds) < 10:
        return f"{seconds:.1f} s"
    unit, size_s = next(((unit, size_s) for unit, size_s in _UNITS if abs(seconds) >= 2 * size_s), ("s", 1.0))
    return f"{seconds / size_s:.0f} {unit}"


def ago(at: float | None, now: float) -> str:
    """ "12 s ago"."""
    return UNKNOWN if at is None else f"{duration(max(0.0, now - at))} ago"


def moment(at: float | None) -> str:
    """ "2026-01-02 03:04:05" in UTC."""
    return UNKNOWN if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def iso(at: float) -> str:
    """For a machine: the `datetime` of a `<time>`."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")


def percent(share: float) -> str:
    """ "90 %"."""
    return f"{share * 100:.0f} %"


def number(value: float | None, unit: str = "") -> str:
    """ "1,080", "30.2 ms", or a dash."""
    if value is None:
        return UNKNOWN
    digits = f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 100 else f"{value:,.1f}"
    return f"{digits} {unit}" if unit else digits


def ranks_seen(seen: int, world_size: int | None) -> str:
    """ "8 of 8", "3 of –"."""
    return f"{seen} of {UNKNOWN if world_size is None else world_size}"


def step_time(step_ms: float | None, jitter_ms: float | None) -> str:
    """ "412 ±9 ms", "412 ms" or a dash."""
    if step_ms is None or jitter_ms is None:
        return number(step_ms, "ms")
    return f"{number(step_ms)} ±{number(jitter_ms)} ms"


FILTERS: Final = {
    "duration": duration,
    "ago": ago,
    "moment": moment,
    "iso": iso,
    "percent": percent,
    "number": number,
}
