"""The whole daemon as a process, with a real ingest, real processes as its job, and a fake NVIDIA driver library."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from controller.settings import Server
from diagnosis.contracts import report
from diagnosis.contracts.columns import Table, unpack
from diagnosis.contracts.control import ArmEvent, CollectEvent
from diagnosis.contracts.credential import node_key
from diagnosis.contracts.report import Report
from node_daemon.native.nccl.masks import Event
from tests import eventually as waiting
from tests.integration import nccl_double
from tests.integration.controller_site import SECRET, IngestSite
from tests.lab.nvml import DRIVER_NOT_LOADED, FakeGpus, build
from tests.nodeframes import FrameImage, idle_process, waiting_python

ROOT = Path(__file__).parents[2]
NODE = "gpu001"
eventually = partial(waiting.eventually, within_s=60.0)
"""Patient: a machine that runs other tests beside this one may need seconds to start a Python process."""


@dataclass
class Daemon:
    """A node: its configuration, and the daemon's present life."""

    directory: Path
    port: int
    lines: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    prefix: list[str] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None

    @property
    def node_directory(self) -> Path:
        return self.directory / "frames" / NODE

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text()

    def configure(self, **lines: str) -> None:
        """Write the configuration; `lines` replaces whole lines by their key."""
        (self.directory / "node.key").write_text(node_key(SECRET, NODE).hex())
        (self.directory / "node.key").chmod(0o600)
        self.lines = {
            "node": f'node = "{NODE}"',
            "controller_url": f'controller_url = "http://127.0.0.1:{self.port}"',
            "key_file": f'key_file = "{self.directory}/node.key"',
            "state_dir": f'state_dir = "{self.directory}/state"',
            "frame_root": f'frame_root = "{self.directory}/frames"',
            "report_period_ms": "report_period_ms = 100",
            "nvml": "[nvml]\nperiod_s = 0.1\ndeadline_s = 0.5",
            "spool": "[spool]\ndrain_per_s = 200",
            **lines,
        }
        (self.directory / "node.toml").write_text("\n".join(self.lines.values()) + "\n")

    def start(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **self.environment}
        argv = [*self.prefix, sys.executable, "-m", "node_daemon", "--config", str(self.directory / "node.toml")]
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(argv, cwd="/", env=environment, stderr=log)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def ended(self) -> int:
        process = self.process
        assert process is not None
        await eventually(lambda: process.poll() is not None)
        assert process.returncode is not None
        return process.returncode

    def job(self, name: str = "7.0") -> Path:
        directory = self.node_directory / name
        directory.mkdir(mode=0o700)
        return directory


@pytest_asyncio.fixture
async def site(tmp_path: Path) -> AsyncIterator[IngestSite]:
    (tmp_path / "site").mkdir()
    started = await IngestSite(tmp_path / "site", Server()).start()
    started.channels.set_report_period(100)
    yield started
    await started.stop()


@pytest.fixture
def daemon(tmp_path: Path, site: IngestSite) -> Iterator[Daemon]:
    (tmp_path / "node").mkdir()
    one = Daemon(tmp_path / "node", site.port)
    one.configure()
    yield one
    if one.process is not None:
        one.process.kill()
        one.process.wait()


def newest(site: IngestSite) -> Report | None:
    return max((told for told, _ in site.reports), key=lambda told: (told.epoch, told.sample), default=None)


def ranks_of(told: Report | None) -> Table:
    return unpack(told.jobs[0].ranks if told and told.jobs else {}, report.RANK_DTYPE, report.RANKS_MAX)


def told_by(site: IngestSite, condition: Callable[[Report], bool]) -> Callable[[], bool]:
    def check() -> bool:
        told = newest(site)
        return told is not None and condition(told)

    return check


