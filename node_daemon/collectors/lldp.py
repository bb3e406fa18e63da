"""Which switch each port of the node leads to, as lldpd knows it: `lldpctl -f json`, once an hour, where it is there.

lldpctl only asks the daemon that runs anyway; nothing is sent on a wire. Cables change rarely, and an answer that does
not come, or cannot be read, leaves what was known.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from typing import Final

from diagnosis.contracts.errors import AgentFault
from diagnosis.evidence.topology.lldp import Uplink, parse_lldp
from node_daemon.log import EventLog

DEADLINE_S: Final = 10.0
FIRST_AFTER_S: Final = 5.0
END_S: Final = 1.0
ANSWER_BYTES_MAX: Final = 4 << 20
_log = EventLog("node_daemon.lldp")


class LldpWatch:
    """`uplinks`: (port, switch), as last told; empty where nobody tells."""

    def __init__(self, *, period_s: float, program: str = "lldpctl", first_after_s: float = FIRST_AFTER_S) -> None:
        self._period_s, self._program, self._first_after_s = period_s, program, first_after_s
        self.uplinks: list[Uplink] = []

    async def run(self) -> None:
        """Ask once a period, for ever; not at all where the program is not installed."""
        await asyncio.sleep(self._first_after_s)
        while (program := shutil.which(self._program)) is not None:
            await self._ask(program)
            await asyncio.sleep(self._period_s)

    async def _ask(self, program: str) -> None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                answer = await _output(program)
            self.uplinks = parse_lldp(answer)
        except (OSError, AgentFault) as error:  # TimeoutError is an OSError
            _log.sparsely("lldp", "lldpctl not read", error=str(error) or "it did not answer in time")


async def _output(program: str) -> bytes:
    """What the program prints. Raises OSError where it fails, and AgentFault where that is too much."""
    child = await asyncio.create_subprocess_exec(
        *(program, "-f", "json"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        cwd="/",
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"},
    )
    try:
        answer = bytearray()
        while child.stdout is not None and (part := await child.stdout.read(64 << 10)):
            answer += part
            if len(answer) > ANSWER_BYTES_MAX:
                raise AgentFault(f"more than {ANSWER_BYTES_MAX} bytes", reason="oversized")
        if (code := await child.wait()) != 0:
            raise OSError(f"exit code {code}")
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
        with contextlib.suppress(TimeoutError):  # the pipe is closed once it is read to its end
            async with asyncio.timeout(END_S):
                while child.stdout is not None and await child.stdout.read(64 << 10):
                    pass
    return bytes(answer)
