"""What stands in for CUPTI and for a CUDA program: records as each release lays them out, and the condenser behind
plain functions."""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from diagnosis.contracts.kernelwindow import KernelWindow, parse_window
from node_daemon.native import library_path

HERE = Path(__file__).resolve().parent
NATIVE = HERE.parents[2] / "node_daemon" / "native"
NAME = "libtocsin_cupti.so"
DEADLINE_S = 120.0
INCLUDES = (f"-I{NATIVE / 'cupti'}", f"-I{NATIVE / 'frame'}", f"-I{HERE}")
WARNINGS = ("-std=c++17", "-g", "-Wall", "-Wextra", "-Werror")
CONDENSER = tuple(NATIVE / "cupti" / name for name in ("condenser.cpp", "sweep.cpp", "window_file.cpp"))
FRAME = tuple(NATIVE / "frame" / name for name in ("frame_file.c", "identity.c"))

MEMCPY, MEMSET, KERNEL, RUNTIME, CONCURRENT_KERNEL, MARKER, OVERHEAD = 1, 2, 3, 5, 10, 12, 17
MEMCPY_PEER, EXTERNAL_CORRELATION = 22, 39
KERNEL_BYTES = {9: 208, 10: 216, 11: 224, 12: 232, 13: 248}
"""By version of CUpti_ActivityKernel: 9 is CUDA 12's, 13 is that of 13.5."""


def _record(size: int, **fields: tuple[str, int]) -> np.dtype[Any]:
    return np.dtype(
        {
            "names": ["kind", *fields],
            "formats": ["<u4", *(code for code, _ in fields.values())],
            "offsets": [0, *(offset for _, offset in fields.values())],
            "itemsize": size,
        }
    )


_TIMES: dict[str, tuple[str, int]] = {"start": ("<u8", 16), "end": ("<u8", 24)}
KERNELS = {
    version: _record(size, **_TIMES, name=("<u8", 104), graph=("<u4", 156), stream=("<u4", 48))
    for version, size in KERNEL_BYTES.items()
}
_COPY: dict[str, tuple[str, int]] = {"copy_kind": ("u1", 4), "bytes": ("<u8", 8), **_TIMES}
COPIES = {6: _record(96, **_COPY), 7: _record(112, **_COPY)}
PEER_COPY = _record(96, **_COPY)
SETS = {4: _record(88, bytes=("<u8", 8), **_TIMES), 5: _record(104, bytes=("<u8", 8), **_TIMES)}
CALL = _record(40, call=("<u4", 4), start=("<u8", 8), end=("<u8", 16))
MARK = _record(56, timestamp=("<u8", 8))
OVERHEAD_RECORD = _record(56, start=("<u8", 24), end=("<u8", 32))
CORRELATION = _record(24)


@dataclass
class Names:
    """Strings that stay where they are, as CUPTI's do."""

    kept: list[ctypes.Array[ctypes.c_char]] = field(default_factory=list)

    def address(self, text: str) -> int:
        """Of a new copy of the text."""
        self.kept.append(ctypes.create_string_buffer(text.encode()))
        return ctypes.addressof(self.kept[-1])


def compile_library(sources: tuple[Path, ...], library: Path, *flags: str) -> None:
    """Of C and C++ sources together, without the C++ library, as the build does it."""
    objects = []
    for source in sources:
        made = library.parent / f"{source.stem}.{library.stem}.o"
        compiler: list[str] = (
            ["g++", *WARNINGS, "-fno-exceptions", "-fno-rtti"] if source.suffix == ".cpp" else ["gcc", "-g"]
        )
        subprocess.run(
            [*compiler, "-fPIC", "-fvisibility=hidden", *flags, *INCLUDES, "-c", str(source), "-o", str(made)],
            check=True,
            timeout=DEADLINE_S,
        )
        objects.append(made)
    linked = ["gcc", *flags, "-shared", "-Wl,-z,defs", *map(str, objects), "-o", str(library), "-ldl", "-lpthread"]
    subprocess.run(linked, check=True, timeout=DEADLINE_S)


