"""Who runs where: the newest words of each node, and the history of each job attempt that Slurm confirms.

A node may speak only for ranks that Slurm placed on it: a sample counts when the job is known, its uid is the frame
directory's owner and the node is among the job's nodes. Until Slurm has been asked, samples of an unknown job wait
unheard (`unconfirmed`). Reports from the spool arrive late and out of order; they are acknowledged and counted, but
only fresh ones tell about now.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

import msgspec
import structlog

from controller.ended import EndedAttempts
from diagnosis.contracts import report as wire
from diagnosis.contracts.columns import unpack
from diagnosis.contracts.gathered import Gathered, unpack_all
from diagnosis.contracts.report import Acknowledgement, GpuFacts, HardwareFacts, JobSample, Report
from diagnosis.contracts.topology import Topology
from diagnosis.contracts.verdict import Verdict
from diagnosis.engine.history import JobHistory
from diagnosis.engine.thresholds import Thresholds
from remediation.policy.world import JobView, World

Attempt = tuple[int, int]
"""(job_id, restart): Slurm's identity of a running attempt; the submit time joins it where acts are decided."""
SAMPLES_REMEMBERED: Final = 1024
STEPPING_ROUNDS_MIN: Final = 3
ASKED_MAX: Final = 4096
ARRIVED_MAX: Final = 4096
MEMBERSHIPS_PER_RANK_MAX: Final = 128
"""Places in communicators that are remembered of a job, on average of its ranks. A frame holds 16 at one time."""
_log = structlog.get_logger("registry")


@dataclass(frozen=True, slots=True)
class Arrived:
    """What `node` gathered of an attempt on suspicion, and when, by the controller's clock."""

    attempt: Attempt
    node: str
    part: Gathered
    at: float


@dataclass(slots=True)
class NodeNow:
    """The newest report of a node, by the controller's clock.

    `alive`: attempts with a rank that still lives there, each with the owner of its directory.
    """

    node: str
    epoch: int
    sample: int
    measured_at: float
    boot_id: str
    hardware: HardwareFacts | None
    refused: dict[str, int]
    spool_dropped: int
    alive: set[tuple[Attempt, int]] = field(default_factory=set)
    recent: set[tuple[int, int]] = field(default_factory=set)
    late_reports: int = 0


class JobStatus(msgspec.Struct, kw_only=True):
    """One job attempt in numbers that people read. None: unknown; `baseline_ms` None: still being learnt. `step_ms`: a
    training step as the nodes infer it, over the ranks; `step_jitter_ms`: the deviation of a single one."""

    job_id: int
    restart: int
    user: str | None
    state: str
    nodes: list[str]
    world_size: int | None
    ranks_seen: int
    rounds: int
    round_ms: float | None
    baseline_ms: float | None
    step_ms: float | None = None
    step_jitter_ms: float | None = None
    quiet_s: float | None
    last_report_age_s: float
    verdict: Verdict | None = None


class NodeStatus(msgspec.Struct, kw_only=True):
    """One node daemon as the controller sees it. `silent`: its newest report is older than `stale_after_s`."""

    node: str
    silent: bool
    last_report_age_s: float
    hardware: str
    refused: dict[str, int]
    spool_dropped: int
    late_reports: int


