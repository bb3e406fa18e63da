"""The job that `bench_overhead` measures: data-parallel training over gloo in several buckets, some steps at a word.

`python -m tests.bench.overhead_job RANKS STEPS WARM_UP_STEPS`; it knows nothing of tocsin. A byte on stdin for each
rank starts a block, warm-up first, and each rank answers with a line: its number, the mean and the median time of a
step, and the CPU time of a step over all threads of the process, in ns. Between blocks the job sleeps. No rank can take
two bytes of one block, for it cannot end a block that the others have not begun.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
import torch._dynamo  # DDP wants it; imported before the fork it is paid for once
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

LAYERS, WIDTH, BATCH = 16, 64, 16
BUCKET_MB = 0.02


class Trainer:
    """One rank: sixteen small layers whose gradients go in as many all-reduces."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        layers = [layer for _ in range(LAYERS) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
        self._model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=BUCKET_MB)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-4)
        self._batch = torch.randn(BATCH, WIDTH)

    def step(self) -> None:
        self._model(self._batch).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def block(self, steps: int, warm_up_steps: int) -> tuple[float, float, float]:
        """(mean, median, CPU) of a step in ns."""
        for _ in range(warm_up_steps):
            self.step()
        used = time.process_time_ns()
        marks = [time.perf_counter_ns()]
        for _ in range(steps):
            self.step()
            marks.append(time.perf_counter_ns())
        used = time.process_time_ns() - used
        taken = [after - before for before, after in pairwise(marks)]
        return statistics.mean(taken), statistics.median(taken), used / steps


def run(rank: int, world: int, steps: int, warm_up_steps: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})  # as Slurm binds tasks; where threads happen to run is noise
    store = Path(os.environ["OUT"], "store")
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world)
    trainer = Trainer()
    trainer.block(1, warm_up_steps)
    gc.collect()
    gc.disable()
    while os.read(0, 1):
        told = " ".join(f"{value:.0f}" for value in trainer.block(steps, warm_up_steps))
        os.write(1, f"{rank} {told}\n".encode())
    os._exit(0)  # not through what the parent registered for its own end


def main() -> int:
    world, steps, warm_up_steps = map(int, sys.argv[1:])
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            run(rank, world, steps, warm_up_steps)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main())
