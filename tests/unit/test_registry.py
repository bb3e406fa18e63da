"""Who is believed about which job, and how much is kept of what jobs write."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from controller.registry import MEMBERSHIPS_PER_RANK_MAX, Registry
from diagnosis.contracts import report as wire
from diagnosis.contracts.columns import pack
from diagnosis.contracts.report import JobSample, Report
from diagnosis.engine.live import diagnose
from diagnosis.engine.thresholds import Thresholds
from remediation.policy.world import JobView, NodeView, World

NOW = 1_000_000.0
OWNER, STRANGER = 1000, 1001
JOB = JobView(42, "T0", "RUNNING", nodes=("gpu001",), restarts=0, uid=OWNER)
COMMS = 16


class Node:
    """One node's daemon, a report a second."""

    def __init__(self) -> None:
        self.registry = Registry(Thresholds())
        self.look()
        self.sample = 0

    def look(self, job: JobView | None = JOB) -> None:
        nodes = {"gpu001": NodeView("gpu001", frozenset({"MIXED"}))}
        self.registry.confirm(World(NOW, nodes, {42: job} if job else {}))

    def report(self, *samples: JobSample) -> None:
        self.sample += 1
        report = Report("gpu001", "boot", 1, self.sample, 0, 0, 1000, list(samples))
        self.registry.accept(report, received_at=NOW + self.sample, age_ms=0)


def told(ranks: int = 8, *, uid: int = OWNER, job_id: int = 42, **columns: Any) -> JobSample:
    """Each rank in COMMS communicators. `columns` replace columns of either table."""
    rank = np.zeros(ranks, wire.RANK_DTYPE)
    rank["rank"], rank["world_size"], rank["process_state"] = np.arange(ranks), ranks, ord("S")
    comm = np.zeros(ranks * COMMS, wire.COMM_DTYPE)
    comm["rank_row"] = np.arange(len(comm)) // COMMS
    comm["comm_id"], comm["comm_size"] = 1 + np.arange(len(comm)) % COMMS, ranks
    comm["comm_rank"] = rank["rank"][comm["rank_row"]]
    for name, values in columns.items():
        table = rank if name in (wire.RANK_DTYPE.names or ()) else comm
        table[name] = values
    return JobSample(job_id, 0, uid, pack(rank), pack(comm), pack(np.zeros(0, wire.ROUND_DTYPE)))


def test_only_the_jobs_own_user_says_that_its_processes_still_live() -> None:
    node = Node()
    node.report(told(), told(uid=STRANGER))
    assert node.registry.ranks_gone("gpu001", (42, 0), NOW + 1) is False
    node.report(told(uid=STRANGER))
    assert node.registry.ranks_gone("gpu001", (42, 0), NOW + 2) is True
    node.look(None)  # Slurm has forgotten whose job it was
    assert node.registry.ranks_gone("gpu001", (42, 0), NOW + 2) is False


def test_slurm_is_asked_once_about_a_job_that_it_does_not_know() -> None:
    node = Node()
    node.report(told(job_id=77))
    assert node.registry.unconfirmed == {(77, 0)}
    node.look()
    node.report(told(job_id=77), told(job_id=78))
    assert node.registry.unconfirmed == {(78, 0)}


@pytest.mark.parametrize("world", [1 << 20, 2**31 - 1])
def test_a_world_that_the_jobs_nodes_cannot_hold_is_not_believed(world: int) -> None:
    node = Node()
    node.report(told(world_size=world), told(comm_size=world))
    history = node.registry.histories[(42, 0)]
    assert (history.world_size, len(history.ranks), history.comms) == (8, 8, {})
    assert diagnose(history, {}, NOW + 10_000).anomaly == "none"


def test_communicators_that_have_ended_make_room_for_new_ones() -> None:
    node = Node()
    for number in range(1, 4 * MEMBERSHIPS_PER_RANK_MAX):
        node.report(told(comm_id=number * 1000 + np.arange(8 * COMMS) % COMMS))
        node.look()
        history = node.registry.histories[(42, 0)]
        assert number * 1000 in history.comms
        assert sum(len(comm.members) for comm in history.comms.values()) <= 8 * MEMBERSHIPS_PER_RANK_MAX


def test_a_job_that_makes_up_places_without_end_is_watched_anew() -> None:
    node = Node()
    kept = []
    for number in range(2 * MEMBERSHIPS_PER_RANK_MAX // COMMS):
        place = (8 * number + np.repeat(np.arange(8), COMMS)) % 256
        node.report(told(comm_size=256, comm_rank=place))
        comms = node.registry.histories[(42, 0)].comms.values()
        kept.append(sum(len(comm.members) for comm in comms))
        node.look()
    assert max(kept) <= 8 * MEMBERSHIPS_PER_RANK_MAX + 8 * COMMS
    assert kept.count(8 * COMMS) == 2  # it began twice
