"""What the gloo probe costs a training job: step time and CPU time, with it and without, turn by turn.

Five jobs of the same program (`overhead_job`: data parallel, several buckets) live side by side, each rank bound to a
core, and only one job runs at a time, for a third of a second, in random order and then in the reverse of it:

    plain        nothing of tocsin in it
    plain again  the same once more: what is measured between these two is noise
    off          the library preloaded, TOCSIN_DISABLE=1
    unread       frames are written, nobody reads them
    on           frames are written, and a node daemon reads and reports them once a second

The daemon sleeps while another arm runs, and for so much of "on" that it reports once for each second of it. This
process takes its reports in, which costs the machine too, so "on" holds a little more than a job pays. After some
rounds all jobs are started anew. Beside it stands what to expect: collectives and transfer steps, as the frames count
them, times what one costs in a tight loop (`bench_probe`). Prints figures and judges nothing. A table worth keeping
takes a machine that does nothing else, and some time:

    python -m tests.bench.bench_overhead --launches 20 --rounds 30

Without arguments it takes about three minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from diagnosis.contracts import probeframe
from tests.bench.bench_node_daemon import Listener, cpu_s, running_daemon, write_config
from tests.bench.bench_probe import unit_costs_ns
from tests.bench.paired import difference
from tests.eventually import eventually
from tests.integration.gloo_double import probe_library
from tests.nodeframes import NODE

ROOT: Final = Path(__file__).parents[2]
PLAIN, AGAIN, OFF, UNREAD, ON = "plain", "plain again", "off", "unread", "on"
ARMS: Final = (PLAIN, AGAIN, OFF, UNREAD, ON)
SEED: Final = 1
WARM_UP_STEPS: Final = 5
ANSWER_DEADLINE_S: Final = 120.0


@dataclass(frozen=True)
class Block:
    """A block of steps of one arm, in ns a step: mean and median over the steps, CPU over the ranks together."""

    mean: float
    median: float
    cpu: float


FIGURES: Final[Mapping[str, Callable[[Block], float]]] = {
    "step time, mean": lambda block: block.mean,
    "step time, median": lambda block: block.median,
    "CPU time of all ranks": lambda block: block.cpu,
}


@dataclass(frozen=True)
class Counted:
    """Collectives, and transfer steps (a send and a receive each) in them."""

    collectives: float
    steps: float


@dataclass
class Job:
    """A running job of one arm."""

    process: asyncio.subprocess.Process
    ranks: int
    frames: Path

    async def block(self) -> Block:
        """Runs one block of steps. Raises AssertionError where the job has ended."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(b"g" * self.ranks)
        lines = []
        for _ in range(self.ranks):
            line = await asyncio.wait_for(self.process.stdout.readline(), ANSWER_DEADLINE_S)
            assert line, "the job has ended"
            lines.append([float(word) for word in line.split()])
        (first,) = [words for words in lines if words[0] == 0]
        return Block(mean=first[1], median=first[2], cpu=sum(words[3] for words in lines))

    def counted(self) -> Counted:
        """By the frame of rank 0 so far; nothing without frames."""
        found = [probeframe.parse(path.read_bytes()) for path in self.frames.glob("*.frame")]
        slots = [frame.slots for frame in found if frame.header["rank"] == 0]
        return Counted(*(sum(int(each[name].sum()) for each in slots) for name in ("done", "recv_steps")))


