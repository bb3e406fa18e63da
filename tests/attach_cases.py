"""What a task's environment becomes, case by case: one table for the TaskProlog and the SPANK plugin.

A case is what the task has before and what it has after. Only what differs from the ordinary task is written down:
`{root}`, `{gloo}`, `{nccl}` and `{other}` stand for the site's frame root, the two probes and a library of the user's.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

NODE: Final = "gpu-n01"
ATTACHED: Final = {
    "TOCSIN_FRAME_DIR": "{root}/gpu-n01/4242.0",
    "LD_PRELOAD": "{gloo}",
    "NCCL_PROFILER_PLUGIN": "{nccl}",
}
BARE: Final = dict.fromkeys(ATTACHED)
OUTER: Final = {**ATTACHED, "TOCSIN_FRAME_DIR": "{root}/gpu-n02/4242.0"}
"""What a step inherits from a batch script that was attached on another node."""


@dataclass(frozen=True, slots=True)
class Site:
    """A node whose daemon has made its directory."""

    directory: Path

    @property
    def root(self) -> Path:
        return self.directory / "frames"

    @property
    def words(self) -> dict[str, str]:
        """What the placeholders of the table stand for."""
        return {
            "root": str(self.root),
            "gloo": str(self.directory / "libtocsin_gloo.so"),
            "nccl": str(self.directory / "libnccl-profiler-tocsin.so"),
            "other": str(self.directory / "libother.so"),
        }

    def make(self, missing: tuple[str, ...] = ()) -> None:
        """Lays everything out but `missing` (names of `words`, or "node")."""
        (self.root / NODE).mkdir(parents=True)
        (self.root / NODE).chmod(0o1777)
        if "node" in missing:
            (self.root / NODE).rmdir()
        for word in {"gloo", "nccl", "other"} - set(missing):
            Path(self.words[word]).write_bytes(_empty_library())

    def environment(self, changes: Mapping[str, str | None]) -> dict[str, str]:
        """The ordinary task's environment with these changes; None takes a variable away."""
        ordinary = {
            "PATH": "/usr/bin:/bin",
            "TOCSIN_FRAME_ROOT": "{root}",
            "TOCSIN_PROBE_LIBRARY": "{gloo}",
            "TOCSIN_NCCL_PLUGIN": "{nccl}",
            "SLURMD_NODENAME": NODE,
            "SLURM_JOB_ID": "4242",
        }
        merged = {**ordinary, **changes}
        return {name: self.filled(value) for name, value in merged.items() if value is not None}

    def filled(self, text: str) -> str:
        """`text` with the site's paths in it."""
        for word, path in self.words.items():
            text = text.replace(f"{{{word}}}", path)
        return text


@cache
def _empty_library() -> bytes:
    """The loader complains about what it cannot preload, so each must really be a library."""
    with tempfile.TemporaryDirectory() as directory:
        library = Path(directory, "empty.so")
        subprocess.run(["cc", "-shared", "-nostdlib", "-x", "c", "/dev/null", "-o", library], check=True, timeout=30)
        return library.read_bytes()


@dataclass(frozen=True, slots=True)
class Case:
    """One row. `after` None for a variable: it is not set. What is in neither is as it was."""

    name: str
    before: Mapping[str, str | None]
    after: Mapping[str, str | None]
    missing: tuple[str, ...] = field(default=())


def odd(**before: str | None) -> Case:
    """A task that must be left alone for this."""
    return Case(f"odd {before}", before, BARE)


