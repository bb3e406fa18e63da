"""What the collector believes of CUPTI, compiled beside NVIDIA's own headers of two releases."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.cupti_double import HERE, NATIVE

HEADERS = Path(sys.prefix) / "cupti" / "nvidia"
CUDA = HEADERS / "cu13" / "include"
RELEASES = {"12.9": HEADERS / "cuda_cupti" / "include", "13.5": CUDA}


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
