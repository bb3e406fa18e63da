"""The store's promises, on a real file."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from controller.store.base import (
    EVIDENCE_ROWS_MAX,
    LINES_MAX,
    OUTBOX_WAITING_MAX,
    EvidenceRow,
    Incident,
    NodeMark,
    Store,
)
from controller.store.sqlite import SqliteStore
from diagnosis.contracts.control import EVIDENCE_BYTES_MAX
from diagnosis.contracts.errors import AgentFault, OperatorFault
from diagnosis.contracts.verdict import Action, Culprit, EvidenceItem, Verdict
from remediation.policy.case import ActRecord, Case


def make_incident(incident_id: str = "a1b2c3", **changes: object) -> Incident:
    case = Case(
        incident=incident_id,
        job_id=42,
        submit_time="2026-01-02T03:04:05",
        restart=0,
        anomaly="slow",
        drain=("gpu002",),
        avoid=("gpu002",),
        requeue=True,
        reason=f"tocsin:{incident_id}:gpu_clock_throttle:GPU1:drain",
        progressing=True,
        decided_at=11.0,
    )
    verdict = Verdict(
        job_id=42,
        anomaly="slow",
        class_="S1",
        culprits=[Culprit(kind="gpu", cause="gpu_clock_throttle", domain="hardware", confidence=0.9, node="gpu002")],
        victims={"rank0": 1},
        action=Action(kind="drain", nodes=["gpu002"]),
        summary="GPU 1 of gpu002 is throttled",
        evidence=[EvidenceItem(kind="clock", text="1080 of 1980 MHz", value=1080.0, witness="nvml")],
    )
    incident = Incident(
        id=incident_id,
        job_id=42,
        submit_time="2026-01-02T03:04:05",
        restart=0,
        user="ada",
        nodes=["gpu001", "gpu002"],
        opened_at=10.0,
        mode="act",
        verdict=verdict,
        case=case,
        decision="drain gpu002 and requeue",
        timeline=[(10.0, "opened")],
    )
    return msgspec.structs.replace(incident, **changes)


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    opened = await SqliteStore.open(tmp_path / "state.db")
    yield opened
    await opened.close()


async def test_the_sqlite_store_is_a_store(store: SqliteStore) -> None:
    as_protocol: Store = store  # checked by mypy
    assert await as_protocol.incidents(10) == []


async def test_an_incident_comes_back_as_it_went(store: SqliteStore) -> None:
    incident = make_incident()
    await store.add_incident(incident)
    assert await store.incident("a1b2c3") == incident
    assert await store.incident("ffffff") is None


async def test_saving_an_incident_leaves_its_timeline_alone(store: SqliteStore) -> None:
    incident = make_incident()
    await store.add_incident(incident)
    await store.add_line("a1b2c3", 11.0, "acting")
    await store.save_incident(msgspec.structs.replace(incident, phase="closed", closed_at=12.0, timeline=[]))
    found = await store.incident("a1b2c3")
    assert found is not None
    assert (found.phase, found.closed_at, found.timeline) == ("closed", 12.0, [(10.0, "opened"), (11.0, "acting")])


async def test_the_same_id_is_not_taken_twice(store: SqliteStore) -> None:
    await store.add_incident(make_incident())
    with pytest.raises(ValueError, match="a1b2c3"):
        await store.add_incident(make_incident())
    with pytest.raises(ValueError, match="ffffff"):
        await store.save_incident(make_incident("ffffff"))


async def test_incidents_come_newest_first_and_open_ones_alone_on_request(store: SqliteStore) -> None:
    for number in range(5):
        phase = "closed" if number % 2 else "open"
        await store.add_incident(make_incident(f"00000{number}", opened_at=float(number), phase=phase))
    assert [incident.id for incident in await store.incidents(3)] == ["000004", "000003", "000002"]
    assert [incident.id for incident in await store.incidents(9, open_only=True)] == ["000004", "000002", "000000"]


async def test_a_timeline_has_an_end(store: SqliteStore) -> None:
    await store.add_incident(make_incident(timeline=[(0.0, "x")] * (LINES_MAX - 1)))
    await store.add_line("a1b2c3", 1.0, "the last")
    await store.add_line("a1b2c3", 2.0, "too many")
    found = await store.incident("a1b2c3")
    assert found is not None and len(found.timeline) == LINES_MAX and found.timeline[-1][1] == "the last"


async def test_an_act_is_intended_once_and_concluded_once(store: SqliteStore) -> None:
    await store.add_incident(make_incident())
    seq = await store.intend("a1b2c3", "drain", "gpu002", {"reason": "tocsin:a1b2c3"}, "throttled", 20.0)
    (act,) = await store.acts("a1b2c3")
    assert (act.outcome, act.args, act.why, act.concluded_at) == (None, {"reason": "tocsin:a1b2c3"}, "throttled", None)
    await store.conclude(seq, "ok", "drained", 21.0)
    with pytest.raises(ValueError, match="not open"):
        await store.conclude(seq, "failed", "no", 22.0)
    (act,) = await store.acts_since(20.0)
    assert (act.seq, act.outcome, act.detail, act.concluded_at) == (seq, "ok", "drained", 21.0)
    assert await store.acts_since(20.5) == []


async def test_the_ledger_cannot_be_rewritten_even_by_hand(store: SqliteStore, tmp_path: Path) -> None:
    await store.add_incident(make_incident())
    seq = await store.intend("a1b2c3", "drain", "gpu002", {}, "", 20.0)
    by_hand = sqlite3.connect(tmp_path / "state.db")
    with pytest.raises(sqlite3.IntegrityError, match="not rewritten"):
        by_hand.execute("UPDATE act SET target = 'gpu003' WHERE seq = ?", (seq,))
    by_hand.close()


async def test_an_act_without_its_incident_is_refused(store: SqliteStore) -> None:
    with pytest.raises(sqlite3.IntegrityError):
        await store.intend("ffffff", "drain", "gpu002", {}, "", 20.0)


async def test_evidence_is_bounded_and_belongs_to_an_incident(store: SqliteStore) -> None:
    await store.add_incident(make_incident())
    with pytest.raises(AgentFault) as unknown:
        await store.add_evidence("ffffff", "gpu002", "processes", b"{}", 30.0)
    assert unknown.value.reason == "incident"
    with pytest.raises(AgentFault) as too_long:
        await store.add_evidence("a1b2c3", "gpu002", "processes", b"x" * (EVIDENCE_BYTES_MAX + 1), 30.0)
    assert too_long.value.reason == "limits"
    for _ in range(EVIDENCE_ROWS_MAX):
        await store.add_evidence("a1b2c3", "gpu002", "processes", b"{}", 30.0)
    with pytest.raises(AgentFault):
        await store.add_evidence("a1b2c3", "gpu002", "processes", b"{}", 30.0)
    rows = await store.evidence("a1b2c3")
    assert len(rows) == EVIDENCE_ROWS_MAX
    assert rows[0] == EvidenceRow(node="gpu002", kind="processes", at=30.0, payload=b"{}")


async def test_a_message_is_enqueued_at_most_once(store: SqliteStore) -> None:
    assert await store.enqueue("a1b2c3:opened:chat", "a1b2c3", b"one", 40.0, target="chat")
    assert not await store.enqueue("a1b2c3:opened:chat", "a1b2c3", b"two", 41.0, target="chat")
    (message,) = await store.due(40.0, 10)
    assert (message.body, message.target, message.attempts) == (b"one", "chat", 0)
    await store.sent(message.id, 42.0)
    assert await store.due(50.0, 10) == []
    assert not await store.enqueue("a1b2c3:opened:chat", "a1b2c3", b"three", 43.0, target="chat")


async def test_a_failed_message_waits_and_in_the_end_is_dead_and_counted(store: SqliteStore) -> None:
    await store.enqueue("k", "a1b2c3", b"", 40.0)
    (message,) = await store.due(40.0, 10)
    await store.failed(message.id, 50.0, "refused", 41.0)
    assert await store.due(49.0, 10) == []
    (message,) = await store.due(50.0, 10)
    assert message.attempts == 1
    await store.failed(message.id, None, "refused again", 51.0)
    counts = await store.outbox_counts()
    assert (counts.waiting, counts.dead, counts.last_error) == (0, 1, "refused again")


async def test_a_target_that_takes_nothing_holds_up_no_other(store: SqliteStore) -> None:
    for number in range(5):
        await store.enqueue(f"dead{number}", "a1b2c3", b"", 40.0, target="dead")
    await store.enqueue("chat", "a1b2c3", b"", 40.0, target="chat")
    assert [message.key for message in await store.due(40.0, 3)] == ["dead0", "dead1", "dead2", "chat"]


async def test_a_full_outbox_takes_no_more(store: SqliteStore, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "state.db") as by_hand:
        rows = [(str(number), "a1b2c3", "chat", b"", 0.0, 0.0) for number in range(OUTBOX_WAITING_MAX)]
        by_hand.executemany(
            "INSERT INTO outbox (key, incident, target, body, at, next_at) VALUES (?, ?, ?, ?, ?, ?)", rows
        )
    by_hand.close()
    assert not await store.enqueue("one more", "a1b2c3", b"", 1.0)


async def test_node_marks_of_one_moment_share_a_write_and_survive(tmp_path: Path) -> None:
    marks = {f"gpu{number:03}": NodeMark(7, number, 3, 1.0) for number in range(200)}
    store = await SqliteStore.open(tmp_path / "state.db")
    await asyncio.gather(*(store.see_node(node, mark) for node, mark in marks.items()))
    await store.see_node("gpu000", NodeMark(8, 1, 1, 2.0))
    await store.close()
    again = await SqliteStore.open(tmp_path / "state.db")
    seen = await again.nodes_seen()
    newest, unknown = await again.node_seen("gpu000"), await again.node_seen("gpu999")
    await again.close()
    assert seen == marks | {"gpu000": NodeMark(8, 1, 1, 2.0)}
    assert newest == NodeMark(8, 1, 1, 2.0) and unknown is None


async def test_pruning_forgets_what_closed_long_ago_and_nothing_else(store: SqliteStore) -> None:
    for number, closed_at in enumerate((100.0, 200.0, None)):
        phase = "open" if closed_at is None else "closed"
        await store.add_incident(make_incident(f"00000{number}", phase=phase, closed_at=closed_at))
        await store.add_evidence(f"00000{number}", "gpu002", "processes", b"{}", 30.0)
        await store.intend(f"00000{number}", "drain", "gpu002", {}, "", 20.0)
    await store.prune(evidence_before=250.0, incidents_before=150.0)
    assert {incident.id for incident in await store.incidents(9)} == {"000001", "000002"}
    assert await store.evidence("000001") == []
    assert len(await store.acts("000001")) == 1
    assert len(await store.evidence("000002")) == 1


async def test_a_second_opener_is_refused_and_told_who_is_first(store: SqliteStore, tmp_path: Path) -> None:
    with pytest.raises(OperatorFault, match=f"pid {os.getpid()}") as refused:
        await SqliteStore.open(tmp_path / "state.db")
    assert refused.value.reason == "locked"
    assert await store.incidents(1) == []


async def test_a_file_that_is_no_state_or_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "noise.db").write_bytes(b"this is not a database, whatever its name says" * 100)
    with pytest.raises(OperatorFault, match=r"noise\.db"):
        await SqliteStore.open(tmp_path / "noise.db")
    newer = sqlite3.connect(tmp_path / "newer.db")
    newer.execute("PRAGMA user_version = 999")
    newer.close()
    with pytest.raises(OperatorFault, match="upgrade"):
        await SqliteStore.open(tmp_path / "newer.db")
    with pytest.raises(OperatorFault):
        await SqliteStore.open(tmp_path / "no such directory" / "state.db")


@pytest.mark.parametrize("change", ["UPDATE incident SET body = x'7b7d'", "UPDATE act SET args = x'ff'"])
async def test_a_damaged_entry_is_told_as_the_operators(store: SqliteStore, tmp_path: Path, change: str) -> None:
    await store.add_incident(make_incident())
    await store.intend("a1b2c3", "drain", "gpu002", {}, "why", 1.0)
    with sqlite3.connect(tmp_path / "state.db") as by_hand:
        by_hand.execute("DROP TRIGGER act_is_final")
        by_hand.execute(change)
    read = store.incidents(10) if "incident" in change else store.acts_since(0.0)
    with pytest.raises(OperatorFault, match=r"state\.db: an entry is damaged"):
        await read


async def test_the_state_file_is_for_its_owner_alone(store: SqliteStore, tmp_path: Path) -> None:
    await store.add_incident(make_incident())
    assert {path.stat().st_mode & 0o077 for path in tmp_path.glob("state.db*")} == {0}


WRITER = """
import asyncio, sys
from pathlib import Path
from controller.store.base import NodeMark
from controller.store.sqlite import SqliteStore
from tests.unit.test_store import make_incident

async def main():
    store = await SqliteStore.open(Path(sys.argv[1]))
    await store.add_incident(make_incident())
    number = 0
    while True:
        number += 1
        seq = await store.intend("a1b2c3", "drain", f"gpu{number}", {}, "", float(number))
        await store.see_node("gpu001", NodeMark(1, number))
        print(seq, number, flush=True)

asyncio.run(main())
"""


def test_what_was_answered_is_there_after_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    told = [writer.stdout.readline().split() for _ in range(20)]
    writer.send_signal(signal.SIGKILL)
    told += [line.split() for line in writer.stdout.read().splitlines()]
    writer.wait()
    writer.stdout.close()
    acts, mark = asyncio.run(_read_back(path))  # the lock went with its owner
    assert {int(seq) for seq, _ in told} <= {act.seq for act in acts}
    assert mark is not None and mark.counter >= int(told[-1][1])


async def _read_back(path: Path) -> tuple[list[ActRecord], NodeMark | None]:
    store = await SqliteStore.open(path)
    try:
        return await store.acts("a1b2c3"), await store.node_seen("gpu001")
    finally:
        await store.close()
