"""A training job for the probe's tests: `python gloo_job.py RANKS PHASE...`, forked after importing torch.

Each rank copies its frame to `$OUT/<phase>.<rank>` after a phase. Knows nothing of tocsin but where the frame is.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def operations(rank: int, world: int) -> None:
    """Every kind of collective once, in the order of `OPERATIONS` in the tests."""
    dist.all_reduce(torch.ones(1000))
    dist.all_reduce(torch.ones(7, dtype=torch.float64))
    dist.broadcast(torch.ones(5, dtype=torch.int64), src=2)
    dist.reduce(torch.ones(6, dtype=torch.bfloat16), dst=1)
    dist.all_gather([torch.ones(3, dtype=torch.uint8) for _ in range(world)], torch.ones(3, dtype=torch.uint8))
    dist.gather(torch.ones(4), [torch.ones(4) for _ in range(world)] if rank == 3 else None, dst=3)
    dist.scatter(torch.ones(2), [torch.ones(2) for _ in range(world)] if rank == 0 else None, src=0)
    dist.all_to_all_single(torch.ones(8), torch.ones(8))
    dist.barrier()
    dist.all_reduce_coalesced([torch.ones(2), torch.ones(3)])


def groups(rank: int, world: int) -> None:
    """Halves of the world, then the same halves again, then a pair in reverse order."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    again = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for group in (halves[rank // 2], again[rank // 2]):
        for _ in range(3):
            dist.all_reduce(torch.ones(4), group=group)


def ddp(rank: int, world: int) -> None:
    model = DistributedDataParallel(
        torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))), bucket_cap_mb=0.02
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = DataLoader(TensorDataset(torch.ones(8, 64)), batch_size=2, num_workers=2)
    for (batch,) in batches:
        model(batch).sum().backward()
        optimizer.step()


def threads(rank: int, world: int) -> None:
    """Two threads, each with its own group and several operations in flight."""
    mine = [dist.new_group(list(range(world))) for _ in range(2)]

    def busy(group: dist.ProcessGroup) -> None:
        for _ in range(20):
            works = [dist.all_reduce(torch.ones(100), group=group, async_op=True) for _ in range(5)]
            for work in works:
                work.wait()

    running = [threading.Thread(target=busy, args=(group,)) for group in mine]
    for one in running:
        one.start()
    for one in running:
        one.join()


def again(rank: int, world: int) -> None:
    """The world is taken down and made anew in the same process."""
    dist.destroy_process_group()
    join(rank, world, 1)
    dist.all_reduce(torch.ones(1))


def endless(rank: int, world: int) -> None:
    """All-reduce for ever; large enough that a stopped rank is stopped inside one."""
    tensor = torch.ones(1 << 18)
    while True:
        dist.all_reduce(tensor)


def desert(rank: int, world: int) -> None:
    """The last rank leaves without a word; the others see their operation fail and go on."""
    dist.all_reduce(torch.ones(1))
    if rank == world - 1:
        os._exit(0)
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        return
    raise AssertionError("the operation went well without its peer")


PHASES: dict[str, Callable[[int, int], None]] = {
    phase.__name__: phase for phase in (operations, groups, ddp, threads, again, endless, desert)
}


def join(rank: int, world: int, life: int) -> None:
    where = f"file://{os.environ['OUT']}/store.{life}"
    dist.init_process_group("gloo", where, rank=rank, world_size=world, timeout=timedelta(seconds=60))


def run(rank: int, world: int, phases: list[str]) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    join(rank, world, 0)
    for name in phases:
        PHASES[name](rank, world)
        frame = Path(os.environ["TOCSIN_FRAME_DIR"], f"{os.getpid()}.frame")
        if frame.exists():
            shutil.copy(frame, Path(os.environ["OUT"], f"{name}.{rank}"))


def main() -> int:
    world, phases = int(sys.argv[1]), sys.argv[2:]
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            run(rank, world, phases)
            os._exit(0)  # not through what the parent registered for its own end
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main())
