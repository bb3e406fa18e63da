"""`make demo`: the whole loop on real input, told line by line.

A throw-away Slurm cluster, a controller, node daemons, a chat and a real data-parallel training job; then a fault:

    FAULT=s1    a throttled GPU: rank 5 is slowed and its GPU says so: two witnesses, so drain and requeue
    FAULT=h1    rank 5 is stopped for ever: software, so the job is requeued away from it and nothing is drained
    FAULT=h2    rank 5 calls another collective than the rest: a bug of the program, so people are told, nothing is done
    FAULT=s2    a node's wire becomes narrow: the path is named and flagged, the job requeued away, nothing is drained
    FAULT=h3    a node's wire swallows everything: likewise
    FAULT=s3    a narrow wire and a throttled GPU: both are named, the node is drained for its GPU
    FAULT=none  a minute of healthy training with one long checkpoint: nothing happens

Exit code 0 when the story ended as it should, 1 when not. Everything is removed at the end, whatever happened; the
first ^C (or SIGTERM, or the terminal going away) ends the demo early, further ones cannot cut the cleaning short.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Final

from diagnosis.engine.thresholds import Thresholds
from remediation.policy.rules import Policy
from tests.bench.bench_probe import unit_costs_ns
from tests.lab import demo_network
from tests.lab.cluster import Lab
from tests.lab.faults import Duty, ranks, stop_forever, work_seen
from tests.lab.stack import HANG_FLOOR_S, PAGE_PORT, Stack
from tests.lab.system import LabError, eventually

FAULTS: Final = {
    "s1": "Fault: a GPU is throttled, so its rank is slow. Two witnesses: its node is drained, the job runs elsewhere.",
    "h1": "Fault: a rank is stopped for ever. Software: the job is requeued away from it, and nothing is drained.",
    "h2": "Fault: a rank calls another collective than the rest. A bug of the program: people are told, no more.",
    "s2": "Fault: the wire of a node becomes narrow. The path is flagged, the job requeued away, nothing is drained.",
    "h3": "Fault: the wire of a node swallows everything. The path is flagged, the job requeued, nothing is drained.",
    "s3": "Fault: a narrow wire and a throttled GPU. Both are named; the node is drained for its GPU alone.",
    "none": "No fault: a minute of healthy training with one long checkpoint, and nothing is done.",
}
ENDINGS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CULPRIT = 5
HEALTHY_S = 60.0
LONG_CHECKPOINT_S = 5
STEPPING_ROUNDS = 3
SLOW_DWELL_S: Final = {"s3": 6.0}
"""Of two faults one may be seen first: a verdict must have stood a while before it is acted upon."""


class Story:
    """Lines with the seconds since the demo began, and since the fault once there is one."""

    def __init__(self) -> None:
        self._began = time.time()
        self.fault_at: float | None = None

    def tell(self, text: str, at: float | None = None) -> None:
        """One line. `at`: when it happened, seconds since the epoch; now if not given."""
        at = time.time() if at is None else at
        since = f" fault {at - self.fault_at:+5.1f} s" if self.fault_at is not None else ""
        sys.stdout.write(f"[{at - self._began:6.1f} s{since}] {text}\n")
        sys.stdout.flush()

    def plain(self, text: str = "") -> None:
        """A line without a time."""
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


class Demo:
    """One run. `check` collects what ended as it should and what did not."""

    def __init__(self, story: Story, lab: Lab, stack: Stack) -> None:
        self.story = story
        self.lab = lab
        self.stack = stack
        self.right: list[str] = []
        self.wrong: list[str] = []
        self.incident = ""

    def check(self, fine: bool, expectation: str, found: object = "") -> None:
        """Note an expectation, and what was found instead where it did not hold."""
        if fine:
            self.right.append(expectation)
        else:
            self.wrong.append(f"{expectation}; found: {found}" if found != "" else expectation)

    def train(self) -> int:
        """Submit the user's script and wait until it trains at its normal speed."""
        job = self.lab.submit("train.sh", env={"PAUSE_FILE": "pause", "BRANCH_FILE": "branch", "SLEEP_FILE": "sleep"})
        self.story.tell(f"job {job} submitted: sbatch train.sh (4 nodes, 8 ranks, DDP over gloo, no word about tocsin)")
        self.story.tell("the ranks load torch, and tocsin learns how long a round (here one training step) takes ...")
        self.stack.wait_healthy(job)
        told = self.stack.job(job) or {}
        self.story.tell(
            f"healthy: {told['ranks_seen']} ranks on {_nodes(self.lab, job)}, {told['round_ms']} ms a round"
        )
        return job

    def s1(self) -> None:
        """A throttled GPU."""
        job = self.train()
        victim = self.stack.ranks(job)[CULPRIT]
        self.story.fault_at = time.time()
        with Duty(victim.pid):
            self.stack.gpus[victim.node].throttle(CULPRIT % 2)
            self.story.tell(
                f"fault made: rank {CULPRIT} on {victim.node} (pid {victim.pid}) stops 60 of every 90 ms,"
                f" and NVML says GPU{CULPRIT % 2} runs at 1080 of 1980 MHz for a hardware slow-down"
            )
            incident = self.act(job, victim.node)
        reasons = self.lab.drain_reasons()
        self.check(list(reasons) == [victim.node], f"{victim.node} alone is drained", reasons)
        self.check(incident["verdict"]["class"] == "S1", "the class is S1", incident["verdict"]["class"])

    def h1(self) -> None:
        """A rank that is stopped for ever."""
        job = self.train()
        victim = self.stack.ranks(job)[CULPRIT]
        self.story.fault_at = time.time()
        stop_forever(victim.pid)
        self.story.tell(f"fault made: rank {CULPRIT} on {victim.node} (pid {victim.pid}) is stopped for ever")
        incident = self.act(job, victim.node)
        self.check(self.lab.drain_reasons() == {}, "nothing is drained", self.lab.drain_reasons())
        self.check(incident["verdict"]["class"] == "H1", "the class is H1", incident["verdict"]["class"])
        told = [row["told"] for row in self.stack.detail(incident["id"])["evidence"]]
        kept = [process for one in told if one is not None for process in one["processes"]]
        stopped = [process for process in kept if process["rank"] == CULPRIT and process["state"] == "T"]
        self.check(bool(stopped), "the state of the stopped process is kept as evidence")
        if stopped:
            stack = (stopped[0]["python_stack"] or "").strip().splitlines()
            self.story.tell(f"kept as evidence: rank {CULPRIT} in state T, and its Python stack ({len(stack)} lines)")
            self.check(bool(stack), "the Python stack is kept as evidence")

    def h2(self) -> None:
        """A rank that calls another collective."""
        job = self.train()
        self.story.fault_at = time.time()
        (self.lab.work / "branch").write_text(str(CULPRIT))
        self.story.tell(f"fault made: rank {CULPRIT} meets a condition of its own and calls all_gather")
        incident = self.stack.wait_incident(job, 60)
        self.incident = incident["id"]
        verdict = incident["verdict"]
        self.story.tell(f"verdict {verdict['class']}: {verdict['summary']}", incident["opened_at"])
        self.story.tell(f"decided: {incident['decision']}", incident["opened_at"])
        self._show_message(1)
        self.story.plain()
        self.story.plain(f"fault to verdict                     {incident['opened_at'] - self.story.fault_at:5.1f} s")
        named = [culprit["rank"] for culprit in verdict["culprits"]]
        self.check(named == [CULPRIT], f"rank {CULPRIT} alone is named", named)
        self.check(verdict["class"] == "H2", "the class is H2", verdict["class"])
        self.check(self.lab.drain_reasons() == {}, "nothing is drained", self.lab.drain_reasons())
        self.check(self.lab.job(job)["Restarts"] == "0", "the job is not requeued")

    def none(self) -> None:
        """No fault."""
        job = self.train()
        began = time.time()
        (self.lab.work / "pause").touch()
        self.story.tell(f"no fault: {HEALTHY_S:.0f} s of training, rank 0 takes {LONG_CHECKPOINT_S} s for a checkpoint")
        saved = f"after {LONG_CHECKPOINT_S} s the checkpoint"
        eventually(lambda: "saved at step" in self.lab.output(job), 30, saved, 0.2)
        self.story.tell("the long checkpoint is saved, the others waited meanwhile")
        eventually(lambda: time.time() - began >= HEALTHY_S, HEALTHY_S + 1, "a minute", 0.5)
        told = self.stack.job(job) or {}
        self.story.tell(f"after {HEALTHY_S:.0f} s: {told['rounds']} rounds, {told['round_ms']} ms a round")
        self.check(self.stack.incidents() == [], "no incident is opened", self.stack.incidents())
        self.check(self.lab.drain_reasons() == {}, "nothing is drained", self.lab.drain_reasons())
        self.check(self.lab.job(job)["Restarts"] == "0", "the job is not requeued")
        self.check(self.stack.chat.posts == [], "the chat gets no message", self.stack.chat.posts)

    def act(self, job: int, node: str, named: Sequence[int | str] = (CULPRIT,)) -> dict[str, Any]:
        """Follow one fault from detection to the job that runs elsewhere; returns the closed incident.

        `named`: the ranks and links that the verdict should name, and nobody else.
        """
        story, fault_at = self.story, self.story.fault_at or 0.0
        incident = self.stack.wait_incident(job, 60)
        self.incident = incident["id"]
        story.tell(f"detected: incident {incident['id']}", incident["opened_at"])
        if not incident["verdict"]["culprits"]:
            story.tell("nobody is named yet, evidence is still coming in")
            eventually(lambda: self.stack.detail(self.incident)["incident"]["verdict"]["culprits"], 60, "a culprit")
            incident = self.stack.detail(self.incident)["incident"]
        verdict = incident["verdict"]
        story.tell(f"verdict {verdict['class']}: {verdict['summary']}", incident["opened_at"])
        story.tell(f"decided: {incident['decision']}", incident["opened_at"])
        self._show_message(1)
        eventually(lambda: self.lab.job(job).get("Restarts") == "1", 60, "the job requeued")
        for name, reason in self.lab.drain_reasons().items():
            story.tell(f"drained, as sinfo -R says: {name}  {reason}")
        story.tell(f"requeued: job {job} is {self.lab.job_state(job)}")
        running_at = self._moment(lambda: self.lab.job_state(job) == "RUNNING", "the job running again")
        nodes = self.lab.job_nodes(job)
        story.tell(f"running elsewhere: {_nodes(self.lab, job)}; the ranks load torch again ...", running_at)
        self.check(node not in nodes and len(nodes) == 4, f"the job runs on four nodes without {node}", nodes)
        stepping_at = self._moment(lambda: self._steps(job), "steps of the new attempt")
        story.tell("its ranks advance", stepping_at)
        closed: dict[str, Any] = self.stack.wait_closed(incident["id"])["incident"]
        story.tell(f"incident closed, {closed['outcome']}: {closed['outcome_text']}", closed["closed_at"])
        self.check(closed["outcome"] == "resolved", "the incident is resolved", closed["outcome"])
        self._show_message(2)
        found = [one["link"] or one["rank"] for one in closed["verdict"]["culprits"]]
        wanted = " and ".join(one if isinstance(one, str) else f"rank {one}" for one in named)
        self.check(sorted(map(str, found)) == sorted(map(str, named)), f"{wanted} alone named", found)
        story.plain()
        story.plain(f"fault to verdict                     {incident['opened_at'] - fault_at:5.1f} s")
        story.plain(f"verdict to RUNNING elsewhere         {running_at - incident['opened_at']:5.1f} s")
        story.plain(f"verdict to the first steps there     {stepping_at - incident['opened_at']:5.1f} s")
        return closed

    def _show_message(self, number: int) -> None:
        post = self.stack.chat.wait(number)[number - 1]
        text = str(post.body["text"] if isinstance(post.body, dict) else post.body)
        self.story.tell("message received in the chat:", post.at)
        self.story.plain("    " + text.replace("\n", "\n    "))

    def _steps(self, job: int) -> bool:
        found = ranks(self.lab.frame_root, job, 1)
        return len(found) == 8 and min(one.rounds_done() for one in found.values()) >= STEPPING_ROUNDS

    def _moment(self, condition: Callable[[], bool], what: str) -> float:
        eventually(condition, 90, what)
        return time.time()