def environment(arm: str, base: Path, frames: Path) -> Mapping[str, str]:
    added = {"OUT": str(base), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    if arm not in (PLAIN, AGAIN):
        added |= {"LD_PRELOAD": str(probe_library()), "TOCSIN_FRAME_DIR": str(frames)}
    if arm == OFF:
        added |= {"TOCSIN_DISABLE": "1"}
    return {**{name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}, **added}


@asynccontextmanager
async def job(arm: str, base: Path, frames: Path, ranks: int, steps: int) -> AsyncIterator[Job]:
    base.mkdir()
    frames.mkdir(mode=0o700, exist_ok=True)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.bench.overhead_job", str(ranks), str(steps), str(WARM_UP_STEPS)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=environment(arm, base, frames),
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        yield Job(process, ranks, frames)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


@dataclass
class Watcher:
    """The node daemon and who acknowledges its reports; awake in a part of `ON` alone."""

    daemon: subprocess.Popen[bytes]
    listener: Listener
    root: Path
    first_reports: int
    first_cpu_s: float
    watched_s: float = 0.0

    @property
    def reports(self) -> int:
        return self.listener.reports - self.first_reports

    @property
    def cpu_s(self) -> float:
        return cpu_s(self.daemon.pid) - self.first_cpu_s

    async def block(self, watched: Job) -> Block:
        """A block; where a report is due the daemon is awake in it, and being late it looks and reports at once."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        if self.reports <= self.watched_s:
            self.daemon.send_signal(signal.SIGCONT)
        try:
            return await watched.block()
        finally:
            self.daemon.send_signal(signal.SIGSTOP)
            self.watched_s += loop.time() - began


@asynccontextmanager
async def watcher(base: Path) -> AsyncIterator[Watcher]:
    listener = Listener()
    config = write_config(base, await listener.start())
    with running_daemon(config) as daemon:
        try:
            await eventually(lambda: listener.reports > 0, within_s=60)
            daemon.send_signal(signal.SIGSTOP)
            yield Watcher(daemon, listener, base / "frames" / NODE, listener.reports, cpu_s(daemon.pid))
        finally:
            daemon.send_signal(signal.SIGCONT)


@dataclass
class Series:
    """All that was measured: by launch, by round, by arm; the blocks of an arm in one round as one."""

    launches: list[list[dict[str, Block]]] = field(default_factory=list)
    per_step: Counted = Counted(0.0, 0.0)

    def pairs(self, arm: str, figure: str) -> list[list[tuple[float, float]]]:
        value = FIGURES[figure]
        return [[(value(one[PLAIN]), value(one[arm])) for one in rounds] for rounds in self.launches]


def averaged(blocks: list[Block]) -> Block:
    return Block(*(statistics.mean(getattr(one, name) for one in blocks) for name in ("mean", "median", "cpu")))


async def one_round(jobs: Mapping[str, Job], watching: Watcher, chance: random.Random) -> dict[str, Block]:
    order = list(jobs)
    chance.shuffle(order)
    taken: dict[str, list[Block]] = {arm: [] for arm in jobs}
    for arm in [*order, *reversed(order)]:
        taken[arm].append(await (watching.block(jobs[arm]) if arm == ON else jobs[arm].block()))
    return {arm: averaged(blocks) for arm, blocks in taken.items()}


async def launch(number: int, base: Path, watching: Watcher, asked: argparse.Namespace, series: Series) -> None:
    """All jobs started, measured, and ended."""
    chance = random.Random(SEED + number)
    async with AsyncExitStack() as stack:
        jobs = {}
        for arm in ARMS:
            place = base / f"{arm.replace(' ', '_')}.{number}"
            frames = watching.root / f"{number + 1}.0" if arm == ON else place / "frames"
            jobs[arm] = await stack.enter_async_context(job(arm, place, frames, asked.ranks, asked.steps))
        await one_round(jobs, watching, chance)  # everything has run once
        before = jobs[UNREAD].counted()
        series.launches.append([await one_round(jobs, watching, chance) for _ in range(asked.rounds)])
        after, steps = jobs[UNREAD].counted(), 2 * asked.rounds * (asked.steps + WARM_UP_STEPS)
        series.per_step = Counted(
            (after.collectives - before.collectives) / steps, (after.steps - before.steps) / steps
        )
        assert all(jobs[arm].counted().collectives for arm in (UNREAD, ON)), "a probe is not there"
        assert not any(jobs[arm].counted().collectives for arm in (PLAIN, AGAIN, OFF)), (
            "a probe is where none should be"
        )


def report(series: Series, watching: Watcher, asked: argparse.Namespace, unit_costs_ns: tuple[float, float]) -> None:
    plain = [one[PLAIN] for rounds in series.launches for one in rounds]
    per_step, cpu_ns = series.per_step, statistics.median(one.cpu for one in plain) / asked.ranks
    expected_ns = per_step.collectives * unit_costs_ns[0] + per_step.steps * unit_costs_ns[1]
    sys.stdout.write(
        f"{asked.ranks} ranks, {len(plain)} rounds in {asked.launches} launches, two blocks of {asked.steps} steps an"
        f" arm and round; step {statistics.median(one.median for one in plain) / 1e6:.2f} ms (median)\n"
        f"a rank and step: {cpu_ns / 1e6:.2f} ms of CPU, {per_step.collectives:.1f} collectives of"
        f" {per_step.steps / max(1.0, per_step.collectives):.1f} steps each way; to expect of the probe:"
        f" {unit_costs_ns[0]:.0f} ns and {unit_costs_ns[1]:.0f} ns, {expected_ns / 1000:.1f} us,"
        f" {100 * expected_ns / cpu_ns:.3f} % of the CPU time\n"
        f"'on' ran for {watching.watched_s:.0f} s: {watching.reports / watching.watched_s:.2f} reports a second,"
        f" the daemon at {100 * watching.cpu_s / watching.watched_s:.2f} % of a core\n\n"
        "| | against plain | 95 % interval | smallest difference that would show |\n|---|---:|---:|---:|\n"
    )
    for figure in FIGURES:
        for arm in ARMS[1:]:
            found = difference(series.pairs(arm, figure))
            sys.stdout.write(
                f"| {figure}: {arm} | {found.pct:+.2f} % | {found.low_pct:+.2f} to {found.high_pct:+.2f} %"
                f" | {found.smallest_seen_pct:.2f} % |\n"
            )


async def run(asked: argparse.Namespace, base: Path) -> None:
    series = Series()
    async with watcher(base) as watching:
        for number in range(asked.launches):
            await launch(number, base, watching, asked, series)
        report(series, watching, asked, unit_costs_ns(base))


def main() -> None:
    """Measures and prints one table. Whoever ends it leaves no job, no daemon and no frame behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(prog="bench_overhead")
    for name, default in (("ranks", 2), ("launches", 4), ("rounds", 10), ("steps", 25)):
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    with tempfile.TemporaryDirectory(prefix="tocsin-bench-", dir="/dev/shm") as name:
        asyncio.run(run(parser.parse_args(), Path(name)))


if __name__ == "__main__":
    main()
