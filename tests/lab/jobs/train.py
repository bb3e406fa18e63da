"""Data-parallel training of a small network on CPUs with gloo, as a user would write it.

One task per node imports torch once and forks a process per GPU. A pause in each step stands where the GPU would
compute. Settings come from the environment: CHECKPOINT (path), STEPS, SAVE_EVERY, WORK_MS, PAUSE_FILE (when that file
appears, rank 0 takes five seconds over one checkpoint while the others wait for it), BRANCH_FILE (when that file
appears, the rank whose number is in it takes another branch of the program), SLEEP_FILE (when that file appears, the
rank whose number is its first word sleeps in every step for as many ms as its second says). SIGUSR1: save at the next
step.
"""
# ruff: noqa: T201 (a job talks through its output)

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # DDP wants it; imported before the fork it is paid for once
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

WIDTH = 256
LAYERS = 4
BATCH = 64
LONG_CHECKPOINT_S = 5.0
REPORT_EVERY = 10


class Trainer:
    """One rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.checkpoint = Path(os.environ.get("CHECKPOINT", "checkpoint.pt"))
        self.save_every = int(os.environ.get("SAVE_EVERY", "50"))
        self.work_s = int(os.environ.get("WORK_MS", "30")) / 1000
        self.pause_file = Path(os.environ.get("PAUSE_FILE", "pause"))
        self.branch_file = Path(os.environ.get("BRANCH_FILE", "branch"))
        self.sleep_file = Path(os.environ.get("SLEEP_FILE", "sleep"))
        self.paused = False
        self.save_now = False
        torch.manual_seed(0)
        layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        self.model = nn.Sequential(*layers)
        self.step = self._resume()
        self.parallel = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.parallel.parameters(), lr=1e-3)
        signal.signal(signal.SIGUSR1, lambda *_: setattr(self, "save_now", True))

    def _resume(self) -> int:
        """Load the checkpoint if there is one; rank 0 says where everybody starts."""
        if self.checkpoint.exists():
            saved = torch.load(self.checkpoint)
            self.model.load_state_dict(saved["model"])
            start = torch.tensor([saved["step"]])
        else:
            start = torch.tensor([0])
        dist.broadcast(start, src=0)
        return int(start)

    def train(self, steps: int) -> None:
        """Run until `steps` steps are done in all."""
        if self.rank == 0:
            print(f"starting at step {self.step}", flush=True)
        while self.step < steps:
            began = time.monotonic()
            time.sleep(self.work_s)
            if self.branch_file.exists() and self.branch_file.read_text().strip() == str(self.rank):
                self._other_branch()
            time.sleep(self._extra_s())
            loss = self.parallel(torch.randn(BATCH, WIDTH)).pow(2).mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.step += 1
            if self.rank == 0:
                self._report(loss.item(), time.monotonic() - began)
                self._save_when_due()

    def _extra_s(self) -> float:
        """The code of one rank that takes longer than that of the others, or never ends."""
        words = self.sleep_file.read_text().split() if self.sleep_file.exists() else []
        return int(words[1]) / 1000 if len(words) == 2 and words[0] == str(self.rank) else 0.0

    def _other_branch(self) -> None:
        """The bug of many programs: a condition that only one rank meets, with a collective in it."""
        norm = torch.zeros(1)
        dist.all_gather([torch.zeros(1) for _ in range(dist.get_world_size())], norm)

    def _report(self, loss: float, seconds: float) -> None:
        if self.step % REPORT_EVERY == 0:
            print(f"step {self.step} loss {loss:.5f} {seconds * 1000:.0f} ms", flush=True)

    def _save_when_due(self) -> None:
        long = self.pause_file.exists() and not self.paused
        if not (long or self.save_now or self.step % self.save_every == 0):
            return
        if long:
            self.paused = True
            time.sleep(LONG_CHECKPOINT_S)
        self.save_now = False
        part = self.checkpoint.with_suffix(".part")
        torch.save({"model": self.model.state_dict(), "step": self.step}, part)
        part.replace(self.checkpoint)
        if long or self.step % self.save_every:
            print(f"saved at step {self.step}", flush=True)


def run_rank(local_rank: int, ranks_per_node: int) -> None:
    """The life of one forked rank."""
    torch.set_num_threads(1)
    rank = int(os.environ["SLURM_NODEID"]) * ranks_per_node + local_rank
    world = int(os.environ["SLURM_NNODES"]) * ranks_per_node
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(local_rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo", timeout=timedelta(minutes=30))
    Trainer(rank).train(int(os.environ.get("STEPS", "1000000")))
    dist.destroy_process_group()


def main() -> None:
    """One task: fork a rank for each GPU of this node."""
    ranks_per_node = int(os.environ.get("SLURM_GPUS_ON_NODE", "2"))
    arguments = (ranks_per_node,)
    start_processes(run_rank, arguments, ranks_per_node, start_method="fork")  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