def _nodes(lab: Lab, job: int) -> str:
    return lab.job(job).get("NodeList", "?")


def main() -> int:
    """See the module."""
    fault = os.environ.get("FAULT", "s1")
    if fault not in FAULTS:
        sys.stderr.write(f"FAULT={fault}: should be {', '.join(FAULTS)}\n")
        return 2
    story = Story()
    try:
        _end_on_signals()
        story.plain(
            "A throw-away Slurm cluster, a controller, node daemons, a chat and a real data-parallel training job."
        )
        story.plain(FAULTS[fault])
        story.plain(_shortened(fault))
        story.tell(f"starting, FAULT={fault}")
        with Lab(probe=True) as lab:
            version = lab.run("sinfo", "--version").stdout.strip()
            story.tell(f"cluster up: {version}, 8 nodes with 2 (fake) GPUs each, idle")
            with Stack(lab, slow_dwell_s=SLOW_DWELL_S.get(fault, 0.0)) as stack:
                return _run(fault, story, lab, stack)
    except LabError as error:
        story.plain(f"the demo failed: {error}")
        return 1
    except SystemExit:
        with contextlib.suppress(OSError):  # the terminal may be gone
            story.plain("everything is removed")
        raise


def _end_on_signals() -> None:
    """What the caller ignores (nohup) stays ignored."""

    def end(number: int, _frame: FrameType | None) -> None:
        _hear_no_signals()
        with contextlib.suppress(OSError):
            os.write(1, b"\nended early, removing everything ...\n")  # print may be interrupted in the middle
        raise SystemExit(128 + number)

    for one in ENDINGS:
        if signal.getsignal(one) is not signal.SIG_IGN:
            signal.signal(one, end)


