"""The control loop over an in-memory Slurm: from reports to a job that runs elsewhere, on a clock of the test's own."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from controller.control.pause import Pause
from controller.loop import ControlLoop
from controller.registry import Registry
from controller.settings import Settings
from controller.store.base import Incident
from controller.store.sqlite import SqliteStore
from diagnosis.contracts.control import (
    ArmEvent,
    CollectEvent,
    ControlEvent,
    Evidence,
    GatherEvent,
    HelloEvent,
    PingEvent,
    ProcessEvidence,
)
from diagnosis.contracts.errors import AgentFault
from diagnosis.contracts.report import GpuFacts, HardwareFacts, Report
from diagnosis.engine.thresholds import Thresholds
from remediation.backends.fake import FakeSlurm
from remediation.policy.rules import Policy
from tests.simjob import SimJob

CULPRIT, GUILTY = 5, "gpu003"
JOB = 42
LIMITS = Thresholds(hang_floor_s=6.0, startup_floor_s=30.0)
ACT = {
    "mode": "act",
    "budget": {"nodes_held_pct_max": 25.0},
    "hang": {"dwell_s": 0.0},
    "slow": {"dwell_s": 0.0, "checkpoint_signal": "USR1", "checkpoint_grace_s": 2.0, "restart_cost_s": 60.0},
}


class World:
    """Everything around the loop: Slurm, the job's ranks, the daemons' reports, the chat."""

    def __init__(self, directory: Path, policy: Policy) -> None:
        self.directory = directory
        self.policy = policy
        self.slurm = FakeSlurm(8)
        self.slurm.submit("gpu001", "gpu002", "gpu003", "gpu004", job_id=JOB)
        self.pause = Pause(directory)
        self.told: list[tuple[str, str]] = []
        self.asked: list[tuple[str, CollectEvent]] = []
        self.gathers: list[tuple[str, GatherEvent]] = []
        self.armed: list[tuple[str, ArmEvent]] = []
        self.pinged: list[tuple[str, PingEvent]] = []
        self.throttled: set[str] = set()
        self.unheard: set[str] = set()
        self.sample = 0
        self.ticks = itertools.count()
        self.sim = SimJob(job_id=JOB)
        self.offset_s = self.slurm.now - self.sim.now_ms / 1000

    async def start(self) -> None:
        """(Re)start the controller on the state that is on disk."""
        self.store = await SqliteStore.open(self.directory / "state.db")
        self.registry = Registry(LIMITS)
        self.loop = ControlLoop(
            store=self.store,
            registry=self.registry,
            backend=self.slurm,
            channels=self,
            pause=self.pause,
            notifier=self,
            policy_source=lambda: self.policy,
            settings=Settings(),
            clock=lambda: self.slurm.now + next(self.ticks) * 1e-6,  # time passes within a cycle too
        )

    async def tell(self, incident: Incident, change: str, at: float) -> None:
        """The chat."""
        if (incident.id, change) not in self.told:
            self.told.append((incident.id, change))

    def send(self, node: str, event: ControlEvent) -> bool:
        """The control streams."""
        assert not isinstance(event, HelloEvent)
        if isinstance(event, GatherEvent):
            self.gathers.append((node, event))
        elif isinstance(event, ArmEvent):
            self.armed.append((node, event))
        elif isinstance(event, PingEvent):
            self.pinged.append((node, event))
        else:
            self.asked.append((node, event))
        return True

    def report(self) -> None:
        """Every daemon reports what its ranks and GPUs say now."""
        self.sample += 1
        for node in (name for name in self.sim.nodes if name not in self.unheard):
            clock = 1080 if node in self.throttled else 1980
            gpus = [
                GpuFacts(
                    index=gpu,
                    sm_clock_mhz=clock if gpu == 1 else 1980,
                    sm_clock_max_mhz=1980,
                    clocks_event_reasons=0x8 if node in self.throttled and gpu == 1 else 0,
                )
                for gpu in range(2)
            ]
            report = Report(
                node=node,
                boot_id="boot",
                epoch=1,
                sample=self.sample,
                mono_ms=0,
                wall_ms=0,
                window_ms=1000,
                jobs=[self.sim.sample(node)],
                hardware=HardwareFacts("ok", gpus=gpus),
            )
            self.registry.accept(report, received_at=self.slurm.now, age_ms=0)

    async def second(self, slow: float = 1.0) -> None:
        """One second: the ranks step (the culprit `slow` times slower), daemons report, the loop runs once."""
        if any(rank.running for rank in self.sim.ranks):
            self.sim.now_ms += 1000
        else:
            until = self.sim.now_ms + 1000
            while self.sim.now_ms < until:
                self.sim.steps(1, lambda rank, step: 40.0 * (slow if rank == CULPRIT else 1.0) + (rank * 7 + step) % 3)
        self.slurm.advance(self.sim.now_ms / 1000 + self.offset_s - self.slurm.now)
        self.follow_slurm()
        self.report()
        await self.loop.cycle()
        assert self.loop.status().fault is None

    def follow_slurm(self) -> None:
        """When Slurm has started the job anew, the ranks are new processes on the new nodes."""
        view = self.slurm.jobs[JOB].view
        if view.state != "RUNNING" or view.restarts == self.sim.restart:
            return
        now_ms = self.sim.now_ms
        self.sim = SimJob(job_id=JOB, restart=view.restarts or 0)
        self.sim.now_ms = now_ms
        for rank in self.sim.ranks:
            rank.node, rank.since_ms = view.nodes[rank.rank // 2], now_ms

    async def healthy(self) -> None:
        """Long enough for a baseline."""
        for _ in range(16):
            await self.second()

    async def incidents(self) -> list[Incident]:
        """Newest first."""
        return await self.store.incidents(10)

    async def acts(self) -> list[tuple[str, str]]:
        """The ledger of the newest incident, as (kind, target) of what succeeded."""
        (newest, *_) = await self.incidents()
        return [(act.kind, act.target) for act in await self.store.acts(newest.id) if act.outcome == "ok"]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path, Policy.model_validate(ACT))
    await made.start()
    await made.healthy()
    yield made
    await made.store.close()


async def until_closed(world: World, seconds: int = 40, slow: float = 2.0) -> Incident:
    for _ in range(seconds):
        await world.second(slow)
        found = await world.incidents()
        if found and found[0].phase == "closed":
            return found[0]
    raise AssertionError((await world.incidents())[0].timeline)


async def test_nothing_happens_to_a_healthy_job(world: World) -> None:
    for _ in range(30):
        await world.second()
    assert await world.incidents() == [] and world.told == [] and world.asked == []


async def test_a_daemon_that_stops_reporting_is_called_silent(world: World) -> None:
    def silent() -> set[str]:
        return {node.node for node in world.registry.node_status(world.slurm.now) if node.silent}

    assert silent() == set() and world.loop.status().nodes_known == 8
    world.unheard = {"gpu002"}
    for _ in range(7):
        await world.second()
    assert silent() == {"gpu002"}


async def test_a_throttled_gpu_is_drained_and_the_job_runs_elsewhere(world: World) -> None:
    world.throttled = {GUILTY}
    incident = await until_closed(world)
    assert incident.outcome == "resolved", incident.outcome_text
    assert [name for name, view in world.slurm.nodes.items() if view.held] == [GUILTY]
    assert world.slurm.nodes[GUILTY].reason.startswith(f"tocsin:{incident.id}:gpu_clock_throttle:GPU1:drain ")
    assert await world.acts() == [
        ("drain", GUILTY),
        ("signal", str(JOB)),
        ("requeue", str(JOB)),
        ("set_exclude", str(JOB)),
        ("start_in", str(JOB)),
    ]
    view = world.slurm.jobs[JOB].view
    assert (view.state, view.restarts) == ("RUNNING", 1) and GUILTY not in view.nodes
    assert world.told == [(incident.id, "opened"), (incident.id, "closed")]
    assert incident.timeline == sorted(incident.timeline, key=lambda line: line[0])


async def test_a_fault_that_lasts_is_logged_once_a_minute_and_its_end_once(world: World) -> None:
    world.slurm.failures = {"snapshot": 125}
    with capture_logs() as logs:
        for _ in range(130):
            world.slurm.now += 1.0
            await world.loop.cycle()
    events = [entry["event"] for entry in logs]
    assert events.count("cycle failed") == 3 and events.count("cycle succeeds again") == 1


async def test_the_nodes_of_a_slow_job_are_asked_to_let_its_probes_tell_more(world: World) -> None:
    for _ in range(20):
        await world.second()
    assert world.armed == []
    for _ in range(40):
        await world.second(slow=2.0)
    asked = [node for node, _ in world.armed]
    assert sorted(asked[:4]) == world.sim.nodes and len(asked) == 4
    assert world.armed[0][1] == ArmEvent(job_id=JOB, restart=0)


async def test_a_slow_rank_without_a_second_witness_is_named_and_nothing_is_done(world: World) -> None:
    for _ in range(20):
        await world.second(slow=2.0)
    (incident,) = await world.incidents()
    assert incident.verdict.culprits[0].rank == CULPRIT
    assert incident.phase == "open" and incident.case is None
    assert world.told == [(incident.id, "opened")]
    assert [name for name, _ in world.slurm.calls if name != "snapshot"] == []


async def test_the_second_witness_may_come_later(world: World) -> None:
    for _ in range(8):
        await world.second(slow=2.0)
    assert (await world.incidents())[0].phase == "open"
    world.throttled = {GUILTY}
    assert (await until_closed(world)).outcome == "resolved"


async def test_a_hang_is_requeued_away_with_its_evidence_kept_and_nothing_drained(world: World) -> None:
    world.sim.hang(absent=[CULPRIT])
    for _ in range(4):
        await world.second()
    (asked,) = world.asked
    assert asked[0] == GUILTY and asked[1].ranks == [CULPRIT]
    evidence = Evidence(
        incident=asked[1].incident,
        node=GUILTY,
        job_id=JOB,
        restart=0,
        processes=[ProcessEvidence(rank=CULPRIT, pid=1005, state="T")],
    )
    await world.loop.accept_evidence(evidence)
    incident = await until_closed(world)
    assert incident.id == asked[1].incident
    assert incident.outcome == "resolved", incident.outcome_text
    assert [row.node for row in await world.store.evidence(incident.id)] == [GUILTY]
    assert not any(view.held for view in world.slurm.nodes.values())
    view = world.slurm.jobs[JOB].view
    assert view.exclude == (GUILTY,) and GUILTY not in view.nodes and not view.held


async def test_an_act_waits_for_evidence_that_was_asked_for_but_not_for_ever(world: World) -> None:
    world.sim.hang(absent=[CULPRIT])
    for _ in range(7):
        await world.second()
    (incident,) = await world.incidents()
    assert incident.phase == "acting" and await world.acts() == []
    assert (await until_closed(world)).outcome == "resolved"


async def test_evidence_that_nobody_asked_for_is_refused(world: World) -> None:
    with pytest.raises(AgentFault):
        await world.loop.accept_evidence(Evidence(incident="abcdef", node=GUILTY, job_id=JOB, restart=0, processes=[]))


async def test_nothing_is_done_while_paused_and_all_of_it_after_resuming(world: World) -> None:
    world.pause.pause("root", "maintenance", world.slurm.now)
    world.throttled = {GUILTY}
    for _ in range(15):
        await world.second(slow=2.0)
    assert [name for name, _ in world.slurm.calls if name != "snapshot"] == []
    assert "paused" in (await world.incidents())[0].decision
    world.pause.resume()
    assert (await until_closed(world)).outcome == "resolved"


async def test_observing_says_what_would_be_done_and_does_nothing(tmp_path: Path) -> None:
    world = World(tmp_path, Policy())
    await world.start()
    await world.healthy()
    world.throttled = {GUILTY}
    for _ in range(15):
        await world.second(slow=2.0)
    (incident,) = await world.incidents()
    assert f"would drain {GUILTY}" in incident.decision
    assert [name for name, _ in world.slurm.calls if name != "snapshot"] == []
    await world.store.close()


class Killed(BaseException):
    """Stands for kill -9: nothing in the product catches it."""


class MortalSlurm(FakeSlurm):
    """Slurm whose caller dies at the `dies_at`-th act, before Slurm has obeyed or `after_effect`."""

    dies_at: int | None = None
    after_effect = False
    acted = 0

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ACTS:
            return found

        async def act(*args: Any, **kwargs: Any) -> None:
            self.acted += 1
            dies = self.acted == self.dies_at
            if dies and not self.after_effect:
                raise Killed
            await found(*args, **kwargs)
            if dies:
                raise Killed

        return act


ACTS = frozenset({"drain", "requeue", "set_exclude", "start_in", "release", "signal"})


@pytest.mark.parametrize("after_effect", [False, True])
@pytest.mark.parametrize(("fault", "count"), [("slow", 5), ("hang", 4)])
async def test_dying_at_any_act_ends_the_same_with_each_act_once(
    tmp_path: Path, fault: str, count: int, after_effect: bool
) -> None:
    for dies_at in range(1, count + 1):
        directory = tmp_path / str(dies_at)
        directory.mkdir()
        world = World(directory, Policy.model_validate(ACT))
        slurm = MortalSlurm(8)
        slurm.jobs, slurm.dies_at, slurm.after_effect = world.slurm.jobs, dies_at, after_effect
        world.slurm = slurm
        await world.start()
        await world.healthy()
        world.throttled = {GUILTY} if fault == "slow" else set()
        if fault == "hang":
            world.sim.hang(absent=[CULPRIT])
        incident = await _until_closed_in_spite_of_death(world)
        assert incident.outcome == "resolved", incident.timeline
        effects = [name for name, _ in slurm.calls if name in ACTS]
        assert sorted(effects) == sorted(set(effects)), f"died at act {dies_at}: {effects}"
        lost = ["signal"] if fault == "slow" and dies_at == 2 and not after_effect else []
        assert len(effects) == count - len(lost), "only a signal, which leaves no trace in Slurm, may be lost"
        assert world.told == [(incident.id, "opened"), (incident.id, "closed")]
        await world.store.close()


async def _until_closed_in_spite_of_death(world: World) -> Incident:
    for _ in range(80):
        found = await world.incidents()
        if found and found[0].phase == "closed":
            return found[0]
        try:
            await world.second(slow=2.0)
        except Killed:
            await world.store.close()
            await world.start()
    raise AssertionError((await world.incidents())[0].timeline)


async def test_a_silent_slurm_means_nothing_is_done_and_the_status_says_so(world: World) -> None:
    world.throttled = {GUILTY}
    world.slurm.failures["snapshot"] = 1000
    world.sim.steps(20, lambda rank, step: 80.0 if rank == CULPRIT else 40.0)
    world.slurm.advance(10)
    await world.loop.cycle()
    fault = world.loop.status().fault
    assert fault is not None and "Slurm" in fault
    assert await world.incidents() == []


async def test_a_bug_in_one_cycle_is_told_and_the_next_cycle_runs(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("controller.loop.examine_running", lambda *_: 1 / 0)
        await world.loop.cycle()
        fault = world.loop.status().fault
        assert fault is not None and "bug in tocsin" in fault
    await world.second()
    assert world.loop.status().fault is None
