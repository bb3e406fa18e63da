"""`tocsin drill`: a bundle without its truth, the truth beside it, and a fair word on the verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from controller.cli.drill import Exam, exam_lines, same_anomaly, same_culprits
from controller.cli.main import ExitCode, app
from diagnosis.contracts.verdict import Culprit, Verdict
from diagnosis.drill import Drill, Limits, draw, files, kinds
from tests.grading import grade


def drill(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["drill", *arguments])


def test_a_drill_is_written_judged_and_told(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "down"
    result = drill("gpu_clock_throttle", "--seed", "7", "--effect", "30", "--fidelity", "full", "--out", str(out))
    assert result.exit_code == ExitCode.OK, result.output
    expected = Drill(7, "gpu_clock_throttle", Limits(effect=0.3, fidelity="full"))
    assert {path.name: path.read_bytes() for path in (out / "bundle").iterdir()} == files(expected)
    assert sorted(path.name for path in out.iterdir()) == ["bundle", "truth.json"]
    assert json.loads((out / "truth.json").read_bytes()) == {
        "kind": "gpu_clock_throttle",
        "seed": 7,
        **expected.truth,
    }
    lines = result.output.splitlines()
    assert lines[0] == "drill gpu_clock_throttle, seed 7" and lines[-1] == "same culprits: yes"
    rank = expected.truth["ranks"][0]
    assert any(line.split()[:3] == ["culprits", "rank", str(rank)] for line in lines)


def test_as_json_the_exam_has_truth_and_verdict(tmp_path: Path) -> None:
    result = drill("process_stuck", "--seed", "3", "--out", str(tmp_path / "d"), "--json")
    exam = msgspec.json.decode(result.output, type=Exam)
    assert (exam.schema, exam.kind, exam.seed) == ("tocsin.drill/1", "process_stuck", 3)
    assert exam.verdict is not None and exam.verdict.anomaly == exam.truth["anomaly"] == "hang"
    assert exam.same_culprits and exam.same_anomaly and exam.false_drains == [] and result.exit_code == ExitCode.OK


def test_without_judging_there_is_no_verdict(tmp_path: Path) -> None:
    result = drill("healthy", "--seed", "3", "--no-judge", "--json", "--out", str(tmp_path / "d"))
    assert result.exit_code == ExitCode.OK and json.loads(result.output)["verdict"] is None
    told = drill("healthy", "--seed", "3", "--no-judge", "--out", str(tmp_path / "e"))
    assert len(told.output.splitlines()) == 2


def test_what_is_not_told_is_drawn_and_the_directory_is_named_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = drill("--seed", "11", "--no-judge", "--json")
    assert json.loads(told.output)["kind"] == draw(11).kind
    assert (tmp_path / f"drill-{draw(11).kind}-11" / "truth.json").is_file()
    drawn = json.loads(drill("healthy", "--no-judge", "--json").output)
    assert (tmp_path / f"drill-healthy-{drawn['seed']}" / "bundle" / "job.json").is_file()


def test_all_kinds_are_listed() -> None:
    assert tuple(drill("--list").output.splitlines()) == kinds()
    assert tuple(json.loads(drill("--list", "--json").output)) == kinds()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nonsense",), "no drill is called 'nonsense'"),
        (("healthy", "--fidelity", "half"), "full or nccl"),
        (("healthy", "--seed", str(1 << 63)), "seed"),
        (("healthy", "--effect", "1"), "effect"),
        (("healthy", "--noise", "nan"), "noise"),
        (("healthy", "--missing", "51"), "missing"),
        (("healthy", "--seed", "-1"), "seed"),
    ],
)
def test_what_cannot_be_drilled_is_wrong_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = drill(*arguments)
    assert result.exit_code == ExitCode.USAGE and words in result.output and list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep")
    result = drill("healthy", "--seed", "3", "--no-judge", "--out", str(tmp_path))
    assert result.exit_code == ExitCode.USAGE and "nothing is overwritten" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    result = drill("healthy", "--seed", "3", "--no-judge", "--out", str(tmp_path / "mine" / "below"))
    assert result.exit_code == ExitCode.USAGE and "Not a directory" in result.output


def verdict(*culprits: Culprit, anomaly: str = "slow", class_: str | None = "S1") -> Verdict:
    return Verdict(job_id=1, anomaly=anomaly, class_=class_, culprits=list(culprits))


def truth(**changes: Any) -> dict[str, Any]:
    nothing = {"anomaly": "slow", "class": "S1", "ranks": [], "nodes": [], "links": [], "causes": []}
    return nothing | {"action": "none", "kind": "rank", "must_not_drain": [], "any_of": []} | changes


def rank(number: int, domain: str = "hardware") -> Culprit:
    return Culprit(kind="rank", rank=number, node=f"n{number // 2}", domain=domain)


TWO_LINKS = truth(kind="link", links=["leaf0-spine1", "leaf2-spine1"])


@pytest.mark.parametrize(
    ("right", "told", "same"),
    [
        (truth(ranks=[3]), verdict(rank(3)), True),
        (truth(ranks=[3]), verdict(rank(3), rank(4)), False),
        (truth(ranks=[3, 4]), verdict(rank(3)), False),
        (truth(ranks=[3]), verdict(), False),
        (truth(kind="node", nodes=["n1"], ranks=[2, 3]), verdict(Culprit(kind="node", node="n1")), True),
        (truth(kind="node", nodes=["n1"], ranks=[2, 3]), verdict(rank(2), rank(3)), True),
        (truth(kind="node", nodes=["n1"]), verdict(Culprit(kind="node", node="n2")), False),
        (TWO_LINKS, verdict(Culprit(kind="link", link="leaf2-spine1")), True),
        (TWO_LINKS, verdict(Culprit(kind="switch", switch="spine1")), True),
        (TWO_LINKS, verdict(Culprit(kind="link", link="leaf3-spine2")), False),
        (TWO_LINKS, verdict(*(Culprit(kind="link", link=f"leaf{n}-spine1") for n in range(7))), False),
        (TWO_LINKS, verdict(), False),
        (truth(anomaly="none"), verdict(anomaly="none", class_=None), True),
        (truth(anomaly="none"), verdict(rank(3)), False),
        (truth(kind="job"), verdict(Culprit(kind="job", domain="workload")), True),
    ],
)
def test_who_is_the_same(right: dict[str, Any], told: Verdict, same: bool) -> None:
    assert same_culprits(right, told) is same


@pytest.mark.parametrize(
    ("right", "told", "same"),
    [
        (truth(), verdict(), True),
        (truth(), verdict(class_="S2"), False),
        (truth(any_of=["S2"]), verdict(class_="S2"), True),
        (truth(), verdict(anomaly="hang"), False),
        (truth(any_of=["none"]), verdict(anomaly="none", class_=None), True),
        (truth(**{"class": None}), verdict(class_="S3"), True),
    ],
)
def test_what_is_the_same(right: dict[str, Any], told: Verdict, same: bool) -> None:
    assert same_anomaly(right, told) is same


@pytest.mark.parametrize("seed", range(12))
def test_the_word_of_an_exam_agrees_with_the_grader(tmp_path: Path, seed: int) -> None:
    result = drill("--seed", str(seed), "--out", str(tmp_path / "d"), "--json")
    exam = msgspec.json.decode(result.output, type=Exam)
    assert exam.verdict is not None
    found = grade(exam.truth, exam.verdict)
    assert (exam.same_culprits and exam.same_anomaly) == found.located, found.why
    assert (result.exit_code == ExitCode.OK) == (found.located and not exam.false_drains)


def test_a_wrong_verdict_is_told_to_be_wrong() -> None:
    exam = Exam(
        kind="x", seed=1, bundle="b", truth_file="t", truth=truth(ranks=[3], must_not_drain=["n1"]),
        verdict=verdict(rank(2), anomaly="hang"), same_culprits=False, same_anomaly=False, false_drains=["n1\x1b[2J"],
    )  # fmt: skip
    lines = list(exam_lines(exam))
    assert not exam.passed and "same culprits: no" in lines and "same anomaly and class: no" in lines
    assert "\x1b" not in "".join(lines) and "must not be drained" in lines[-1]