def _hear_no_signals() -> None:
    """From now on nothing interrupts: everything is about to be removed."""
    for one in ENDINGS:
        signal.signal(one, signal.SIG_IGN)


def _shortened(fault: str) -> str:
    """How the lab differs from the defaults."""
    policy, limits = Policy(), Thresholds()
    stood_s = SLOW_DWELL_S.get(fault, 0.0)
    acted = f"after it has stood {stood_s:.0f} s" if stood_s else "at once"
    return (
        f"Limits are short here: {HANG_FLOOR_S:.0f} s without progress are a hang (by default"
        f" {limits.hang_floor_s:.0f} s), and a verdict is acted upon {acted}\n"
        f"(by default it must have stood {policy.hang.dwell_s:.0f} s for a hang and {policy.slow.dwell_s:.0f} s for a"
        " slow job, and tocsin only observes)."
    )


def _run(fault: str, story: Story, lab: Lab, stack: Stack) -> int:
    story.tell("controller and 8 node daemons up, every node reports")
    person = sys.stdin.isatty() and sys.stdout.isatty()
    page = f"http://127.0.0.1:{lab.relay(PAGE_PORT)}/" if person else ""
    if person:
        story.plain(f"Watch it on the page: {page}")
    demo = Demo(story, lab, stack)
    before, began = stack.cpu_share(), time.monotonic()
    story_of = getattr(demo, fault, None)
    if story_of is not None:
        story_of()
    else:
        getattr(demo_network, fault)(demo)
    seconds = time.monotonic() - began
    _tell_costs(story, stack, {name: used - before[name] for name, used in stack.cpu_share().items()}, seconds)
    story.plain()
    story.plain(f"As it should be: {'; '.join(demo.right)}.")
    for expectation in demo.wrong:
        story.plain(f"WRONG: expected that {expectation}")
    if person:
        _show_around(story, lab, stack, page, demo.incident)
        sys.stdin.readline()
    _hear_no_signals()
    story.tell("removing everything")
    return 1 if demo.wrong else 0


