"""How fast the collector condenses CUPTI's records, on one core: records a second, and what a window costs at its end.

Records of CUDA 13.5's size (248 bytes a kernel) in 8 MiB, condensed again and again by the library's own code; only the
step from record to record is a table of sizes here, where a program on a GPU asks CUPTI for it (which answers nothing
without a driver). Time is the processor's, of this thread alone. Windows of `EXECUTIONS_MAX` executions, all of which
are kept for the critical path. `python -m tests.bench.bench_cupti`
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from diagnosis.contracts.kernelwindow import EXECUTIONS_MAX, parse_window
from diagnosis.contracts.summary import rank_bytes
from diagnosis.evidence.kernel_window import summary_of
from tests.integration.cupti_double import KERNEL_BYTES, Feed, Names, kernels
from tests.integration.cupti_double.program import build, running

BUFFER_BYTES, TURNS, STEP_KERNELS, STEPS = 8 << 20, 9, 5000, 4
DORMANT_S = 20
TEXT = "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_64x3_tn_align8_{}>(Params)"


def say(name: str, value: float, unit: str, note: str = "") -> None:
    sys.stdout.write(f"{name:<66} {value:10.1f} {unit:<9} {note}\n")


def records(names: Names, functions: int, many: int) -> object:
    """Kernels of random length, one after the other, of so many functions in any order."""
    random = np.random.default_rng(1)
    addresses = np.array([names.address(TEXT.format(number)) for number in range(functions)])
    length = random.lognormal(10, 1, many).astype(np.int64)
    start = np.cumsum(length + 500) + 1
    return kernels(13, addresses[random.integers(0, functions, many)], start, start + length)


def per_second(feed: Feed, functions: int) -> list[float]:
    """Million records a second, window by window."""
    names = Names()
    many = BUFFER_BYTES // KERNEL_BYTES[13]
    buffer = np.asarray(records(names, functions, many))
    times = EXECUTIONS_MAX // many
    speeds = []
    for _ in range(TURNS):
        feed.clear()
        speeds.append(many * times / feed.time_ns(buffer, times) * 1e3)
    return speeds


def dormant(directory: Path) -> None:
    """What the collector takes of a program that asks for nothing: its thread looks twice a second."""
    with running(build(directory), directory) as program:
        before_ns = int(program.ask("processor"))
        time.sleep(DORMANT_S)
        took_ns = int(program.ask("processor")) - before_ns
    say("dormant, of one core", took_ns / DORMANT_S / 1e3, "us/s", f"in {DORMANT_S} s")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="tocsin-bench-") as name:
        directory = Path(name)
        feed = Feed(directory)
        feed.sizes(kernel=13)
        for functions, budget in ((200, 50), (2000, 14)):
            speeds = sorted(per_second(feed, functions))
            note = f"best {speeds[-1]:.1f}, least {speeds[0]:.1f}; budget {budget}"
            say(f"kernel records condensed, {functions} names", speeds[len(speeds) // 2], "M/s", note)
        say(f"  critical path of {EXECUTIONS_MAX} executions, at the window's end", feed.sweep_ns() / 1e6, "ms")
        names = Names()
        buffer = np.asarray(records(names, 300, STEP_KERNELS * STEPS))
        feed.clear()
        feed.give(buffer)
        feed.clear()  # the memory is there
        took_ns = feed.time_ns(buffer, 1)
        sweep_ns = feed.sweep_ns()
        data = feed.written(directory)
        note = f"of {STEPS} steps of {STEP_KERNELS} kernels, 300 names; {took_ns / STEPS / 1e6:.3f} % of a 100 ms step"
        say("condensing one step", took_ns / STEPS / 1e3, "us", note)
        say("  and its critical path, once the window is over", sweep_ns / STEPS / 1e3, "us")
        say("  window's file on the node", len(data) / 1024, "KiB")
        told = summary_of(parse_window(data), 0, STEPS).summary
        say("  its summary on the wire, without names", rank_bytes(told) / 1024, "KiB", "budget 10")
        feed.close()
        dormant(directory)


if __name__ == "__main__":
    main()