def collector_library() -> Path:
    """The built collector. Raises AssertionError where it is missing or older than its sources in this tree."""
    library = library_path(NAME)
    assert library is not None, "the collector is not built: cmake -S . -B build/dev && cmake --build build/dev"
    if library.is_relative_to(NATIVE):
        sources = [path for part in ("cupti", "frame") for path in (NATIVE / part).iterdir() if path.suffix != ".py"]
        newest = max(source.stat().st_mtime for source in sources if source.is_file())
        assert library.stat().st_mtime >= newest, "the collector is older than its sources: cmake --build build/dev"
    return library


class Feed:
    """One condenser. `begin_ns`, `end_ns`: its window."""

    def __init__(self, base: Path, begin_ns: int = 0, end_ns: int = (1 << 64) - 1) -> None:
        library = base / "libfeed.so"
        if not library.exists():
            compile_library((HERE / "feed.cpp", *CONDENSER, *FRAME), library, "-O2", "-fvisibility=default")
        self.calls = ctypes.CDLL(str(library))
        self.calls.feed_make.restype = ctypes.c_void_p
        self.calls.feed_time_ns.restype = ctypes.c_uint64
        self.calls.feed_sweep_ns.restype = ctypes.c_uint64
        self.here = ctypes.c_void_p(self.calls.feed_make(ctypes.c_uint64(begin_ns), ctypes.c_uint64(end_ns)))
        assert self.here

    def sizes(self, kernel: int, copy: int = 7, memset: int = 5) -> None:
        """The record versions that buffers hold from now on."""
        sizes = {CONCURRENT_KERNEL: KERNEL_BYTES[kernel], KERNEL: KERNEL_BYTES[kernel]}
        sizes |= {MEMCPY: COPIES[copy].itemsize, MEMSET: SETS[memset].itemsize, MEMCPY_PEER: PEER_COPY.itemsize}
        sizes |= {RUNTIME: CALL.itemsize, MARKER: MARK.itemsize, OVERHEAD: OVERHEAD_RECORD.itemsize}
        for kind, size in {**sizes, EXTERNAL_CORRELATION: CORRELATION.itemsize, 60: 16}.items():
            self.calls.feed_size(kind, size)

    def give(self, *records: np.ndarray[Any, np.dtype[Any]]) -> None:
        """One buffer with these records, one after the other."""
        data = b"".join(part.tobytes() for part in records)
        buffer = ctypes.create_string_buffer(data, len(data) + 8)
        self.calls.feed_buffer(self.here, buffer, ctypes.c_size_t(len(data)))

    def clear(self, begin_ns: int = 0, end_ns: int = (1 << 64) - 1) -> None:
        self.calls.feed_clear(self.here, ctypes.c_uint64(begin_ns), ctypes.c_uint64(end_ns))

    def sweep_ns(self) -> int:
        return int(self.calls.feed_sweep_ns(self.here))

    def time_ns(self, buffer: np.ndarray[Any, np.dtype[Any]], times: int) -> int:
        """Condensing the same records so many times."""
        address = ctypes.c_void_p(buffer.ctypes.data)
        return int(self.calls.feed_time_ns(self.here, address, ctypes.c_size_t(buffer.nbytes), times))

    def written(self, directory: Path) -> bytes:
        """The window's file. Raises OSError where it could not be written."""
        if not self.calls.feed_write(self.here, str(directory).encode(), b"w"):
            raise OSError("the window was not written")
        return (directory / "w").read_bytes()

    def window(self, directory: Path) -> KernelWindow:
        """Swept, written and read again."""
        self.sweep_ns()
        return parse_window(self.written(directory))

    def close(self) -> None:
        self.calls.feed_free(self.here)


def kernels(version: int, name: Any, start: Any, end: Any, kind: int = CONCURRENT_KERNEL) -> Any:
    """Kernel records of that version, of columns of equal length (or single values)."""
    names, starts, ends = np.broadcast_arrays(np.atleast_1d(name), np.atleast_1d(start), np.atleast_1d(end))
    made = np.zeros(len(names), KERNELS[version])
    made["kind"], made["name"], made["start"], made["end"] = kind, names, starts, ends
    return made
