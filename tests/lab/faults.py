"""Faults for real processes, and how to find the process of a rank.

Processes are held by pidfd, so a signal can never reach somebody who was given the same pid later.
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from diagnosis.contracts import probeframe
from diagnosis.contracts.errors import AgentFault


@dataclass(frozen=True, slots=True)
class RankProcess:
    """One rank of a running job as its probe frame names it."""

    rank: int
    node: str
    pid: int
    frame: Path

    def rounds_done(self) -> int:
        """Collectives that this rank has finished so far, over all its communicators."""
        return int(probeframe.parse(self.frame.read_bytes()).slots["done"].sum())


def ranks(frame_root: Path, job: int, restart: int = 0) -> dict[int, RankProcess]:
    """The ranks of one attempt of a job that have a frame, by rank."""
    found = {}
    for path in frame_root.glob(f"*/{job}.{restart}/*.frame"):
        try:
            header = probeframe.parse(path.read_bytes()).header
        except (AgentFault, FileNotFoundError):
            continue  # not whole yet, or gone meanwhile
        rank = int(header["rank"])
        found[rank] = RankProcess(rank, path.parent.parent.name, int(header["pid"]), path)
    return found


def work_seen(frame_root: Path, job: int) -> tuple[int, int]:
    """(collectives, transfer steps) that the probe has followed in all attempts of a job so far."""
    frames = [probeframe.parse(path.read_bytes()) for path in frame_root.glob(f"*/{job}.*/*.frame")]
    return sum(int(one.slots["done"].sum()) for one in frames), sum(
        int(one.slots["send_steps"].sum()) for one in frames
    )


class Duty:
    """A slow rank: stopped for `stop_ms`, running for `run_ms`, over and over, until `end` (or the end of `with`)."""

    def __init__(self, pid: int, *, stop_ms: int = 60, run_ms: int = 30) -> None:
        self._process = os.pidfd_open(pid)
        self._stop_s = stop_ms / 1000
        self._run_s = run_ms / 1000
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"duty-{pid}", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop slowing it; the process runs on. Safe to call again."""
        self._over.set()
        self._thread.join(5)

    def __enter__(self) -> Duty:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def _work(self) -> None:
        try:
            while not self._over.is_set():
                signal.pidfd_send_signal(self._process, signal.SIGSTOP)
                self._over.wait(self._stop_s)
                signal.pidfd_send_signal(self._process, signal.SIGCONT)
                self._over.wait(self._run_s)
        except ProcessLookupError:
            return  # it ended, slowed to the last
        finally:
            os.close(self._process)


def stop_forever(pid: int) -> None:
    """Stop a process and leave it so: the rank that hangs. Only SIGKILL or `let_go` ends this."""
    _send(pid, signal.SIGSTOP)


def kill(pid: int) -> None:
    """End a process as the kernel does for want of memory, or somebody with `kill -9`."""
    _send(pid, signal.SIGKILL)


def let_go(pid: int) -> None:
    """Let a stopped process run on."""
    _send(pid, signal.SIGCONT)


def _send(pid: int, number: signal.Signals) -> None:
    process = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(process, number)
    finally:
        os.close(process)
