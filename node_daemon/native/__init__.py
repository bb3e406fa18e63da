"""The native parts: what runs inside a training process, as shared libraries built by CMake."""

from __future__ import annotations

from pathlib import Path


def library_path(name: str) -> Path | None:
    """The built library of that file name (`libtocsin_gloo.so`), None where this installation was built without it.

    A wheel and an in-place build keep it in the same place: `lib/` beside this module.
    """
    path = Path(__file__).resolve().parent / "lib" / name
    return path if path.is_file() else None