class Registry:
    """See the module. Bounded by Slurm's own jobs and nodes: what Slurm does not know is not kept."""

    def __init__(self, limits: Thresholds, topology: Topology | None = None, *, by_lldp: bool = False) -> None:
        self.limits = limits
        self._topology = None if by_lldp else topology or Topology()
        self.nodes: dict[str, NodeNow] = {}
        self.histories: dict[Attempt, JobHistory] = {}
        self.unconfirmed: set[Attempt] = set()
        self._asked: set[Attempt] = set()
        self.ended = EndedAttempts()
        self._arrived: deque[Arrived] = deque(maxlen=ARRIVED_MAX)
        self._passed_over: set[str] = set()
        self._world: World | None = None

    def accept(self, report: Report, *, received_at: float, age_ms: int) -> Acknowledgement:
        """Take in a report whose sender is proven. Raises AgentFault where its tables are unsound."""
        measured_at = received_at - age_ms / 1000
        known = self.nodes.get(report.node)
        if known is not None and (report.epoch, report.sample) in known.recent:
            return Acknowledgement(duplicate=True)
        fresh = received_at - measured_at <= self.limits.stale_after_s
        if known is not None and not (fresh and (report.epoch, report.sample) > (known.epoch, known.sample)):
            known.late_reports += 1
            self._remember(known, report)
            self._take_gathered(report, measured_at)
            return Acknowledgement()
        alive = {((sample.job_id, sample.restart), sample.uid) for sample in report.jobs if _lives(sample)}
        now = NodeNow(
            node=report.node,
            epoch=report.epoch,
            sample=report.sample,
            measured_at=measured_at,
            boot_id=report.boot_id,
            hardware=report.hardware,
            refused=report.refused,
            spool_dropped=report.spool_dropped,
            alive=alive,
            recent=known.recent if known else set(),
            late_reports=known.late_reports if known else 0,
        )
        self._remember(now, report)
        self.nodes[report.node] = now
        for sample in report.jobs:
            self._observe(report, sample, measured_at)
        self._take_gathered(report, measured_at)
        return Acknowledgement()

    def _take_gathered(self, report: Report, measured_at: float) -> None:
        """Of the attempts that are watched, from a node and for an owner of theirs; also out of late reports."""
        for part in unpack_all(report.gathered):
            if isinstance(part, str):
                if part not in self._passed_over:  # once: a newer daemon sends such for as long as it lives
                    self._passed_over.add(part)
                    _log.warning("gathered evidence passed over", node=report.node, why=part)
                continue
            attempt = (part.job_id, part.restart)
            history = self.histories.get(attempt)
            job = self._world.jobs.get(part.job_id) if self._world else None
            if history is None or job is None or report.node not in job.nodes or job.uid != part.uid:
                continue
            at = measured_at - part.age_ms / 1000
            history.witnessed.take(part, report.node, at, history)
            self._arrived.append(Arrived(attempt, report.node, part, at))

    def arrivals(self) -> list[Arrived]:
        """What nodes have gathered since the last call."""
        arrived = list(self._arrived)
        self._arrived.clear()
        return arrived

    def _remember(self, node: NodeNow, report: Report) -> None:
        node.recent.add((report.epoch, report.sample))
        if len(node.recent) > SAMPLES_REMEMBERED:
            node.recent = set(sorted(node.recent)[SAMPLES_REMEMBERED // 2 :])

    def _observe(self, report: Report, sample: JobSample, measured_at: float) -> None:
        attempt = (sample.job_id, sample.restart)
        over = self.ended.history(attempt, report.node, sample.uid)
        if over is not None:
            over.observe(report.node, report.boot_id, sample, measured_at, report.network)
            return
        job = self._world.jobs.get(sample.job_id) if self._world else None
        if job is None or (job.restarts or 0) < sample.restart or report.node not in job.nodes:
            # Slurm is asked early, but once: the frames of an ended job, and what users make up, are told for long.
            if attempt not in self._asked and len(self.unconfirmed) < wire.JOBS_MAX:
                self.unconfirmed.add(attempt)
            return
        if job.ended or job.restarts != sample.restart or job.uid != sample.uid:
            return
        history = self.histories.get(attempt)
        if history is None:
            ranks_max = wire.RANKS_MAX * len(job.nodes)
            history = self.histories[attempt] = JobHistory(*attempt, self.limits, measured_at, ranks_max)
            history.topology = self._topology
        history.observe(report.node, report.boot_id, sample, measured_at, report.network)

    def confirm(self, world: World) -> None:
        """Take Slurm's word on which attempts exist; forget the others."""
        self._world = world
        if len(self._asked) > ASKED_MAX:
            self._asked.clear()
        self._asked |= self.unconfirmed
        self.unconfirmed.clear()
        for attempt, history in list(self.histories.items()):
            job = world.jobs.get(attempt[0])
            if job is None or job.ended or job.restarts != attempt[1]:
                self.ended.take(history, job, world)
                del self.histories[attempt]
            elif _outgrown(history):
                _log.warning("watched anew: too many communicators", job=attempt[0], restart=attempt[1])
                del self.histories[attempt]
        for name in [name for name in self.nodes if name not in world.nodes]:
            del self.nodes[name]

    def heard(self) -> dict[str, float]:
        """When the newest report of each node was made."""
        return {name: node.measured_at for name, node in self.nodes.items()}

    def gpus(self, now: float) -> dict[str, dict[int, GpuFacts]]:
        """Fresh NVML facts by node and index."""
        return {
            node.node: {gpu.index: gpu for gpu in node.hardware.gpus}
            for node in self.nodes.values()
            if node.hardware is not None
            and node.hardware.state == "ok"
            and now - node.measured_at + node.hardware.age_ms / 1000 <= self.limits.stale_after_s
        }

    def stepping(self, job_id: int, restart: int) -> bool:
        """True once all ranks of the attempt have been heard and each has ended a few rounds.

        Where a probe does not see their ends, rounds entered stand for them: who goes on entering is not stuck.
        """
        history = self.histories.get((job_id, restart))
        if history is None or history.world_size is None or len(history.ranks) < history.world_size:
            return False
        members = [member for comm in history.comms.values() for member in comm.members.values()]
        done = [member.seq if member.done_seq is None else member.done_seq for member in members]
        return bool(done) and min(done) >= STEPPING_ROUNDS_MIN

    def moved_since(self, attempt: Attempt, at: float) -> bool:
        """Whether any rank of the attempt has entered or left a round after `at`."""
        history = self.histories.get(attempt)
        quiet_since = history.quiet_since if history else None
        return quiet_since is not None and quiet_since > at

    def ranks_gone(self, node: str, attempt: Attempt, now: float) -> bool | None:
        """Whether no process of the attempt lives on the node; None while its daemon is silent."""
        told = self.nodes.get(node)
        job = self._world.jobs.get(attempt[0]) if self._world else None
        if told is None or now - told.measured_at > self.limits.stale_after_s:
            return None
        # Anybody may make a directory of that name; only the job's own user speaks for it, where Slurm still tells who.
        return not any(alive == attempt and (job is None or uid == job.uid) for alive, uid in told.alive)

    def status(self, now: float) -> list[JobStatus]:
        """All known attempts, by job id."""
        return [self._job_status(self.histories[key], now) for key in sorted(self.histories)]

    def _job_status(self, history: JobHistory, now: float) -> JobStatus:
        job = self._world.jobs.get(history.job_id) if self._world else None
        comm = max(history.comms.values(), key=lambda comm: comm.rounds_seen, default=None)
        quiet_since, step = history.quiet_since, history.steps.now
        return JobStatus(
            job_id=history.job_id,
            restart=history.restart,
            user=job.user if job else None,
            state=job.state if job else "UNKNOWN",
            nodes=history.nodes(),
            world_size=history.world_size,
            ranks_seen=len(history.ranks),
            rounds=history.rounds_seen,
            round_ms=round(comm.windows[-1].period_ms, 1) if comm and comm.windows else None,
            baseline_ms=round(comm.baseline_ms, 1) if comm and comm.learnt(self.limits) else None,
            step_ms=round(step.ms, 1) if step else None,
            step_jitter_ms=round(step.jitter_ms, 1) if step and step.jitter_ms is not None else None,
            quiet_s=round(now - quiet_since, 1) if quiet_since is not None else None,
            last_report_age_s=round(now - history.last_report_at, 1),
        )

    def node_status(self, now: float) -> list[NodeStatus]:
        """All node daemons heard of, by name."""
        return [
            NodeStatus(
                node=node.node,
                silent=now - node.measured_at > self.limits.stale_after_s,
                last_report_age_s=round(now - node.measured_at, 1),
                hardware=node.hardware.state if node.hardware else "absent",
                refused=node.refused,
                spool_dropped=node.spool_dropped,
                late_reports=node.late_reports,
            )
            for _, node in sorted(self.nodes.items())
        ]


def _outgrown(history: JobHistory) -> bool:
    """Whether more is remembered than a job can need: the communicators that ended are forgotten first."""
    allowed = MEMBERSHIPS_PER_RANK_MAX * max(1, len(history.ranks))
    if _memberships(history) <= allowed:
        return False
    for comm_id, comm in list(history.comms.items()):
        if all(member.measured_at < history.ranks[member.rank].measured_at for member in comm.members.values()):
            del history.comms[comm_id]
    return _memberships(history) > allowed


def _memberships(history: JobHistory) -> int:
    return sum(len(comm.members) for comm in history.comms.values())


def _lives(sample: JobSample) -> bool:
    """Whether a process of the sample still exists, as far as its node's daemon can see."""
    states = unpack(sample.ranks, wire.RANK_DTYPE, wire.RANKS_MAX)["process_state"]
    return bool((states != ord("X")).any())


def current(job: JobView | None, attempt: Attempt) -> bool:
    """Whether the attempt is what Slurm runs now under this job id."""
    return job is not None and job.restarts == attempt[1] and job.state == "RUNNING"
