"""What a verdict was given on, kept as a bundle and judged anew: the same verdict, within bounds, whatever comes."""

from __future__ import annotations

import io
import sqlite3
import tarfile
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings

from controller import captures
from controller.captures import pack, suspects_of
from controller.cli import replay as replaying
from controller.cli.replay import Replayed, chosen, judged_again, replay_lines, replayed, summed
from controller.store.base import INPUTS_BYTES_MAX, Incident
from controller.store.readonly import StateCopy
from controller.store.sqlite import SqliteStore
from diagnosis.contracts import incident as columns
from diagnosis.contracts.errors import AgentFault, OperatorFault
from diagnosis.contracts.report import GpuFacts
from diagnosis.contracts.verdict import Action, Culprit, Verdict
from diagnosis.engine.history import JobHistory
from diagnosis.engine.live import GpusOfNode, examine, incident_of
from diagnosis.engine.thresholds import Thresholds
from diagnosis.engine.verdict import judge
from diagnosis.evidence.bundle.narrow import part_of
from diagnosis.evidence.bundle.reader import read_bundle
from diagnosis.evidence.bundle.writer import write_bundle
from tests.fleet import Fault, job
from tests.incidents import incidents, plain
from tests.simjob import SimJob
from tests.unit.test_store import make_incident

LIMITS = Thresholds(hang_floor_s=6.0, startup_floor_s=30.0)
GUILTY = 5


class Watched:
    """A simulated job under watch."""

    def __init__(self) -> None:
        self.job = SimJob()
        self.history = JobHistory(self.job.job_id, 0, LIMITS, 0.0)
        self.gpus: GpusOfNode = {}
        self.run(14)

    @property
    def now(self) -> float:
        return self.job.now_ms / 1000

    def run(self, seconds: int, slow: float = 1.0) -> None:
        until = self.job.now_ms + seconds * 1000
        while self.job.now_ms < until:
            self.job.steps(18, lambda rank, step: (slow if rank == GUILTY else 1.0) * 40.0 + (rank * 7 + step) % 3)
            self.observe()

    def wait(self, seconds: int, silent: str = "") -> None:
        for _ in range(seconds):
            self.job.now_ms += 1000
            self.observe(silent)

    def observe(self, silent: str = "") -> None:
        for node in self.job.nodes:
            if node != silent:
                self.history.observe(node, "boot", self.job.sample(node), self.now)


def healthy() -> Watched:
    return Watched()


def absent() -> Watched:
    watched = Watched()
    watched.job.hang(absent=[GUILTY])
    watched.wait(8)
    return watched


def stopped_inside() -> Watched:
    watched = Watched()
    watched.job.hang(inside=[GUILTY])
    watched.wait(8)
    return watched


def unseen_while_hanging() -> Watched:
    watched = Watched()
    watched.job.hang(absent=[GUILTY])
    watched.wait(8, silent="gpu001")
    return watched


def slow_for_no_reason() -> Watched:
    watched = Watched()
    watched.run(10, slow=2.0)
    return watched


def throttled() -> Watched:
    watched = slow_for_no_reason()
    watched.gpus = {
        rank.node: {
            rank.gpu: GpuFacts(
                index=rank.gpu,
                sm_clock_mhz=990 if rank.rank == GUILTY else 1980,
                sm_clock_max_mhz=1980,
                clocks_event_reasons=0x8 if rank.rank == GUILTY else 0,
            )
            for rank in watched.job.ranks
            if rank.node == node
        }
        for node in watched.job.nodes
        for rank in watched.job.ranks
        if rank.node == node
    }
    return watched


SCENES = (healthy, absent, stopped_inside, unseen_while_hanging, slow_for_no_reason, throttled)


def packed_of(watched: Watched) -> bytes:
    inputs = incident_of(watched.history, watched.gpus, watched.now)
    return pack("incident-a1b2c3", inputs, suspects_of(judge(inputs), inputs))


@pytest.mark.parametrize("scene", SCENES)
def test_what_is_kept_of_a_watched_job_gives_the_same_verdict(scene: Callable[[], Watched]) -> None:
    watched = scene()
    judged = examine(watched.history, watched.gpus, watched.now)
    again = judged_again("a1b2c3", packed_of(watched), None)
    assert again is not None
    if scene is healthy:
        assert judged.incident is None and (again.anomaly, judged.verdict.anomaly) == ("none", "none")
        return
    assert judged.verdict.anomaly != "none"
    assert msgspec.structs.asdict(again) == msgspec.structs.asdict(judged.verdict)


