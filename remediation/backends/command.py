"""One command of Slurm as a subprocess: a deadline, bounded output, an end with its parent, a fault with a word.

Nothing goes through a shell. A command that outlives its deadline is killed with its whole process group; one that
cannot even be killed (stuck in the kernel) is left behind after a second and not waited for. A command must not
outlive the controller either: the next controller decides from what Slurm shows, and a late act of a dead one would
come on top of it.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from diagnosis.contracts.errors import SlurmFault

STDERR_BYTES_MAX: Final = 16 << 10
_CHUNK: Final = 1 << 16
_REAP_S: Final = 1.0
_KEPT_ENVIRONMENT: Final = ("PATH", "HOME", "LD_LIBRARY_PATH", "SLURM_CONF", "TZ")
"""All that a command gets to see. SQUEUE_FORMAT, SLURM_CLUSTERS and the like would change what it says and to whom."""
_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None)
_REASONS: Final = (
    ("timeout", r"socket timed out"),
    (
        "unreachable",
        r"unable to contact|connection refused|zero bytes|configuration source|host is down|not responding",
    ),
    ("permission", r"permission denied|invalid user id|authentication|access denied"),
    ("unknown_job", r"invalid job id|invalid job array"),
    ("unknown_node", r"invalid node name|node \S+ not found"),
)


async def run(argv: Sequence[str], *, deadline_s: float, output_bytes_max: int) -> str:
    """What the command printed. Raises SlurmFault; its reason says what it was:

    `missing` no such command; `timeout` no answer in time; `oversized` more output than allowed; else by the command's
    own words `unreachable`, `permission`, `unknown_job`, `unknown_node`, or `refused` for all others.
    """
    name = Path(argv[0]).name
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_environment(os.environ),
            start_new_session=True,
            preexec_fn=_end_with_parent(os.getpid()),
        )
    except OSError as error:
        text = f"{argv[0]} cannot be run ({error.strerror}): set [slurm] path to the directory of Slurm's commands"
        raise SlurmFault(text, reason="missing") from error
    try:
        async with asyncio.timeout(deadline_s):
            out, err = await _read(process, name, output_bytes_max)
            code = await process.wait()
    except TimeoutError as error:
        raise SlurmFault(f"{' '.join(argv)[:200]}: no answer within {deadline_s:g} s", reason="timeout") from error
    finally:
        await _end(process)
    if code != 0:
        raise _fault(name, code, out, err)
    return out


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    return {
        "LC_ALL": "C",
        "SLURM_TIME_FORMAT": "standard",
        **{key: own[key] for key in _KEPT_ENVIRONMENT if key in own},
    }


def _end_with_parent(parent: int) -> Callable[[], None]:
    """To be run in the child between fork and exec: the kernel kills it when the controller dies."""

    def arm() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(127)

    return arm


async def _read(process: asyncio.subprocess.Process, name: str, output_bytes_max: int) -> tuple[str, str]:
    assert process.stdout is not None and process.stderr is not None
    out, err = await asyncio.gather(
        _bounded(process.stdout, output_bytes_max + 1), _bounded(process.stderr, STDERR_BYTES_MAX)
    )
    if len(out) > output_bytes_max:
        raise SlurmFault(f"{name} printed more than {output_bytes_max} bytes", reason="oversized")
    return out.decode(errors="replace"), err.decode(errors="replace")


async def _bounded(stream: asyncio.StreamReader, bytes_max: int) -> bytes:
    parts: list[bytes] = []
    left = bytes_max
    while left > 0 and (part := await stream.read(min(_CHUNK, left))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


async def _end(process: asyncio.subprocess.Process) -> None:
    """The whole group is gone, or unkillable."""
    if process.returncode is not None:
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)
        async with asyncio.timeout(_REAP_S):
            await process.wait()
    except (ProcessLookupError, TimeoutError):
        return


def _fault(name: str, code: int, out: str, err: str) -> SlurmFault:
    said = " ".join((err.strip() or out.strip() or f"exit status {code}, not a word").split())[:400]
    reason = next((word for word, pattern in _REASONS if re.search(pattern, said, re.IGNORECASE)), "refused")
    return SlurmFault(f"{name}: {said}", reason=reason)