async def test_a_job_is_reported_as_it_moves_and_its_frame_is_never_written(site: IngestSite, daemon: Daemon) -> None:
    daemon.start()
    await eventually(told_by(site, lambda told: told.jobs == []))
    with idle_process() as child:
        frame = FrameImage(child.pid, rank=3)
        frame.join(rank=3)
        path = frame.save(daemon.job("4242.1"))
        path.chmod(0o400)
        for _ in range(3):
            frame.step()
            path.chmod(0o600)
            frame.save(path.parent)
            path.chmod(0o400)
            sample = len(site.reports)
            await eventually(lambda: len(site.reports) > sample + 1)  # noqa: B023 - awaited within the turn
        await eventually(told_by(site, lambda told: len(told.jobs) == 1))
        told = newest(site)
        assert told is not None
        assert (told.node, told.jobs[0].job_id, told.jobs[0].restart, told.jobs[0].uid) == (NODE, 4242, 1, os.geteuid())
        assert ranks_of(told)["rank"].tolist() == [3]
        assert ranks_of(told)["process_state"].tolist() == [ord("S")]
        assert path.read_bytes() == frame.tobytes()
        child.send_signal(signal.SIGSTOP)
        await eventually(lambda: ranks_of(newest(site))["process_state"].tolist() == [ord("T")])
    await eventually(lambda: ranks_of(newest(site))["process_state"].tolist() == [ord("X")])
    rounds = [
        seq
        for told, _ in site.reports
        for job in told.jobs
        for seq in unpack(job.rounds, report.ROUND_DTYPE, report.ROUND_ROWS_MAX)["seq"].tolist()
    ]
    assert rounds == [1, 2, 3]
    samples = [told.sample for told, _ in site.reports]
    assert samples == list(range(1, len(samples) + 1))


async def test_the_controller_sets_the_period(site: IngestSite, daemon: Daemon) -> None:
    daemon.configure(report_period_ms="report_period_ms = 60000")
    daemon.start()
    await eventually(lambda: len(site.reports) >= 5)


async def test_hostile_frames_are_counted_in_the_report(site: IngestSite, daemon: Daemon) -> None:
    daemon.start()
    await eventually(lambda: daemon.node_directory.is_dir())
    job = daemon.job()
    (job / "1.frame").symlink_to("/etc/passwd")
    os.mkfifo(job / "2.frame")
    (job / "3.frame").write_bytes(b"short")
    (daemon.node_directory / "no job").mkdir()
    wanted = {"symlink": 1, "unreadable": 1, "short": 1, "name": 1}
    await eventually(told_by(site, lambda told: told.refused == wanted))


async def test_stacks_of_a_stopped_rank_arrive_on_request(site: IngestSite, daemon: Daemon) -> None:
    daemon.start()
    with waiting_python("stuck_here") as child:
        await eventually(lambda: daemon.node_directory.is_dir())
        FrameImage(child.pid, rank=5).save(daemon.job())
        child.send_signal(signal.SIGSTOP)
        await eventually(lambda: ranks_of(newest(site))["process_state"].tolist() == [ord("T")])
        await eventually(lambda: site.channels.nodes() == {NODE})
        ask = CollectEvent(incident="c0ffee", job_id=7, restart=0, ranks=[5, 6], deadline_ms=10_000)
        assert site.channels.send(NODE, ask)
        assert site.channels.send(NODE, ask)
        await eventually(lambda: len(site.evidence) > 0)
    (process,) = site.evidence[0].processes
    assert (site.evidence[0].incident, process.rank, process.pid, process.state) == ("c0ffee", 5, child.pid, "T")
    assert process.python_stack is not None, process.notes
    assert "stuck_here" in process.python_stack


