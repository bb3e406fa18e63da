"""`tocsin capture`: what a verdict was given on, as a file that `tocsin diagnose` reads anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from diagnosis.contracts.errors import OperatorFault

_PART: Final = ".part"


class Captured(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `tocsin capture` ("tocsin.capture/1"). One of `incident` and `job_id` is null."""

    file: str
    size_bytes: int
    incident: str | None
    job_id: int | None
    schema: str = "tocsin.capture/1"


def write_file(path: Path, content: bytes, overwrite: bool) -> None:
    """The whole file or none. What has that name is replaced only if `overwrite`; a link is never followed.

    Raises: OperatorFault.
    """
    target = path.with_name(path.name + _PART) if overwrite else path
    try:
        with target.open("xb") as file:
            try:
                file.write(content)
                file.flush()
            except OSError:
                target.unlink()
                raise
        if overwrite:
            target.replace(path)
    except FileExistsError as error:
        hint = "remove it" if overwrite else "nothing is overwritten without --force"
        raise OperatorFault(f"{target} exists: {hint}") from error
    except (OSError, ValueError) as error:
        raise OperatorFault(f"{path}: {getattr(error, 'strerror', None) or error}") from error
