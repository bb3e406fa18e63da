"""What runs on other people's systems asks no more of them than was promised: old Python, old glibc."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GLIBC_MAX = (2, 28)
GLIBC_OF_PRELOADED_MAX = (2, 17)
"""The loader starts no program into which it cannot preload for its glibc's age, and a container may have any."""
PRELOADED = {"libtocsin_gloo.so"}
OF_THE_SITE = {"tocsin_spank.so"}
"""Compiled for the Slurm of the machine that loads it."""
LIBRARIES = sorted((ROOT / "node_daemon" / "native" / "lib").glob("*.so"))
HOOKS = sorted((ROOT / "slurm_plugins").glob("*.py"))
IN_PROCESS = sorted((ROOT / "node_daemon" / "inprocess").glob("*.py"))


@pytest.mark.parametrize(
    ("path", "oldest"),
    [*((path, "3.6") for path in HOOKS), *((path, "3.8") for path in IN_PROCESS)],
    ids=lambda value: value.name if isinstance(value, Path) else value,
)
def test_a_hook_runs_on_python_3_6_and_what_runs_in_a_job_on_3_8(path: Path, oldest: str) -> None:
    assert _violations(path, oldest) == []


def test_a_file_for_newer_pythons_is_found_out() -> None:
    assert _violations(Path(__file__), "3.6")


@pytest.mark.parametrize(
    "library", [path for path in LIBRARIES if path.name not in OF_THE_SITE], ids=lambda one: one.name
)
def test_a_probe_needs_glibc_2_28_at_most_and_no_other_library(library: Path) -> None:
    symbols = _ask("objdump", "-T", library)
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", _ask("readelf", "-d", library)))
    versions = {tuple(map(int, found.split("."))) for found in re.findall(r"GLIBC_([0-9.]+)", symbols)}
    assert versions and max(versions) <= (GLIBC_OF_PRELOADED_MAX if library.name in PRELOADED else GLIBC_MAX)
    assert needed <= {"libc.so.6", "libdl.so.2", "libpthread.so.0"}


def test_there_are_probes_to_look_at() -> None:
    names = {path.name for path in LIBRARIES}
    assert names >= {"libtocsin_gloo.so", "libnccl-profiler-tocsin.so", "libtocsin_cupti.so"}


def _violations(path: Path, oldest: str) -> list[str]:
    """What in `path` is newer than Python `oldest`, in vermin's words."""
    vermin = Path(sys.executable).with_name("vermin")
    argv = [str(vermin), "--quiet", "--no-tips", "--violations", f"--target={oldest}-", str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    return done.stdout.splitlines()


def _ask(*argv: str | Path) -> str:
    return subprocess.run([*argv], check=True, capture_output=True, text=True, timeout=60).stdout
