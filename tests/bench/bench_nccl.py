"""What the NCCL plugin costs the job's threads: time and instructions per callback, beside a plugin that does nothing.

The loop is one all-reduce of 8 channels and 14 steps each way (1,199 callbacks with every event on), on a program that
plays NCCL (tests/integration/nccl_double): without a GPU, and without NCCL's own wrappers, which cost about as much.
`python -m tests.bench.bench_nccl`
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from node_daemon.native.nccl.masks import TABLE
from tests.integration.nccl_double import ALL, COMM_ID, Double, Driver, build, build_null_plugin, running
from tests.integration.test_probe_budget import CALLBACKS, NET_MAX, per_collective

COLLECTIVES, TURNS = 4000, 9


def say(name: str, value: float, unit: str, note: str = "") -> None:
    sys.stdout.write(f"{name:<66} {value:10.1f} {unit:<4} {note}\n")


def loop_ns(driver: Driver) -> float:
    begin = time.perf_counter_ns()
    driver.ask(f"allreduce a {COLLECTIVES} 8 14")
    return (time.perf_counter_ns() - begin) / COLLECTIVES


def medians_ns(double: Double, nothing: Path, frames: Path, events: int) -> tuple[float, float]:
    """Per collective: (plugin that does nothing, ours), turn by turn."""
    with contextlib.ExitStack() as stack:
        drivers = [
            stack.enter_context(running(one, frames, 5, TOCSIN_NCCL_EVENTS=str(events)))
            for one in (replace(double, plugin=nothing), double)
        ]
        for driver in drivers:
            driver.ask(f"comm a {COMM_ID} 16 3")
            driver.ask(f"mask {events}")
            loop_ns(driver)
        turns = [[loop_ns(driver) for driver in drivers] for _ in range(TURNS)]
    nothing_ns, ours_ns = (statistics.median(turn[which] for turn in turns) for which in (0, 1))
    return nothing_ns, ours_ns


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="tocsin-bench-", dir="/dev/shm") as name:
        directory = Path(name)
        double, nothing = build(directory), build_null_plugin(directory)
        plain, ours = medians_ns(double, nothing, directory, ALL)
        say("plugin that does nothing, per callback", plain / CALLBACKS, "ns")
        say("tocsin's with every event on, per callback, net", (ours - plain) / CALLBACKS, "ns")
        counts = [per_collective(double.driver, plugin, directory) for plugin in (nothing, double.plugin)]
        say("  instructions, net", (counts[1] - counts[0]) / CALLBACKS, "", f"budget {NET_MAX:.0f}")
        for row in TABLE:
            release = ".".join(map(str, row.since[:2]))
            plain, ours = medians_ns(double, nothing, directory, int(row.standing))
            say(f"standing events of {release} ({int(row.standing):#x}), per collective, net", ours - plain, "ns")


if __name__ == "__main__":
    main()
