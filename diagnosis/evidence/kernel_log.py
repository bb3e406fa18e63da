"""Lines of a kernel log that say something about hardware or a job's processes: bytes in, facts out.

Xid classes follow NVIDIA's Xid catalogue ("Xid Errors", r580): those that the application itself causes say nothing
about the node; those that leave the GPU unusable are authoritative about it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

LINE_CHARS_MAX: Final = 4096

XID_OF_NVLINK: Final = frozenset({74, 136, 155})
XID_FATAL: Final = frozenset(
    {46, 48, 54, 62, 64, 79, 94, 95, 109, 110, 119, 120, 140, 151, 157, 158, 159, 167, 168, 169}
)
"""The GPU needs a reset, a reboot or a replacement before it may work again. Xid 13, 31, 43, 45 and the like are the
application's own faults and are not among them."""

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})[^)]*\): (\d{1,4})\b")
_FALLEN = re.compile(r"NVRM:.{0,200}GPU has fallen off the bus", re.IGNORECASE)
_OOM = re.compile(r"(?:Out of memory|Memory cgroup out of memory).{0,40}Killed process (\d{1,9})", re.IGNORECASE)
_NIC_DOWN = re.compile(
    r"\b(mlx5_\d{1,3}|ib\d{1,3}|bnxt_re\d{1,3})\b.{0,120}\b(?:link down|link is down|port down)", re.IGNORECASE
)
_SEGFAULT = re.compile(r"\b([\w.-]{1,64})\[(\d{1,9})\]: segfault at ")


@dataclass(frozen=True, slots=True)
class KernelFact:
    """`kind`: "xid" | "off_bus" | "oom" | "nic_down" | "segfault". `number`: Xid or pid; `entity`: bus id or NIC."""

    kind: str
    entity: str = ""
    number: int | None = None


def read_line(line: str) -> KernelFact | None:
    """What one line says, None where nothing that matters here."""
    text = line[:LINE_CHARS_MAX]
    if match := _XID.search(text):
        return KernelFact("xid", match[1].lower(), int(match[2]))
    if _FALLEN.search(text):
        return KernelFact("off_bus")
    if match := _OOM.search(text):
        return KernelFact("oom", number=int(match[1]))
    if match := _NIC_DOWN.search(text):
        return KernelFact("nic_down", match[1])
    if match := _SEGFAULT.search(text):
        return KernelFact("segfault", match[1], int(match[2]))
    return None
