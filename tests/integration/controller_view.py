"""A controller's reading side with a real store and a loop and registry that say what a test wants."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from controller.captures import Captures
from controller.cli.client import ask
from controller.control.app import ControlApp
from controller.control.pause import Pause
from controller.control.status import LoopStatus, View
from controller.registry import JobStatus, NodeStatus, Registry
from controller.servers import unix_server
from controller.settings import Control
from controller.store.sqlite import SqliteStore
from diagnosis.contracts.control import Evidence, ProcessEvidence
from diagnosis.engine.thresholds import Thresholds
from tests.eventually import eventually
from tests.unit.test_store import make_incident

NOW = 1_800_000_000.0
HOSTILE = "<script>alert('x')</script>\x1b[2J\"'&"


class FakeLoop:
    """The loop's words."""

    def __init__(self) -> None:
        self.told = LoopStatus(
            mode="act", cycles=7, cycle_at=NOW - 1, sentence="nothing to do", world_at=NOW - 2, nodes_known=2
        )

    def status(self) -> LoopStatus:
        return self.told


class FakeRegistry:
    """The registry's words."""

    def __init__(self) -> None:
        self.jobs = [
            JobStatus(
                job_id=42,
                restart=1,
                user="ada",
                state="RUNNING",
                nodes=["gpu001", "gpu002"],
                world_size=8,
                ranks_seen=8,
                rounds=12_345,
                round_ms=42.5,
                baseline_ms=30.0,
                step_ms=412.0,
                step_jitter_ms=9.0,
                quiet_s=None,
                last_report_age_s=0.4,
            )
        ]
        self.nodes = [
            NodeStatus(
                node="gpu002",
                silent=False,
                last_report_age_s=0.4,
                hardware="hung",
                refused={"symlink": 3},
                spool_dropped=0,
                late_reports=0,
            )
        ]

    def status(self, now: float) -> list[JobStatus]:
        return self.jobs

    def node_status(self, now: float) -> list[NodeStatus]:
        return self.nodes


class Reading:
    """Store, pause file and view of one state directory."""

    def __init__(self, directory: Path, store: SqliteStore) -> None:
        self.store = store
        self.pause = Pause(directory)
        self.loop = FakeLoop()
        self.registry = FakeRegistry()
        self.view = View(
            store,
            self.pause,
            self.loop,
            self.registry,
            requests=Counter(taken=3, garbage=1),
            listening=lambda: 1,
            clock=lambda: NOW,
        )

    @classmethod
    async def open(cls, directory: Path) -> Reading:
        return cls(directory, await SqliteStore.open(directory / "state.db"))

    async def add_hostile_incident(self) -> None:
        """An incident in which everything that a job or a node may influence is hostile."""
        incident = make_incident(user=HOSTILE, decision=HOSTILE, opened_at=NOW - 60, timeline=[(NOW - 50, HOSTILE)])
        verdict = incident.verdict
        incident.verdict = msgspec.structs.replace(
            verdict,
            summary=HOSTILE,
            victims={HOSTILE: 1},
            unseen=[HOSTILE],
            evidence=[msgspec.structs.replace(verdict.evidence[0], text=HOSTILE)],
            culprits=[msgspec.structs.replace(verdict.culprits[0], cause=HOSTILE, nic=HOSTILE)],
        )
        await self.store.add_incident(incident)
        seq = await self.store.intend("a1b2c3", "drain", "gpu002", {}, HOSTILE, NOW - 40)
        await self.store.conclude(seq, "failed", HOSTILE, NOW - 39)
        process = ProcessEvidence(
            rank=3, pid=7, state="T", wchan=HOSTILE, kernel_stack=HOSTILE, python_stack=HOSTILE, notes=[HOSTILE]
        )
        told = Evidence(incident="a1b2c3", node="gpu002", job_id=42, restart=0, processes=[process])
        await self.store.add_evidence("a1b2c3", "gpu002", "processes", msgspec.json.encode(told), NOW - 45)
        await self.store.add_evidence("a1b2c3", "gpu001", HOSTILE, b"\xff not JSON", NOW - 44)


class ControlSite:
    """A served control socket in a directory that everybody may enter."""

    now = NOW

    async def start(self) -> ControlSite:
        self.directory = Path(tempfile.mkdtemp(prefix="tocsin-control-"))
        self.directory.chmod(0o755)
        self.reading = await Reading.open(self.directory)
        self.socket = self.directory / "controller.sock"
        self.watching = Registry(Thresholds())
        captures = Captures(self.reading.store)
        self.app = ControlApp(
            self.reading.view, self.reading.pause, captures, self.watching, Control(), clock=lambda: self.now
        )
        self.server = unix_server(self.app.asgi(), self.socket)
        self._serving = asyncio.create_task(self.server.serve())
        await eventually(lambda: self.server.started)
        return self

    async def stop(self) -> None:
        self.server.stop()
        await self._serving
        await self.reading.store.close()
        shutil.rmtree(self.directory)

    async def ask(self, method: str, url: str, body: bytes | None = None) -> Any:
        return json.loads(await asyncio.to_thread(ask, self.socket, method, url, body))
