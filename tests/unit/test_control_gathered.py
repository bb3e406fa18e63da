"""What nodes gather on suspicion, from the report into the incident, its verdict and its bundle."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import msgspec
import pytest

from controller import gathered
from controller.gathered import GatheredParts, kinds_of
from controller.gathered_words import lines_of
from controller.registry import Arrived
from controller.store.sqlite import SqliteStore
from diagnosis.contracts.gathered import (
    FlightFacts,
    FlightGroup,
    Gathered,
    ProcessFacts,
    RasComm,
    RasDifference,
    RasFacts,
    RasProcess,
    RasRank,
    RasValue,
    pack,
)
from diagnosis.contracts.report import Report
from diagnosis.contracts.verdict import EvidenceItem
from remediation.policy.rules import Policy
from tests.simjob import COMM_ID
from tests.unit.test_control_loop import CULPRIT, GUILTY, JOB, World

OBSERVE = {"mode": "observe", "hang": {"dwell_s": 0.0}}
OTHERS = [rank for rank in range(8) if rank != CULPRIT]
RAS = RasFacts(
    state="ok",
    form="json",
    answers=2,
    apart_s=5.0,
    comms_told=1,
    comms=[
        RasComm(
            hash=f"{COMM_ID:#x}",
            size=8,
            heard=8,
            missing_count=0,
            alike=False,
            launched=9,
            moved=False,
            differs=[
                RasDifference(
                    what="AllReduce",
                    values=[
                        RasValue(value=9, ranks=7, listed=[RasRank(rank=rank, pid=1000 + rank) for rank in OTHERS]),
                        RasValue(value=8, ranks=1, listed=[RasRank(rank=CULPRIT, pid=1000 + CULPRIT)]),
                    ],
                )
            ],
        )
    ],
)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path, Policy.model_validate(OBSERVE))
    await made.start()
    await made.healthy()
    yield made
    await made.store.close()


def part(*, uid: int = 1000, age_ms: int = 0, **kinds: object) -> bytes:
    whole = {"job_id": JOB, "restart": 0, "uid": uid, "suspicion": 1, "age_ms": age_ms, **kinds}
    return pack(Gathered(**whole))  # type: ignore[arg-type]


def send(world: World, node: str, *parts: bytes) -> None:
    """A report of the node with nothing but these parts, after those of the world."""
    world.sample += 1
    report = Report(node, "boot", 1, world.sample, 0, 0, 1000, [world.sim.sample(node)], gathered=list(parts))
    world.registry.accept(report, received_at=world.slurm.now, age_ms=0)


async def seconds(world: World, count: int) -> None:
    for _ in range(count):
        await world.second()


async def kinds(world: World) -> list[tuple[str, str]]:
    (incident,) = await world.incidents()
    return [(row.node, row.kind) for row in await world.store.evidence(incident.id)]


def said(evidence: Iterable[EvidenceItem]) -> list[str]:
    return [item.text for item in evidence if item.witness == "ras"]


async def test_evidence_that_came_before_the_incident_is_kept_with_it_and_cited(world: World) -> None:
    world.sim.hang(absent=[CULPRIT])
    await seconds(world, 3)
    send(world, "gpu001", part(ras=RAS), part(processes=[ProcessFacts(world_rank=0, pid=1000, state="S")]))
    assert await world.incidents() == []
    await seconds(world, 6)
    (incident,) = await world.incidents()
    assert (incident.verdict.class_, [one.rank for one in incident.verdict.culprits]) == ("H1", [CULPRIT])
    assert len(said(incident.verdict.evidence)) == 1
    assert await kinds(world) == [("gpu001", "ras"), ("gpu001", "liveness")]
    (row, _) = await world.store.evidence(incident.id)
    assert msgspec.json.decode(row.payload)["ras"]["answers"] == 2


async def test_evidence_that_comes_later_joins_an_open_incident_and_its_bundle(world: World) -> None:
    world.sim.hang(absent=[CULPRIT])
    await seconds(world, 10)
    (before,) = await world.incidents()
    assert said(before.verdict.evidence) == []
    kept = await world.store.inputs(before.id)
    send(world, GUILTY, part(ras=RAS, age_ms=500))
    await seconds(world, 1)
    (incident,) = await world.incidents()
    assert len(said(incident.verdict.evidence)) == 1
    assert (incident.verdict.culprits, incident.verdict.action) == (before.verdict.culprits, before.verdict.action)
    assert await world.store.inputs(incident.id) != kept
    assert await kinds(world) == [(GUILTY, "ras")]


async def test_a_hang_is_decided_without_waiting_for_any_of_it(world: World) -> None:
    world.sim.hang(absent=[CULPRIT])
    await seconds(world, 10)
    (incident,) = await world.incidents()
    assert [one.rank for one in incident.verdict.culprits] == [CULPRIT]
    assert await kinds(world) == []


async def test_what_was_gathered_in_an_earlier_standstill_is_not_of_this_one(world: World) -> None:
    send(world, "gpu001", part(ras=RAS))
    await seconds(world, 5)
    world.sim.hang(absent=[CULPRIT])
    await seconds(world, 10)
    (incident,) = await world.incidents()
    assert (said(incident.verdict.evidence), await kinds(world)) == ([], [])


@pytest.mark.parametrize("fault", ["uid", "node", "job"])
async def test_only_a_node_of_the_job_and_its_owner_s_directory_speak_of_it(world: World, fault: str) -> None:
    world.sim.hang(absent=[CULPRIT])
    await seconds(world, 3)
    raw = part(uid=1001 if fault == "uid" else 1000, ras=RAS)
    if fault == "job":
        raw = pack(Gathered(job_id=JOB + 1, restart=0, uid=1000, suspicion=1, ras=RAS))
    send(world, "gpu007" if fault == "node" else "gpu001", raw)
    await seconds(world, 7)
    (incident,) = await world.incidents()
    assert (said(incident.verdict.evidence), await kinds(world)) == ([], [])


async def test_parts_that_are_not_understood_cost_nothing_but_themselves(world: World) -> None:
    world.sim.hang(absent=[CULPRIT])
    await seconds(world, 3)
    newer = msgspec.msgpack.encode((2, {"ras": "in other words"}))
    send(world, "gpu001", newer, b"\xff", b"", part(ras=RAS))
    await seconds(world, 7)
    (incident,) = await world.incidents()
    assert len(said(incident.verdict.evidence)) == 1


async def test_one_node_without_suspects_is_asked_to_ask_ras_and_all_suspected_ones_to_gather(world: World) -> None:
    world.sim.hang(absent=[CULPRIT])
    await seconds(world, 6)
    assert [(node, event.ras) for node, event in world.gathers] == [(GUILTY, False), ("gpu001", True)]
    assert {(event.job_id, event.restart) for _, event in world.gathers} == {(JOB, 0)}


async def test_ras_is_not_asked_for_where_its_answer_is_here(world: World) -> None:
    world.sim.hang(absent=[CULPRIT])
    await seconds(world, 1)
    send(world, "gpu001", part(ras=RAS))
    await seconds(world, 6)
    assert [(node, event.ras) for node, event in world.gathers] == [(GUILTY, False)]


async def test_of_many_nodes_ras_and_the_suspects_have_room_first(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.sim.hang(absent=[CULPRIT])
    await seconds(world, 10)
    (incident,) = await world.incidents()
    monkeypatch.setattr(gathered, "ROWS_MAX", 5)
    parts = GatheredParts(world.store)
    attempt = (JOB, 0)
    flights = [FlightFacts(world_rank=0, source="json")]
    whole = Gathered(job_id=JOB, restart=0, uid=1000, suspicion=1, flights=flights)
    arrived = [Arrived(attempt, f"n{number}", whole, 100.0) for number in range(50)]
    arrived += [
        Arrived(attempt, GUILTY, whole, 100.0),
        Arrived(attempt, "n7", msgspec.structs.replace(whole, ras=RAS), 100.0),
    ]
    parts.hold(arrived, {attempt})
    assert await parts.keep(attempt, incident.id, {GUILTY}, 50.0, 101.0)
    rows = [(row.node, row.kind) for row in await world.store.evidence(incident.id)]
    assert rows[:2] == [("n7", "ras"), (GUILTY, "flights")]
    assert len(rows) == 5
    parts.hold(arrived, {attempt})
    assert not await parts.keep(attempt, incident.id, set(), 50.0, 102.0)


async def test_what_is_held_is_bounded_and_forgotten_with_its_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathered, "HELD_BYTES_MAX", 10_000)
    store = await SqliteStore.open(tmp_path / "other.db")
    parts = GatheredParts(store)
    whole = Gathered(job_id=JOB, restart=0, uid=1, suspicion=1, flights=[FlightFacts(world_rank=0, notes=["n" * 900])])
    parts.hold((Arrived((JOB, 0), "n", whole, 1.0) for _ in range(100)), {(JOB, 0)})
    held = parts._held[JOB, 0]
    assert held.size_bytes == sum(len(piece.payload) for piece in held.others) <= 10_000
    parts.hold([], set())
    assert parts._held == {}
    await store.close()


# -- in words ----------------------------------------------------------------------------------------------------------


def in_words(**kinds: object) -> list[str]:
    part = Gathered(job_id=JOB, restart=0, uid=1, suspicion=1, **kinds)  # type: ignore[arg-type]
    return [line for _, payload in kinds_of(part) for line in lines_of(payload)]


def test_people_read_what_ras_says() -> None:
    known = [RasRank(rank=2, pid=7, world_rank=10)]
    values = [RasValue(value=9, ranks=70), RasValue(value=8, ranks=1, listed=known)]
    comm = RasComm(
        hash="0xabc",
        size=72,
        heard=71,
        missing=[RasRank(rank=3, world_rank=11)],
        missing_count=1,
        launched=9,
        differs=[RasDifference(what="AllReduce", values=values)],
    )
    silent = [RasProcess(pid=77, host="10.0.0.1"), RasProcess(pid=78, dead=True, world_rank=4)]
    ras = RasFacts(
        state="ok", answers=2, apart_s=5.0, nccl_version="2.30.7", comms=[comm], processes=silent, notes=["x"]
    )
    assert in_words(ras=ras) == [
        "NCCL's RAS is ok (NCCL 2.30.7, asked twice, 5 s apart)",
        "process 77 (on 10.0.0.1) does not answer",
        "process 78 (rank 4) is considered dead",
        "communicator 0xabc: 71 of 72 ranks answer, missing: rank 11, up to 9 launched",
        "  AllReduce: 9 by 70 ranks; 8 by rank 10",
        "x",
    ]


def test_people_read_how_processes_ended_and_where_recorders_stand() -> None:
    processes = [
        ProcessFacts(world_rank=1, pid=5, state="S", wchan="futex_wait"),
        ProcessFacts(world_rank=2, pid=6, state="Z", signal=9, oom_kills=1, cgroup="memory/job_7"),
        ProcessFacts(world_rank=3, pid=7, state="X", pid_reused=True, notes=["n"]),
        ProcessFacts(world_rank=4, pid=8, exit_code=3),
    ]
    assert in_words(processes=processes) == [
        "rank 1, pid 5, state S; waits in futex_wait",
        "rank 2, pid 6, state Z; ended by signal 9; the kernel has killed 1 processes of memory/job_7 for memory",
        "rank 3, pid 7, state X; its number belongs to another process now; n",
        "rank 4, pid 8, state not known; ended with code 3",
    ]
    group = FlightGroup(group="0", kind="default_pg", ended=5, stands_at=6, operation="all_reduce")
    flights = [FlightFacts(world_rank=0, source="json", groups=[group]), FlightFacts(world_rank=1, notes=["none"])]
    assert in_words(flights=flights) == [
        "rank 0, group 0 default_pg: newest ended 5, stands at 6 (all_reduce) (json)",
        "rank 1: no flight recorder (none)",
    ]


@pytest.mark.parametrize("payload", [b"", b"[]", b"{", b'{"ras": 7}', b"\xff"])
def test_what_is_none_of_it_has_no_words(payload: bytes) -> None:
    assert lines_of(payload) == []


def test_words_are_bounded() -> None:
    flights = [FlightFacts(world_rank=rank, notes=["n" * 5000]) for rank in range(256)]
    lines = in_words(flights=flights)
    assert (len(lines), max(map(len, lines))) == (64, 400)
