"""Pings on suspicion: which paths are asked for, and that they confirm or qualify a verdict and never make one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from diagnosis.contracts.control import PAIRS_MAX
from diagnosis.contracts.gathered import Gathered, PingFacts
from diagnosis.contracts.incident import Probe
from diagnosis.contracts.verdict import EvidenceItem, Verdict, says_the_same
from diagnosis.engine.history import JobHistory
from diagnosis.engine.live import diagnose, examine, incident_of
from diagnosis.engine.probes import OTHERS_MAX, SUSPECTED_MAX, pairs_to_ping
from diagnosis.engine.verdict import judge
from diagnosis.evidence.bundle.reader import read_bundle
from diagnosis.evidence.bundle.writer import write_bundle
from tests.unit.test_engine_flows import BAD, _hang, _healthy, _links, _run

Answer = Callable[[str, str], PingFacts]
LINK = f"{BAD}-fabric"


def _pass(local: str, remote: str, rtt_us: float = 200.0) -> PingFacts:
    return PingFacts(local=local, remote=remote, sent=10, heard=10, rtt_us=rtt_us)


def _die(local: str, remote: str) -> PingFacts:
    return PingFacts(local=local, remote=remote, sent=10, heard=0, note="No route to host")


def _through(history: JobHistory, answer: Answer, elsewhere: Answer = _pass) -> Answer:
    """Pings that touch the bad node answer in one way, all the others in another."""
    node_of = history.network.node_of

    def answered(local: str, remote: str) -> PingFacts:
        return (answer if BAD in (node_of[local], node_of[remote]) else elsewhere)(local, remote)

    return answered


def _ping(history: JobHistory, answer: Answer, at: float, silent: frozenset[str] = frozenset()) -> None:
    """The daemons answer what the controller would ask for."""
    for node, pairs in pairs_to_ping(history.network, {BAD}).items():
        if node not in silent:
            pings = [answer(*pair) for pair in pairs]
            part = Gathered(job_id=history.job_id, restart=0, uid=1, suspicion=1, pings=pings)
            history.witnessed.take(part, node, at, history)


def _said(verdict: Verdict) -> list[EvidenceItem]:
    return [item for item in verdict.evidence if item.witness == "probe"]


def _cut(silent: frozenset[str] = frozenset()) -> tuple[JobHistory, Verdict, float]:
    history, wires = _healthy()
    wires.cut.add(BAD)
    verdict = _hang(history, wires, silent)
    return history, verdict, wires.job.now_ms / 1000


@pytest.mark.parametrize("silent", [frozenset[str](), frozenset({BAD})], ids=["heard", "cut off from us too"])
def test_pings_that_die_where_connections_are_dead_and_pass_elsewhere_make_it_surer(silent: frozenset[str]) -> None:
    history, before, now = _cut(silent)
    _ping(history, _through(history, _die), now - 1, silent)
    verdict = diagnose(history, {}, now)
    (item,) = _said(verdict)
    assert not item.against and "die as well" in item.text and "elsewhere they pass" in item.text
    assert _links(verdict) == _links(before) == [(LINK, BAD, "link_fault")]
    assert verdict.culprits[0].confidence > before.culprits[0].confidence
    assert says_the_same(verdict, before)


@pytest.mark.parametrize("elsewhere", ["die", "unasked"])
def test_where_no_ping_is_answered_at_all_silence_counts_for_nothing(elsewhere: str) -> None:
    history, before, now = _cut()
    _ping(history, _die, now - 1)
    if elsewhere == "unasked":
        node_of = history.network.node_of
        history.witnessed.pings = {
            path: told for path, told in history.witnessed.pings.items() if BAD in (node_of[path[0]], node_of[path[1]])
        }
    verdict = diagnose(history, {}, now)
    (item,) = _said(verdict)
    assert "may be that none are answered" in item.text
    assert verdict.culprits == before.culprits


def test_pings_that_pass_where_connections_are_dead_say_what_that_means_and_acquit_nobody() -> None:
    history, before, now = _cut()
    _ping(history, _pass, now - 1)
    verdict = diagnose(history, {}, now)
    (item,) = _said(verdict)
    assert item.against and "the job's own packets" in item.text
    assert (verdict.culprits, verdict.action) == (before.culprits, before.action)


def test_some_dead_paths_of_several_are_told_as_such() -> None:
    history, before, now = _cut()
    answers = iter([_die, _pass] * 100)
    _ping(history, _through(history, lambda *pair: next(answers)(*pair)), now - 1)
    (item,) = _said(diagnose(history, {}, now))
    assert not item.against and " paths (" in item.text
    assert diagnose(history, {}, now).culprits == before.culprits


def test_pings_from_before_the_standstill_are_not_of_it() -> None:
    history, _, now = _cut()
    _ping(history, _through(history, _die), now - 60)
    assert _said(diagnose(history, {}, now)) == []


def test_a_hang_that_names_nothing_is_told_what_pings_say_and_still_names_nothing() -> None:
    history, wires = _healthy()
    assert _hang(history, wires).culprits == []
    now = wires.job.now_ms / 1000
    _ping(history, _through(history, _die), now - 1)
    verdict = diagnose(history, {}, now)
    (item,) = _said(verdict)
    assert f"between gpu002 and {BAD}" in item.text and "pass on" in item.text
    assert (verdict.culprits, verdict.action.kind) == ([], "collect")
    _ping(history, _pass, now)
    (item,) = _said(diagnose(history, {}, now))
    assert item.against and "pass on all" in item.text


@pytest.mark.parametrize(
    ("answer", "against", "words"),
    [
        (lambda local, remote: _pass(local, remote, 12_000.0), False, "are slow too"),
        (
            lambda local, remote: PingFacts(local=local, remote=remote, sent=10, heard=7, rtt_us=210.0),
            False,
            "are lost",
        ),
        (_pass, True, "do not show it"),
        (lambda local, remote: PingFacts(local=local, remote=remote, note="Operation not permitted"), None, ""),
    ],
    ids=["slow", "lossy", "quick", "not sent"],
)
def test_pings_over_a_slow_path_confirm_it_or_leave_it_open(answer: Answer, against: bool | None, words: str) -> None:
    history, wires = _healthy()
    wires.slow[BAD] = 12_000
    now = _run(history, wires, 20, transfer_ms=60.0)
    before = diagnose(history, {}, now)
    _ping(history, _through(history, answer), now - 30)
    verdict = diagnose(history, {}, now)
    assert (verdict.class_, _links(verdict)) == ("S2", [(LINK, BAD, "link_fault")])
    assert [(item.against, words in item.text) for item in _said(verdict)] == (
        [] if against is None else [(against, True)]
    )
    assert (verdict.culprits, verdict.action) == (before.culprits, before.action)


def test_a_node_pings_for_itself_alone() -> None:
    history, _, now = _cut()
    stranger = Gathered(job_id=1, restart=0, uid=1, suspicion=1, pings=[_die("10.0.0.1", "10.0.0.2")])
    history.witnessed.take(stranger, "gpu004", now, history)
    assert history.witnessed.pings == {}


def test_a_capture_keeps_pings_and_its_verdict_says_the_same() -> None:
    history, _, now = _cut()
    _ping(history, _through(history, _die), now - 1)
    incident = examine(history, {}, now).incident
    assert incident is not None and incident.fabric is not None and incident.fabric.probes
    back = read_bundle((name, [content]) for name, content in write_bundle(incident).items())
    assert back.fabric is not None
    for told, kept in zip(incident.fabric.probes, back.fabric.probes, strict=True):
        assert (told.src, told.dst, told.sent, told.path) == (kept.src, kept.dst, kept.sent, kept.path)
        np.testing.assert_allclose([told.loss, told.rtt_us], [kept.loss, kept.rtt_us])
    assert [item.text for item in _said(judge(back))] == [item.text for item in _said(judge(incident))]


def test_pings_alone_make_no_flow() -> None:
    history, wires = _healthy()
    now = wires.job.now_ms / 1000
    flows = incident_of(history, {}, now).fabric
    _ping(history, _die, now)
    fabric = incident_of(history, {}, now).fabric
    assert flows is not None and fabric is not None and fabric.probes
    assert (fabric.links, len(fabric.gbps)) == (flows.links, len(flows.gbps))


# -- which paths -----------------------------------------------------------------------------------------------------


def test_dead_paths_and_those_of_suspected_nodes_are_asked_for_both_ways_and_some_others() -> None:
    history, wires = _healthy(16, 1)
    wires.cut.add(BAD)
    _hang(history, wires)
    asked = pairs_to_ping(history.network, {"gpu010"})
    node_of = history.network.node_of
    pairs = {(node_of[local], node_of[remote]) for of_node in asked.values() for local, remote in of_node}
    assert all(node_of[local] == node for node, of_node in asked.items() for local, _ in of_node)
    assert pairs == {(remote, local) for local, remote in pairs}
    near = {pair for pair in pairs if {BAD, "gpu010"} & set(pair)}
    assert near >= {("gpu002", BAD), (BAD, "gpu004"), ("gpu009", "gpu010"), ("gpu010", "gpu011")}
    assert len(pairs - near) == 2 * OTHERS_MAX


def test_however_many_paths_a_job_has_few_are_pinged() -> None:
    history, wires = _healthy(64, 1)
    asked = pairs_to_ping(history.network, set(wires.job.nodes))
    assert sum(map(len, asked.values())) <= 2 * (SUSPECTED_MAX + OTHERS_MAX)
    assert max(map(len, asked.values())) <= PAIRS_MAX


def test_a_job_without_connections_has_no_path_to_ping() -> None:
    history, wires = _healthy()
    history.network.ends.clear()
    assert pairs_to_ping(history.network, set(wires.job.nodes)) == {}


def test_a_path_without_flows_counts_by_its_nodes_and_not_as_one_elsewhere() -> None:
    history, _, now = _cut()
    _ping(history, _through(history, _die), now - 1)
    incident = examine(history, {}, now).incident
    assert incident is not None and incident.fabric is not None
    idle = Probe(src=0, dst=4, sent=10, loss=1.0, rtt_us=np.nan)  # from gpu001 to the bad node
    fabric = replace(incident.fabric, probes=(*incident.fabric.probes, idle))
    (item,) = _said(judge(replace(incident, fabric=fabric)))
    assert "elsewhere they pass (0 of" in item.text
