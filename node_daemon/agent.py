"""The daemon's loop: once a period look at all frames, form one report, hand it to the uplink.

Blocking work (frames, NVML, the spool's disk, /proc of suspects) happens on threads with deadlines; this loop only
waits for them. A tick in which the frames could not be read reports nothing at all: silence is honest, an empty
report would say that no job runs here. systemd's watchdog is fed by finished ticks alone.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from typing import Final

from diagnosis.contracts.columns import rows_of
from diagnosis.contracts.control import ArmEvent, CollectEvent, ControlEvent, GatherEvent, HelloEvent, PingEvent
from diagnosis.contracts.errors import OperatorFault
from diagnosis.contracts.report import ROUND_DTYPE, ROUND_ROWS_MAX, JobSample, NetworkFacts, Report, encode
from node_daemon.arming import Arming
from node_daemon.client import Client
from node_daemon.collectors.exits import ExitWatch
from node_daemon.collectors.frame_root import open_node_directory
from node_daemon.collectors.frames import FrameReader, JobFrames, Sweep
from node_daemon.collectors.lldp import LldpWatch
from node_daemon.collectors.network import NetworkMonitor, NetworkSource
from node_daemon.collectors.nvml import NvmlMonitor, NvmlSource
from node_daemon.collectors.process import STATE_UNKNOWN, Processes
from node_daemon.events import listen
from node_daemon.evidence import EvidenceCollector, Suspect
from node_daemon.gatherer import Gatherer
from node_daemon.identity import boot_id, next_epoch, read_key
from node_daemon.log import EventLog
from node_daemon.notify import notify
from node_daemon.pinger import Paths, Pinger
from node_daemon.settings import PERIOD_MS_LEAST, PERIOD_MS_MOST, Settings
from node_daemon.spool import Spool, Spooled
from node_daemon.step_watch import StepWatch
from node_daemon.summarise import Memory, Steps, summarise
from node_daemon.suspicion import members_of
from node_daemon.threads import OwnThread
from node_daemon.uplink import Uplink

FRAMES_DEADLINE_S: Final = 5.0
_log = EventLog("node_daemon.agent")


class Agent:
    """One life of the daemon with one set of settings.

    Raises OperatorFault where the key, the state directory or the frame directory cannot be used.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._key = read_key(settings.key_file)
        _make_state_dir(settings)
        self._epoch = next_epoch(settings.state_dir, int(time.time()))
        self._boot_id = boot_id()
        self._period_s = settings.report_period_ms / 1000
        self._reader = FrameReader(
            settings.frame_root,
            settings.node,
            Processes(),
            gone_keep_s=settings.frames_gone_keep_s,
            idle_keep_s=settings.frames_idle_keep_s,
        )
        os.close(open_node_directory(settings.frame_root, settings.node))
        self._frames = OwnThread("frames")
        self._memory: dict[tuple[int, int], Memory] = {}
        self._jobs: list[JobFrames] = []
        self._steps = StepWatch()
        self._exits = ExitWatch()
        self._exits_thread = OwnThread("watch")
        self._arming = Arming(settings.frame_root, settings.node) if settings.arming_enabled else None
        self._sample = 0
        self._reported_ns = time.monotonic_ns()
        self._nvml: NvmlMonitor | None = None
        if settings.nvml_enabled:
            self._nvml = NvmlMonitor(NvmlSource(), period_s=settings.nvml_period_s, deadline_s=settings.nvml_deadline_s)
        self._network: NetworkMonitor | None = None
        if settings.network_enabled:
            self._network = NetworkMonitor(
                NetworkSource(), period_s=settings.network_period_s, deadline_s=settings.network_deadline_s
            )
        self._lldp: LldpWatch | None = None
        if settings.network_enabled and settings.network_lldp_period_s > 0:
            self._lldp = LldpWatch(period_s=settings.network_lldp_period_s)
        self._evidence: EvidenceCollector | None = None
        self._gatherer: Gatherer | None = None
        self._pinger: Pinger | None = None
        self._sooner = asyncio.Event()

    async def run(self) -> None:
        """Report until cancelled; then what is undelivered has gone to the spool."""
        settings = self._settings
        spool = Spool(
            settings.state_dir / "spool", reports_max=settings.spool_reports_max, bytes_max=settings.spool_bytes_max
        )
        client = Client(
            settings.controller_url, settings.node, self._key, self._epoch, timeout_s=settings.request_timeout_s
        )
        _log.info("starting", node=settings.node, controller=settings.controller_url, epoch=self._epoch)
        async with client, asyncio.TaskGroup() as tasks:
            uplink = Uplink(client, spool, self._boot_id, drain_per_s=settings.spool_drain_per_s)
            tasks.create_task(uplink.run())
            tasks.create_task(listen(client, self._handle))
            if self._nvml is not None:
                tasks.create_task(self._nvml.run())
            if self._network is not None:
                tasks.create_task(self._network.run())
            if self._lldp is not None:
                tasks.create_task(self._lldp.run())
            if settings.evidence_enabled:
                self._evidence = EvidenceCollector(
                    settings.node,
                    client,
                    self._suspects,
                    py_spy=settings.evidence_py_spy,
                    per_minute_max=settings.evidence_per_minute_max,
                )
                tasks.create_task(self._evidence.run())
                self._gatherer = Gatherer(
                    floor_s=settings.evidence_suspect_after_s, per_minute_max=settings.evidence_per_minute_max
                )
                tasks.create_task(self._gatherer.run())
                if self._network is not None and settings.network_ping:
                    self._pinger = Pinger(
                        self._paths, self._gatherer.hold, per_minute_max=settings.evidence_per_minute_max
                    )
                    tasks.create_task(self._pinger.run())
            tasks.create_task(self._tick_for_ever(uplink))

    async def _tick_for_ever(self, uplink: Uplink) -> None:
        # The daemons of a cluster start together; their reports should not arrive together.
        due = time.monotonic() + random.uniform(0.0, min(self._period_s, 1.0))
        ready = False
        try:
            while True:
                await self._wait_until(due)
                if await self._tick(uplink):
                    notify("WATCHDOG=1" if ready else "READY=1")
                    ready = True
                due = max(due + self._period_s, time.monotonic())
        finally:
            self._frames.close()
            self._exits_thread.close()
            self._exits.close()

    async def _wait_until(self, due: float) -> None:
        """Wait until `due`, or less where the controller shortens the period meanwhile."""
        while (left_s := due - time.monotonic()) > 0:
            self._sooner.clear()
            try:
                async with asyncio.timeout(left_s):
                    await self._sooner.wait()
                due = min(due, time.monotonic() + self._period_s)
            except TimeoutError:
                return

    async def _tick(self, uplink: Uplink) -> bool:
        """One look and one report; False where the frames could not be read."""
        try:
            sweep = await self._frames.run(self._reader.collect, FRAMES_DEADLINE_S)
        except (OSError, OperatorFault) as error:
            _log.sparsely("frames", "frames not read", error=str(error))
            return False
        self._jobs = sweep.jobs
        await self._watch_exits(sweep.jobs)
        if self._gatherer is not None:
            await self._gatherer.look(sweep.jobs)
        steps = self._steps.look(sweep.jobs)
        report = self._report(sweep, steps, uplink.dropped)
        body = encode(report)
        uplink.offer(
            Spooled(report.epoch, report.sample, self._boot_id, self._reported_ns, report.wall_ms * 1_000_000, body)
        )
        if self._arming is not None:
            await self._arm(self._arming, sweep, steps)
        return True

    async def _watch_exits(self, jobs: list[JobFrames]) -> None:
        members = [member for job in jobs for member in members_of(job)]
        try:
            await self._exits_thread.run(lambda: self._exits.watch(members), FRAMES_DEADLINE_S)
        except OSError as error:  # TimeoutError is one
            _log.sparsely("exits", "ends of new ranks will not be seen", error=str(error))

    async def _arm(self, arming: Arming, sweep: Sweep, steps: Steps) -> None:
        requests = arming.due(sweep.jobs, steps)
        if requests:
            try:
                await self._frames.run(lambda: arming.arm(requests), FRAMES_DEADLINE_S)
            except OSError as error:  # TimeoutError is one
                _log.sparsely("arm", "probes not asked for more", error=str(error))

    def _report(self, sweep: Sweep, steps: Steps, spool_dropped: int) -> Report:
        former_ns, self._reported_ns = self._reported_ns, time.monotonic_ns()
        memory: dict[tuple[int, int], Memory] = {}
        samples: list[JobSample] = []
        rounds_left, ends = ROUND_ROWS_MAX, self._exits.ends()
        for number, job in enumerate(sweep.jobs):
            attempt = (job.job_id, job.restart)
            share = rounds_left // (len(sweep.jobs) - number)  # what a job leaves is there for those after it
            sample, memory[attempt] = summarise(
                job, self._memory.get(attempt, {}), share, steps, former_ns, ends, self._reported_ns
            )
            rounds_left -= rows_of(sample.rounds, ROUND_DTYPE)
            samples.append(sample)
        self._memory = memory
        self._sample += 1
        network: NetworkFacts | None = None
        if self._network is not None:
            self._network.watch(sweep.jobs)
            uplinks = self._lldp.uplinks if self._lldp is not None else []
            samples, network = self._network.told(sweep.jobs, samples, uplinks)
        return Report(
            node=self._settings.node,
            boot_id=self._boot_id,
            epoch=self._epoch,
            sample=self._sample,
            mono_ms=self._reported_ns // 1_000_000,
            wall_ms=time.time_ns() // 1_000_000,
            window_ms=(self._reported_ns - former_ns) // 1_000_000,
            jobs=samples,
            hardware=self._nvml.facts() if self._nvml is not None else None,
            refused=sweep.refused,
            spool_dropped=spool_dropped,
            gathered=self._gatherer.take() if self._gatherer is not None else [],
            network=network,
        )

    def _handle(self, event: ControlEvent) -> None:
        if isinstance(event, HelloEvent):
            self._period_s = min(max(event.period_ms, PERIOD_MS_LEAST), PERIOD_MS_MOST) / 1000
            self._sooner.set()
        elif isinstance(event, CollectEvent) and self._evidence is not None:
            self._evidence.ask(event)
        elif isinstance(event, GatherEvent) and self._gatherer is not None:
            self._gatherer.ask(event)
        elif isinstance(event, PingEvent) and self._pinger is not None:
            self._pinger.ask(event)
        if isinstance(event, GatherEvent | ArmEvent) and self._arming is not None:
            self._arming.ask(event.job_id, event.restart)

    def _paths(self, job_id: int, restart: int) -> Paths | None:
        """Where the connections of a job attempt lead, as last seen."""
        for job in self._jobs:
            if (job.job_id, job.restart) == (job_id, restart) and self._network is not None:
                return Paths(job.uid, self._network.paths([frame.pid for frame in job.frames]))
        return None

    def _suspects(self, job_id: int, restart: int) -> list[Suspect]:
        """Processes of a job attempt as last seen; those that the kernel does not confirm are left out."""
        return [
            Suspect(int(frame.header["rank"]), frame.pid, frame.start_ticks, job.uid, job.gid)
            for job in self._jobs
            if (job.job_id, job.restart) == (job_id, restart)
            for frame in job.frames
            if frame.state != STATE_UNKNOWN
        ]


def _make_state_dir(settings: Settings) -> None:
    try:
        settings.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise OperatorFault(
            f"{settings.state_dir}: {error.strerror}: state_dir must be a directory that the daemon can write",
            reason="state_dir",
        ) from error