async def test_nvml_speaks_fails_hangs_and_comes_back(site: IngestSite, daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "library").mkdir()
    gpus = FakeGpus(tmp_path / "gpus.ini", build(tmp_path / "library"), NODE)
    daemon.environment = gpus.environment
    daemon.start()

    def state(told: Report) -> str:
        return told.hardware.state if told.hardware else ""

    await eventually(told_by(site, lambda told: state(told) == "ok"))
    gpus.throttle(1)

    def throttled(told: Report) -> bool:
        clocks = [(gpu.sm_clock_mhz, gpu.clocks_event_reasons) for gpu in told.hardware.gpus] if told.hardware else []
        return clocks == [(1980, 0), (1080, 8)]

    await eventually(told_by(site, throttled))
    told = newest(site)
    assert told is not None and told.hardware is not None
    gpu = told.hardware.gpus[1]
    assert (gpu.uuid, gpu.sm_clock_max_mhz, gpu.mem_clock_mhz) == (f"GPU-{NODE}-0001", 1980, 2619)
    assert (gpu.temperature_c, gpu.power_w, gpu.utilization_pct) == (45, 520.0, 97)
    assert re.fullmatch(r"[0-9A-Fa-f]{8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.0", gpu.bus_id or "")
    gpus.fail("nvmlDeviceGetTemperature", 3, gpu=0)

    def temperatures(told: Report) -> list[int | None]:
        return [gpu.temperature_c for gpu in told.hardware.gpus] if told.hardware else []

    await eventually(told_by(site, lambda told: temperatures(told) == [None, 45]))
    gpus.hang(600)
    await eventually(told_by(site, lambda told: state(told) == "hung"))
    reports = len(site.reports)
    await eventually(lambda: len(site.reports) > reports + 3)  # the loop lives on
    gpus.hang(0)
    await eventually(told_by(site, lambda told: state(told) == "ok"))
    gpus.fail("nvmlDeviceGetCount_v2", DRIVER_NOT_LOADED)
    await eventually(told_by(site, lambda told: state(told) in ("absent", "error")))
    gpus.hang(600)
    await eventually(told_by(site, lambda told: state(told) == "hung"))
    daemon.signal(signal.SIGTERM)
    assert await daemon.ended() == 0


async def test_without_a_driver_nvml_is_absent(site: IngestSite, daemon: Daemon) -> None:
    daemon.start()
    await eventually(told_by(site, lambda told: told.hardware is not None and told.hardware.state == "absent"))


async def test_reports_outlive_an_absent_controller_and_a_killed_daemon(daemon: Daemon, site: IngestSite) -> None:
    with socket.socket() as nobody:  # bound and not listening: connections are refused
        nobody.bind(("127.0.0.1", 0))
        daemon.configure(controller_url=f'controller_url = "http://127.0.0.1:{nobody.getsockname()[1]}"')
        daemon.start()
        spool = daemon.directory / "state" / "spool"
        await eventually(lambda: spool.is_dir() and len(list(spool.glob("*.report"))) >= 5)
        daemon.signal(signal.SIGKILL)
        await daemon.ended()
    left = len(list(spool.glob("*.report")))
    daemon.configure()
    daemon.start()
    await eventually(lambda: not list(spool.iterdir()) and len(site.reports) > left)
    epochs = sorted({told.epoch for told, _ in site.reports})
    assert len(epochs) == 2
    late = [(told.sample, age_ms) for told, age_ms in site.reports if told.epoch == epochs[0]]
    assert [sample for sample, _ in late] == sorted(sample for sample, _ in late)
    assert len(late) == left
    assert all(age_ms >= 100 for _, age_ms in late)
    assert site.app.counts["replayed"] == 0


async def test_sighup_takes_a_sound_configuration_and_keeps_the_old_one_for_a_faulty_one(
    site: IngestSite, daemon: Daemon
) -> None:
    daemon.start()
    await eventually(lambda: len(site.reports) > 0)
    epoch = site.reports[-1][0].epoch
    daemon.configure(node='node = "gpu 1"', report_period_ms="report_period_ms = 1", nvml="[nvml]\ncolour = 1")
    daemon.signal(signal.SIGHUP)
    await eventually(lambda: daemon.log.count("configuration kept") == 3)
    count = len(site.reports)
    await eventually(lambda: len(site.reports) > count + 1)
    assert site.reports[-1][0].epoch == epoch
    daemon.configure(nvml="[nvml]\nenabled = false")
    daemon.signal(signal.SIGHUP)
    await eventually(told_by(site, lambda told: told.epoch > epoch and told.hardware is None))


async def test_a_faulty_configuration_is_told_whole_and_ends_with_78(daemon: Daemon) -> None:
    daemon.configure(node='node = "gpu 1"', report_period_ms="report_period_ms = 1", spool="[spool]\ncolour = 1")
    daemon.start()
    assert await daemon.ended() == 78
    assert re.findall(r"node\.toml:(\d+): ([a-z_.]+):", daemon.log) == [
        ("1", "node"),
        ("6", "report_period_ms"),
        ("11", "spool.colour"),
    ]


