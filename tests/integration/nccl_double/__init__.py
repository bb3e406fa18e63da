"""A program that plays NCCL for the profiler plugin, command by command, without a GPU and without NCCL."""

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
from node_daemon.native.nccl.masks import Event
from tests.integration import gloo_double
from tests.integration.gloo_double import DEADLINE_S

HERE = Path(__file__).resolve().parent
NATIVE = HERE.parents[2] / "node_daemon" / "native"
INTERFACES = (4, 5, 6, 7)
ALL = 0xFFFF
"""Every event that a mask can name."""
NAME = "libnccl-profiler-tocsin.so"
COMM_ID = 0xBEEF
INCLUDES = (f"-I{NATIVE / 'nccl'}", f"-I{NATIVE / 'frame'}")
_WARNINGS = ("-std=gnu11", "-g", "-Wall", "-Wextra", "-Werror")


def plugin_library() -> Path:
    """The built plugin. Raises AssertionError where it is missing or older than its sources in this tree."""
    library = library_path(NAME)
    assert library is not None, "the plugin is not built: cmake -S . -B build/dev && cmake --build build/dev"
    if library.is_relative_to(NATIVE):
        sources = [path for part in ("nccl", "frame") for path in (NATIVE / part).glob("*.[ch]")]
        newest = max(source.stat().st_mtime for source in sources)
        assert library.stat().st_mtime >= newest, "the plugin is older than its sources: cmake --build build/dev"
    return library


@dataclass(frozen=True)
class Double:
    """The built program with the plugin that it loads, and what its environment needs besides."""

    driver: Path
    plugin: Path
    environment: Mapping[str, str]


def _compile(*arguments: object) -> None:
    subprocess.run(["gcc", *_WARNINGS, *INCLUDES, *map(str, arguments)], check=True, timeout=2 * DEADLINE_S)


def build(base: Path, sanitizer: str = "") -> Double:
    """Compiles the program once per `base`; with `sanitizer` the plugin too, both with it (`thread`, ...)."""
    directory = base / f"nccl_double_{sanitizer or 'plain'}".replace(",", "_")
    driver, stand_in = directory / "driver", directory / "libfake_nccl.so"
    own = directory / NAME
    if not driver.exists():
        directory.mkdir()
        checked = (f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-O1") if sanitizer else ("-O2",)
        _compile("-shared", "-fPIC", HERE / "fake_nccl.c", "-o", stand_in)
        if sanitizer:
            sources = [*sorted((NATIVE / "nccl").glob("*.c")), *sorted((NATIVE / "frame").glob("*.c"))]
            _compile(*checked, "-shared", "-fPIC", "-fvisibility=hidden", *sources, "-o", own, "-ldl")
        program = (HERE / "driver.c", HERE / "collective.c", "-o", driver)
        _compile(*checked, *program, f"-L{directory}", "-lfake_nccl", f"-Wl,-rpath,{directory}", "-lpthread", "-ldl")
    options = {f"{name}_OPTIONS": "exitcode=66:halt_on_error=1" for name in ("ASAN", "TSAN", "UBSAN")}
    return Double(driver, own if sanitizer else plugin_library(), options)


def build_null_plugin(base: Path) -> Path:
    """The plugin that does nothing."""
    library = base / "libnull.so"
    _compile("-O2", "-shared", "-fPIC", HERE / "null_plugin.c", "-o", library)
    return library


class Driver(gloo_double.Driver):
    """The running program; its frame is NCCL's."""

    def frame_path(self, pid: int | None = None) -> Path:
        return self._frames / f"{pid or self.pid}.nccl.frame"

    def begin(self, handle: str, comm: str, event: Event, parent: str = "-", **fields: object) -> bool:
        """Starts an event; whether the plugin gave a handle for it."""
        told = " ".join(f"{name}={value}" for name, value in fields.items())
        return self.ask(f"begin {handle} {comm} {int(event)} {parent} {told}") == "1"

    def coll(self, name: str, comm: str = "a", channels: int = 1, **fields: object) -> None:
        """One collective as far as its launch, with handles `name` (its task) and `name`.group."""
        what = {"function": "AllReduce", "datatype": "ncclFloat32", "count": 8, "root": 0, **fields}
        api = {key: value for key, value in what.items() if key not in ("algorithm", "protocol")}
        task = {key: value for key, value in what.items() if key != "captured"}
        self.begin(f"{name}.api", comm, Event.COLL_API, "-", **api)
        self.ask(f"end {name}.api")
        self.begin(f"{name}.group", comm, Event.GROUP)
        self.begin(name, comm, Event.COLL, f"{name}.api", channels=channels, group=f"{name}.group", **task)
        self.ask(f"end {name}")

    def kernel(self, task: str, channel: int, begun_ns: int, ended_ns: int | None, comm: str = "a") -> None:
        """A channel's kernel; without an end it runs on."""
        handle = f"{task}.k{channel}"
        self.begin(handle, comm, Event.KERNEL_CH, task, channel=channel, gpu_ns=begun_ns)
        if ended_ns is not None:
            self.ask(f"state {handle} 22 {ended_ns}")
            self.ask(f"end {handle}")

    def slot(self, comm_id: int = COMM_ID) -> np.void:
        """The communicator's slot."""
        found: np.void
        (found,) = [slot for slot in self.frame().slots if slot["comm_id"] == comm_id]
        return found

    def channels(self, comm_id: int = COMM_ID) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        """The channels in the communicator's slot."""
        slots = self.frame().slots
        found: np.ndarray[tuple[int], np.dtype[np.void]]
        (found,) = probeframe.channels_of(slots[slots["comm_id"] == comm_id])
        return found


@contextmanager
def running(double: Double, frames: Path, interface: int = 5, **environment: str) -> Iterator[Driver]:
    """The program, writing to `frames`, with every event on unless told otherwise; killed in the end if it runs."""
    env = {
        "PATH": os.environ.get("PATH", ""),
        "TOCSIN_FRAME_DIR": str(frames),
        "TOCSIN_NCCL_EVENTS": str(ALL),
        "FAKE_NCCL_VERSION": "22907",
        **double.environment,
        **environment,
    }
    process = subprocess.Popen(
        [double.driver, double.plugin, str(interface)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )
    try:
        yield Driver(process, frames)
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)
