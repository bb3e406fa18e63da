"""Steps of real torch jobs, inferred from their frames and compared with what the jobs themselves note down."""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from diagnosis.evidence.steps import Step
from node_daemon.collectors.frame_root import open_node_directory
from node_daemon.collectors.frames import FrameReader
from node_daemon.collectors.process import Processes
from node_daemon.step_watch import StepWatch
from tests.integration.test_gloo_probe_torch import DEADLINE_S, environment, eventually

JOB = Path(__file__).with_name("steps_job.py")
WITHIN = 0.25
"""Of the job's own median: the machine is shared, and the job is not as fast at every moment."""


@dataclass
class Watched:
    """A running job, looked at again and again."""

    reader: FrameReader
    out: Path
    watch: StepWatch

    def look(self) -> list[Step]:
        """What is told now, by rank."""
        jobs = self.reader.collect().jobs
        steps = self.watch.look(jobs)
        frames = [frame for job in jobs for frame in job.frames]
        frames.sort(key=lambda frame: int(frame.header["rank"]))
        found = [steps.get((frame.pid, frame.start_ticks)) for frame in frames]
        return [step for step in found if step is not None]

    def true_ns(self) -> float:
        """Median of the newest hundred steps, as the job noted them."""
        lines = (self.out / "steps").read_text().splitlines()[-100:]
        pairs = itertools.pairwise(lines)
        return statistics.median(int(end) - int(begin) for begin, end in pairs if "pause" not in (begin, end))


@contextmanager
def training(base: Path, ranks: int, program: str) -> Iterator[Watched]:
    os.close(open_node_directory(base / "root", "gpu001"))
    directory, out = base / "root" / "gpu001" / "4242.0", base / "out"
    directory.mkdir(mode=0o700)
    out.mkdir()
    process = subprocess.Popen(
        [sys.executable, JOB, str(ranks), program, str(DEADLINE_S)],
        env=environment(directory, out),
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    reader = FrameReader(base / "root", "gpu001", Processes(), gone_keep_s=900, idle_keep_s=86_400)
    try:
        yield Watched(reader, out, StepWatch())
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=DEADLINE_S)


@pytest.mark.parametrize(
    ("program", "ranks", "rounds"),
    [("plain", 2, 3), ("alike", 2, 4), ("single", 2, 1), ("harsh", 2, 3), ("layered", 4, 2), ("sharded", 2, 32)],
)
def test_every_rank_s_steps_are_told_as_the_job_notes_them(
    tmp_path: Path, program: str, ranks: int, rounds: int
) -> None:
    with training(tmp_path, ranks, program) as job:
        told: list[Step] = []

        def right() -> bool:
            told[:] = job.look()
            return (
                len(told) == ranks
                and all(step.jitter_ns is not None and step.rounds == rounds for step in told)
                and all(abs(step.step_ns / job.true_ns() - 1) < WITHIN for step in told)
            )

        eventually(right, "all ranks tell the step that the job has")
