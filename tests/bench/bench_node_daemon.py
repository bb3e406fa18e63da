"""What the node daemon costs with everything on: 3 communicators a rank, 20 rounds a second each, one report a second.

The daemon is a process of its own, in the environment of its unit; a real HTTP server acknowledges, idle processes with
real TCP connections between neighbours stand for the ranks, and a fake driver library for the GPUs. Own times and
durations are noise, so that a report is as large as a real one. Printed: CPU time of all its threads as a share of one
core (budget 1 % at 8 ranks), resident memory (budget 60 MB) when it began to count and when it ended, bytes per report
and of the HTTP head before it.

    python -m tests.bench.bench_node_daemon [SECONDS] [RANKS]
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from aiohttp import web

from diagnosis.contracts.report import Acknowledgement, decode
from tests.eventually import eventually
from tests.lab import nvml
from tests.nodeframes import NODE, FrameImage, idle_process

ROOT = Path(__file__).parents[2]
RANKS, COMMUNICATORS, ROUNDS_PER_S = 8, 3, 20
GPUS, CONNECTIONS_TO_NEXT = 8, 8
WARM_UP_S = 15
UNIT_ENVIRONMENT = {"MALLOC_ARENA_MAX": "2"}
"""As in deploy/tocsin-node-daemon.service."""
CPU_PCT_MAX, RSS_MB_MAX = 1.0, 60.0


class Listener:
    """Acknowledges everything and counts."""

    def __init__(self) -> None:
        self.reports, self.bytes, self.head_bytes, self.ranks = 0, 0, 0, 0

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
        head = sum(len(name) + len(value) + len(": \r\n") for name, value in request.raw_headers)
        self.reports, self.bytes, self.head_bytes = self.reports + 1, self.bytes + len(body), head
        self.ranks = sum(len(job.ranks.get("rank", b"")) // 4 for job in decode(body).jobs)
        return web.Response(body=msgspec.json.encode(Acknowledgement()))


def cpu_s(pid: int) -> float:
    """CPU time of all threads, to the nanosecond (schedstat: on-CPU time first)."""
    return sum(int(p.read_text().split()[0]) for p in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def memory_mb(pid: int, field: str) -> float:
    """A field of /proc/PID/smaps_rollup in MB: Rss, or Pss, where a page that n processes share counts for 1/n."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(text.split(f"\n{field}:")[1].split()[0]) / 1024


async def train(frames: list[FrameImage], directory: Path) -> None:
    """The ranks' probes, once a second."""
    chance = random.Random(1)
    while True:
        for frame in frames:
            for slot in range(COMMUNICATORS):
                for _ in range(ROUNDS_PER_S):
                    frame.step(slot, gap_us=chance.randrange(25_000, 40_000), dur_us=chance.randrange(5_000, 20_000))
            frame.save(directory)
        await asyncio.sleep(1.0)


def write_config(base: Path, port: int) -> Path:
    """The daemon's configuration with its key, everything below `base`; reports go to this port."""
    (base / "node.key").write_text("ab" * 32)
    (base / "node.key").chmod(0o600)
    config = base / "node.toml"
    config.write_text(
        f'node = "{NODE}"\ncontroller_url = "http://127.0.0.1:{port}"\nkey_file = "{base}/node.key"\n'
        f'state_dir = "{base}/state"\nframe_root = "{base}/frames"\n'
    )
    return config


@contextlib.contextmanager
def running_daemon(
    config: Path, environment: Mapping[str, str] = UNIT_ENVIRONMENT
) -> Iterator[subprocess.Popen[bytes]]:
    """The daemon as a process, ended afterwards."""
    argv = [sys.executable, "-m", "node_daemon", "--config", str(config)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, **environment}
    with subprocess.Popen(argv, env=env, stderr=subprocess.DEVNULL) as daemon:
        try:
            yield daemon
        finally:
            daemon.terminate()


@contextlib.contextmanager
def connected_ranks(count: int) -> Iterator[list[int]]:
    """Idle processes in a ring, with several TCP connections from each to the next; their numbers."""
    with contextlib.ExitStack() as stack:
        held: list[list[socket.socket]] = [[] for _ in range(count)]
        with socket.create_server(("127.0.0.1", 0), backlog=count) as server:
            for rank in range(count):
                for _ in range(CONNECTIONS_TO_NEXT):
                    held[rank].append(stack.enter_context(socket.create_connection(server.getsockname())))
                    held[(rank + 1) % count].append(stack.enter_context(server.accept()[0]))
        ranks = [idle_process(pass_fds=[one.fileno() for one in sockets]) for sockets in held]
        yield [stack.enter_context(rank).pid for rank in ranks]


@contextlib.contextmanager
def training(base: Path, ranks: int) -> Iterator[None]:
    """A job of so many ranks on this node, told by frames once a second; within a running loop."""
    directory = base / "frames" / NODE / "7.0"
    directory.mkdir(mode=0o700)
    with connected_ranks(ranks) as pids:
        frames = [FrameImage(pid, rank=rank, world_size=ranks) for rank, pid in enumerate(pids)]
        for rank, frame in enumerate(frames):
            frame.header["gpu"] = rank % GPUS
            for slot in range(COMMUNICATORS):
                frame.join(slot, comm_id=100 + slot, size=ranks, rank=rank)
        told = asyncio.create_task(train(frames, directory))
        try:
            yield
        finally:
            told.cancel()


async def measure(base: Path, seconds: float, ranks: int) -> dict[str, float]:
    """Figures of one run."""
    listener = Listener()
    config = write_config(base, await listener.start())
    (base / "nvml").mkdir()
    gpus = nvml.FakeGpus(base / "gpus", nvml.build(base / "nvml"), NODE, GPUS)
    with running_daemon(config, {**UNIT_ENVIRONMENT, **gpus.environment}) as daemon:
        await eventually(lambda: listener.reports > 0, within_s=60)
        with training(base, ranks):
            await asyncio.sleep(WARM_UP_S)
            before, reports, size = cpu_s(daemon.pid), listener.reports, listener.bytes
            rss_mb = memory_mb(daemon.pid, "Rss")
            await asyncio.sleep(seconds)
            used = cpu_s(daemon.pid) - before
            told = listener.reports - reports
            return {
                "ranks": listener.ranks,
                "reports": told,
                "cpu_pct_of_one_core": round(100 * used / seconds, 2),
                "cpu_pct_budget": CPU_PCT_MAX,
                "cpu_ms_per_report": round(1000 * used / max(1, told), 2),
                "rss_mb_began": round(rss_mb, 1),
                "rss_mb": round(memory_mb(daemon.pid, "Rss"), 1),
                "pss_mb": round(memory_mb(daemon.pid, "Pss"), 1),
                "rss_mb_budget": RSS_MB_MAX,
                "bytes_per_report": round((listener.bytes - size) / max(1, told)),
                "bytes_of_http_head": listener.head_bytes,
            }


def main() -> None:
    """Run once and print one JSON object."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 20.0
    ranks = int(sys.argv[2]) if len(sys.argv) > 2 else RANKS
    with tempfile.TemporaryDirectory(dir="/dev/shm") as base:
        figures = asyncio.run(measure(Path(base), seconds, ranks))
    sys.stdout.write(json.dumps({"bench": "node_daemon", **figures}) + "\n")


if __name__ == "__main__":
    main()
