"""One command of Slurm as a subprocess: a deadline, bounded output, an end with its parent, a fault with a word.

Nothing goes through a shell. A command that outlives its deadline is killed with its whole process group, and not
waited for: it may be stuck in the kernel. A command must not outlive the controller either: the next controller
decides from what Slurm shows, and a late act of a dead one would come on top of it.
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
    loop, name = asyncio.get_running_loop(), Path(argv[0]).name
    try:
        transport, told = await loop.subprocess_exec(
            lambda: _Told(loop, output_bytes_max),
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            env=_environment(os.environ),
            start_new_session=True,
            preexec_fn=_end_with_parent(os.getpid()),
        )
    except OSError as error:
        text = f"{argv[0]} cannot be run ({error.strerror}): set [slurm] path to the directory of Slurm's commands"
        raise SlurmFault(text, reason="missing") from error
    try:
        async with asyncio.timeout(deadline_s):
            await told.ended
    except TimeoutError as error:
        raise SlurmFault(f"{' '.join(argv)[:200]}: no answer within {deadline_s:g} s", reason="timeout") from error
    finally:
        if transport.get_returncode() is None:
            _kill_group(transport.get_pid())
        transport.close()
    if told.too_much:
        raise SlurmFault(f"{name} printed more than {output_bytes_max} bytes", reason="oversized")
    code = transport.get_returncode()
    if code != 0:
        raise _fault(name, code, told.text(1), told.text(2))
    return told.text(1)


class _Told(asyncio.SubprocessProtocol):
    """What a command said. `ended`: it exited and all its output is here, or there was too much of it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, output_bytes_max: int) -> None:
        self.ended: asyncio.Future[None] = loop.create_future()
        self.too_much = False
        self._left = {1: output_bytes_max, 2: STDERR_BYTES_MAX}
        self._parts: dict[int, list[bytes]] = {1: [], 2: []}

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._parts[fd].append(data[: self._left[fd]])
        self._left[fd] -= min(len(data), self._left[fd])
        if fd == 1 and len(data) > len(self._parts[1][-1]):
            self.too_much = True
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def text(self, fd: int) -> str:
        return b"".join(self._parts[fd]).decode(errors="replace")


def _kill_group(pid: int) -> None:
    """The command itself and whatever it started: nothing of it may act any more."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


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


def _fault(name: str, code: int | None, out: str, err: str) -> SlurmFault:
    said = " ".join((err.strip() or out.strip() or f"exit status {code}, not a word").split())[:400]
    reason = next((word for word, pattern in _REASONS if re.search(pattern, said, re.IGNORECASE)), "refused")
    return SlurmFault(f"{name}: {said}", reason=reason)
