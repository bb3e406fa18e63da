"""What the tests of the SPANK plugin compile: the plugin, its rules without Slurm, a container plugin of their own."""

from __future__ import annotations

import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[2] / "slurm_plugins" / "spank"
DEADLINE_S = 60.0
_STATIC = """\
#include <stdio.h>
int main(int argc, char **argv, char **environment) {
  for (; *environment; ++environment) puts(*environment);
  return argc - 1;
}
"""
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


def build_plugin(directory: Path) -> Path:
    """tocsin_spank.so, by the one command that docs/attach.md tells, and with all warnings."""
    plugin = directory / "tocsin_spank.so"
    _compile("-O2", "-shared", "-fPIC", "-o", str(plugin), *map(str, sorted(SOURCES.glob("*.c"))))
    return plugin


def build_container_plugin(directory: Path) -> Path:
    """The plugin of `enter_root.c`."""
    plugin = directory / "enter_root.so"
    _compile("-shared", "-fPIC", "-o", str(plugin), str(HERE / "enter_root.c"))
    return plugin


def build_static(directory: Path) -> Path:
    """A program that prints its environment and needs no C library: what a container without glibc can run."""
    source, program = directory / "static.c", directory / "static"
    source.write_text(
        "#include <stdio.h>\nint main(int c, char **v, char **e) { for (; *e; ++e) puts(*e); return 0; }\n"
    )
    subprocess.run(["gcc", "-static", str(source), "-o", str(program)], check=True, timeout=DEADLINE_S)
    return program
