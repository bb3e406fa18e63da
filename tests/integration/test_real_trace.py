"""A trace that torch.profiler makes of a real training loop is condensed to what the loop did."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from diagnosis.contracts.summary import COMPUTE, HOST, PARTS, table
from diagnosis.evidence.condense import Condensed
from diagnosis.evidence.kineto import read_trace
from diagnosis.evidence.notes import Notes

SLEPT_MS = 20
STEPS = 3
PROGRAM = f"""
import sys, time, torch
from torch.profiler import ProfilerActivity, profile, schedule

def slow_augment(x):
    time.sleep({SLEPT_MS / 1000})
    return x * 2

def main():
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.DataLoader(torch.randn(400, 64), batch_size=20)
    steps = schedule(wait=1, warmup=1, active={STEPS})
    with profile(activities=[ProfilerActivity.CPU], schedule=steps, with_stack=True,
                 on_trace_ready=lambda p: p.export_chrome_trace(sys.argv[1])) as profiler:
        for at, batch in enumerate(data):
            if at > {STEPS + 2}:
                break
            optimizer.zero_grad()
            model(slow_augment(batch)).sum().backward()
            optimizer.step()
            profiler.step()

main()
"""


def _condensed(tmp_path: Path) -> Condensed:
    program, out = tmp_path / "train.py", tmp_path / "rank4.json"
    program.write_text(PROGRAM)
    subprocess.run([sys.executable, program, out], check=True, timeout=120, cwd=tmp_path)
    notes = Notes()
    trace = read_trace(out.name, out.read_bytes(), notes)
    assert notes.lines() == ()
    assert trace.rank == 4
    return trace.condensed(4)


def test_the_slow_function_is_named_and_the_phases_are_the_step(tmp_path: Path) -> None:
    done = _condensed(tmp_path)
    summary = done.summary
    assert summary.steps == STEPS
    assert summary.first_step is not None
    assert summary.last_step == summary.first_step + STEPS - 1
    assert summary.step_ms is not None
    assert sum(summary.phases.values()) == pytest.approx(summary.step_ms, rel=1e-3)
    assert summary.phases["host_ms"] >= SLEPT_MS
    assert summary.phases["forward_compute_ms"] > 0
    assert summary.phases["backward_compute_ms"] > 0
    assert summary.phases["data_ms"] > 0
    rows, _ = table(summary)
    slowest = rows[rows["kind"] == HOST][rows["beta"][rows["kind"] == HOST].argmax()]
    kind, name = done.names[int(slowest["name"])]
    assert kind == HOST
    assert name.startswith("<built-in function sleep> < train.py(5): slow_augment < train.py")
    assert slowest["count"] == STEPS
    assert slowest["total_ns"] >= STEPS * SLEPT_MS * 1e6
    assert slowest["beta"] / PARTS == pytest.approx(slowest["total_ns"] / 1e6 / summary.window_ms, rel=1e-3)
    computed = {done.names[int(row["name"])][1] for row in rows[rows["kind"] == COMPUTE]}
    assert {"aten::addmm", "aten::mul"} <= computed