async def test_a_key_that_others_may_read_ends_with_78(daemon: Daemon) -> None:
    (daemon.directory / "node.key").chmod(0o644)
    daemon.start()
    assert await daemon.ended() == 78
    assert "chmod 600" in daemon.log


async def test_systemd_hears_ready_then_the_watchdog_and_at_last_stopping(
    site: IngestSite, daemon: Daemon, tmp_path: Path
) -> None:
    heard: list[bytes] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        address = f"tocsin-test-{os.getpid()}"
        manager.bind(f"\0{address}")
        manager.setblocking(False)
        asyncio.get_running_loop().add_reader(manager, lambda: heard.append(manager.recv(4096)))
        try:
            daemon.environment = {"NOTIFY_SOCKET": f"@{address}"}
            daemon.start()
            await eventually(lambda: len(heard) >= 3)
            daemon.signal(signal.SIGTERM)
            assert await daemon.ended() == 0
            await eventually(lambda: heard[-1] == b"STOPPING=1")
        finally:
            asyncio.get_running_loop().remove_reader(manager)
    assert heard[0] == b"READY=1"
    assert set(heard[1:-1]) == {b"WATCHDOG=1"}


async def test_a_controller_that_takes_connections_and_never_answers_does_not_hold_up_the_end(daemon: Daemon) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        daemon.configure(controller_url=f'controller_url = "http://127.0.0.1:{mute.getsockname()[1]}"')
        daemon.start()
        spool = daemon.directory / "state" / "spool"
        await eventually(lambda: spool.is_dir() and daemon.node_directory.is_dir())
        await eventually(lambda: "starting" in daemon.log)
        daemon.signal(signal.SIGTERM)
        assert await daemon.ended() == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be given a part of root's capabilities")
async def test_the_capabilities_of_the_unit_are_enough(site: IngestSite, daemon: Daemon) -> None:
    unit = (ROOT / "deploy" / "tocsin-node-daemon.service").read_text()
    found = re.search(r"^CapabilityBoundingSet=(.*)$", unit, re.MULTILINE)
    assert found is not None
    kept = ",".join("+" + name.removeprefix("CAP_").lower() for name in found[1].split())
    daemon.prefix = ["setpriv", "--bounding-set", f"-all,{kept}", "--no-new-privs"]
    daemon.start()
    await eventually(lambda: daemon.node_directory.is_dir())
    with idle_process(user=65534, group=65534, extra_groups=[]) as child:
        directory = daemon.job()
        os.chown(directory, 65534, 65534)
        path = FrameImage(child.pid, rank=5).save(directory)
        os.chown(path, 65534, 65534)
        await eventually(lambda: ranks_of(newest(site))["process_state"].tolist() == [ord("S")])
        await eventually(lambda: site.channels.nodes() == {NODE})
        site.channels.send(NODE, CollectEvent(incident="a1", job_id=7, restart=0, ranks=[5], stacks=False))
        await eventually(lambda: len(site.evidence) == 1)
    (process,) = site.evidence[0].processes
    assert process.kernel_stack is not None, process.notes
    assert process.wchan is not None


async def test_the_controller_has_a_job_s_nccl_tell_more_and_the_report_marks_it(
    site: IngestSite, daemon: Daemon, tmp_path: Path
) -> None:
    daemon.start()
    await eventually(lambda: daemon.node_directory.is_dir())
    environment = {"TOCSIN_NCCL_EVENTS": "-", "FAKE_NCCL_VERSION": "23102", "RANK": "3", "WORLD_SIZE": "16"}
    with nccl_double.running(nccl_double.build(tmp_path), daemon.job(), 7, **environment) as job:
        job.ask(f"comm a {nccl_double.COMM_ID} 16 3")
        job.ask("allreduce a 1 2 3")
        await eventually(lambda: ranks_of(newest(site))["armed"].tolist() == [0])
        await eventually(lambda: site.channels.nodes() == {NODE})
        assert site.channels.send(NODE, ArmEvent(job_id=7, restart=0))
        await eventually(lambda: ranks_of(newest(site))["armed"].tolist() == [1])
        job.ask("allreduce a 1 2 3")
        assert Event.PROXY_STEP | Event.KERNEL_CH in Event(int(job.ask("mask")))
