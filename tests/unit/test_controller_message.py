"""What a chat is told of an incident."""

from __future__ import annotations

import json

import msgspec

from controller.notify.message import DIGEST_LINES_MAX, LINE_CHARS_MAX, digest_text, notice, text, who
from diagnosis.contracts.verdict import Culprit, EvidenceItem
from remediation.policy.case import ActRecord
from tests.unit.test_store import make_incident


def drained() -> ActRecord:
    return ActRecord(1, "a1b2c3", "drain", "gpu002", {}, intent_at=12.0, outcome="ok", concluded_at=12.5)


def test_a_new_incident_says_who_why_how_sure_and_what_is_planned() -> None:
    told = text(notice(make_incident(), "opened", [], 11.0)).splitlines()
    assert told == [
        "tocsin a1b2c3: job 42 (ada) is slow",
        "Who: node gpu002: gpu_clock_throttle (hardware), 90% sure",
        "Why: GPU 1 of gpu002 is throttled",
        "- nvml: 1080 of 1980 MHz",
        "Decided (act): drain gpu002 and requeue",
        "More: tocsin show a1b2c3",
    ]


def test_a_closed_incident_says_what_was_done_and_how_long_it_took() -> None:
    incident = make_incident(closed_at=24.0, phase="closed", outcome="resolved", outcome_text="running on gpu003")
    requeue = ActRecord(2, "a1b2c3", "requeue", "42", {}, 13.0, outcome="failed", detail="refused", concluded_at=14.0)
    told = text(notice(incident, "closed", [drained(), requeue], 30.0))
    assert "tocsin a1b2c3: job 42 (ada) is slow: resolved after 14 s" in told
    assert "Done: drain gpu002 (at 2.5 s)" in told
    assert "Failed: requeue job 42 (at 4 s, refused)" in told
    assert "End: running on gpu003" in told


def test_nobody_is_named_where_nobody_is_known() -> None:
    incident = make_incident()
    incident.verdict = msgspec.structs.replace(incident.verdict, culprits=[], anomaly="hang")
    told = text(notice(incident, "opened", [], 11.0))
    assert "job 42 (ada) hangs" in told and "Who: not known yet" in told


def test_different_witnesses_come_before_a_second_word_of_the_same() -> None:
    incident = make_incident()
    evidence = [EvidenceItem(kind="gap", text=f"gap {number}") for number in range(5)]
    evidence += [
        EvidenceItem(kind="clock", text="slow clock", witness="nvml"),
        EvidenceItem(kind="other", text="but", against=True),
    ]
    incident.verdict = msgspec.structs.replace(incident.verdict, evidence=evidence)
    shown = [line for line in notice(incident, "opened", [], 11.0).lines if line.startswith("- ")]
    assert shown == ["- job: gap 0", "- nvml: slow clock", "- job (against): but"]


def test_hostile_text_stays_one_harmless_line() -> None:
    incident = make_incident(user="ada\n@channel <!everyone> \u202e" + "x" * 10_000)
    told = text(notice(incident, "opened", [], 11.0))
    assert len(told.splitlines()) == 6
    assert "@channel" not in told and "\u202e" not in told
    assert max(map(len, told.splitlines())) <= LINE_CHARS_MAX + 1


def test_a_digest_has_a_line_for_each_and_an_end() -> None:
    told = digest_text([notice(make_incident(), "opened", [], 11.0)] * (DIGEST_LINES_MAX + 5)).splitlines()
    assert told[0] == "tocsin: 25 messages at once"
    assert len(told) == DIGEST_LINES_MAX + 2 and "5 more" in told[-1]


def test_as_json_a_notice_carries_the_whole_verdict() -> None:
    told = json.loads(msgspec.json.encode(notice(make_incident(), "opened", [drained()], 11.0)))
    assert told["schema"] == "tocsin.notice/1"
    assert told["verdict"]["schema"] == "tocsin.verdict/1" and told["verdict"]["class"] == "S1"
    assert told["acts"] == [{"kind": "drain", "target": "gpu002", "outcome": "ok", "after_s": 2.5, "detail": ""}]


def test_every_kind_of_culprit_has_a_name() -> None:
    assert who(Culprit(kind="gpu", rank=5, node="gpu003", gpu=1)) == "rank 5, GPU1 of gpu003"
    assert who(Culprit(kind="nic", node="gpu003", nic="mlx5_3")) == "NIC mlx5_3 of gpu003"
    assert who(Culprit(kind="node", node="gpu003")) == "node gpu003"
    assert who(Culprit(kind="link", link="leaf1-spine2", switch="leaf1")) == "link leaf1-spine2, switch leaf1"
    assert who(Culprit(kind="job")) == "the whole job"