def _show_around(story: Story, lab: Lab, stack: Stack, page: str, incident: str) -> None:
    """Where a person can look while the cluster stands."""
    inside = " ".join([f"SLURM_CONF={lab.slurm_conf}", *lab.network.enter(None)])
    story.plain()
    story.plain(f"It runs on until you press Enter; that removes everything. The page: {page}")
    story.plain("From another terminal, in this directory:")
    story.plain(f"    export TOCSIN_SOCKET={stack.socket}")
    story.plain("    .venv/bin/tocsin status")
    if incident:
        story.plain(f"    .venv/bin/tocsin show {incident}")
    story.plain(f"    {inside} sinfo")
    story.plain("Enter ends the demo.")


def _tell_costs(story: Story, stack: Stack, used_s: Mapping[str, float], seconds: float) -> None:
    """The share of one core that tocsin took. The probes' is their work times what each piece costs, measured now."""
    story.tell("measuring what a collective costs the probe on this machine (a small program is compiled) ...")
    per_collective_ns, per_step_ns = unit_costs_ns(stack.directory)
    collectives, steps = work_seen(stack.lab.frame_root, 1)
    probes_s = (collectives * per_collective_ns + steps * per_step_ns) / 1e9
    told = (
        f"{collectives:,} collectives at {per_collective_ns:.0f} ns, {steps:,} transfer steps at {per_step_ns:.0f} ns"
    )
    story.plain(f"share of one core: all 8 probes        {100 * probes_s / seconds:5.2f} %  ({told})")
    story.plain(f"share of one core: 8 node daemons      {100 * used_s['daemons'] / seconds:5.2f} %")
    story.plain(f"share of one core: controller          {100 * used_s['controller'] / seconds:5.2f} %")


if __name__ == "__main__":
    sys.exit(main())
