"""Answers a CollectEvent: what the suspects' processes are doing, before anybody ends them.

Nothing here disturbs the job: no signal, no ptrace stop. /proc gives the state, the kernel function in which the main
thread sleeps and its kernel stack (that one needs CAP_SYS_ADMIN); `py-spy dump --nonblocking` gives the Python stacks
by reading the process's memory; where it cannot, torch's worker server is asked for them, if the process runs one.
py-spy runs as the job's user where the kernel allows that (Yama's ptrace_scope 0), since it parses memory that the job
could have prepared. What cannot be read is None, with a note that says why.

Only processes that were identified (see `process`) are looked at: a job may name its ranks, not any process it likes.
One collection runs at a time, each incident is answered once, and their number a minute is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from diagnosis.contracts.control import (
    EVIDENCE_BYTES_MAX,
    PROCESSES_MAX,
    TEXT_BYTES_MAX,
    CollectEvent,
    Evidence,
    ProcessEvidence,
)
from node_daemon.client import Client
from node_daemon.collectors.doors import Process
from node_daemon.collectors.flight import FlightCollector
from node_daemon.collectors.owner import acting_as
from node_daemon.collectors.process import STATE_GONE, STATE_UNKNOWN, Processes
from node_daemon.log import EventLog
from node_daemon.threads import OwnThread

PATH: Final = "/v1/evidence"
REQUESTS_MAX: Final = 8
INCIDENTS_REMEMBERED: Final = 256
DEADLINE_S_MAX: Final = 30.0
POST_TRIES_MAX: Final = 4
POST_WAIT_S: Final = 1.0
_STACKS_AT_ONCE: Final = 2
_PTRACE_SCOPE: Final = Path("/proc/sys/kernel/yama/ptrace_scope")
_CONTROL_CHARACTERS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_log = EventLog("node_daemon.evidence")


@dataclass(frozen=True, slots=True)
class Suspect:
    """A rank's process as its frame and the kernel name it. `uid`, `gid`: the owner of the job's directory."""

    rank: int
    pid: int
    start_ticks: int
    uid: int
    gid: int


Lookup = Callable[[int, int], list[Suspect]]
"""(job_id, restart) to the processes whose frames were seen last."""


class EvidenceCollector:
    """See the module. `ask` never waits, `run` does the work."""

    def __init__(self, node: str, client: Client, lookup: Lookup, *, py_spy: str = "", per_minute_max: int = 6) -> None:
        self._node, self._client, self._lookup = node, client, lookup
        self._py_spy = py_spy
        self._per_minute_max = per_minute_max
        self._requests: asyncio.Queue[CollectEvent] = asyncio.Queue(REQUESTS_MAX)
        self._incidents: OrderedDict[str, None] = OrderedDict()
        self._began_at: deque[float] = deque(maxlen=per_minute_max)
        self._thread = OwnThread("proc")
        self._flights = FlightCollector()

    def ask(self, event: CollectEvent) -> None:
        """Take up a request, unless its incident was answered before or too much is asked."""
        if event.incident in self._incidents:
            return
        try:
            self._requests.put_nowait(event)
        except asyncio.QueueFull:
            _log.sparsely("full", "evidence not collected", incident=event.incident, why="too many requests")
            return
        self._incidents[event.incident] = None
        if len(self._incidents) > INCIDENTS_REMEMBERED:
            self._incidents.popitem(last=False)

    async def run(self) -> None:
        """Answer requests one after the other, for ever."""
        try:
            while True:
                event = await self._requests.get()
                await self._respect_rate()
                evidence = await self.gather(event)
                await self._deliver(evidence)
        finally:
            self._thread.close()
            self._flights.close()

    async def gather(self, event: CollectEvent) -> Evidence:
        """Evidence of the suspects that are known here. Takes at most the event's deadline (30 s at the most)."""
        ends_at = time.monotonic() + min(max(event.deadline_ms, 0) / 1000, DEADLINE_S_MAX)
        wanted = set(event.ranks)
        suspects = [s for s in self._lookup(event.job_id, event.restart) if s.rank in wanted][:PROCESSES_MAX]
        # Two texts a process; JSON may double a text (quotes, backslashes and line ends), hence a fifth of the room.
        text_bytes_max = min(TEXT_BYTES_MAX, EVIDENCE_BYTES_MAX // (5 * max(1, len(suspects))))
        try:
            seen = await self._thread.run(
                lambda: [look_at(suspect, text_bytes_max) for suspect in suspects], max(0.1, ends_at - time.monotonic())
            )
        except OSError as error:  # TimeoutError is one
            note = f"/proc was not read: {error}"
            seen = [ProcessEvidence(rank=s.rank, pid=s.pid, notes=[note]) for s in suspects]
        if event.stacks:
            turns = asyncio.Semaphore(_STACKS_AT_ONCE)
            jobs = [self._add_stack(s, p, turns, ends_at, text_bytes_max) for s, p in zip(suspects, seen, strict=True)]
            seen = list(await asyncio.gather(*jobs))
        return Evidence(
            incident=event.incident, node=self._node, job_id=event.job_id, restart=event.restart, processes=seen
        )

    async def _respect_rate(self) -> None:
        if len(self._began_at) == self._per_minute_max:
            await asyncio.sleep(max(0.0, self._began_at[0] + 60.0 - time.monotonic()))
        self._began_at.append(time.monotonic())

    async def _add_stack(
        self, suspect: Suspect, process: ProcessEvidence, turns: asyncio.Semaphore, ends_at: float, bytes_max: int
    ) -> ProcessEvidence:
        if process.state in (None, "X", "Z"):
            return process
        async with turns:
            stack, note = await python_stack(suspect, self._py_spy, ends_at - time.monotonic(), bytes_max)
            notes = process.notes if note is None else [*process.notes, note]
            left_s = ends_at - time.monotonic()
            if stack is None and left_s > 0:
                who = Process(suspect.rank, suspect.pid, suspect.start_ticks, suspect.uid, suspect.gid)
                told, why = await self._flights.traceback(who, left_s, bytes_max)
                stack = _clean(told.encode()) if told is not None else None
                notes = notes if why is None else [*notes, why]
        return msgspec.structs.replace(process, python_stack=stack, notes=notes)

    async def _deliver(self, evidence: Evidence) -> None:
        body = msgspec.json.encode(evidence)
        for attempt in range(1, POST_TRIES_MAX + 1):
            answer = await self._client.post(PATH, body, kind="application/json")
            if answer.taken:
                _log.info("evidence sent", incident=evidence.incident, processes=len(evidence.processes))
                return
            if answer.refused:
                break
            await asyncio.sleep(max(answer.retry_after_s, POST_WAIT_S * attempt))
        _log.warning("evidence not sent", incident=evidence.incident, reason=answer.reason, detail=answer.detail)


def look_at(suspect: Suspect, text_bytes_max: int, processes: Processes | None = None) -> ProcessEvidence:
    """What /proc says of one process. Blocking; nothing is read of a process that is not the suspect's."""
    processes = processes or Processes()
    state = processes.state(suspect.pid, suspect.start_ticks, suspect.uid)
    if state == STATE_GONE:
        return ProcessEvidence(rank=suspect.rank, pid=suspect.pid, state="X", notes=["the process has ended"])
    if state == STATE_UNKNOWN:
        note = "the process does not belong to the job's user"
        return ProcessEvidence(rank=suspect.rank, pid=suspect.pid, notes=[note])
    notes: list[str] = []
    with acting_as(suspect.uid, suspect.gid):  # whose files these are; CAP_SYS_ADMIN still counts for `stack`
        wchan = _read(suspect.pid, "wchan", 256, notes)
        stack = _read(suspect.pid, "stack", text_bytes_max, notes)
    if processes.state(suspect.pid, suspect.start_ticks, suspect.uid) == STATE_GONE:
        return ProcessEvidence(rank=suspect.rank, pid=suspect.pid, state="X", notes=["the process has just ended"])
    return ProcessEvidence(
        rank=suspect.rank,
        pid=suspect.pid,
        state=chr(state),
        wchan=None if wchan in (None, "", "0") else wchan,  # "0": it runs, or the kernel does not tell
        kernel_stack=stack or None,
        notes=notes,
    )


def _read(pid: int, name: str, bytes_max: int, notes: list[str]) -> str | None:
    try:
        with Path("/proc", str(pid), name).open("rb") as file:
            return _clean(file.read(bytes_max))
    except OSError as error:
        notes.append(f"{name}: {error.strerror}")
        return None


def _clean(data: bytes) -> str:
    """Text for people, never longer than the data: no invalid UTF-8, nothing that would steer a terminal."""
    return _CONTROL_CHARACTERS.sub("?", data.decode(errors="ignore")).strip()


def find_py_spy(configured: str = "") -> str | None:
    """The configured path; else beside the daemon's Python, else on PATH; None when there is none."""
    if configured:
        return configured if os.access(configured, os.X_OK) else None
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")


def _owner_may_look() -> bool:
    """Whether a user may read the memory of own processes. Yama forbids it to others than ancestors from scope 1 on."""
    try:
        return _PTRACE_SCOPE.read_text().strip() == "0"
    except OSError:
        return True


async def python_stack(
    suspect: Suspect, py_spy: str, deadline_s: float, text_bytes_max: int
) -> tuple[str | None, str | None]:
    """(stack, note) of one process: exactly one of the two is None. The process is not stopped for it."""
    program = find_py_spy(py_spy)
    if program is None:
        return None, "no Python stack: py-spy is not installed"
    if deadline_s <= 0:
        return None, "no Python stack: the time was up"
    as_owner = os.geteuid() == 0 and _owner_may_look()
    try:
        dump = await asyncio.create_subprocess_exec(
            *(program, "dump", "--nonblocking", "--pid", str(suspect.pid)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd="/",
            env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
            user=suspect.uid if as_owner else None,
            group=suspect.gid if as_owner else None,
            extra_groups=[] if as_owner else None,
        )
    except OSError as error:
        return None, f"no Python stack: {program}: {error.strerror}"
    try:
        async with asyncio.timeout(deadline_s):
            output, errors = await asyncio.gather(_head(dump.stdout, text_bytes_max), _head(dump.stderr, 1024))
            code = await dump.wait()
    except TimeoutError:
        return None, f"no Python stack: py-spy took longer than {deadline_s:.1f} s"
    finally:
        if dump.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                dump.kill()
    if code != 0 or not output:
        return None, f"no Python stack: py-spy: {_clean(errors)[-300:] or f'exit code {code}'}"
    return _clean(output), None


async def _head(stream: asyncio.StreamReader | None, bytes_max: int) -> bytes:
    """The first bytes of a stream; the rest is read and dropped, so that its writer is not blocked."""
    kept = bytearray()
    while stream is not None and (part := await stream.read(16 << 10)):
        kept += part[: bytes_max - len(kept)]
    return bytes(kept)
