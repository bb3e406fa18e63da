"""What a summary costs and how exact it is: events condensed a second, bytes on the wire, error of quantiles.

    python -m tests.bench.bench_summaries

Events are of a made GPU step (5,000 kernels, popular and rare names, collectives beside them) and its host functions in
calls, as Kineto writes them. One core. Bytes are of one rank by itself, compressed, without names; names travel once
per job and node.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np

from diagnosis.contracts import histogram, summary
from diagnosis.evidence.condense import condense
from diagnosis.evidence.functions import Functions, with_functions
from diagnosis.evidence.kineto import read_trace
from diagnosis.evidence.notes import Notes
from diagnosis.evidence.summary_columns import columns_of
from tests.unit.test_summary import BARE, a_step

PARTS = np.array([0.5, 0.9, 0.95, 0.99])


def made_trace(kernels: int, names: int, seed: int = 3) -> bytes:
    """Two steps of a job on a GPU as a trace: per kernel an operator, the launch in it, and the kernel."""
    rng = np.random.default_rng(seed)
    events = []
    for step in range(2):
        base = step * kernels * 20.0
        events.append(_span("user_annotation", f"ProfilerStep#{step}", base, kernels * 20.0, 1))
        for at in range(kernels):
            now, name = base + at * 20.0, int(rng.zipf(1.3)) % names
            launch = step * kernels + at + 1
            events.append(_span("cpu_op", f"aten::op_{name}", now, 10.0, 1))
            events.append(_span("cuda_runtime", "cudaLaunchKernel", now + 2, 4.0, 1, correlation=launch))
            comm = at % 50 == 0
            kernel = f"ncclDevKernel_AllReduce_Sum_f32_RING_LL_{name}" if comm else f"void kernel_{name}<float>(float*)"
            took = float(rng.normal(18, 1))
            events.append(_span("kernel", kernel, now + 12, took, 20 if comm else 7, correlation=launch))
    return json.dumps({"traceEvents": events, "distributedInfo": {"rank": 0, "world_size": 1}}).encode()


def _span(cat: str, name: str, ts: float, dur: float, tid: int, **args: int) -> dict[str, object]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": 5e12 + ts, "dur": dur, "args": args}


def best_s(work: Callable[[], object], runs: int = 3) -> float:
    """The quickest of some runs."""
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


def _packed(told: Functions) -> summary.RankSummary:
    return with_functions(BARE, told)[0]


def quantile_error_pct(seed: int = 5) -> float:
    """The greatest error of P50, P90, P95 and P99 over 1,000 log-normal functions of 1,000 executions each."""
    rng = np.random.default_rng(seed)
    took = np.exp(rng.normal(rng.uniform(7, 19, (1000, 1)), 0.8, (1000, 1000))).astype(np.int64)
    told = histogram.quantiles(histogram.from_durations(np.repeat(np.arange(1000), 1000), took.ravel(), 1000), PARTS)
    true = np.sort(took, axis=1)[:, np.ceil(PARTS * 1000).astype(int) - 1]
    return float(np.abs(told / true - 1).max() * 100)


def main() -> None:
    """Prints the figures."""
    write = sys.stdout.write
    content = made_trace(5000, 200)
    trace = read_trace("rank0.json", content, Notes())
    count = len(trace.events)
    read_s = best_s(lambda: read_trace("rank0.json", content, Notes()))
    condensed_s = best_s(lambda: condense(trace.events, trace.window, 0))
    write(f"trace of {len(content) / 1e6:.1f} MB, {count:,} events: read {read_s * 1e3:.0f} ms, ")
    write(f"condensed {condensed_s * 1e3:.0f} ms; {count / (read_s + condensed_s) / 1e3:.0f} k events/s together\n")
    for names in (50, 200, 2000):
        told = a_step(names, 5000)
        one, texts = with_functions(BARE, told)
        rows = len(summary.table(one)[0])
        text_bytes = sum(len(text) + 2 for _, text in texts.values())
        write(f"5,000 kernels a step, {names} names: {summary.rank_bytes(one):,} bytes in {rows} rows, ")
        took_ms = best_s(partial(_packed, told)) * 1e3
        write(f"{took_ms:.0f} ms; names once: {text_bytes:,} bytes plain\n")
    write(f"greatest error of P50 to P99: {quantile_error_pct():.2f} %\n")
    one, texts = with_functions(BARE, a_step(200, 5000))
    many = [msgspec.structs.replace(one, rank=rank) for rank in range(1000)]
    write(f"1,000 summaries as columns: {best_s(lambda: columns_of(many, texts, Notes())):.2f} s\n")


if __name__ == "__main__":
    main()
