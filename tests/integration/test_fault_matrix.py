"""The fault matrix: real data-parallel jobs in network namespaces, real faults, and the verdict that must follow.

Everything is as on a cluster: the probe in the job, a daemon per node, the controller. One lab serves all cases; each
has a job of its own on four nodes. `make test` runs each class once with 4 ranks, `make acceptance` repeats them, each
time at another rank, and runs 8 ranks and torchrun. The controller observes: what is done about a verdict is told in
`test_closed_loop`. How long each took is noted for the table of docs/fault-matrix.md (`tests.detection`).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from tests.detection import FILE, Told, note
from tests.lab.cluster import Lab
from tests.lab.faults import Duty, RankProcess, kill, stop_forever
from tests.lab.stack import Stack
from tests.lab.system import LabError, eventually
from tests.lab.wires import Wires

VERDICT_S = 60.0
HEALTHY_S = 600.0
REPEATS = 8
HEALTHY_LIFE = {
    "EVAL_EVERY": "100",
    "EVAL_BATCHES": "30",
    "SAVE_EVERY": "300",
    "SAVE_MS": "4000",
    "SHARDS_EVERY": "700",
    "HICCUP_EVERY": "90",
    "HICCUP_MS": "600",
}
"""What a job does besides training, in steps and ms: see `tests/lab/jobs/train.py`."""


@dataclass
class Site:
    """A cluster under tocsin's eyes, and what a case needs of it."""

    lab: Lab
    stack: Stack
    wires: Wires


@dataclass(frozen=True)
class Shape:
    """How a job is started, always on four nodes."""

    gpus_per_node: int
    launcher: str = "fork"

    @property
    def ranks(self) -> int:
        return 4 * self.gpus_per_node


@dataclass
class Running:
    """One job. `victim`: the rank that the fault is made at; `faults`: what undoes it."""

    site: Site
    job: int
    victim: RankProcess
    pids: list[int]
    faults: ExitStack

    def duty(self, stop_ms: int = 60, run_ms: int = 30) -> None:
        """The victim computes slowly."""
        self.faults.enter_context(Duty(self.victim.pid, stop_ms=stop_ms, run_ms=run_ms))

    def rate(self) -> None:
        """The wire of the victim's node carries 200 Mbit/s."""
        self.site.wires.slow(self.victim.node, 200)

    def sleep(self, ms: int) -> None:
        """The victim's own code takes so much longer in every step."""
        part = self.site.lab.work / "sleep.part"
        part.write_text(f"{self.victim.rank} {ms}")
        part.replace(self.site.lab.work / "sleep")


Fault = Callable[[Running], object]


def _branch(running: Running) -> None:
    (running.site.lab.work / "branch").write_text(str(running.victim.rank))


def _other_size(running: Running) -> None:
    (running.site.lab.work / "branch").write_text(f"{running.victim.rank} size")


def _rate_and_sleep(running: Running) -> None:
    running.rate()
    running.sleep(120)


CASES: dict[str, tuple[Fault, str | None, str]] = {
    "H1 stopped": (lambda r: stop_forever(r.victim.pid), "H1", "rank"),
    "H1 asleep": (lambda r: r.sleep(10_000_000), "H1", "rank"),
    "H2 other operation": (_branch, "H2", "rank"),
    "H2 another size": (_other_size, "H2", "rank"),
    "killed": (lambda r: kill(r.victim.pid), None, "rank"),
    "H3 black hole": (lambda r: r.site.wires.swallow(r.victim.node, r.pids), "H3", "link"),
    "S1 duty cycle": (lambda r: r.duty(), "S1", "rank"),
    "S1 sleep": (lambda r: r.sleep(60), "S1", "rank"),
    "S2 rate": (Running.rate, "S2", "link"),
    "S2 delay": (lambda r: r.site.wires.delay(r.victim.node, 5), "S2", "link"),
    "S2 loss": (lambda r: r.site.wires.lose(r.victim.node, 50, r.pids), "S2", "link"),
    "S3 rate and sleep": (_rate_and_sleep, "S3", "both"),
    # Last: Slurm misses the node for a while.
    "H3 cable": (
        lambda r: r.site.lab.link(r.victim.node, False),
        "H3",
        "link",
    ),
}

ONCE_PER_CLASS = (
    "H1 stopped",
    "H2 other operation",
    "H2 another size",
    "killed",
    "H3 black hole",
    "S1 sleep",
    "S2 rate",
    "S3 rate and sleep",
)
ENDS_THE_JOB = ("H2 another size", "killed")
"""On gloo these are over within a second: they are told as `failed`, from what is left behind."""


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Lab(probe=True) as lab, Stack(lab, mode="observe") as stack:
        yield Site(lab, stack, Wires(lab))


