"""The program that plays a CUDA job for the collector, and the daemon's and the probe's side of it."""

from __future__ import annotations

import os
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from diagnosis.contracts import kernelwindow, probeframe
from diagnosis.contracts.kernelwindow import ASKED_OFFSET, REQUEST_OFFSET, KernelWindow, Request, State, Why
from tests.integration.cupti_double import (
    CONDENSER,
    DEADLINE_S,
    FRAME,
    HERE,
    INCLUDES,
    NAME,
    NATIVE,
    WARNINGS,
    collector_library,
    compile_library,
)

COMM = 0xC0FFEE
assert probeframe.SLOT_DTYPE.fields is not None
SLOT_ENQUEUED = probeframe.HEADER_BYTES + int(probeframe.SLOT_DTYPE.fields["enqueued"][1])
COLLECTOR = tuple(NATIVE / "cupti" / name for name in ("collector.cpp", "client.cpp", "own_rounds.cpp"))


@dataclass(frozen=True)
class Built:
    """The program, the collector that it loads, the stand-in for CUPTI, and what the environment needs besides."""

    driver: Path
    collector: Path
    fake: Path
    environment: Mapping[str, str]


def build(base: Path, sanitizer: str = "") -> Built:
    """Compiles all of it once per `base`; with `sanitizer` the collector too (`thread`, ...)."""
    directory = base / f"cupti_double_{sanitizer or 'plain'}".replace(",", "_")
    driver, fake, own = directory / "driver", directory / "libcupti_fake.so", directory / NAME
    if not driver.exists():
        directory.mkdir()
        checked = (f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-O1") if sanitizer else ("-O2",)
        common = ["g++", "-std=c++20", *WARNINGS[1:], *checked, *INCLUDES]
        shared = ["-shared", "-fPIC", str(HERE / "fake_cupti.cpp"), "-o", str(fake)]
        subprocess.run([*common, *shared], check=True, timeout=DEADLINE_S)
        program = [str(HERE / "driver.cpp"), "-o", str(driver), "-ldl", "-lpthread"]
        subprocess.run([*common, *program], check=True, timeout=DEADLINE_S)
        if sanitizer:
            compile_library((*COLLECTOR, *CONDENSER, *FRAME), own, *checked)
    options = {f"{name}_OPTIONS": "exitcode=66:halt_on_error=1" for name in ("TSAN", "UBSAN")}
    options["ASAN_OPTIONS"] = (
        "exitcode=66:halt_on_error=1:detect_leaks=0"  # its leak finder dies of threads that run on
    )
    return Built(driver, own if sanitizer else collector_library(), fake, options)


class Program:
    """The running program and what lies in its frame directory."""

    def __init__(self, process: subprocess.Popen[str], frames: Path) -> None:
        self.process = process
        self.frames = frames
        self.asked = 0
        assert self._line() == "1"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, command: str) -> str:
        """The program's answer to a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self._line()

    def file(self, suffix: str) -> Path:
        return self.frames / f"{self.process.pid}{suffix}"

    def control(self) -> np.void:
        return kernelwindow.parse_control(self.file(".cupti.control").read_bytes())

    def state(self) -> State:
        return State(int(self.control()["state"]))

    def request(self, request: Request) -> None:
        """As the daemon does it: the request, then its number."""
        self.asked += 1
        with self.file(".cupti.control").open("r+b", buffering=0) as control:
            os.pwrite(control.fileno(), request.packed(), REQUEST_OFFSET)
            os.pwrite(control.fileno(), struct.pack("<I", self.asked), ASKED_OFFSET)

    def await_state(self, state: State) -> None:
        self._await(lambda: self.state() == state)

    def await_done(self) -> Why:
        """Why the request that was made last is over."""
        self._await(lambda: int(self.control()["done"]) == self.asked)
        return Why(int(self.control()["why"]))

    def _await(self, condition: Callable[[], bool]) -> None:
        await_(lambda: condition() or self.process.poll() is not None)
        if self.process.poll() is not None and not condition():
            raise AssertionError(f"the program ended early: {self.process.communicate(timeout=DEADLINE_S)[1]}")

    def window(self) -> KernelWindow:
        return kernelwindow.parse_window(self.file(".cupti.window").read_bytes())

    def make_frame(self, comm_id: int = COMM, suffix: str = ".nccl.frame", ticks: int | None = None) -> None:
        """The probe's frame with one communicator."""
        header = np.zeros(1, probeframe.HEADER_DTYPE)
        header["magic"], header["version"], header["pid"] = probeframe.MAGIC, probeframe.VERSION, self.process.pid
        header["pid_start_ticks"] = int(self.control()["pid_start_ticks"]) if ticks is None else ticks
        slots = np.zeros(probeframe.SLOT_COUNT, probeframe.SLOT_DTYPE)
        slots[0]["comm_id"], slots[0]["comm_size"] = comm_id, 8
        self.file(suffix).write_bytes(header.tobytes() + slots.tobytes())

    def enter(self, rounds: int, suffix: str = ".nccl.frame") -> None:
        """So many rounds were entered by now."""
        with self.file(suffix).open("r+b", buffering=0) as frame:
            os.pwrite(frame.fileno(), struct.pack("<Q", rounds), SLOT_ENQUEUED)

    def finish(self) -> str:
        """Ends it by itself; what it said on stderr. Raises AssertionError where it ended badly."""
        assert self.process.stdin is not None
        self.process.stdin.write("exit\n")
        self.process.stdin.flush()
        _, errors = self.process.communicate(timeout=DEADLINE_S)
        assert self.process.returncode == 0, errors
        return errors


def await_(condition: Callable[[], bool]) -> None:
    """Returns as soon as the condition holds. Raises AssertionError where it does not in time."""
    give_up_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < give_up_s, "the condition did not come true"
        time.sleep(0.005)


def soon(seconds: float = 60.0) -> int:
    """A deadline."""
    return time.monotonic_ns() + int(seconds * 1e9)


@contextmanager
def running(built: Built, frames: Path, **environment: str) -> Iterator[Program]:
    """The program, writing to `frames`; killed in the end if it runs."""
    env = {
        "PATH": os.environ.get("PATH", ""),
        "TOCSIN_FRAME_DIR": str(frames),
        "TOCSIN_CUPTI_LIBRARY": str(built.fake),
        "CUDA_INJECTION64_PATH": str(built.collector),
        "RANK": "5",
        **built.environment,
        **environment,
    }
    process = subprocess.Popen(
        [built.driver, built.collector, built.fake],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )
    try:
        yield Program(process, frames)
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)
