"""When the controller asks nodes for round trips, and what becomes of the answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import msgspec
import pytest

from controller.gathered import GatheredParts
from controller.gathering import PING_AGAIN_S, PINGS_FORGET_S, PINGS_MAX, Gathering
from controller.registry import Arrived
from controller.store.base import Store
from diagnosis.contracts.control import ControlEvent, PingEvent
from diagnosis.contracts.gathered import Gathered, PingFacts, ProcessFacts
from diagnosis.contracts.verdict import Culprit, Verdict
from diagnosis.engine.history import JobHistory
from remediation.policy.rules import Policy
from tests.unit.test_control_gathered import OBSERVE, in_words
from tests.unit.test_control_loop import CULPRIT, GUILTY, JOB, World
from tests.unit.test_engine_flows import BAD, _healthy

LINK = Verdict(job_id=JOB, anomaly="hang", class_="H3", culprits=[Culprit(kind="link", node=BAD, link=f"{BAD}-fabric")])
PING = PingFacts(local="10.0.0.1", remote="10.0.0.3", sent=10, heard=0, note="No route to host")


class Daemons:
    """The control streams; `deaf` daemons do not listen."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, PingEvent]] = []
        self.deaf: set[str] = set()

    def send(self, node: str, event: ControlEvent) -> bool:
        if isinstance(event, PingEvent) and node not in self.deaf:
            self.asked.append((node, event))
        return node not in self.deaf


@pytest.fixture
def daemons() -> Daemons:
    return Daemons()


@pytest.fixture
def gathering(daemons: Daemons) -> Gathering:
    return Gathering(cast(Store, None), daemons, lambda: "abc123")  # nothing here is stored


@pytest.fixture
def history() -> JobHistory:
    return _healthy()[0]


@pytest.mark.parametrize(
    ("anomaly", "class_", "asked"),
    [
        ("hang", "H3", True),
        ("hang", None, True),
        ("slow", "S2", True),
        ("slow", "S3", True),
        ("hang", "H1", False),
        ("hang", "H2", False),
        ("slow", "S1", False),
        ("slow", None, False),
        ("none", None, False),
    ],
)
def test_only_a_suspected_path_is_pinged(
    gathering: Gathering, daemons: Daemons, history: JobHistory, anomaly: str, class_: str | None, asked: bool
) -> None:
    gathering.ping(history, msgspec.structs.replace(LINK, anomaly=anomaly, class_=class_), 100.0)
    assert bool(daemons.asked) == asked


def test_the_nodes_at_both_ends_are_asked_and_again_after_a_while_and_then_no_more(
    gathering: Gathering, daemons: Daemons, history: JobHistory
) -> None:
    gathering.ping(history, LINK, 100.0)
    first = list(daemons.asked)
    assert {node for node, _ in first} == {"gpu001", "gpu002", BAD, "gpu004"}
    assert {(event.job_id, event.restart) for _, event in first} == {(history.job_id, 0)}
    for second in range(600):
        gathering.ping(history, LINK, 100.0 + second)
    assert len(daemons.asked) == PINGS_MAX * len(first)
    gathering.ping(history, LINK, 100.0 + PINGS_MAX * PING_AGAIN_S + PINGS_FORGET_S)
    assert len(daemons.asked) == (PINGS_MAX + 1) * len(first)


def test_daemons_that_do_not_listen_are_asked_when_they_do(
    gathering: Gathering, daemons: Daemons, history: JobHistory
) -> None:
    daemons.deaf = set(history.nodes())
    gathering.ping(history, LINK, 100.0)
    daemons.deaf = set()
    gathering.ping(history, LINK, 101.0)
    assert daemons.asked


# -- answers ---------------------------------------------------------------------------------------------------------


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path, Policy.model_validate(OBSERVE))
    await made.start()
    await made.healthy()
    yield made
    await made.store.close()


async def test_a_job_that_is_slow_moves_on_and_its_pings_are_kept_all_the_same(world: World) -> None:
    world.sim.hang(absent=[CULPRIT])
    for _ in range(10):
        await world.second()
    (incident,) = await world.incidents()
    parts, attempt = GatheredParts(world.store), (JOB, 0)
    old = Gathered(
        job_id=JOB, restart=0, uid=1000, suspicion=1, pings=[PING], processes=[ProcessFacts(world_rank=0, pid=1)]
    )
    parts.hold([Arrived(attempt, GUILTY, old, 70.0), Arrived(attempt, "gpu001", old, -100.0)], {attempt})
    assert await parts.keep(attempt, incident.id, set(), 99.0, 100.0)
    assert [(row.node, row.kind) for row in await world.store.evidence(incident.id)][-1:] == [(GUILTY, "pings")]


def test_people_read_who_answered_whom() -> None:
    quick = PingFacts(local="10.0.0.1", remote="10.0.0.2", sent=10, heard=9, rtt_us=217.4)
    assert in_words(pings=[PING, quick]) == [
        "ping 10.0.0.1 to 10.0.0.3: 10 of 10 lost (No route to host)",
        "ping 10.0.0.1 to 10.0.0.2: 1 of 10 lost, 0.22 ms",
    ]
