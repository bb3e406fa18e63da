"""The controller's process: wiring, and nothing else.

One event loop holds three servers (agents on TCP, the page on loopback, control on a Unix socket), the store's thread,
and a scheduler that ticks the control loop, the outbox and the retention. SIGHUP rereads configuration and policy and
takes both or neither; SIGTERM lets a running cycle end and is done within three seconds. The service manager's
watchdog is fed by a finished cycle alone: a loop that hangs is restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from datetime import UTC
from pathlib import Path
from typing import Final

import structlog
import uvloop
from apscheduler.schedulers.asyncio import AsyncIOScheduler

from controller import logs, systemd
from controller.captures import Captures
from controller.clock import SteadyClock
from controller.control.app import ControlApp
from controller.control.pause import Pause
from controller.control.status import View
from controller.ingest.app import IngestApp
from controller.ingest.channels import ControlChannels
from controller.loop import ControlLoop
from controller.notify.notifier import Notifier
from controller.registry import Registry
from controller.servers import Server, bind_tcp, tcp_server, unix_server
from controller.settings import Address, Settings, load_policy, load_settings, read_secret
from controller.store.sqlite import SqliteStore
from controller.topology import read_topology
from controller.web.app import Page
from diagnosis.contracts.errors import OperatorFault
from remediation.backends.scontrol import ScontrolBackend
from remediation.policy.rules import Policy

STATE_FILE: Final = "state.db"
RESTART_KEYS: Final = ("state_dir", "socket", "secret_file", "cycle_period_s", "slurm", "topology", "server")
"""Keys whose change takes a restart; a reload says so. Of `server` only `report_period_ms` does not."""
_START_DEADLINE_S: Final = 10.0
_CYCLE_END_S: Final = 1.0
_DAY_S: Final = 86400.0
_log = structlog.get_logger("controller")


def run(config: Path) -> None:
    """Run until SIGTERM or SIGINT. Raises OperatorFault when the configuration or the machine does not allow it."""
    settings = load_settings(config)
    logs.configure(settings.log_level)
    uvloop.run(_run(config, settings, load_policy(settings.policy_file)))


async def _run(config: Path, settings: Settings, policy: Policy) -> None:
    secret = read_secret(settings.secret_file)
    try:
        settings.state_dir.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise OperatorFault(f"state_dir {settings.state_dir}: {error.strerror}", reason="store") from error
    store = await SqliteStore.open(settings.state_dir / STATE_FILE)
    try:
        controller = Controller(config, settings, policy, store)
        await controller.prepare(secret)
        await controller.serve()
    finally:
        await store.close()


class Controller:
    """All parts, in the order in which they need each other."""

    def __init__(self, config: Path, settings: Settings, policy: Policy, store: SqliteStore) -> None:
        self._config = config
        self._settings = settings
        self._policy = policy
        self._store = store
        self._stop = asyncio.Event()
        self._reloading = asyncio.Lock()
        self._cycle_ended = asyncio.Event()
        self._cycle_ended.set()
        self._clock = SteadyClock()
        self._pause = Pause(settings.state_dir)
        self._notifier = Notifier(store, settings.notify, clock=self._clock)
        self._registry = Registry(
            settings.detect.thresholds(),
            read_topology(settings.topology),
            by_lldp=settings.topology.source == "lldp",
        )
        self._channels = ControlChannels(settings.server.report_period_ms)
        self._loop = ControlLoop(
            store=store,
            registry=self._registry,
            backend=ScontrolBackend(
                path=settings.slurm.path, deadline_s=settings.slurm.call_deadline_s, clock=self._clock
            ),
            settings=settings,
            policy_source=lambda: self._policy,
            notifier=self._notifier,
            pause=self._pause,
            channels=self._channels,
            clock=self._clock,
        )
        self._scheduler = AsyncIOScheduler(timezone=UTC)

    async def prepare(self, secret: bytes) -> None:
        """Make the applications and bind their sockets, so that a fault is told before anything runs."""
        settings = self._settings
        ingest = IngestApp(
            secret,
            settings.server,
            await self._store.nodes_seen(),
            self._store,
            self._channels,
            self._registry.accept,
            self._loop.accept_evidence,
            clock=self._clock,
        )
        self._view = View(
            self._store,
            self._pause,
            self._loop,
            self._registry,
            requests=ingest.counts,
            listening=lambda: len(self._channels.nodes()),
            clock=self._clock,
        )
        self._control = ControlApp(
            self._view, self._pause, Captures(self._store), self._registry, settings.control, clock=self._clock
        )
        self._page = Page(self._view, settings.server.page_hosts)
        agents_socket = bind_tcp(settings.server.listen, "server.listen")
        page_socket = bind_tcp(settings.server.page, "server.page")
        self._servers: list[tuple[Server, list[socket.socket] | None]] = [
            (
                tcp_server(ingest, settings.server.connections_max, settings.server.connections_per_peer_max),
                [agents_socket],
            ),
            (tcp_server(self._page.asgi, 256), [page_socket]),
            (unix_server(self._control.asgi(), settings.socket), None),
        ]
        _log.info(
            "listening",
            agents=str(Address(*agents_socket.getsockname()[:2])),
            page=str(Address(*page_socket.getsockname()[:2])),
            socket=str(settings.socket),
        )

    async def serve(self) -> None:
        """Run until told to stop, then end everything in order."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, lambda: self._scheduler.add_job(self.reload))
        serving = [asyncio.create_task(server.serve(sockets=sockets)) for server, sockets in self._servers]
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await self._started(serving)
            self._schedule()
            systemd.notify("READY=1")
            await asyncio.wait([stopped, *serving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            await self._end(serving)
        for task in serving:
            task.result()

    async def _started(self, serving: list[asyncio.Task[None]]) -> None:
        deadline = time.monotonic() + _START_DEADLINE_S
        while not all(server.started for server, _ in self._servers):
            for task in serving:
                if task.done():
                    task.result()
            if time.monotonic() > deadline:
                raise OperatorFault("the servers did not start in time; is the machine overloaded?", reason="socket")
            await asyncio.sleep(0.01)

    def _schedule(self) -> None:
        once_at_a_time = {"max_instances": 1, "coalesce": True, "misfire_grace_time": None}
        period_s = self._settings.cycle_period_s
        self._scheduler.add_job(self._cycle, "interval", seconds=period_s, **once_at_a_time)
        self._scheduler.add_job(self._deliver, "interval", seconds=1, **once_at_a_time)
        self._scheduler.add_job(self._prune, "interval", hours=1, **once_at_a_time)
        self._scheduler.start()

    async def _cycle(self) -> None:
        self._cycle_ended.clear()
        try:
            await self._loop.cycle()
            systemd.cycle_ended()
        finally:
            self._cycle_ended.set()

    async def _deliver(self) -> None:
        try:
            await self._notifier.deliver_due()
        except OperatorFault as fault:
            _log.error("outbox not read", error=str(fault))

    async def _prune(self) -> None:
        now, retention = self._clock(), self._settings.retention
        try:
            rows = await self._store.prune(
                evidence_before=now - retention.evidence_days * _DAY_S,
                incidents_before=now - retention.incident_days * _DAY_S,
            )
        except OperatorFault as fault:
            _log.error("nothing forgotten", error=str(fault))
        else:
            _log.info("forgotten", rows=rows)

    async def reload(self) -> None:
        """Take the files as they are now, all or none. A fault keeps the old and is shown until the next reload."""
        async with self._reloading:
            systemd.reloading()
            await self._reload()
            systemd.notify("READY=1")

    async def _reload(self) -> None:
        try:
            settings = load_settings(self._config)
            policy = load_policy(settings.policy_file)
            await self._notifier.reconfigure(settings.notify)
        except OperatorFault as fault:
            self._view.config_fault = str(fault)
            _log.error("not reloaded", error=str(fault))
        else:
            self._view.config_fault = None
            needs_restart = _needs_restart(self._settings, settings)
            self._settings, self._policy = settings, policy
            self._registry.limits = settings.detect.thresholds()
            self._channels.set_report_period(settings.server.report_period_ms)
            self._control.settings = settings.control
            logs.configure(settings.log_level)
            _log.info("reloaded", needs_restart=needs_restart)

    async def _end(self, serving: list[asyncio.Task[None]]) -> None:
        """The order matters: no new cycle, no new request, then what waits to be written."""
        systemd.notify("STOPPING=1")
        if self._scheduler.running:
            self._scheduler.pause()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._cycle_ended.wait(), _CYCLE_END_S)
            self._scheduler.shutdown(wait=False)
        self._channels.close()
        self._page.close()
        for server, _ in self._servers:
            server.stop()
        await asyncio.gather(*serving, return_exceptions=True)
        with contextlib.suppress(FileNotFoundError):
            self._settings.socket.unlink()
        await self._notifier.close()
        _log.info("ended")


def _needs_restart(old: Settings, new: Settings) -> list[str]:
    """The keys that were changed but take effect only at the next start."""
    period = {"server": {"report_period_ms"}}
    before, after = (settings.model_dump(exclude=period) for settings in (old, new))
    return [key for key in RESTART_KEYS if before[key] != after[key]]
