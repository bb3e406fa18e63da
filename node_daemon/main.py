"""Entry point of the node daemon: `tocsin-node-daemon --config FILE`.

SIGTERM and SIGINT end it within two seconds. SIGHUP reads the configuration anew: a sound one replaces the old at once,
a faulty one is told and the old stays.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Final, NoReturn

import node_daemon.light  # noqa: F401 (first, before what it makes light)
from diagnosis.contracts.errors import OperatorFault
from node_daemon import settings
from node_daemon.agent import Agent
from node_daemon.log import EventLog, configure
from node_daemon.notify import notify

STOP_DEADLINE_S: Final = 1.5
EXIT_OPERATOR_FAULT: Final = 78
"""EX_CONFIG of sysexits.h; the unit does not start the daemon again after it."""
_log = EventLog("node_daemon")


def main() -> NoReturn:
    """Run until SIGTERM. Exit code 0, 78 for a configuration that cannot be used, 1 for a bug."""
    parser = argparse.ArgumentParser(prog="tocsin-node-daemon", description=__doc__)
    parser.add_argument("--config", type=Path, default=settings.DEFAULT_PATH, help="default: %(default)s")
    arguments = parser.parse_args()
    configure()
    sys.excepthook = _die
    with contextlib.suppress(PermissionError):  # a user's files are read with the user's rights alone, see `owner`
        os.setgroups([])
    code = 0
    try:
        asyncio.new_event_loop().run_until_complete(serve(arguments.config))
    except OperatorFault as fault:
        for line in str(fault).splitlines():
            _log.warning("cannot start", fault=line)
        code = EXIT_OPERATOR_FAULT
    _leave(code)


async def serve(path: Path) -> None:
    """Run one agent after the other as SIGHUP asks for it. Raises OperatorFault where the first cannot be made."""
    stop, reload = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, reload.set)
    running = asyncio.create_task(Agent(settings.load(path)).run())
    while not stop.is_set():
        signals = [asyncio.create_task(event.wait()) for event in (stop, reload)]
        await asyncio.wait([running, *signals], return_when=asyncio.FIRST_COMPLETED)
        for task in signals:
            task.cancel()
        if running.done():
            running.result()  # it never ends by itself: this raises
        if reload.is_set() and not stop.is_set():
            reload.clear()
            running = await _replace(running, path)
    notify("STOPPING=1")
    await _end(running)


async def _replace(running: asyncio.Task[None], path: Path) -> asyncio.Task[None]:
    """The agent of the file's present settings; where they are faulty, the one that runs."""
    try:
        agent = Agent(settings.load(path))
    except OperatorFault as fault:
        for line in str(fault).splitlines():
            _log.warning("configuration kept", fault=line)
        return running
    await _end(running)
    _log.info("configuration replaced", path=path)
    return asyncio.create_task(agent.run())


async def _end(running: asyncio.Task[None]) -> None:
    running.cancel()
    _, late = await asyncio.wait([running], timeout=STOP_DEADLINE_S)
    if late:
        _log.warning("did not end in time", deadline_s=STOP_DEADLINE_S)


def _die(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    traceback.print_exception(kind, error, trace)
    _leave(1)


def _leave(code: int) -> NoReturn:
    """End the process without waiting for threads, of which one may be stuck in a driver or on a disk."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
