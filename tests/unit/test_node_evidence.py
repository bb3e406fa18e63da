"""Evidence of real processes: stopped, gone, foreign; with py-spy, without it, and with one that misbehaves."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from diagnosis.contracts.control import EVIDENCE_BYTES_MAX, PROCESSES_MAX, TEXT_BYTES_MAX, CollectEvent, Evidence
from node_daemon import evidence
from node_daemon.client import Answer, Client
from node_daemon.evidence import EvidenceCollector, Suspect, look_at
from tests.nodeframes import idle_process, start_ticks, waiting_python

NOBODY = 65534


class Controller(Client):
    """Stands in for the connection: keeps what is posted and answers as told."""

    def __init__(self, *answers: Answer) -> None:
        super().__init__("http://127.0.0.1:1", "gpu001", b"k" * 32, 1, timeout_s=1)
        self.answers, self.posted = list(answers), list[tuple[str, bytes]]()

    async def post(self, path: str, body: bytes, *, kind: str, age_ms: int = 0) -> Answer:
        self.posted.append((path, body))
        return self.answers.pop(0) if self.answers else Answer(taken=True)


def state_of(pid: int) -> str:
    return Path("/proc", str(pid), "stat").read_text().rsplit(")", 1)[1].split()[0]


def wait_for_state(pid: int, letters: str) -> None:
    ends_at = time.monotonic() + 60
    while state_of(pid) not in letters:
        assert time.monotonic() < ends_at


@pytest.fixture
def stopped() -> Iterator[Suspect]:
    """A Python process stopped for ever in a function of its own."""
    with waiting_python("wait_for_the_others") as child:
        wait_for_state(child.pid, "S")
        child.send_signal(signal.SIGSTOP)
        wait_for_state(child.pid, "T")
        yield Suspect(3, child.pid, start_ticks(child.pid), os.getuid(), os.getgid())


def collector(*suspects: Suspect, client: Client | None = None, **options: str | int) -> EvidenceCollector:
    def lookup(job_id: int, restart: int) -> list[Suspect]:
        return list(suspects) if (job_id, restart) == (7, 0) else []

    return EvidenceCollector("gpu001", client or Controller(), lookup, **options)  # type: ignore[arg-type]


def event(
    incident: str = "a1", ranks: tuple[int, ...] = (3,), deadline_ms: int = 20_000, **options: bool
) -> CollectEvent:
    return CollectEvent(incident=incident, job_id=7, restart=0, ranks=list(ranks), deadline_ms=deadline_ms, **options)


async def test_a_stopped_process_shows_its_state_and_its_python_stack_and_stays_stopped(stopped: Suspect) -> None:
    told = await collector(stopped).gather(event())
    assert (told.incident, told.node, told.job_id, told.restart) == ("a1", "gpu001", 7, 0)
    (process,) = told.processes
    assert (process.rank, process.pid, process.state) == (3, stopped.pid, "T")
    assert process.python_stack is not None, process.notes
    assert "wait_for_the_others" in process.python_stack
    assert state_of(stopped.pid) == "T"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may read a kernel stack")
async def test_the_kernel_stack_says_where_the_kernel_stopped_it(stopped: Suspect) -> None:
    (process,) = (await collector(stopped).gather(event(stacks=False))).processes
    assert process.kernel_stack is not None
    assert "signal" in process.kernel_stack
    assert process.python_stack is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
async def test_a_users_process_is_looked_at_with_the_users_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "x")
    monkeypatch.setattr(evidence, "_owner_may_look", lambda: True)
    with tempfile.TemporaryDirectory() as directory, idle_process(user=NOBODY, group=NOBODY, extra_groups=[]) as child:
        Path(directory).chmod(0o755)
        spy = Path(directory, "py-spy")
        spy.write_text("#!/bin/sh\nid -u; id -g; id -G; env | grep -c SECRET; exit 0\n")
        spy.chmod(0o755)
        suspect = Suspect(3, child.pid, start_ticks(child.pid), NOBODY, NOBODY)
        (process,) = (await collector(suspect, py_spy=str(spy)).gather(event())).processes
    assert process.python_stack is not None, process.notes
    assert process.python_stack.split() == ["65534", "65534", "65534", "0"]


async def test_only_the_ranks_that_were_asked_for_are_looked_at(stopped: Suspect) -> None:
    assert (await collector(stopped).gather(event(ranks=(4, 5)))).processes == []
    other_job = CollectEvent(incident="a", job_id=8, restart=0, ranks=[3])
    assert (await collector(stopped).gather(other_job)).processes == []


async def test_a_process_that_has_ended_is_told_as_gone() -> None:
    with idle_process() as child:
        suspect = Suspect(3, child.pid, start_ticks(child.pid), os.getuid(), os.getgid())
    (process,) = (await collector(suspect).gather(event())).processes
    assert (process.state, process.python_stack, process.kernel_stack) == ("X", None, None)
    assert process.notes


async def test_a_process_number_that_was_given_away_is_told_as_gone(stopped: Suspect) -> None:
    other = Suspect(3, stopped.pid, stopped.start_ticks + 1, stopped.uid, stopped.gid)
    assert look_at(other, 1000).state == "X"


async def test_nothing_is_told_of_a_process_of_another_user(stopped: Suspect) -> None:
    other = Suspect(3, stopped.pid, stopped.start_ticks, stopped.uid + 1, stopped.gid)
    (process,) = (await collector(other).gather(event())).processes
    assert (process.state, process.wchan, process.kernel_stack, process.python_stack) == (None, None, None, None)
    assert process.notes


async def test_without_py_spy_there_is_a_note_and_all_the_rest(
    stopped: Suspect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "find_py_spy", lambda configured: None)
    (process,) = (await collector(stopped).gather(event())).processes
    assert (process.state, process.python_stack) == ("T", None)
    assert any("not installed" in note for note in process.notes)


@pytest.mark.parametrize(
    ("script", "deadline_ms", "word"),
    [
        ("exec sleep 600", 300, "longer than"),
        ("echo 'Error: no python' >&2; exit 1", 20_000, "no python"),
        ("exit 0", 20_000, "exit code 0"),
        ("true", 0, "time was up"),
    ],
)
async def test_a_py_spy_that_fails_or_hangs_is_a_note(
    stopped: Suspect, tmp_path: Path, script: str, deadline_ms: int, word: str
) -> None:
    spy = tmp_path / "py-spy"
    spy.write_text(f"#!/bin/sh\n{script}\n")
    spy.chmod(0o755)
    (process,) = (await collector(stopped, py_spy=str(spy)).gather(event(deadline_ms=deadline_ms))).processes
    assert process.python_stack is None
    assert any(word in note for note in process.notes), process.notes


async def test_endless_and_hostile_output_is_cut_and_cleaned(stopped: Suspect, tmp_path: Path) -> None:
    spy = tmp_path / "py-spy"
    spy.write_text("#!/bin/sh\nprintf '\\033[2Jred\\000\\377'; head -c 3000000 /dev/zero | tr '\\000' '\"'\n")
    spy.chmod(0o755)
    (process,) = (await collector(stopped, py_spy=str(spy)).gather(event())).processes
    assert process.python_stack is not None, process.notes
    assert process.python_stack.startswith("?[2Jred?")
    assert len(process.python_stack.encode()) <= TEXT_BYTES_MAX


async def test_evidence_of_many_processes_fits_into_one_request(stopped: Suspect, tmp_path: Path) -> None:
    spy = tmp_path / "py-spy"
    spy.write_text("#!/bin/sh\nhead -c 200000 /dev/zero | tr '\\000' '\"'\n")
    spy.chmod(0o755)
    many = [Suspect(rank, stopped.pid, stopped.start_ticks, stopped.uid, stopped.gid) for rank in range(100)]
    told = await collector(*many, py_spy=str(spy)).gather(event(ranks=tuple(range(100)), deadline_ms=30_000))
    assert len(told.processes) == PROCESSES_MAX
    assert len(msgspec.json.encode(told)) <= EVIDENCE_BYTES_MAX


async def _run_until(one: EvidenceCollector, controller: Controller, posts: int) -> None:
    task = asyncio.create_task(one.run())
    async with asyncio.timeout(60):
        while len(controller.posted) < posts:  # noqa: ASYNC110 - what is waited for is a list of another class
            await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.wait([task])


async def test_each_incident_is_answered_once(stopped: Suspect) -> None:
    controller = Controller()
    one = collector(stopped, client=controller)
    for incident in ("a1", "a1", "b2", "a1"):
        one.ask(event(incident, stacks=False))
    await _run_until(one, controller, 2)
    assert [msgspec.json.decode(body, type=Evidence).incident for _, body in controller.posted] == ["a1", "b2"]
    assert {path for path, _ in controller.posted} == {"/v1/evidence"}


async def test_evidence_that_does_not_arrive_is_sent_again_but_not_when_it_is_refused(
    stopped: Suspect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "POST_WAIT_S", 0.01)
    controller = Controller(
        Answer(reason="connection"), Answer(reason="http_503"), Answer(taken=True), Answer(refused=True)
    )
    one = collector(stopped, client=controller)
    one.ask(event("a1", stacks=False))
    one.ask(event("b2", stacks=False))
    await _run_until(one, controller, 4)
    incidents = [msgspec.json.decode(body, type=Evidence).incident for _, body in controller.posted]
    assert incidents == ["a1", "a1", "a1", "b2"]


async def test_more_requests_than_a_minute_allows_wait(stopped: Suspect) -> None:
    controller = Controller()
    one = collector(stopped, client=controller, per_minute_max=2)
    for incident in ("a1", "b2", "c3"):
        one.ask(event(incident, stacks=False))
    await _run_until(one, controller, 2)
    task = asyncio.create_task(one.run())
    await asyncio.wait([task], timeout=0.2)
    assert (task.done(), len(controller.posted)) == (False, 2)
    task.cancel()
    await asyncio.wait([task])


async def test_a_flood_of_requests_is_bounded(stopped: Suspect) -> None:
    one = collector(stopped)
    for number in range(1000):
        one.ask(event(f"{number}"))
    assert one._requests.qsize() == evidence.REQUESTS_MAX
    assert len(one._incidents) == evidence.REQUESTS_MAX