def test_the_present_thresholds_count_but_not_for_when_an_incident_opens() -> None:
    production = Thresholds()
    hang = judged_again("a1b2c3", packed_of(absent()), production)
    assert hang is not None and hang.anomaly == "hang"  # 8 s are no hang to a site with a floor of 120 s
    packed = packed_of(throttled())
    convinced = judged_again("a1b2c3", packed, production)
    strict = judged_again("a1b2c3", packed, Thresholds(clock_ratio_max=0.1))
    assert convinced is not None and convinced.action.kind == "drain"
    assert strict is not None and strict.anomaly == "slow" and strict.action.kind != "drain"


def test_the_same_inputs_are_packed_into_the_same_bytes() -> None:
    watched = absent()
    assert packed_of(watched) == packed_of(watched)


@given(incidents())
@settings(max_examples=40, deadline=None)
def test_a_part_of_an_incident_is_an_incident(incident: columns.Incident) -> None:
    rows = len(incident.frames.frame)
    ranks = incident.frames.rank[incident.frames.frame]
    for rows_max in (rows, rows // 2, 0):
        part = part_of(incident, [0], rows_max)
        again = read_bundle((name, [content]) for name, content in write_bundle(part).items())
        assert plain(again) == plain(part)
        assert "too large" in part.unseen[0]
        judge(part)
        assert int((ranks == 0).sum()) <= len(part.frames.frame) <= max(rows_max, int((ranks == 0).sum()))


@pytest.mark.parametrize(("rows_max", "words"), [(6000, "15 of 1024 ranks"), (20, "1 of 1024 ranks")])
def test_a_job_that_is_too_large_is_cut_down_to_its_suspects_and_says_so(
    monkeypatch: pytest.MonkeyPatch, rows_max: int, words: str
) -> None:
    inputs = job(1024, dp=8, fault=Fault(stuck=77))
    verdict = judge(inputs)
    monkeypatch.setattr(captures, "ROWS_MAX", rows_max)
    packed = pack("x", inputs, suspects_of(verdict, inputs))
    again = judged_again("a1b2c3", packed, None)
    assert again is not None and any(words in line for line in again.unseen)
    assert [culprit.rank for culprit in verdict.culprits] == [77]
    assert [culprit.rank for culprit in again.culprits] == ([77] if words.startswith("15") else [])


def test_what_is_larger_even_so_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = job(128, dp=8)
    for name, bound in (("ROWS_MAX", 1), ("UNPACKED_BYTES_MAX", 100), ("INPUTS_BYTES_MAX", 100)):
        with monkeypatch.context() as patched:
            patched.setattr(captures, name, bound)
            with pytest.raises(AgentFault) as refused:
                pack("x", inputs, [0])
            assert refused.value.reason == "limits"


def test_suspects_are_the_culprits_or_who_runs_on_their_nodes_or_the_first() -> None:
    inputs = job(128, dp=8)
    on_node = Verdict(job_id=1, anomaly="slow", culprits=[Culprit(kind="node", node="gpu000001")])
    assert suspects_of(on_node, inputs) == list(range(8, 16))
    assert suspects_of(Verdict(job_id=1, anomaly="hang", culprits=[Culprit(kind="rank", rank=7)]), inputs) == [7]
    assert suspects_of(Verdict(job_id=1, anomaly="hang"), inputs) == list(range(8))


@pytest.mark.parametrize("packed", [b"", b"no archive", b"\x28\xb5\x2f\xfd garbage", b"\x1f\x8b\x00"])
def test_garbage_is_judged_to_be_nothing(packed: bytes) -> None:
    assert judged_again("a1b2c3", packed, None) is None


def test_an_archive_that_unpacks_without_end_or_leads_out_is_left_alone() -> None:
    zeros = zstandard.ZstdCompressor().compress(b"{" + b" " * (80 << 20))
    assert judged_again("a1b2c3", zeros, None) is None
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        member = tarfile.TarInfo("../../job.json")
        member.size = 2
        archive.addfile(member, io.BytesIO(b"{}"))
    assert judged_again("a1b2c3", zstandard.ZstdCompressor().compress(out.getvalue()), None) is None


def test_hostile_words_of_processes_thresholds_and_the_unseen_are_noted_or_cut() -> None:
    health = [
        b'{"source":"process","rank":1,"state":"T","node":null}',
        b'{"source":"process","rank":-1,"state":"T"}',
        b'{"source":"process","rank":0,"state":"stopped"}',
        b'{"source":"process","rank":0,"state":7}',
        b'{"source":"process","rank":99,"state":"X"}',
    ]
    told = (
        b'{"world_size":2,"thresholds":{"hang_floor_s":9,"hang_factor":-1,"noise_factor":null,"x":"y","z":1},'
        b'"unseen":["' + b"x" * 1000 + b'",5,null,"a"]}'
    )
    incident = read_bundle([("job.json", [told]), ("health.jsonl", [b"\n".join(health)])])
    assert incident.process_state == {1: "T"}
    assert incident.thresholds == {"hang_floor_s": 9.0, "z": 1.0}
    assert Thresholds.told(incident.thresholds) == Thresholds(hang_floor_s=9.0)
    assert incident.unseen[:3] == ("x" * 300, "5", "a")
    assert sum("process" in line for line in incident.unseen) == 4 and any("threshold" in x for x in incident.unseen)


async def opened(directory: Path) -> SqliteStore:
    return await SqliteStore.open(directory / "state.db")


async def test_the_newest_inputs_are_kept_and_forgotten_with_the_evidence(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    for number, closed_at in (("a1b2c3", 100.0), ("a1b2c4", 300.0)):
        await store.add_incident(make_incident(number, phase="closed", closed_at=closed_at))
        await store.keep_inputs(number, b"first", 1.0)
        await store.keep_inputs(number, b"second", 2.0)
    assert await store.inputs("a1b2c3") == b"second" and await store.inputs("ffffff") is None
    with pytest.raises(AgentFault, match="no incident ffffff"):
        await store.keep_inputs("ffffff", b"", 1.0)
    with pytest.raises(AgentFault, match="at most"):
        await store.keep_inputs("a1b2c3", bytes(INPUTS_BYTES_MAX + 1), 1.0)
    await store.prune(evidence_before=200.0, incidents_before=0.0)
    assert await store.inputs("a1b2c3") is None and await store.inputs("a1b2c4") == b"second"
    assert {incident.id for incident in await store.incidents(9)} == {"a1b2c3", "a1b2c4"}
    await store.prune(evidence_before=400.0, incidents_before=400.0)
    assert await store.inputs("a1b2c4") is None
    await store.close()


def state_of_the_first_version(path: Path) -> None:
    script = (resources.files("controller.store") / "migrations" / "0001_first.sql").read_text()
    with sqlite3.connect(path) as old:
        old.executescript(script + "\nPRAGMA user_version = 1;")
        fields = msgspec.structs.asdict(make_incident()) | {"timeline": []}
        old.execute("INSERT INTO incident VALUES ('a1b2c3', 10.0, NULL, 'open', ?)", (msgspec.json.encode(fields),))
    old.close()


async def test_a_state_from_before_inputs_were_kept_is_brought_up_to_date_or_read_as_it_is(tmp_path: Path) -> None:
    state_of_the_first_version(tmp_path / "state.db")
    with StateCopy(tmp_path / "state.db") as copy:
        assert [incident.id for incident in copy.incidents(5)] == ["a1b2c3"] and copy.inputs("a1b2c3") is None
    store = await opened(tmp_path)
    await store.keep_inputs("a1b2c3", b"inputs", 1.0)
    assert await store.inputs("a1b2c3") == b"inputs"
    await store.close()


async def test_a_state_is_read_while_a_controller_works_on_it_and_a_copy_is_left_as_it_is(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await store.add_incident(make_incident())
    await store.keep_inputs("a1b2c3", b"inputs", 1.0)
    with StateCopy(tmp_path / "state.db") as copy:  # what was written is still in the log
        assert copy.inputs("a1b2c3") == b"inputs"
        await store.add_incident(make_incident("a1b2c4", opened_at=20.0))
        assert [incident.id for incident in copy.incidents(5)] == ["a1b2c4", "a1b2c3"]
        found = copy.incident("a1b2c4")
        assert found is not None and found.opened_at == 20.0 and copy.incident("ffffff") is None
    await store.close()
    (tmp_path / "copy").mkdir()
    place = tmp_path / "copy" / "state.db"
    place.write_bytes((tmp_path / "state.db").read_bytes())
    before = place.read_bytes()
    (tmp_path / "copy").chmod(0o555)
    with StateCopy(place) as copy:
        assert len(copy.incidents(5)) == 2
    assert place.read_bytes() == before and [path.name for path in place.parent.iterdir()] == ["state.db"]
    (tmp_path / "copy").chmod(0o755)


@pytest.mark.parametrize("content", [b"", b"noise" * 1000, b"SQLite format 3\0" + b"\xff" * 5000])
def test_what_is_no_state_file_is_said_to_be_none(tmp_path: Path, content: bytes) -> None:
    place = tmp_path / "a?mode=rwc&x#y.db"  # a name is no part of an address
    place.write_bytes(content)
    with pytest.raises(OperatorFault, match="no state file"), StateCopy(place) as copy:
        copy.incidents(1)
    with pytest.raises(OperatorFault, match="no such file"):
        StateCopy(tmp_path / "absent.db")
    assert [path.name for path in tmp_path.iterdir()] == [place.name] and place.read_bytes() == content


class Remembered:
    """A source in memory."""

    def __init__(self, *known: tuple[Incident, bytes | None]) -> None:
        self.known = {incident.id: (incident, packed) for incident, packed in known}

    def incidents(self, limit: int) -> list[Incident]:
        return [incident for incident, _ in self.known.values()][:limit]

    def incident(self, number: str) -> Incident | None:
        return self.known[number][0] if number in self.known else None

    def inputs(self, number: str) -> bytes | None:
        return self.known[number][1]


def test_old_and_new_are_compared_matter_by_matter() -> None:
    watched = throttled()
    verdict = examine(watched.history, watched.gpus, watched.now).verdict
    packed = packed_of(watched)
    weaker = msgspec.structs.replace(
        verdict,
        class_="S2",
        summary="other words\x1b[2J",
        action=Action(kind="notify", collect="logs"),
        culprits=[msgspec.structs.replace(verdict.culprits[0], cause="unknown", domain="unknown", confidence=0.1)],
    )
    reworded = msgspec.structs.replace(verdict, summary="other words", evidence=[])
    source = Remembered(
        (make_incident("000001", verdict=verdict, opened_at=50.0), packed),
        (make_incident("000002", verdict=weaker, opened_at=40.0), packed),
        (make_incident("000003", verdict=reworded, opened_at=30.0), packed),
        (make_incident("000004", opened_at=20.0), None),
        (make_incident("000005", opened_at=10.0), b"garbage"),
    )
    done = list(replayed(source, chosen(source, [], None), None))
    assert [one.changed for one in done] == [[], ["class", "causes", "confidence", "action"], [], [], []]
    assert [bool(one.note) for one in done] == [False, False, False, True, True]
    total = summed(done)
    assert (total.same, total.changed, total.not_judged, total.all_same) == (2, 1, 2, False)
    lines = list(replay_lines(done[1]))
    assert "CHANGED: class, causes, confidence, action" in lines[0]
    assert any(line.split() == ["*", "class", "S2", "S1"] for line in lines)
    assert any(line.split() == ["anomaly", "slow", "slow"] for line in lines)
    assert [line.count("\n") for one in done for line in replay_lines(one)].count(0) == 4 + len(lines)
    assert [number for number, _ in chosen(source, [], 30.0)] == ["000001", "000002", "000003"]


def test_all_is_the_same_only_if_something_was_judged_and_everything_is_known() -> None:
    same = Replayed(incident="000001", old=Verdict(job_id=1, anomaly="slow"), new=Verdict(job_id=1, anomaly="slow"))
    absent_inputs = msgspec.structs.replace(same, new=None, note="not kept")
    unknown = Replayed(incident="ffffff", note="no such incident")
    assert summed([]).all_same and summed([same]).all_same and summed([same, absent_inputs]).all_same
    assert not summed([absent_inputs]).all_same and not summed([same, unknown]).all_same
    assert replaying.sum_line(summed([])) == "no incidents"


def test_an_incident_that_nobody_knows_is_told() -> None:
    (one,) = replayed(Remembered(), chosen(Remembered(), ["ffffff", "ffffff"], None), None)
    assert (one.incident, one.old, one.note) == ("ffffff", None, "no such incident")
    assert list(replay_lines(one)) == ["ffffff  NOT JUDGED: no such incident"]


def test_unknown_stays_unknown_in_what_is_kept() -> None:
    inputs = incident_of(absent().history, {}, absent().now)
    again = read_bundle((name, [content]) for name, content in write_bundle(inputs).items())
    assert np.isnan(again.frames.gap_ms).all() and np.isnan(inputs.frames.gap_ms).all()
