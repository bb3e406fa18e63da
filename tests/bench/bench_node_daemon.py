"""What the node daemon costs: 8 ranks, 3 communicators each, 20 rounds a second, one report a second.

The daemon is a process of its own; a real HTTP server acknowledges, and 8 idle processes stand for the ranks. Printed:
CPU time of all its threads as a share of one core (budget 1 %), resident memory (budget 60 MB), bytes per report.
`python -m tests.bench.bench_node_daemon [SECONDS]`
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
from aiohttp import web

from diagnosis.contracts.report import Acknowledgement, decode
from tests.eventually import eventually
from tests.nodeframes import NODE, FrameImage, idle_process

ROOT = Path(__file__).parents[2]
RANKS, COMMUNICATORS, ROUNDS_PER_S = 8, 3, 20
WARM_UP_S = 5
CPU_PCT_MAX, RSS_MB_MAX = 1.0, 60.0


class Listener:
    """Acknowledges everything and counts."""

    def __init__(self) -> None:
        self.reports, self.bytes, self.ranks = 0, 0, 0

    async def start(self) -> int:
        app = web.Application()
        app.router.add_post("/v1/report", self._report)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return int(runner.addresses[0][1])

    async def _report(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.reports, self.bytes = self.reports + 1, self.bytes + len(body)
        self.ranks = sum(len(job.ranks.get("rank", b"")) // 4 for job in decode(body).jobs)
        return web.Response(body=msgspec.json.encode(Acknowledgement()))


def cpu_s(pid: int) -> float:
    """CPU time of all threads, to the nanosecond (schedstat: on-CPU time first)."""
    return sum(int(p.read_text().split()[0]) for p in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def memory_mb(pid: int, field: str) -> float:
    """A field of /proc/PID/status in MB."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split(f"{field}:")[1].split()[0]) / 1024


async def train(frames: list[FrameImage], directory: Path) -> None:
    """The ranks' probes, once a second."""
    while True:
        for frame in frames:
            for slot in range(COMMUNICATORS):
                for _ in range(ROUNDS_PER_S):
                    frame.step(slot)
            frame.save(directory)
        await asyncio.sleep(1.0)


@contextlib.contextmanager
def running_daemon(config: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The daemon as a process, ended afterwards."""
    argv = [sys.executable, "-m", "node_daemon", "--config", str(config)]
    with subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL) as daemon:
        try:
            yield daemon
        finally:
            daemon.terminate()


async def measure(base: Path, seconds: float) -> dict[str, float]:
    """Figures of one run."""
    listener = Listener()
    port = await listener.start()
    (base / "node.key").write_text("ab" * 32)
    (base / "node.key").chmod(0o600)
    (base / "node.toml").write_text(
        f'node = "{NODE}"\ncontroller_url = "http://127.0.0.1:{port}"\nkey_file = "{base}/node.key"\n'
        f'state_dir = "{base}/state"\nframe_root = "{base}/frames"\n'
    )
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(running_daemon(base / "node.toml"))
        await eventually(lambda: listener.reports > 0, within_s=60)
        directory = base / "frames" / NODE / "7.0"
        directory.mkdir(mode=0o700)
        pids = [stack.enter_context(idle_process()).pid for _ in range(RANKS)]
        frames = [FrameImage(pid, rank=rank) for rank, pid in enumerate(pids)]
        for rank, frame in enumerate(frames):
            for slot in range(COMMUNICATORS):
                frame.join(slot, comm_id=100 + slot, rank=rank)
        training = asyncio.create_task(train(frames, directory))
        stack.callback(training.cancel)
        await asyncio.sleep(WARM_UP_S)
        before, reports, size = cpu_s(daemon.pid), listener.reports, listener.bytes
        await asyncio.sleep(seconds)
        used = cpu_s(daemon.pid) - before
        told = listener.reports - reports
        return {
            "ranks": listener.ranks,
            "reports": told,
            "cpu_pct_of_one_core": round(100 * used / seconds, 2),
            "cpu_pct_budget": CPU_PCT_MAX,
            "cpu_ms_per_report": round(1000 * used / max(1, told), 2),
            "rss_mb": round(memory_mb(daemon.pid, "VmRSS"), 1),
            "rss_mb_peak": round(memory_mb(daemon.pid, "VmHWM"), 1),
            "rss_mb_budget": RSS_MB_MAX,
            "bytes_per_report": round((listener.bytes - size) / max(1, told)),
        }


def main() -> None:
    """Run once and print one JSON object."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 20.0
    with tempfile.TemporaryDirectory(dir="/dev/shm") as base:
        sys.stdout.write(json.dumps({"bench": "node_daemon", **asyncio.run(measure(Path(base), seconds))}) + "\n")


if __name__ == "__main__":
    main()
