"""A stand-in for libtorch_cpu.so and a program that plays a training process on it, command by command."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from diagnosis.contracts import probeframe
from node_daemon.native import library_path
from tests import callgrind

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[2] / "node_daemon" / "native" / "gloo"
DEADLINE_S = 60.0
ALLREDUCE, FLOAT = 1, 6
"""As torch numbers them (c10d::OpType, c10::ScalarType)."""


def probe_library() -> Path:
    """The built probe. Raises AssertionError where it is missing or older than its sources in this tree."""
    library = library_path("libtocsin_gloo.so")
    assert library is not None, "the probe is not built: cmake -S . -B build/dev && cmake --build build/dev"
    if library.is_relative_to(SOURCES.parents[2]):
        shared = (SOURCES.parent / "frame").glob("*.[ch]")
        newest = max(source.stat().st_mtime for source in (*SOURCES.iterdir(), *shared))
        assert library.stat().st_mtime >= newest, "the probe is older than its sources: cmake --build build/dev"
    return library


@dataclass(frozen=True)
class Double:
    """The built stand-in: a directory with `libtorch_cpu.so` and the program `driver`."""

    directory: Path

    @property
    def driver(self) -> Path:
        return self.directory / "driver"


def build(base: Path, *, old: bool = False) -> Double:
    """Compiles both, once per `base`. `old` leaves out of the library what the probe can do without."""
    directory = base / ("double_old" if old else "double")
    if (directory / "driver").exists():
        return Double(directory)
    directory.mkdir()
    common = ["g++", "-std=c++17", "-O1", "-Wall", "-Wextra"]
    library = directory / "libtorch_cpu.so"
    shared = [*common, "-fPIC", "-shared", "-Wl,-soname,libtorch_cpu.so", *(["-DOLD"] if old else [])]
    subprocess.run([*shared, str(HERE / "fake_torch.cpp"), "-o", str(library)], check=True, timeout=DEADLINE_S)
    program = [*common, str(HERE / "driver.cpp"), "-o", str(directory / "driver"), f"-Wl,-rpath,{directory}"]
    subprocess.run([*program, str(library), "-lpthread", "-ldl"], check=True, timeout=DEADLINE_S)
    return Double(directory)


class Driver:
    """The running program. `ask` sends one command and returns the rest of its answer after "ok"."""

    def __init__(self, process: subprocess.Popen[str], frames: Path) -> None:
        self._process, self._frames = process, frames
        self.pid = process.pid

    def ask(self, command: str) -> str:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer.startswith("ok"), f"{command}: {answer!r}"
        return answer[2:].strip()

    def frame_path(self, pid: int | None = None) -> Path:
        return self._frames / f"{pid or self.pid}.frame"

    def frame(self, pid: int | None = None) -> probeframe.Frame:
        return probeframe.parse(self.frame_path(pid).read_bytes())

    def finish(self) -> str:
        """Ends the program; its stderr. Raises AssertionError where it did not end with 0."""
        _, errors = self._process.communicate(timeout=DEADLINE_S)
        assert self._process.returncode == 0, errors
        return errors


@contextmanager
def running(double: Double, frames: Path, environment: Mapping[str, str] = os.environ) -> Iterator[Driver]:
    """The program with the probe preloaded, writing to `frames`; killed in the end if it still runs."""
    env = {
        "PATH": environment.get("PATH", ""),
        "TOCSIN_FRAME_DIR": str(frames),
        "LD_PRELOAD": str(probe_library()),
        **{name: value for name, value in environment.items() if environment is not os.environ},
    }
    process = subprocess.Popen(
        [double.driver], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )
    try:
        yield Driver(process, frames)
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)


def whole_round(driver: Driver, group: str) -> None:
    """One all-reduce of 8 floats, entered, executed and over."""
    driver.ask(f"enqueue {group} w {ALLREDUCE} {FLOAT} 8")
    driver.ask("start w")
    driver.ask("finish w")


def only_slot(driver: Driver) -> np.void:
    slot: np.void
    (slot,) = driver.frame().slots
    return slot


def rounds(slot: np.void) -> list[dict[str, int]]:
    """Entries in use, in ascending order, as a reader sees them that the writer does not disturb."""
    used = slot["rounds"][slot["rounds"]["seq"] != 0]
    return [{name: int(row[name]) for name in row.dtype.names} for row in np.sort(used, order="seq")]


def profile(driver: Path, tmp_path: Path, rounds: int, steps: int) -> Path:
    """Callgrind's output for so many all-reduces of `steps` each way."""
    written = tmp_path / "callgrind.out"
    subprocess.run(
        ["valgrind", "--tool=callgrind", f"--callgrind-out-file={written}", driver],
        input=f"group world 0 4 0,1,2,3\nstorm world 1 {rounds} {steps}\n",
        env={"PATH": "/usr/bin:/bin", "TOCSIN_FRAME_DIR": str(tmp_path), "LD_PRELOAD": str(probe_library())},
        capture_output=True,
        text=True,
        check=True,
        timeout=2 * DEADLINE_S,
    )
    return written


def instructions(driver: Path, tmp_path: Path, rounds: int, steps: int) -> int:
    """Instructions inside the probe's own file but for its clock calls, in so many all-reduces of `steps` each way."""
    by_function = callgrind.read(profile(driver, tmp_path, rounds, steps)).of(probe_library())
    assert by_function["tocsin_now_ns"] > 0  # it was called, and is left out
    return sum(by_function.values()) - by_function["tocsin_now_ns"]
