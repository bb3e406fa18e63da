"""Flight recorders of a real torch job over gloo: of ranks that hang, hold Python's lock, or are stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path

from diagnosis.contracts.control import CollectEvent
from diagnosis.contracts.gathered import FlightFacts
from node_daemon.client import Client
from node_daemon.collectors.doors import Process
from node_daemon.collectors.flight import FlightCollector
from node_daemon.evidence import EvidenceCollector, Suspect
from tests.nodeframes import start_ticks

NO_CLIENT = Client("http://127.0.0.1:1", "gpu001", b"k" * 32, 1, timeout_s=1)
PROGRAM = """
import os, re, sys, time
import torch, torch.distributed as dist
from torch.distributed.elastic.control_plane import worker_main

rank, how = int(os.environ["RANK"]), sys.argv[1]
with worker_main():
    dist.init_process_group("gloo", "file://" + sys.argv[2], rank=rank, world_size=2)
    for _ in range(5):
        dist.all_reduce(torch.ones(8))
    print("ready", flush=True)
    if rank == 0:
        dist.all_reduce(torch.ones(8))
    elif how == "lock":
        re.match("(a+)+$", "a" * 60 + "b")  # for years, in C, without letting go of the lock
    else:
        time.sleep(600)
"""


@contextmanager
def job(how: str, directory: Path) -> Iterator[list[Process]]:
    """Two ranks of which the second never enters the sixth all-reduce."""
    children = []
    try:
        for rank in range(2):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "OMP_NUM_THREADS": "1",
                "TORCH_WORKER_SERVER_SOCKET": str(directory / f"worker.{rank}"),
            }
            command = [sys.executable, "-c", PROGRAM, how, str(directory / "store")]
            children.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        for child in children:
            assert child.stdout and child.stdout.readline() == "ready\n"
        yield [Process(r, c.pid, start_ticks(c.pid), os.getuid(), os.getgid()) for r, c in enumerate(children)]
    finally:
        for child in children:
            child.kill()
            child.communicate()


async def collect(members: list[Process]) -> list[FlightFacts]:
    collector = FlightCollector()
    try:
        return await collector.collect(members)
    finally:
        collector.close()


def stands(facts: FlightFacts) -> int | None:
    return next((group.stands_at for group in facts.groups if group.stands_at is not None), None)


def ended(facts: FlightFacts) -> int:
    return max((group.ended for group in facts.groups if group.ended is not None), default=0)


async def test_who_waits_and_who_never_entered_is_told(tmp_path: Path) -> None:
    with job("sleep", tmp_path) as members:
        evidence = EvidenceCollector("gpu001", NO_CLIENT, lambda *_: [Suspect(*astuple(members[1]))], py_spy="/nowhere")
        (process,) = (await evidence.gather(CollectEvent(incident="a", job_id=1, restart=0, ranks=[1]))).processes
        assert process.python_stack is not None, process.notes
        assert "<string>" in process.python_stack
        told = await collect(members)
        while stands(told[0]) is None or ended(told[1]) < 5:  # "ready" comes just before, and gloo's books lag a little
            told = await collect(members)
    waits, late = told
    assert (waits.source, late.source) == ("json", "json")
    assert (stands(waits), stands(late)) == (6, None)
    assert ended(late) == 5


async def test_a_rank_that_holds_python_s_lock_is_heard_and_a_stopped_one_costs_its_deadline(tmp_path: Path) -> None:
    with job("lock", tmp_path) as members:
        os.kill(members[0].pid, signal.SIGSTOP)
        stopped, locked = await collect(members)
    assert (locked.source, stands(locked)) == ("json", None)
    assert (stopped.source, stopped.groups) == ("", [])
    assert any("no answer within" in note for note in stopped.notes)
