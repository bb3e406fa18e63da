"""One process, one sample: torch may run gloo and NCCL side by side, and each probe keeps a frame of its own.

The communicators of both are the process's. Where the headers differ, what is known counts for more than what is not,
and gloo's word, given by torch itself, for more than NCCL's, which may come from the first communicator that was made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from diagnosis.contracts.probeframe import SLOT_COUNT, SLOT_DTYPE, Transport
from node_daemon.collectors.process import STATE_UNKNOWN

if TYPE_CHECKING:
    from node_daemon.collectors.frames import FrameSample

_IDENTITY: Final = ("rank", "world_size", "local_rank", "gpu", "step_id")


def frame_name(pid: int, transport: int, namespace: int = 0) -> str:
    """The file that a process's frame of that transport lies in. `pid`: as the process itself knows it; `namespace`:
    the inode of its pid namespace where that is not the node's own."""
    process = f"{pid}-{namespace}" if namespace else f"{pid}"
    return f"{process}.nccl.frame" if transport == Transport.NCCL else f"{process}.frame"


def namespace_of(name: str) -> int:
    """The pid namespace that a frame's name tells, 0 where it tells none. `name` is well-formed."""
    _, dash, rest = name.partition("-")
    return int(rest.partition(".")[0]) if dash else 0


def one_per_process(samples: Iterable[FrameSample]) -> list[FrameSample]:
    """The samples with those of one process made one, in the order in which its first came.

    At most SLOT_COUNT communicators of a process are told: those that entered a round last.
    """
    by_process: defaultdict[tuple[int, int, int], list[FrameSample]] = defaultdict(list)
    for sample in samples:
        by_process[sample.pid, sample.start_ticks, sample.namespace].append(sample)
    return [group[0] if len(group) == 1 else _merged(group) for group in by_process.values()]


def _merged(group: list[FrameSample]) -> FrameSample:
    group = sorted(group, key=lambda sample: int(sample.header["transport"]))
    header = group[0].header.copy()
    for name in _IDENTITY:
        header[name] = next((sample.header[name] for sample in group if int(sample.header[name]) >= 0), -1)
    for name in ("last_leave_ns", "library_version", "control", "event_mask"):
        header[name] = max(int(sample.header[name]) for sample in group)
    slots = np.frombuffer(b"".join(sample.slots.tobytes() for sample in group), SLOT_DTYPE)
    again = np.frombuffer(b"".join(sample.again.tobytes() for sample in group), SLOT_DTYPE)
    kept = np.sort(np.argsort(slots["t_enqueued_ns"], kind="stable")[-SLOT_COUNT:])
    return replace(
        group[0],
        header=header,
        slots=slots[kept],
        again=again[kept],
        read_ns=max(sample.read_ns for sample in group),
        state=STATE_UNKNOWN if any(sample.state == STATE_UNKNOWN for sample in group) else group[0].state,
    )
