"""What the tests of the SPANK plugin compile: the plugin, its rules without Slurm, a container plugin of their own."""

from __future__ import annotations

import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[2] / "slurm_plugins" / "spank"
DEADLINE_S = 60.0
_COMPILE = ("gcc", "-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{SOURCES}")


def build_rules(directory: Path) -> Path:
    """The program of `attach_main.c`, with the sanitizers that find a byte out of place."""
    program = directory / "attach_main"
    sources = [HERE / "attach_main.c", SOURCES / "attach.c"]
    sanitizers = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover", "-static-libasan")
    _compile(*sanitizers, *map(str, sources), "-o", str(program))
    return program


def _compile(*arguments: str) -> None:
    done = subprocess.run([*_COMPILE, *arguments], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
