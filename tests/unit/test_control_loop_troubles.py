"""The control loop on bad days: what was given up, a restart in the middle, a job that breaks its own diagnosis."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from controller.ended import examine_running
from diagnosis.contracts.control import Evidence
from diagnosis.contracts.report import Acknowledgement, GpuFacts, HardwareFacts, Report
from diagnosis.engine.history import JobHistory
from diagnosis.engine.live import Judged
from remediation.policy.rules import Policy
from tests.simjob import SimJob
from tests.unit.test_control_loop import CULPRIT, GUILTY, JOB, World, until_closed, world
from tests.unit.test_store import make_incident

__all__ = ["world"]


IDLE: dict[str, Any] = {"sm_clock_mhz": 345, "mem_clock_mhz": 405, "clocks_event_reasons": 0x1}
UNTOLD: dict[str, Any] = {"mem_clock_mhz": 405, "clocks_event_reasons": None}


@pytest.mark.parametrize("words", [IDLE, UNTOLD], ids=["idle", "reasons not told"])
@pytest.mark.parametrize("nodes", [{GUILTY}, {"gpu001", "gpu002", "gpu003", "gpu004"}], ids=["the culprit's", "all"])
async def test_a_gpu_without_work_that_clocks_down_is_no_broken_hardware(
    world: World, monkeypatch: pytest.MonkeyPatch, words: dict[str, Any], nodes: set[str]
) -> None:
    """A rank that sleeps instead of feeding its GPU must not get its node drained."""
    well: dict[str, Any] = {"sm_clock_mhz": 1980, "mem_clock_mhz": 2619, "clocks_event_reasons": 0}
    accept = world.registry.accept

    def with_idle_gpus(report: Report, **times: Any) -> Acknowledgement:
        values = well | (words if report.node in nodes else {})
        gpus = [GpuFacts(index, sm_clock_max_mhz=1980, mem_clock_max_mhz=2619, **values) for index in range(2)]
        return accept(msgspec.structs.replace(report, hardware=HardwareFacts("ok", gpus=gpus)), **times)

    monkeypatch.setattr(world.registry, "accept", with_idle_gpus)
    for _ in range(30):
        await world.second(slow=2.0)
    (incident,) = await world.incidents()
    assert incident.verdict.culprits[0].rank == CULPRIT and incident.verdict.action.kind != "drain"
    assert not any(view.held for view in world.slurm.nodes.values())


async def test_a_number_that_an_older_incident_has_is_not_given_out_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = iter(["a1b2c3", "a1b2c3", "d4e5f6"])
    monkeypatch.setattr("secrets.token_hex", lambda _: next(numbers))
    await world.store.add_incident(make_incident(phase="closed", closed_at=1.0))
    world.sim.hang(absent=[CULPRIT])
    while len(await world.incidents()) < 2:
        await world.second()
    assert {incident.id for incident in await world.incidents()} == {"a1b2c3", "d4e5f6"}


async def test_a_node_answers_once(world: World) -> None:
    world.sim.hang(absent=[CULPRIT])
    while not world.asked:
        await world.second()
    (_, event) = world.asked[0]
    told = Evidence(incident=event.incident, node=GUILTY, job_id=JOB, restart=0, processes=[])
    for _ in range(100):
        await world.loop.accept_evidence(told)
    while not await world.incidents():
        await world.second()
    assert len(await world.store.evidence(event.incident)) == 1


@pytest.mark.parametrize("act", ["drain", "signal", "requeue"])
async def test_what_was_abandoned_is_not_begun_again_not_even_after_a_restart(world: World, act: str) -> None:
    world.throttled = {GUILTY}
    world.slurm.failures[act] = 1_000_000
    await until_closed(world, 100)
    assert sum(name == act for name, _ in world.slurm.calls) == 3
    for _ in range(2):
        for _ in range(60):
            await world.second(slow=2.0)
        still_open, abandoned = await world.incidents()
        assert (abandoned.outcome, still_open.phase) == ("abandoned", "open")
        assert f"incident {abandoned.id} was abandoned on this attempt, a person must look" in still_open.decision
        assert sum(name == act for name, _ in world.slurm.calls) == 3
        await world.store.close()
        await world.start()


@pytest.mark.parametrize("fault", ["hang", "slow"])
async def test_a_restart_does_not_heal_a_job(world: World, fault: str) -> None:
    world.policy = Policy()
    if fault == "hang":
        world.sim.hang(absent=[CULPRIT])
    while not await world.incidents():
        await world.second(slow=2.0)
    await world.store.close()
    await world.start()
    for _ in range(50):
        await world.second(slow=2.0)
    (incident,) = await world.incidents()
    assert incident.phase == "open" and world.told == [(incident.id, "opened")]
    if fault == "hang":
        for rank in world.sim.ranks:
            rank.running, rank.seq = False, max(other.seq for other in world.sim.ranks)
            rank.done, rank.since_ms = rank.seq, world.sim.now_ms
        for _ in range(40):
            await world.second()
        assert (await world.incidents())[0].outcome == "recovered"
    world.slurm.cancel(JOB)
    await world.second()
    assert (await world.incidents())[0].phase == "closed"


async def test_a_job_that_breaks_the_engine_breaks_it_for_itself_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(history: JobHistory, *others: Any) -> Judged:
        if history.job_id == 41:
            raise ZeroDivisionError
        return examine_running(history, *others)

    world.slurm.submit("gpu007", "gpu008", job_id=41)
    other = SimJob(ranks=4, job_id=41)
    for rank in other.ranks:
        rank.node = {"gpu001": "gpu007", "gpu002": "gpu008"}[rank.node]
    world.registry.confirm(await world.slurm.snapshot())
    world.registry.accept(Report("gpu007", "b", 1, 1, 0, 0, 0, [other.sample("gpu007")]), received_at=0, age_ms=0)
    assert list(world.registry.histories) == [(JOB, 0), (41, 0)]
    world.registry.histories = dict(reversed(world.registry.histories.items()))
    monkeypatch.setattr("controller.loop.examine_running", broken)
    world.sim.hang(absent=[CULPRIT])
    for _ in range(10):
        world.sim.now_ms += 1000
        world.slurm.advance(1)
        world.report()
        await world.loop.cycle()
        assert world.loop.status().fault == "bug in tocsin, please report it: job 41: ZeroDivisionError: "
    (incident, *_) = await world.incidents()
    assert incident.job_id == JOB and incident.phase == "acting"
