"""What the gloo probe costs the job: per collective in a tight loop, in instructions, and on a real all-reduce.

Each figure is taken with and without the probe, turn by turn in one run, and the difference is the probe's. Budget:
1 us per collective, which here is its construction, enqueue, execution and end. A step is a send and a receive with
their waits. The loop runs on a stand-in for torch (tests/integration/gloo_double), the all-reduce on torch itself.
`python -m tests.bench.bench_probe`
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.integration.gloo_double import Double, Driver, build, probe_library, running

ROUNDS, TURNS = 100_000, 7
QUICK_ROUNDS, QUICK_TURNS = 20_000, 3
INSTRUCTION_ROUNDS = 2_000
NS_PER_COLLECTIVE_MAX = 1000.0
ALL_REDUCE_TURNS = 3

ALL_REDUCE = """
import os, statistics, sys, time, torch, torch.distributed as dist
torch.set_num_threads(1)
elements, rounds = int(sys.argv[1]), int(sys.argv[2])
children = [os.fork() for rank in range(1)]
rank = 0 if children[0] else 1
dist.init_process_group("gloo", "file://" + os.environ["STORE"], rank=rank, world_size=2)
tensor, times = torch.ones(elements), []
for _ in range(rounds):
    begin = time.perf_counter_ns()
    dist.all_reduce(tensor)
    times.append(time.perf_counter_ns() - begin)
if rank == 0:
    os.wait()
    print(statistics.median(times) / 1000, min(times) / 1000)
else:
    os._exit(0)
"""


def say(name: str, value: float, unit: str, note: str = "") -> None:
    sys.stdout.write(f"{name:<58} {value:10.1f} {unit:<4} {note}\n")


@contextlib.contextmanager
def program(double: Double, frames: Path, *, probed: bool) -> Iterator[Driver]:
    with running(double, frames, {} if probed else {"LD_PRELOAD": ""}) as driver:
        driver.ask("realtime")
        driver.ask("group world 0 4 0,1,2,3")
        driver.ask("storm world 1 1000 1")
        yield driver


def unit_costs_ns(directory: Path) -> tuple[float, float]:
    """What the probe adds to a collective and to each of its transfer steps, in ns; measured in a few seconds."""
    double = build(directory)
    few, many = (
        probed - plain
        for plain, probed in (loop_ns(double, directory, steps, QUICK_TURNS, QUICK_ROUNDS) for steps in (0, 16))
    )
    return few, (many - few) / 16


def loop_ns(double: Double, frames: Path, steps: int, turns: int = TURNS, rounds: int = ROUNDS) -> tuple[float, float]:
    """Medians of CPU time per collective in ns: (without, with) the probe."""
    with program(double, frames, probed=False) as plain, program(double, frames, probed=True) as probed:
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(turns):
            for driver, taken in zip((plain, probed), times, strict=True):
                taken.append(int(driver.ask(f"storm world 1 {rounds} {steps}")) / rounds)
    return statistics.median(times[0]), statistics.median(times[1])


def instructions(double: Double, directory: Path, steps: int, *, probed: bool) -> float:
    """Instructions per collective, by the difference of two runs under callgrind."""
    counts = []
    for rounds in (INSTRUCTION_ROUNDS, 2 * INSTRUCTION_ROUNDS):
        commands = f"group world 0 4 0,1,2,3\nstorm world 1 {rounds} {steps}\n"
        env = {"PATH": os.environ["PATH"], "TOCSIN_FRAME_DIR": str(directory)}
        if probed:
            env["LD_PRELOAD"] = str(probe_library())
        tool = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={directory}/callgrind.out"]
        told = subprocess.run(
            [*tool, str(double.driver)],
            input=commands,
            env=env,
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        ).stderr
        found = re.search(r"Collected : (\d+)", told)
        assert found, told
        counts.append(int(found[1]))
    return (counts[1] - counts[0]) / INSTRUCTION_ROUNDS


def all_reduce_us(directory: Path, elements: int, rounds: int, *, probed: bool) -> tuple[float, float]:
    """(median, least) time of an all-reduce of two ranks on loopback."""
    store = directory / "store"
    store.unlink(missing_ok=True)
    env = os.environ | {
        "STORE": str(store),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TOCSIN_FRAME_DIR": str(directory),
        "LD_PRELOAD": str(probe_library()) if probed else "",
    }
    command = [sys.executable, "-c", ALL_REDUCE, str(elements), str(rounds)]
    told = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=300).stdout
    median, least = map(float, told.split())
    return median, least


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="tocsin-bench-", dir="/dev/shm") as name:
        directory = Path(name)
        double = build(directory)
        per_steps = {}
        for steps in (0, 1, 16):
            plain, probed = loop_ns(double, directory, steps)
            per_steps[steps] = probed - plain
            note = f"budget {NS_PER_COLLECTIVE_MAX:.0f} ns" if steps == 0 else ""
            say(f"probe per collective with {steps} steps, tight loop", probed - plain, "ns", note)
        say("probe per further step", (per_steps[16] - per_steps[1]) / 15, "ns")
        if shutil.which("valgrind"):
            for steps in (0, 16):
                net = [instructions(double, directory, steps, probed=on) for on in (False, True)]
                say(f"instructions per collective with {steps} steps", net[1] - net[0], "")
        for elements, rounds in ((1, 2000), (1 << 20, 100)):
            turns = [
                [all_reduce_us(directory, elements, rounds, probed=on) for on in (False, True)]
                for _ in range(ALL_REDUCE_TURNS)
            ]
            for which, index in (("median", 0), ("least", 1)):
                plain, probed = (statistics.median(turn[on][index] for turn in turns) for on in (0, 1))
                label = f"all-reduce of {4 * elements} bytes, {which}, without / with"
                say(label, plain, "us", f"{probed:10.1f} us")


if __name__ == "__main__":
    main()
