"""Data-parallel training of a small network on CPUs with gloo, as a user would write it.

One task per node imports torch once and forks a process per GPU; under torchrun each process is started by it. A pause
in each step stands where the GPU would compute. SIGUSR1: save at the next step. Settings come from the environment:

CHECKPOINT (path), STEPS, SAVE_EVERY, WORK_MS; PAUSE_FILE: when that file appears, rank 0 takes five seconds over one
checkpoint while the others wait for it; BRANCH_FILE: when that file appears, the rank whose number is in it takes
another branch of the program, with `size` behind it the same with another size; SLEEP_FILE: when that file appears,
the rank whose number is its first word sleeps in every step for as many ms as its second says.

What a job does besides training, each only where its number of steps is given: EVAL_EVERY: an evaluation of
EVAL_BATCHES batches; SAVE_MS: rank 0 takes so long over each checkpoint, and a barrier follows; SHARDS_EVERY: all ranks
write a part, about SAVE_MS long, and a barrier follows; HICCUP_EVERY: one rank, each time another, waits HICCUP_MS for
its data.
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
        self.duties = Duties(self)
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
            branch = self.branch_file.read_text().split() if self.branch_file.exists() else []
            if branch[:1] == [str(self.rank)]:
                self._other_branch(branch[1:] == ["size"])
            time.sleep(self._extra_s() + self.duties.hiccup_s(self.step))
            loss = self.parallel(torch.randn(BATCH, WIDTH)).pow(2).mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.step += 1
            if self.rank == 0:
                self._report(loss.item(), time.monotonic() - began)
                self._save_when_due()
            self.duties.after(self.step)

    def _extra_s(self) -> float:
        """The code of one rank that takes longer than that of the others, or never ends."""
        words = self.sleep_file.read_text().split() if self.sleep_file.exists() else []
        return int(words[1]) / 1000 if len(words) == 2 and words[0] == str(self.rank) else 0.0

    def _other_branch(self, size: bool) -> None:
        """The bug of many programs: a condition that only one rank meets, with a collective in it, or a `size`."""
        if size:
            dist.all_reduce(torch.zeros(WIDTH))
            return
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
        time.sleep(LONG_CHECKPOINT_S if long else self.duties.save_s)
        self.save_now = False
        part = self.checkpoint.with_suffix(".part")
        torch.save({"model": self.model.state_dict(), "step": self.step}, part)
        part.replace(self.checkpoint)
        if long or self.step % self.save_every:
            print(f"saved at step {self.step}", flush=True)


class Duties:
    """What a rank does besides training: other collectives, of other sizes, and pauses that are nobody's fault."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.world = dist.get_world_size()
        self.eval_every = _number("EVAL_EVERY")
        self.eval_batches = _number("EVAL_BATCHES", 10)
        self.save_s = _number("SAVE_MS") / 1000
        self.shards_every = _number("SHARDS_EVERY")
        self.hiccup_every = _number("HICCUP_EVERY")
        self.hiccup_ms = _number("HICCUP_MS")

    def hiccup_s(self, step: int) -> float:
        """How long this rank waits for the data of this step; the ranks have their turns in an order of its own."""
        turn, rest = divmod(step, self.hiccup_every) if self.hiccup_every else (0, 1)
        if rest or turn * 3 % self.world != self.trainer.rank:
            return 0.0
        print(f"rank {self.trainer.rank} waits for data at step {step}", flush=True)
        return self.hiccup_ms / 1000

    def after(self, step: int) -> None:
        """Whatever is due after a step; the saving of rank 0 has been."""
        if self.save_s and step % self.trainer.save_every == 0:
            dist.barrier()
        if self.shards_every and step % self.shards_every == 0:
            time.sleep(self.save_s * (1 + self.trainer.rank / self.world))
            dist.barrier()
            self._tell(f"all parts saved at step {step}")
        if self.eval_every and step % self.eval_every == 0:
            self._tell(f"evaluated at step {step}: {self._evaluate():.5f}")

    def _tell(self, text: str) -> None:
        if self.trainer.rank == 0:
            print(text, flush=True)

    @torch.no_grad()
    def _evaluate(self) -> float:
        """Forward only, a sum over the ranks for each batch, in the end everybody's scores to everybody; the best."""
        self.trainer.model.eval()
        scores = torch.zeros(self.eval_batches)
        for batch in range(self.eval_batches):
            time.sleep(self.trainer.work_s / 3)
            loss = self.trainer.model(torch.randn(BATCH, WIDTH)).pow(2).mean()
            total = torch.stack((loss, torch.ones(())))
            dist.all_reduce(total)
            scores[batch] = total[0] / total[1]
        everybodys = [torch.zeros_like(scores) for _ in range(self.world)]
        dist.all_gather(everybodys, scores)
        best = scores.min().reshape(1)
        dist.broadcast(best, src=0)
        self.trainer.model.train()
        return float(best)


def _number(name: str, default: int = 0) -> int:
    return int(os.environ.get(name, default))


def run_rank() -> None:
    """The life of one rank; its environment says which."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=30))
    Trainer(dist.get_rank()).train(int(os.environ.get("STEPS", "1000000")))
    dist.destroy_process_group()


def run_forked(local_rank: int, ranks_per_node: int) -> None:
    """A forked rank: torchrun's environment, made from Slurm's."""
    rank = int(os.environ["SLURM_NODEID"]) * ranks_per_node + local_rank
    world = int(os.environ["SLURM_NNODES"]) * ranks_per_node
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(local_rank), WORLD_SIZE=str(world))
    run_rank()


def main() -> None:
    """A rank that torchrun has started, or one task: fork a rank for each GPU of this node."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        run_rank()
        return
    ranks_per_node = int(os.environ.get("SLURM_GPUS_ON_NODE", "2"))
    arguments = (ranks_per_node,)
    start_processes(run_forked, arguments, ranks_per_node, start_method="fork")  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
