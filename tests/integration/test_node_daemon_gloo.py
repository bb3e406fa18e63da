"""Real torch ranks, seen as the controller sees them: probe, frame reader and summary together."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from diagnosis.contracts import report
from diagnosis.contracts.columns import Table, null_of, unpack
from diagnosis.contracts.report import COMM_DTYPE, CommState
from node_daemon.collectors.frame_root import open_node_directory
from node_daemon.collectors.frames import FrameReader
from node_daemon.collectors.process import Processes
from node_daemon.summarise import Memory, summarise
from tests.integration.test_gloo_probe_torch import eventually, started

RANKS = 4
STOPPED = 2
U4 = null_of(COMM_DTYPE["rounds"])


@dataclass
class Watcher:
    """Looks at the job again and again, as the daemon's loop does; keeps the newest tables."""

    reader: FrameReader
    memory: Memory = field(default_factory=dict)
    ranks: Table = field(default_factory=lambda: unpack({}, report.RANK_DTYPE, 0))
    comms: Table = field(default_factory=lambda: unpack({}, report.COMM_DTYPE, 0))
    rounds: Table = field(default_factory=lambda: unpack({}, report.ROUND_DTYPE, 0))

    def look(self) -> Watcher:
        for job in self.reader.collect().jobs:
            sample, self.memory = summarise(job, self.memory)
            self.ranks = unpack(sample.ranks, report.RANK_DTYPE, report.RANKS_MAX)
            self.comms = unpack(sample.comms, report.COMM_DTYPE, report.COMM_ROWS_MAX)
            self.rounds = unpack(sample.rounds, report.ROUND_DTYPE, report.ROUND_ROWS_MAX)
        return self

    def comm_of(self, rank: int) -> Table:
        """The rank's row of the world communicator."""
        row = int((self.ranks["rank"] == rank).argmax())
        found: Table = self.comms[self.comms["rank_row"] == row][0]
        return found


@pytest.fixture
def watcher(tmp_path: Path) -> Iterator[Watcher]:
    """A job of four ranks that all-reduce for ever, all of them seen at work."""
    os.close(open_node_directory(tmp_path / "root", "gpu001"))
    directory = tmp_path / "root" / "gpu001" / "4242.0"
    directory.mkdir(mode=0o700)
    reader = FrameReader(tmp_path / "root", "gpu001", Processes(), gone_keep_s=900, idle_keep_s=86_400)
    with started(tmp_path, RANKS, "endless", TOCSIN_FRAME_DIR=str(directory)):
        one = Watcher(reader)
        eventually(lambda: _all_at_work(one.look()), "all ranks are told with their windows")
        yield one


def _all_at_work(one: Watcher) -> bool:
    windows = one.comms["rounds"].tolist()
    return len(one.ranks) == RANKS and len(windows) == RANKS and all(0 < rounds < U4 for rounds in windows)


def test_a_healthy_job_tells_the_same_rounds_on_all_ranks(watcher: Watcher) -> None:
    seen: dict[int, dict[int, int]] = {}

    def enough() -> bool:
        one = watcher.look()
        for row in one.rounds:
            rank = int(one.ranks["rank"][one.comms["rank_row"][row["comm_row"]]])
            seen.setdefault(int(row["seq"]), {})[rank] = int(row["signature"])
        return sum(len(told) == RANKS for told in seen.values()) >= 5

    eventually(enough, "rounds that all four ranks told")
    assert {len(set(told.values())) for told in seen.values()} == {1}
    assert sorted(watcher.ranks["rank"].tolist()) == list(range(RANKS))
    assert set(watcher.ranks["world_size"].tolist()) == {RANKS}
    assert len(set(watcher.comms["comm_id"].tolist())) == 1
    assert set(watcher.comms["signature"].tolist()) == set(next(iter(seen.values())).values())
    assert (watcher.comms["dur_us"] < null_of(COMM_DTYPE["dur_us"])).all()


def test_a_stopped_rank_is_the_one_behind_or_the_one_that_the_kernel_says_is_stopped(watcher: Watcher) -> None:
    pid = int(watcher.ranks["pid"][watcher.ranks["rank"] == STOPPED][0])
    os.kill(pid, signal.SIGSTOP)
    try:
        eventually(lambda: _frozen(watcher), "nobody moves")
        states = {int(row["rank"]): chr(row["process_state"]) for row in watcher.ranks}
        assert states[STOPPED] == "T"
        assert all(states[rank] in "RSD" for rank in states if rank != STOPPED)
        waiting = [watcher.comm_of(rank) for rank in range(RANKS) if rank != STOPPED]
        assert {int(row["state"]) for row in waiting} == {CommState.RUNNING}
        entered = [int(row["seq"]) for row in waiting]
        assert max(entered) - min(entered) <= 1  # its neighbour may have all it needs and be one round further
        assert all(0 <= int(row["recv"]) < U4 for row in waiting)
        age_us = int(waiting[0]["age_us"])
        rank = int(watcher.ranks["rank"][waiting[0]["rank_row"]])
        eventually(lambda: int(watcher.look().comm_of(rank)["age_us"]) > age_us + 300_000, "its age grows")
        assert int(watcher.comm_of(STOPPED)["seq"]) <= max(entered)
    finally:
        os.kill(pid, signal.SIGCONT)
    eventually(lambda: _all_at_work(watcher.look()), "it goes on")


def _frozen(watcher: Watcher) -> bool:
    before = watcher.look().comms["seq"].tolist()
    for _ in range(5):
        time.sleep(0.05)  # between two looks, as between two ticks
        if watcher.look().comms["seq"].tolist() != before or (watcher.comms["rounds"] != 0).any():
            return False
    return True