CASES: Final = (
    Case("an ordinary task", {}, ATTACHED),
    Case("a restarted job", {"SLURM_RESTART_COUNT": "3"}, {**ATTACHED, "TOCSIN_FRAME_DIR": "{root}/gpu-n01/4242.3"}),
    Case("an empty restart count", {"SLURM_RESTART_COUNT": ""}, ATTACHED),
    Case("a root with a slash", {"TOCSIN_FRAME_ROOT": "{root}//"}, ATTACHED),
    Case("an inner step of the same job", OUTER, ATTACHED),
    # -- what the user preloads
    Case("a preload of the user's", {"LD_PRELOAD": "{other}"}, {**ATTACHED, "LD_PRELOAD": "{other}:{gloo}"}),
    Case(
        "a preload with spaces",
        {"LD_PRELOAD": " {other} libm.so.6"},
        {**ATTACHED, "LD_PRELOAD": "{other}:libm.so.6:{gloo}"},
    ),
    Case("the probe is there already", {"LD_PRELOAD": "{other}:{gloo}"}, {**ATTACHED, "LD_PRELOAD": "{other}:{gloo}"}),
    Case("the probe is there first", {"LD_PRELOAD": "{gloo} {other}"}, {**ATTACHED, "LD_PRELOAD": "{other}:{gloo}"}),
    Case(
        "the probe of another version",
        {"LD_PRELOAD": "/old/libtocsin_gloo.so:{other}"},
        {**ATTACHED, "LD_PRELOAD": "{other}:{gloo}"},
    ),
    Case(
        "a name that only looks alike",
        {"LD_PRELOAD": "{other}.libtocsin_gloo.so"},
        {**ATTACHED, "LD_PRELOAD": "{other}.libtocsin_gloo.so:{gloo}"},
    ),
    # -- which profiler plugin the user wants
    Case(
        "a plugin of the user's",
        {"NCCL_PROFILER_PLUGIN": "inspector"},
        {**ATTACHED, "TOCSIN_NCCL_CHAIN": "inspector"},
    ),
    Case(
        "a plugin of the user's by its path",
        {"NCCL_PROFILER_PLUGIN": "{other}", "TOCSIN_NCCL_CHAIN": "before"},
        {**ATTACHED, "TOCSIN_NCCL_CHAIN": "{other}"},
    ),
    Case("a plugin that the user chains", {"TOCSIN_NCCL_CHAIN": "{other}"}, ATTACHED),
    Case("an inner step with a plugin of the user's", {**OUTER, "TOCSIN_NCCL_CHAIN": "inspector"}, ATTACHED),
    Case(
        "another plugin for an inner step",
        {**OUTER, "NCCL_PROFILER_PLUGIN": "x", "TOCSIN_NCCL_CHAIN": "inspector"},
        {**ATTACHED, "TOCSIN_NCCL_CHAIN": "x"},
    ),
    Case("no plugin, says the user", {"NCCL_PROFILER_PLUGIN": "none"}, {**ATTACHED, "NCCL_PROFILER_PLUGIN": "none"}),
    Case("in capitals", {"NCCL_PROFILER_PLUGIN": "NONE"}, {**ATTACHED, "NCCL_PROFILER_PLUGIN": "NONE"}),
    Case("an empty plugin", {"NCCL_PROFILER_PLUGIN": ""}, ATTACHED),
    Case("our plugin by its short name", {"NCCL_PROFILER_PLUGIN": "tocsin"}, ATTACHED),
    Case("our plugin of another version", {"NCCL_PROFILER_PLUGIN": "/old/libnccl-profiler-tocsin.so"}, ATTACHED),
    # -- off
    Case("switched off", {"TOCSIN_DISABLE": "1"}, BARE),
    Case(
        "switched off by any word",
        {"TOCSIN_DISABLE": "yes", "LD_PRELOAD": "{other}"},
        {**BARE, "LD_PRELOAD": "{other}"},
    ),
    Case("a switch that says nothing", {"TOCSIN_DISABLE": ""}, ATTACHED),
    Case("a switch that says no", {"TOCSIN_DISABLE": "0"}, ATTACHED),
    Case("switched off inside", {**OUTER, "TOCSIN_DISABLE": "1"}, BARE),
    Case(
        "switched off inside, with a preload",
        {**OUTER, "TOCSIN_DISABLE": "1", "LD_PRELOAD": "{other}:{gloo}"},
        {**BARE, "LD_PRELOAD": "{other}"},
    ),
    Case(
        "switched off inside, with a plugin",
        {**OUTER, "TOCSIN_DISABLE": "1", "NCCL_PROFILER_PLUGIN": "x"},
        {**BARE, "NCCL_PROFILER_PLUGIN": "x"},
    ),
    Case(
        "switched off inside, with a plugin behind ours",
        {**OUTER, "TOCSIN_DISABLE": "1", "TOCSIN_NCCL_CHAIN": "{other}"},
        {**BARE, "NCCL_PROFILER_PLUGIN": "{other}", "TOCSIN_NCCL_CHAIN": None},
    ),
    Case(
        "switched off inside, with ours behind itself",
        {**OUTER, "TOCSIN_DISABLE": "1", "TOCSIN_NCCL_CHAIN": "tocsin"},
        {**BARE, "TOCSIN_NCCL_CHAIN": None},
    ),
    # -- a broken installation
    Case("no daemon", {}, BARE, ("node",)),
    Case(
        "no daemon on the inner node",
        {**OUTER, "LD_PRELOAD": "{other} {gloo}"},
        {**BARE, "LD_PRELOAD": "{other}"},
        ("node",),
    ),
    Case("no probe at all", OUTER, BARE, ("gloo", "nccl")),
    Case("no NCCL plugin", OUTER, {**ATTACHED, "NCCL_PROFILER_PLUGIN": None}, ("nccl",)),
    Case(
        "no NCCL plugin, and one of the user's",
        {**OUTER, "TOCSIN_NCCL_CHAIN": "x"},
        {**ATTACHED, "NCCL_PROFILER_PLUGIN": "x", "TOCSIN_NCCL_CHAIN": None},
        ("nccl",),
    ),
    Case("no gloo probe", OUTER, {**ATTACHED, "LD_PRELOAD": None}, ("gloo",)),
    # -- odd
    odd(SLURMD_NODENAME=None),
    odd(SLURMD_NODENAME=""),
    odd(SLURMD_NODENAME="other"),
    odd(SLURMD_NODENAME="../gpu-n01"),
    odd(SLURMD_NODENAME=".."),
    odd(SLURM_JOB_ID=None),
    odd(SLURM_JOB_ID="42_7"),
    odd(SLURM_JOB_ID="4/2"),
    odd(SLURM_JOB_ID="1" * 11),
    odd(SLURM_JOB_ID="1" * 3000),
    odd(SLURM_JOB_ID="\u0664\u0662"),  # digits, but not ours
    odd(SLURM_RESTART_COUNT="-1"),
    odd(SLURM_RESTART_COUNT="1 2"),
    odd(SLURM_RESTART_COUNT="123456"),
    odd(TOCSIN_FRAME_ROOT="relative"),
    odd(TOCSIN_FRAME_ROOT="/nowhere/at/all"),
    odd(TOCSIN_FRAME_ROOT="/dev/null"),
    odd(TOCSIN_FRAME_ROOT="/" + "x" * 5000),
    odd(TOCSIN_PROBE_LIBRARY="libtocsin_gloo.so"),
    odd(TOCSIN_PROBE_LIBRARY="/tmp/a b.so"),
    odd(TOCSIN_PROBE_LIBRARY="/tmp/a:b.so"),
    odd(TOCSIN_PROBE_LIBRARY="/tmp/$LIB/b.so"),
    odd(TOCSIN_PROBE_LIBRARY="/tmp/a.so\nexport PATH=/evil"),
    odd(TOCSIN_NCCL_PLUGIN="/tmp/a.so\nexport PATH=/evil"),
    *(
        Case(f"an odd preload {value!r}", {"LD_PRELOAD": value}, {**BARE, "LD_PRELOAD": value})
        for value in ("/a.so\nexport PATH=/evil", "/a.so\rb", "/\u00e9.so", "/a.so:" * 11000)
    ),
    Case("an odd plugin", {"NCCL_PROFILER_PLUGIN": "a\nb"}, {**BARE, "NCCL_PROFILER_PLUGIN": "a\nb"}),
    odd(TOCSIN_NCCL_CHAIN="a\nexport PATH=/evil"),
)


def after(environment: Mapping[str, str], output: str) -> dict[str, str]:
    """The environment after the lines that Slurm would read from a TaskProlog: `export NAME=value`, `unset NAME`."""
    changed = dict(environment)
    for line in output.splitlines():
        word, _, rest = line.partition(" ")
        assert word in ("export", "unset"), line
        name, _, value = rest.partition("=")
        changed.pop(name, None)
        if word == "export":
            changed[name] = value
    return changed
