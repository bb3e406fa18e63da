"""What the collector believes of CUPTI, held to NVIDIA's own headers and libraries of two releases."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from diagnosis.contracts.kernelwindow import Request, State, Why
from tests.integration.cupti_double import HERE, NATIVE
from tests.integration.cupti_double.program import build, running, soon

HEADERS = Path(sys.prefix) / "cupti" / "nvidia"
CUDA = HEADERS / "cu13" / "include"
RELEASES = {"12.9": HEADERS / "cuda_cupti" / "include", "13.5": CUDA}
LIBRARIES = {
    "12.9": HEADERS / "cuda_cupti" / "lib" / "libcupti.so.12",
    "13.5": HEADERS / "cu13" / "lib" / "libcupti.so.13",
}
NOT_INITIALIZED, UNKNOWN = 15, 999
"""What CUPTI answers where there is no driver."""


def compiled(include: Path, source: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """CUPTI's headers of one release; what they include of CUDA comes from 13.5."""
    paths = [f"-I{include}", f"-I{CUDA}", f"-I{NATIVE / 'cupti'}"]
    command = ["g++", "-std=c++17", "-Wno-deprecated-declarations", "-fsyntax-only", *flags, *paths, str(source)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("release", list(RELEASES))
def test_records_constants_and_functions_are_as_nvidia_declares_them(release: str) -> None:
    include = RELEASES[release]
    assert (include / "cupti.h").is_file(), "the headers are missing: tools/install.sh test"
    done = compiled(include, HERE / "abi_check.cpp")
    assert done.returncode == 0, done.stderr


def test_a_field_in_another_place_is_found_out(tmp_path: Path) -> None:
    moved = (NATIVE / "cupti" / "cupti_abi.h").read_text().replace("kKernelName = 104", "kKernelName = 96")
    (tmp_path / "cupti_abi.h").write_text(moved)
    done = compiled(CUDA, HERE / "abi_check.cpp", f"-I{tmp_path}")
    assert "CUpti_ActivityKernel9.name lies elsewhere" in done.stderr


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="with a driver the real library records")
@pytest.mark.parametrize("release", list(LIBRARIES))
def test_the_real_library_without_a_driver_refuses_and_the_job_goes_on(
    release: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert LIBRARIES[release].is_file(), "the library is missing: tools/install.sh test"
    with running(
        build(tmp_path_factory.getbasetemp()), tmp_path, TOCSIN_CUPTI_LIBRARY=str(LIBRARIES[release])
    ) as program:
        for window in (1, 2):
            program.request(Request(window, soon(), duration_ns=1_000_000))
            assert program.await_done() == Why.REFUSED
            assert int(program.control()["error"]) in (NOT_INITIALIZED, UNKNOWN)
            assert program.state() == State.DORMANT
        assert program.finish() == ""
