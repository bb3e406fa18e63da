"""Probe frames as a job would write them, for tests of the node daemon: sound ones, and any lie on request."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from diagnosis.contracts import probeframe
from node_daemon.collectors.process import parse_stat

NODE = "gpu001"


def start_ticks(pid: int) -> int:
    """Field 22 of /proc/PID/stat."""
    stat = parse_stat(Path("/proc", str(pid), "stat").read_bytes())
    assert stat is not None
    return stat.start_ticks


class FrameImage:
    """One process's frame in memory; `save` writes it as the file of its pid."""

    def __init__(
        self, pid: int, ticks: int | None = None, *, rank: int = 0, world_size: int = 8, **header: Any
    ) -> None:
        self.header = np.zeros(1, probeframe.HEADER_DTYPE)
        self.slots = np.zeros(probeframe.SLOT_COUNT, probeframe.SLOT_DTYPE)
        fields = {
            "magic": probeframe.MAGIC,
            "version": probeframe.VERSION,
            "header_bytes": probeframe.HEADER_BYTES,
            "slot_bytes": probeframe.SLOT_BYTES,
            "slot_count": probeframe.SLOT_COUNT,
            "pid": pid,
            "pid_start_ticks": start_ticks(pid) if ticks is None else ticks,
            "rank": rank,
            "world_size": world_size,
            "local_rank": rank,
            "gpu": rank,
            "step_id": 0,
            **header,
        }
        for name, value in fields.items():
            self.header[name] = value

    def join(self, slot: int = 0, comm_id: int = 0xC0FFEE, size: int = 8, rank: int = 0) -> None:
        """Take part in a communicator."""
        self.slots[slot]["comm_id"], self.slots[slot]["comm_size"] = comm_id, size
        self.slots[slot]["comm_rank"], self.slots[slot]["stride"] = rank, 1

    def enter(self, slot: int = 0, *, gap_us: int = 30_000, signature: int = 7) -> None:
        """Begin a round."""
        row = self.slots[slot]
        seq = int(row["enqueued"]) + 1
        row["rounds"][seq % probeframe.ROUND_COUNT] = (seq & 0xFFFF_FFFF, gap_us, probeframe.DUR_OPEN, signature)
        row["open"][0] = (seq & 0xFFFF_FFFF, 1, 2, signature)
        row["gap_sum_ns"] += gap_us * 1000
        row["t_enqueued_ns"] = time.monotonic_ns()
        row["enqueued"] = row["started"] = seq

    def leave(self, slot: int = 0, *, dur_us: int = 10_000) -> None:
        """End the round."""
        row = self.slots[slot]
        seq = int(row["enqueued"])
        row["rounds"][seq % probeframe.ROUND_COUNT]["dur_us"] = dur_us
        row["open"][0] = (0, 0, 0, 0)
        row["dur_sum_ns"] += dur_us * 1000
        row["send_steps"] += 14
        row["recv_steps"] += 14
        row["t_done_ns"] = self.header["last_leave_ns"] = time.monotonic_ns()
        row["done"] += 1

    def step(self, slot: int = 0, *, gap_us: int = 30_000, dur_us: int = 10_000) -> None:
        """One whole round."""
        self.enter(slot, gap_us=gap_us)
        self.leave(slot, dur_us=dur_us)

    def tobytes(self) -> bytes:
        """The file's content."""
        return self.header.tobytes() + self.slots.tobytes()

    def save(self, directory: Path) -> Path:
        """Write in place, as a probe does, so that time stamps and inode behave alike."""
        path = directory / f"{int(self.header['pid'][0])}.frame"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        os.pwrite(fd, self.tobytes(), 0)
        os.close(fd)
        return path


@contextmanager
def idle_process(**options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that sleeps until the test is over."""
    child = subprocess.Popen(["sleep", "600"], **options)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


@contextmanager
def waiting_python(function: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process that sleeps in a function of this name until the test is over."""
    program = f"import time\ndef {function}():\n    print(flush=True)\n    time.sleep(600)\n{function}()\n"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            yield child
        finally:
            child.kill()
