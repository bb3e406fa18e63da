"""The GPUs' own words, made up: builds the fake `libnvidia-ml.so.1` and writes what it says (`native/fake_nvml.c`)."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

SOURCE = Path(__file__).parent / "native" / "fake_nvml.c"
HW_SLOWDOWN = 0x8
"""nvmlClocksEventReasonHwSlowdown: power brake or thermal slow-down asserted by hardware."""
SW_POWER_CAP = 0x4
GPU_IS_LOST = 15
DRIVER_NOT_LOADED = 9


def build(directory: Path) -> Path:
    """Compile the library into `directory` and return it; for use as LD_LIBRARY_PATH of one process."""
    library = directory / "libnvidia-ml.so.1"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-pthread"]
    named = f"-Wl,-soname,{library.name}"
    subprocess.run(["gcc", *flags, named, "-o", str(library), str(SOURCE)], check=True, timeout=60)
    return directory


class FakeGpus:
    """What the GPUs of one node say. Each change replaces the file at once, so a reader sees all of it or none.

    Values and their healthy defaults: sm_clock_mhz (1980), sm_clock_mhz_max, mem_clock_mhz (2619), mem_clock_mhz_max,
    clocks_event_reasons (0), temperature_c (45), power_mw (520000), utilization_percent (97), uuid, name, pci_bus.
    """

    def __init__(self, path: Path, library: Path, node: str, count: int = 2) -> None:
        self.path = path
        self._library = library
        self._lock = threading.Lock()
        self._sections: dict[str, dict[str, str]] = {"node": {"count": str(count)}}
        for gpu in range(count):
            self._sections[f"gpu{gpu}"] = {"uuid": f"GPU-{node}-{gpu:04d}"}
        self._write()

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to see these GPUs."""
        return {"LD_LIBRARY_PATH": str(self._library), "TOCSIN_FAKE_NVML": str(self.path)}

    def set(self, gpu: int, **values: int | str) -> None:
        """Let one GPU say something else."""
        self._change(f"gpu{gpu}", {name: str(value) for name, value in values.items()})

    def throttle(self, gpu: int) -> None:
        """A GPU whose hardware slows it down: 1,080 of 1,980 MHz, and it says why."""
        self.set(gpu, sm_clock_mhz=1080, graphics_clock_mhz=1080, clocks_event_reasons=hex(HW_SLOWDOWN))

    def fail(self, function: str, code: int, gpu: int | None = None) -> None:
        """Let an NVML function return an error code (0: work again), for one GPU or for all."""
        self._change("node" if gpu is None else f"gpu{gpu}", {f"error.{function}": str(code)})

    def hang(self, seconds: int) -> None:
        """Let every call block for so long; 0 frees also those that block now."""
        self._change("node", {"hang_s": str(seconds)})

    def _change(self, section: str, values: dict[str, str]) -> None:
        with self._lock:
            self._sections[section].update(values)
            self._write()

    def _write(self) -> None:
        text = ""
        for section, values in self._sections.items():
            text += f"[{section}]\n" + "".join(f"{key} = {value}\n" for key, value in values.items())
        part = self.path.with_suffix(".part")
        part.write_text(text)
        part.replace(self.path)
