"""RAS as a witness: for or against whom the frames name, and never more than that."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from diagnosis.contracts.gathered import (
    NOBODY_LISTENS,
    FlightFacts,
    Gathered,
    ProcessFacts,
    RasComm,
    RasDifference,
    RasFacts,
    RasProcess,
    RasRank,
    RasValue,
)
from diagnosis.contracts.report import Report
from diagnosis.contracts.verdict import Action, Culprit, EvidenceItem, Verdict
from diagnosis.engine.gathered import ANSWER_KEPT_S
from diagnosis.engine.history import JobHistory
from diagnosis.engine.live import examine
from diagnosis.engine.thresholds import Thresholds
from diagnosis.evidence.bundle import files
from diagnosis.evidence.bundle.narrow import part_of
from diagnosis.evidence.bundle.reader import read_bundle
from diagnosis.evidence.bundle.writer import write_bundle
from diagnosis.evidence.ras.answer import Answer, read_answer
from remediation.policy.guards import not_convicted
from tests.simjob import COMM_ID, SimJob

COMM = f"{COMM_ID:#x}"
RANKS = 8


class Live:
    """A job whose rank 5 does not enter, as the controller knows it."""

    def __init__(self, **hang: Any) -> None:
        self.sim = SimJob(RANKS)
        self.history = JobHistory(7, 0, Thresholds(hang_floor_s=6.0, startup_floor_s=6.0), 0.0)
        self.sim.steps(50, lambda rank, step: 40.0)
        self._observe()
        self.sim.hang(**(hang or {"absent": [5]}))
        self.sim.now_ms += 20_000
        self._observe()

    @property
    def now(self) -> float:
        return self.sim.now_ms / 1000

    def _observe(self) -> None:
        for node in self.sim.nodes:
            self.history.observe(node, "boot", self.sim.sample(node), self.now)

    def take(self, at: float | None = None, node: str = "gpu001", **kinds: Any) -> None:
        part = Gathered(job_id=7, restart=0, uid=1000, suspicion=1, **kinds)
        self.history.witnessed.take(part, node, self.now if at is None else at, self.history)

    def verdict(self) -> Verdict:
        return examine(self.history, {}, self.now).verdict

    def said(self) -> list[tuple[bool, str]]:
        return [(item.against, item.text) for item in self.verdict().evidence if item.witness == "ras"]


def value(count: int | str, *ranks: int, listed: bool = True) -> RasValue:
    named = [RasRank(rank=rank, host="10.0.0.1", pid=1000 + rank) for rank in ranks]
    return RasValue(value=count, ranks=len(ranks), listed=named if listed else [])


def facts(*values: RasValue, what: str = "AllReduce", **more: Any) -> RasFacts:
    differs = [RasDifference(what=what, values=list(values))] if values else []
    comm = {"hash": COMM, "size": RANKS, "heard": RANKS, "missing_count": 0, "alike": not values, "launched": 51}
    comm |= {"moved": False, "differs": differs} | more
    return RasFacts(state="ok", form="json", answers=2, apart_s=5.0, comms_told=1, comms=[RasComm(**comm)])  # type: ignore[arg-type]


OTHERS = tuple(rank for rank in range(RANKS) if rank != 5)


def test_who_is_behind_by_ras_too_is_confirmed() -> None:
    live = Live()
    before = live.verdict()
    live.take(ras=facts(value(51, *OTHERS), value(50, 5)))
    ((against, text),) = live.said()
    assert not against
    assert "rank 5 has launched 50 AllReduce, 7 members" in text
    after = live.verdict()
    assert (after.class_, after.culprits, after.action) == (before.class_, before.culprits, before.action)


def test_the_group_that_ras_lists_may_be_ahead() -> None:
    live = Live()
    live.take(ras=facts(value(50, *range(7), listed=False), value(51, 5)))
    ((against, text),) = live.said()
    assert against
    assert "rank 5 is ahead" in text


def test_a_silent_rank_is_confirmed_by_its_place_or_its_process() -> None:
    for silent in (
        facts(missing=[RasRank(rank=5)], missing_count=1, heard=7),
        msgspec.structs.replace(facts(), processes=[RasProcess(pid=1005, host="h")]),
    ):
        live = Live()
        live.take(ras=silent)
        assert [against for against, _ in live.said()] == [False]
        assert "rank 5" in live.said()[0][1]


def test_equal_launches_speak_against_never_entered_and_for_stopped_inside() -> None:
    live = Live()
    live.take(ras=facts())
    ((against, text),) = live.said()
    assert against
    assert "as many operations" in text
    assert live.verdict().class_ == "H1"


def test_launches_that_went_on_speak_against_a_hang() -> None:
    live = Live()
    live.take(ras=facts(moved=True))
    assert [against for against, _ in live.said()] == [True]


def test_somebody_else_who_is_behind_is_told_and_changes_nothing() -> None:
    live = Live()
    live.take(ras=facts(value(51, *(rank for rank in range(RANKS) if rank not in (2, 5))), value(50, 2), value(49, 5)))
    texts = [text for _, text in live.said()]
    assert len(texts) == 2
    assert "besides, rank 2" in texts[1]
    assert [culprit.rank for culprit in live.verdict().culprits] == [5]


@pytest.mark.parametrize(
    "told",
    [
        msgspec.structs.replace(facts(value(51, *OTHERS), value(50, 5)), answers=1),
        RasFacts(state="silent", notes=["no answer within 9 s"]),
        RasFacts(state="absent", notes=[NOBODY_LISTENS, "rank 4: NCCL_RAS_ENABLE=0"]),
        RasFacts(state="garbage", notes=["the answer is no report of RAS"]),
    ],
)
def test_an_answer_that_is_none_says_nothing_and_that_is_told(told: RasFacts) -> None:
    live = Live()
    live.take(ras=told)
    assert live.said() == []
    assert any("RAS" in line for line in live.verdict().unseen)


@pytest.mark.parametrize("notes", [[], [NOBODY_LISTENS]])
def test_a_job_that_has_no_ras_is_not_told_so(notes: list[str]) -> None:
    live = Live()
    before = live.verdict()
    live.take(ras=RasFacts(state="absent", notes=notes))
    assert live.verdict() == before


def test_without_counts_ras_says_nothing() -> None:
    live = Live()
    live.take(ras=facts(alike=None, launched=None))
    assert live.said() == []
    live = Live()
    live.take(ras=facts(alike=True, launched=0))  # a captured graph launches without being counted
    assert live.said() == []


def test_a_status_that_differs_is_no_count() -> None:
    live = Live()
    live.take(ras=facts(value("RUNNING", *OTHERS), value("INIT", 5), what="status", alike=None))
    assert live.said() == []


# -- who may say what --------------------------------------------------------------------------------------------------


def test_what_was_gathered_before_the_job_last_moved_says_nothing() -> None:
    live = Live()
    live.take(at=live.now - 30.0, ras=facts(value(51, *OTHERS), value(50, 5)))
    assert live.said() == []


def test_a_failure_does_not_replace_an_answer_until_that_is_old() -> None:
    live = Live()
    live.take(at=live.now, ras=facts(value(51, *OTHERS), value(50, 5)))
    live.take(at=live.now + 1, ras=RasFacts(state="silent"))
    assert len(live.said()) == 1
    live.take(at=live.now + 2 + ANSWER_KEPT_S, ras=RasFacts(state="silent"))
    assert live.said() == []


def test_ranks_are_placed_by_what_the_frames_told_and_not_by_what_the_node_says() -> None:
    lie = RasValue(value=50, ranks=1, listed=[RasRank(rank=5, pid=1003, world_rank=3)])
    live = Live()
    live.take(ras=facts(value(51, *OTHERS), lie))
    assert live.history.witnessed.ras is not None
    (told,) = live.history.witnessed.ras[0].comms[0].differs[0].values[1].listed
    assert told.world_rank is None  # its place says 5, its process says 3
    assert live.said() == []


def test_a_node_speaks_for_its_own_ranks_alone() -> None:
    live = Live()
    flights = [FlightFacts(world_rank=0, source="json"), FlightFacts(world_rank=5, source="json")]
    processes = [ProcessFacts(world_rank=rank, pid=1000 + rank, state="S") for rank in (0, 5, 700)]
    live.take(node="gpu001", flights=flights, processes=processes)
    assert list(live.history.witnessed.flights) == [0]
    assert list(live.history.witnessed.processes) == [0]


def test_ras_is_the_job_s_own_word_and_never_the_second_witness_of_a_drain() -> None:
    culprit = Culprit(kind="gpu", rank=5, node="gpu003", gpu=1, cause="gpu_fault", domain="hardware", confidence=0.97)
    job, ras = EvidenceItem(kind="wait_for", text="-"), EvidenceItem(kind="ras", text="-", witness="ras")
    nvml = EvidenceItem(kind="gpu_fault", text="-", witness="nvml")

    def objection(*evidence: EvidenceItem) -> str | None:
        action = Action(kind="drain", nodes=["gpu003"])
        verdict = Verdict(job_id=1, anomaly="hang", culprits=[culprit], action=action, evidence=list(evidence))
        return not_convicted(verdict, ["gpu003"])

    assert objection(job, ras) is not None
    assert objection(ras) is not None
    assert objection(ras, nvml) is None


# -- bundles -----------------------------------------------------------------------------------------------------------


def test_a_bundle_keeps_what_was_gathered_and_is_judged_alike() -> None:
    live = Live()
    live.take(
        ras=facts(value(51, *OTHERS), value(50, 5)),
        flights=[FlightFacts(world_rank=0, source="json")],
        processes=[ProcessFacts(world_rank=1, pid=1001, state="S", oom_kills=0)],
    )
    judged = examine(live.history, {}, live.now)
    assert judged.incident is not None
    content = write_bundle(judged.incident)
    assert {files.RAS, files.FLIGHTS, files.PROCESSES} <= content.keys()
    again = read_bundle((name, [data]) for name, data in content.items())
    assert again.unseen == ()
    for name in ("ras", "flights", "processes"):
        assert getattr(again, name) == getattr(judged.incident, name)
    few = part_of(again, [0], 0)
    assert ([one.world_rank for one in few.flights], few.processes) == ([0], ())


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (files.RAS, b""),
        (files.RAS, b"[]"),
        (files.RAS, b'{"state": "ok", "comms": [{"hash": 7}]}'),
        (files.RAS, msgspec.json.encode({"state": "ok", "comms": [{"hash": "0x1"}] * 1000})),
        (files.RAS, b"\xff" * 100),
        (files.FLIGHTS, b'{"world_rank": -1}\n{"world_rank": 99999999}\n[]\n{}\n'),
        (files.PROCESSES, b'{"world_rank": 3}\n{"world_rank": 1, "pid": "x"}\n\xff\n'),
        (files.PROCESSES, b'{"world_rank": 1000000, "pid": 1}\n'),
    ],
)
def test_broken_files_are_noted_and_nothing_else(name: str, content: bytes) -> None:
    incident = read_bundle([(files.JOB, [b'{"world_size": 4}']), (name, [content])])
    assert (incident.ras, incident.flights, incident.processes) == (None, (), ())
    assert incident.unseen


def test_ranks_that_the_job_does_not_have_are_nobody_in_a_bundle() -> None:
    lie = RasValue(value=1, ranks=1, listed=[RasRank(rank=0, world_rank=77)])
    told = msgspec.structs.replace(facts(lie), processes=[RasProcess(pid=1, world_rank=-3)])
    incident = read_bundle([(files.JOB, [b'{"world_size": 4}']), (files.RAS, [msgspec.json.encode(told)])])
    assert incident.ras is not None
    assert incident.ras.processes[0].world_rank is None
    assert incident.ras.comms[0].differs[0].values[0].listed[0].world_rank is None


def test_what_ras_says_of_a_whole_recorded_answer_fits_the_engine() -> None:
    ranks = [{"rank": r, "pid": 1000 + r, "collective_counts": {"AllReduce": 50 + (r != 5)}} for r in range(RANKS)]
    content = msgspec.json.encode({"communicators": [{"hash": COMM, "size": RANKS, "ranks": ranks}]})
    answer: Answer = read_answer(content)
    live = Live()
    live.take(ras=msgspec.structs.replace(answer.facts, answers=2))
    assert [against for against, _ in live.said()] == [False]


def test_an_older_report_without_parts_and_a_newer_with_them_are_both_read() -> None:
    plain = ("gpu001", "b", 1, 1, 0, 0, 1000)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plain), type=Report).gathered == []
    assert msgspec.msgpack.decode(msgspec.msgpack.encode((*plain, [], None, {}, 0, [b"x"])), type=Report).gathered == [
        b"x"
    ]
