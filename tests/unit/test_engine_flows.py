"""What kernels tell of the network convicts a path and nobody else: dead connections (H3), round trips, losses (S2)."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest

from diagnosis.contracts import report as wire
from diagnosis.contracts.columns import empty, pack
from diagnosis.contracts.report import NetworkFacts, NicFacts
from diagnosis.contracts.topology import Topology, joined
from diagnosis.contracts.verdict import Verdict
from diagnosis.engine.flows import NetworkHistory
from diagnosis.engine.history import JobHistory
from diagnosis.engine.live import diagnose, incident_of
from diagnosis.engine.thresholds import Thresholds
from diagnosis.evidence.bundle.reader import read_bundle
from diagnosis.evidence.bundle.writer import write_bundle
from remediation.policy.guards import not_convicted
from tests.simjob import SimJob

LIMITS = Thresholds(hang_floor_s=6.0, startup_floor_s=30.0)
HEALTHY_US, BUSY_BYTES = 400, 10_000_000
BAD = "gpu003"


@dataclass
class Wires:
    """The sockets of a job whose ranks form a ring. `slow`, `lossy`, `cut`: by node, what is wrong with its link;
    `cut_between`: two nodes with data under way between them that is lost."""

    job: SimJob
    slow: dict[str, int] = field(default_factory=dict)
    lossy: set[str] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)
    cut_between: set[str] = field(default_factory=set)
    busy: bool = True
    window_closed: bool = False
    busy_us: dict[frozenset[str], int] = field(default_factory=dict)
    nics: Mapping[str, NicFacts] = field(default_factory=dict)
    state: str = "ok"

    def facts(self, node: str) -> tuple[wire.JobSample, NetworkFacts]:
        """What the daemon of `node` says."""
        ranks = self.job.ranks
        addresses = {name: f"10.0.0.{number}" for number, name in enumerate(self.job.nodes, 1)}
        order = list(addresses)
        rows = []
        here = [rank for rank in ranks if rank.node == node]
        for row, rank in enumerate(here):
            for step, ports in ((1, (1000 + rank.rank, 2000)), (-1, (2000, 1000 + (rank.rank - 1) % len(ranks)))):
                peer = ranks[(rank.rank + step) % len(ranks)]
                rows.append((row, order.index(node), ports[0], order.index(peer.node), ports[1], {node, peer.node}))
        table = empty(wire.FLOW_DTYPE, len(rows))
        for at, (row, local, local_port, remote, remote_port, touched) in enumerate(rows):
            dead = bool(touched & self.cut or touched == self.cut_between) and len(touched) == 2
            told = {"rank_row": row, "local": local, "local_port": local_port, "remote": remote}
            told |= {"remote_port": remote_port, "rtt_us": max([HEALTHY_US, *(self.slow.get(n, 0) for n in touched)])}
            moved = BUSY_BYTES if self.busy and not dead else 0
            told |= {"acked_bytes": moved, "received_bytes": moved, "segments": 1000 if moved else 0}
            told |= {"resent": 40 if touched & self.lossy and len(touched) == 2 else 0, "unacked": 3 if dead else 0}
            late = touched & (self.lossy | self.slow.keys()) and len(touched) == 2
            busy_us = self.busy_us.get(frozenset(touched), 700_000 if late else 100_000)
            told |= {"busy_us": busy_us if moved else 0}
            told |= {"queued_bytes": 0, "backoff": 4 if dead else 0, "ack_age_ms": 5000 if dead else 10, "probes": 0}
            if self.window_closed and not moved:  # data waits for the receiver, which is asked ever more rarely
                told |= {"queued_bytes": 600_000, "unacked": 0, "backoff": 4}
                told |= {"probes": 3 if dead else 0, "ack_age_ms": 5000 if dead else 2600}
            for name, value in told.items():
                table[at][name] = value
        sample = msgspec.structs.replace(self.job.sample(node), flows=pack(table))
        nic = self.nics.get(node, NicFacts("eth0", True, 100.0))
        texts = list(addresses.values())
        nic_of = ["eth0" if name == node else "" for name in addresses]
        return sample, NetworkFacts(self.state, "", 0, 1000, texts, nic_of, [nic])


def _observe(history: JobHistory, wires: Wires, silent: frozenset[str] = frozenset()) -> float:
    now = wires.job.now_ms / 1000
    for node in wires.job.nodes:
        if node not in silent:
            sample, network = wires.facts(node)
            history.observe(node, "boot", sample, now, network)
    return now


def _run(history: JobHistory, wires: Wires, seconds: int, transfer_ms: float = 10.0) -> float:
    dice = random.Random(1)
    until = wires.job.now_ms + seconds * 1000
    now = 0.0
    while wires.job.now_ms < until:
        wires.job.steps(18, lambda rank, step: 40.0 + dice.uniform(-2, 2), transfer_ms)
        now = _observe(history, wires)
    return now


def _healthy(ranks: int = 8, per_node: int = 2, topology: Topology | None = None) -> tuple[JobHistory, Wires]:
    job = SimJob(ranks, per_node)
    history = JobHistory(job.job_id, job.restart, LIMITS, 0.0, topology=topology or Topology())
    wires = Wires(job)
    _run(history, wires, 16)
    return history, wires


def _hang(history: JobHistory, wires: Wires, silent: frozenset[str] = frozenset()) -> Verdict:
    wires.job.hang()
    wires.busy = False
    for _ in range(10):
        wires.job.now_ms += 1000
        now = _observe(history, wires, silent)
    return diagnose(history, {}, now)


def _links(verdict: Verdict) -> list[tuple[str | None, str | None, str]]:
    return [(culprit.link, culprit.node, culprit.cause) for culprit in verdict.culprits]


@pytest.mark.parametrize(("ranks", "per_node"), [(8, 2), (4, 1)])
@pytest.mark.parametrize("silent", [frozenset[str](), frozenset({BAD})], ids=["black hole", "cable"])
def test_dead_connections_of_one_node_name_its_link_and_drain_nothing(
    ranks: int, per_node: int, silent: frozenset[str]
) -> None:
    history, wires = _healthy(ranks, per_node)
    wires.cut.add(BAD)
    verdict = _hang(history, wires, silent)
    assert (verdict.anomaly, verdict.class_, _links(verdict)) == (
        "hang",
        "H3",
        [(f"{BAD}-fabric", BAD, "link_fault")],
    )
    assert (verdict.action.kind, verdict.action.nodes, verdict.action.exclude) == ("requeue", [], [BAD])
    assert verdict.action.flag == "fabric"


def test_a_silent_node_at_the_one_dead_connection_is_guilty_for_nobody_tells_of_its_others() -> None:
    history, wires = _healthy(4, 1)
    wires.cut_between = {"gpu002", BAD}
    verdict = _hang(history, wires, frozenset({BAD}))
    assert (verdict.class_, _links(verdict)) == ("H3", [(f"{BAD}-fabric", BAD, "link_fault")])


def test_one_dead_connection_between_nodes_that_are_heard_names_the_path_and_neither_end() -> None:
    history, wires = _healthy(4, 1)
    wires.cut_between = {"gpu002", BAD}
    verdict = _hang(history, wires)
    assert (verdict.class_, _links(verdict)) == ("H3", [(f"gpu002-{BAD}", None, "link_fault")])
    assert verdict.culprits[0].rank is None and verdict.culprits[0].confidence < 0.6
    assert (verdict.action.kind, verdict.action.exclude, verdict.action.flag) == ("notify", [], "fabric")
    assert any(item.witness == "network" for item in verdict.evidence)


def test_connections_whose_receiver_is_asked_in_vain_whether_it_takes_more_are_dead() -> None:
    history, wires = _healthy()
    wires.cut.add(BAD)
    wires.window_closed = True
    assert _links(_hang(history, wires)) == [(f"{BAD}-fabric", BAD, "link_fault")]


@pytest.mark.parametrize("window_closed", [False, True], ids=["window open", "window closed"])
def test_a_stopped_receiver_is_no_dead_connection(window_closed: bool) -> None:
    history, wires = _healthy()
    wires.window_closed = window_closed
    verdict = _hang(history, wires)
    assert verdict.culprits == [] and verdict.class_ is None, "all connections live: nobody is named"
    assert history.network.fabric(Topology(), wires.job.now_ms / 1000, 5.0) is not None


@pytest.mark.parametrize("busy_us", [400_000, 650_000], ids=["half as late", "as late, with short round trips"])
def test_an_innocent_flow_that_waits_in_a_slow_ring_makes_no_second_culprit(busy_us: int) -> None:
    history, wires = _healthy(4, 1)
    wires.slow[BAD] = 12_000
    wires.busy_us[frozenset({"gpu001", "gpu002"})] = busy_us
    now = _run(history, wires, 12, transfer_ms=60.0)
    assert _links(diagnose(history, {}, now)) == [(f"{BAD}-fabric", BAD, "link_fault")]


def test_two_narrow_links_are_both_named() -> None:
    history, wires = _healthy(8, 1)
    wires.slow |= {"gpu003": 12_000, "gpu006": 12_000}
    now = _run(history, wires, 12, transfer_ms=60.0)
    named = {node for _, node, _ in _links(diagnose(history, {}, now))}
    assert named == {"gpu003", "gpu006"}


@pytest.mark.parametrize(("ranks", "per_node"), [(8, 2), (4, 1)])
def test_round_trips_that_grew_name_the_link_that_slowed_the_transfers(ranks: int, per_node: int) -> None:
    history, wires = _healthy(ranks, per_node)
    wires.slow[BAD] = 12_000
    verdict = diagnose(history, {}, _run(history, wires, 20, transfer_ms=60.0))
    assert (verdict.anomaly, verdict.class_) == ("slow", "S2")
    assert _links(verdict) == [(f"{BAD}-fabric", BAD, "link_fault")]
    assert (verdict.action.kind, verdict.action.exclude, verdict.action.flag) == ("requeue", [BAD], "fabric")
    assert not_convicted(verdict, [BAD]) is None, "the kernel bears witness beside the job"
    alone = msgspec.structs.replace(verdict, evidence=[one for one in verdict.evidence if one.witness == "job"])
    assert not_convicted(alone, [BAD]) is not None
    draining = msgspec.structs.replace(verdict.action, kind="drain", nodes=[BAD])
    assert not_convicted(msgspec.structs.replace(verdict, action=draining), [BAD]) is not None


def test_losses_name_the_link_too() -> None:
    history, wires = _healthy()
    wires.lossy.add(BAD)
    verdict = diagnose(history, {}, _run(history, wires, 20, transfer_ms=60.0))
    assert (verdict.class_, _links(verdict)) == ("S2", [(f"{BAD}-fabric", BAD, "link_fault")])
    assert any("sent again" in item.text for item in verdict.evidence)


def test_round_trips_that_are_what_they_were_name_nobody() -> None:
    history, wires = _healthy()
    verdict = diagnose(history, {}, _run(history, wires, 20, transfer_ms=60.0))
    assert (verdict.class_, verdict.culprits, verdict.action.kind) == ("S2", [], "collect")


def test_a_path_that_was_always_long_is_not_blamed() -> None:
    job = SimJob()
    history, wires = JobHistory(job.job_id, 0, LIMITS, 0.0), Wires(job, slow={BAD: 12_000})
    _run(history, wires, 16)
    verdict = diagnose(history, {}, _run(history, wires, 20, transfer_ms=60.0))
    assert verdict.culprits == []


def test_two_nodes_have_one_path_and_neither_is_blamed_for_it() -> None:
    history, wires = _healthy(4, 2)
    wires.cut.add("gpu002")
    fabric_before = history.network.fabric(Topology(), wires.job.now_ms / 1000, 5.0)
    assert fabric_before is not None and fabric_before.links == ("gpu001-gpu002",)
    verdict = _hang(history, wires)
    assert all(culprit.node is None for culprit in verdict.culprits)
    assert verdict.action.exclude == []


def test_a_slow_switch_of_the_topology_is_named_and_not_the_nodes_below_it() -> None:
    above = {f"gpu{number:03d}": f"leaf{(number - 1) // 2}" for number in range(1, 9)}
    topology = Topology(joined((above | {f"leaf{number}": "spine" for number in range(4)}).items()))
    history, wires = _healthy(8, 1, topology)
    fabric = history.network.fabric(topology, wires.job.now_ms / 1000, 5.0)
    assert fabric is not None and {"gpu001-leaf0", "leaf0-spine"} <= set(fabric.links)
    lengths = set(np.diff(fabric.path_start).tolist())
    assert lengths == {2, 4}, "within a leaf, and across the spine"


def test_what_a_daemon_could_not_read_is_no_fact() -> None:
    job = SimJob()
    history, wires = JobHistory(job.job_id, 0, LIMITS, 0.0), Wires(job, state="error")
    _observe(history, wires)
    assert history.network == NetworkHistory()


def test_stale_words_are_left_out() -> None:
    history, wires = _healthy()
    later = wires.job.now_ms / 1000 + 60
    assert history.network.fabric(Topology(), later, 5.0) is None
    assert history.network.ports(wires.job.nodes, later, 5.0) is None


def test_a_port_that_was_never_up_has_no_state_and_one_that_fell_is_down() -> None:
    history, wires = _healthy()
    wires.nics = {BAD: NicFacts("eth0", False, 100.0), "gpu001": NicFacts("spare", False)}
    wires.job.now_ms += 1000
    now = _observe(history, wires)
    table = history.network.ports(wires.job.nodes, now, 5.0)
    assert table is not None
    told = dict(zip(zip(table.node.tolist(), table.entity, strict=True), table.values["link"], strict=True))
    assert told[(wires.job.nodes.index(BAD), "eth0")] == 0.0
    assert np.isnan(told[(0, "spare")])


def test_counters_of_ports_tell_what_was_added() -> None:
    history, wires = _healthy()
    for errors in (1000, 1007):
        wires.nics = {node: NicFacts("eth0", True, 100.0, symbol_errors=errors) for node in wires.job.nodes}
        wires.job.now_ms += 130_000 if errors == 1000 else 1000
        now = _observe(history, wires)
    table = history.network.ports(wires.job.nodes, now, 5.0)
    assert table is not None and set(table.values["symbol_errors"]) == {7.0}


def test_a_capture_keeps_flows_and_ports() -> None:
    history, wires = _healthy()
    wires.lossy.add(BAD)
    now = _run(history, wires, 20, transfer_ms=60.0)
    incident = incident_of(history, {}, now)
    back = read_bundle((name, [content]) for name, content in write_bundle(incident).items())
    assert incident.fabric is not None and back.fabric is not None and back.ib is not None
    assert back.fabric.links == incident.fabric.links
    np.testing.assert_allclose(back.fabric.resent, incident.fabric.resent)
    assert back.job.nic_of_gpu == {0: "eth0", 1: "eth0"}