def _submit(
    site: Site, shape: Shape, faults: ExitStack, *, repeat: int = 0, life: Mapping[str, str] | None = None
) -> Running:
    for name in ("branch", "sleep", "pause"):
        (site.lab.work / name).unlink(missing_ok=True)
    site.lab.wait_idle(site.lab.node_names, 90)
    files = {"BRANCH_FILE": "branch", "SLEEP_FILE": "sleep", "PAUSE_FILE": "pause"}
    environment = {**files, "LAUNCHER": shape.launcher, **(life or {})}
    job = site.lab.submit("train.sh", gpus_per_node=shape.gpus_per_node, env=environment)
    faults.callback(site.lab.cancel_all)
    site.stack.wait_healthy(job)
    ranks = site.stack.ranks(job)
    victim = ranks[(2 * shape.gpus_per_node + repeat) % shape.ranks]
    faults.callback(site.lab.link, victim.node, True)
    faults.callback(site.wires.mend)
    return Running(site, job, victim, [one.pid for one in ranks.values() if one.node == victim.node], faults)


def _last_step(running: Running) -> int:
    return max(map(int, re.findall(r"^step (\d+) ", running.site.lab.output(running.job), re.MULTILINE)), default=0)


def _named(culprits: list[dict[str, Any]]) -> set[tuple[str, object]]:
    return {("link", one["node"]) if one["kind"] == "link" else ("rank", one["rank"]) for one in culprits}


def _incidents(running: Running) -> list[dict[str, Any]]:
    return [one for one in running.site.stack.incidents() if one["job_id"] == running.job]


def _judge(running: Running, classes: Collection[str | None], culprit: str) -> None:
    """Wait for the right verdict; a first one may know less, but never names somebody else."""
    victim = running.victim
    wanted: set[tuple[str, object]] = {("rank", victim.rank)} if culprit in ("rank", "both") else set()
    wanted |= {("link", victim.node)} if culprit in ("link", "both") else set()

    def right() -> bool:
        found = [one["verdict"] for one in _incidents(running)]
        if not found:
            return False
        named = _named(found[0]["culprits"])
        assert named <= wanted, found[0]
        return named == wanted and found[0]["class"] in classes

    try:
        eventually(right, VERDICT_S, f"{classes} at {wanted}", 0.2)
    except (LabError, AssertionError) as error:
        _keep(running, error)
        raise


def _keep(running: Running, error: Exception) -> None:
    """What the verdicts of a case that failed were, and what the newest was given on."""
    told = _incidents(running)
    error.add_note(str([one["verdict"] for one in told]))
    if told:
        file = FILE.with_name(f"incident-{told[0]['id']}.tar.zst")
        running.site.stack.capture(told[0]["id"], file)
        error.add_note(f"kept: {file}")


def _case(site: Site, name: str, shape: Shape, repeat: int = 0) -> None:
    fault, class_, culprit = CASES[name]
    with ExitStack() as faults:
        running = _submit(site, shape, faults, repeat=repeat)
        # torchrun takes up to twenty seconds to end the last ranks: until then they hang, for the same reason.
        held = name in ENDS_THE_JOB and shape.launcher == "torchrun"
        right_at, step, fault_at = None, _last_step(running), time.time()
        fault(running)
        try:
            _judge(running, {class_, "H1"} if held and name == "killed" else {class_}, culprit)
            right_at = time.time()
            told = _incidents(running)[0]["verdict"]
            assert held or (told["anomaly"] == "failed") == (name in ENDS_THE_JOB)
            assert name != "killed" or [one["cause"] for one in told["culprits"]] == ["process_exit"]
        finally:
            first_at = min((one["opened_at"] for one in _incidents(running)), default=None)
            first_s, right_s = (None if at is None else at - fault_at for at in (first_at, right_at))
            note(Told(name, shape.launcher, shape.ranks, first_s, right_s, _last_step(running) - step))
        assert site.lab.drain_reasons() == {}


@pytest.mark.parametrize("name", ONCE_PER_CLASS)
def test_a_fault_of_4_ranks_is_told_by_its_class_and_its_culprit(site: Site, name: str) -> None:
    _case(site, name, Shape(1))


@pytest.mark.acceptance
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", CASES)
def test_a_fault_of_4_ranks_is_told_right_each_time(site: Site, name: str) -> None:
    for repeat in range(REPEATS):
        _case(site, name, Shape(1), repeat)


@pytest.mark.acceptance
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_a_fault_of_8_ranks_is_told_by_its_class_and_its_culprit(site: Site, name: str) -> None:
    _case(site, name, Shape(2))


@pytest.mark.acceptance
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ONCE_PER_CLASS)
def test_a_fault_of_8_ranks_under_torchrun_is_told_by_its_class_and_its_culprit(site: Site, name: str) -> None:
    _case(site, name, Shape(2, "torchrun"))


@pytest.mark.acceptance
@pytest.mark.timeout(800)
def test_a_healthy_job_that_evaluates_saves_and_waits_for_data_gives_nothing_in_ten_minutes(site: Site) -> None:
    with ExitStack() as faults:
        running = _submit(site, Shape(2), faults, life=HEALTHY_LIFE)
        until = time.monotonic() + HEALTHY_S
        (site.lab.work / "pause").touch()
        eventually(lambda: time.monotonic() >= until, HEALTHY_S + 5, "ten minutes", 1.0)
        assert _incidents(running) == []
        assert site.lab.job(running.job)["Restarts"] == "0"
        output = site.lab.output(running.job)
    for done in ("evaluated at step", "all parts saved at step", "waits for data at step", "saved at step"):
        assert len(re.findall(done, output)) >= 2, done
