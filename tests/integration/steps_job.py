"""Training programs whose steps are known, for tests of step inference: `python steps_job.py RANKS PROGRAM SECONDS`.

Forked after importing torch, on loopback. Rank 0 writes the moment (CLOCK_MONOTONIC, ns) at which each of its steps
begins to `$OUT/steps`, one a line, and where a pause or an evaluation follows a step, `pause`. Knows nothing of tocsin.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

COMPUTE_S = 0.03


class Clock:
    """Begins steps until the time is over. All ranks stop alike: rank 0 is asked."""

    def __init__(self, rank: int, seconds: float) -> None:
        self._rank, self._end = rank, time.monotonic() + seconds
        self._path = Path(os.environ["OUT"], "steps") if rank == 0 else None
        self.step = 0

    def steps(self) -> Iterator[int]:
        while time.monotonic() < self._end:
            self.step += 1
            self._note(str(time.monotonic_ns()))
            yield self.step

    def pause(self) -> None:
        self._note("pause")

    def _note(self, text: str) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(text + "\n")


def _model() -> DistributedDataParallel:
    layers = [torch.nn.Linear(96, 96), torch.nn.Linear(96, 160), torch.nn.Linear(160, 64), torch.nn.Linear(64, 96)]
    return DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.03)


def _train_step(model: DistributedDataParallel, rows: int) -> None:
    time.sleep(COMPUTE_S)
    model(torch.ones(rows, 96)).sum().backward()
    model.zero_grad(set_to_none=True)


def plain(rank: int, world: int, clock: Clock) -> None:
    """Data-parallel, several buckets a step."""
    model = _model()
    for _ in clock.steps():
        _train_step(model, 4)


def alike(rank: int, world: int, clock: Clock) -> None:
    """Four equal all-reduces a step."""
    buffers = [torch.ones(4096) for _ in range(4)]
    for _ in clock.steps():
        time.sleep(4 * COMPUTE_S)
        for buffer in buffers:
            time.sleep(0.002)
            dist.all_reduce(buffer)


def single(rank: int, world: int, clock: Clock) -> None:
    """One all-reduce a step."""
    buffer = torch.ones(4096)
    for _ in clock.steps():
        time.sleep(COMPUTE_S)
        dist.all_reduce(buffer)


def harsh(rank: int, world: int, clock: Clock) -> None:
    """Buckets, a changing number of micro-batches, a logged loss, evaluations and checkpoints in between."""
    model, dice = _model(), random.Random(5)
    for step in clock.steps():
        with model.no_sync():
            for _ in range(dice.randrange(3)):
                _train_step(model, 4)
        _train_step(model, 4)
        if step % 10 == 0:
            dist.all_reduce(torch.ones(1))
        if step % 40 == 0:
            clock.pause()
            for _ in range(5):
                time.sleep(COMPUTE_S / 2)
                dist.all_reduce(torch.ones(2))
        if step % 60 == 0:
            clock.pause()
            if rank == 0:
                time.sleep(1.0)
            dist.barrier()


def layered(rank: int, world: int, clock: Clock) -> None:
    """Tensor parallel pairs with many rounds, and a data-parallel pair of each position, with a norm over the world."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    activations, gradients = torch.ones(2048), [torch.ones(8192), torch.ones(5000)]
    for _ in clock.steps():
        time.sleep(COMPUTE_S)
        for _ in range(12):
            time.sleep(0.002)
            dist.all_reduce(activations, group=halves[rank // 2])
        for gradient in gradients:
            dist.all_reduce(gradient, group=across[rank % 2])
        dist.all_reduce(torch.ones(1))


def sharded(rank: int, world: int, clock: Clock) -> None:
    """As FSDP does it: gather each layer forwards, gather and scatter it backwards; the root is of another size."""
    layer, root = torch.ones(2048), torch.ones(5000)
    parts = [torch.ones(2048) for _ in range(world)]
    for _ in clock.steps():
        dist.all_reduce(root)
        for _ in range(10):
            time.sleep(0.004)
            dist.all_gather(parts, layer)
        for _ in range(10):
            time.sleep(0.004)
            dist.all_gather(parts, layer)
            dist.all_reduce(layer)
        dist.all_reduce(root)
        time.sleep(COMPUTE_S)


PROGRAMS: dict[str, Callable[[int, int, Clock], None]] = {
    program.__name__: program for program in (plain, alike, single, harsh, layered, sharded)
}


def run(rank: int, world: int, program: str, seconds: float) -> None:
    """The life of one rank."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    where = f"file://{os.environ['OUT']}/store"
    dist.init_process_group("gloo", where, rank=rank, world_size=world, timeout=timedelta(seconds=5))
    try:
        PROGRAMS[program](rank, world, Clock(rank, seconds))
    except RuntimeError:  # the others' time was over a moment earlier
        return


def main() -> int:
    world, program, seconds = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            run(rank, world, program, seconds)
            os._exit(0)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main())
