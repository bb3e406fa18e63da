"""What is known of one attempt of one job: the newest words of each rank, and the rounds that all members ended.

Filled from reports, read by `hangs` and `slows`. Times are the controller's clock in seconds, already corrected for
the age of the report, so that only durations measured on one node are ever compared between nodes:

* `quiet_since`: the moment when anybody last entered or left any round, from each node's own ages.
* a round (communicator, seq) is laid out over the members, so lateness needs no clock at all: members leave a
  synchronous collective together, hence whoever spent the least time inside came last.

Rounds are gathered into windows; a window keeps the mean own time (`gap`) and mean duration per member. Everything
has a bound: members, communicators, open rounds, windows.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from diagnosis.contracts import report as wire
from diagnosis.contracts.columns import null_of, unpack
from diagnosis.contracts.errors import AgentFault
from diagnosis.contracts.exits import ExitFacts
from diagnosis.contracts.topology import Topology
from diagnosis.engine.flows import NetworkHistory
from diagnosis.engine.gathered import Witnessed
from diagnosis.engine.step_history import StepHistory, StepNow, step_of_row
from diagnosis.engine.thresholds import Thresholds
from diagnosis.evidence.topology.lldp import topology_of

RANKS_MAX: Final = 1 << 20
COMMS_MAX: Final = 4096
ROUNDS_OPEN_MAX: Final = 256
WINDOWS_KEPT: Final = 32
_NULL_U8: Final = null_of(np.dtype("u8"))
_NULL_U4: Final = null_of(np.dtype("u4"))

Floats = NDArray[np.float64]


@dataclass(slots=True)
class RankNow:
    """The newest words of one rank, and where it runs. `process_state`: a letter, "" unknown; `step`: None unknown;
    `end`: None while it lives, or nobody saw it end, with its time in ms of the controller's clock."""

    rank: int
    node: str
    boot_id: str
    gpu: int | None
    pid: int
    process_state: str
    measured_at: float
    step: StepNow | None
    end: ExitFacts | None = None


@dataclass(slots=True)
class MemberNow:
    """One rank in one communicator. `since`: when it entered the oldest open round, or left its last one.

    `done_seq` None: its probe does not see the ends of rounds, and `since` is when it last did anything at all.
    `idle_seq`: its process runs no operation of NCCL, and this is the newest round that it ran here; None: not told.
    """

    rank: int
    comm_rank: int
    state: int
    seq: int
    done_seq: int | None
    since: float
    op: int
    count: int
    signature: int | None
    send: int | None
    recv: int | None
    idle_seq: int | None
    errors: int | None
    measured_at: float


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Means over the rounds of a window, in ms, per member in the order of `CommHistory.members`; NaN: told nothing."""

    rounds: int
    gap_ms: Floats
    dur_ms: Floats
    period_ms: float
    ended_at: float
    dur_min_ms: Floats
    dur_max_ms: Floats


_Round = dict[int, tuple[int, int]]
"""Words about one round: position in the communicator to (gap_us, dur_us)."""


@dataclass(slots=True)
class CommHistory:
    """One communicator. `members`: position to newest words; `windows`: newest last; `baseline`: the healthy ones."""

    comm_id: int
    size: int
    members: dict[int, MemberNow] = field(default_factory=dict)
    windows: deque[Window] = field(default_factory=lambda: deque(maxlen=WINDOWS_KEPT))
    baseline: list[Window] = field(default_factory=list)
    rounds_seen: int = 0
    longest_round_s: float = 0.0
    _open: OrderedDict[int, _Round] = field(default_factory=OrderedDict)
    _ready: list[_Round] = field(default_factory=list)
    _ready_s: float = 0.0
    _newest_closed: int = 0

    def learnt(self, limits: Thresholds) -> bool:
        """Whether the normal speed is known."""
        return len(self.baseline) >= limits.baseline_windows

    @property
    def baseline_ms(self) -> float:
        """Healthy round time; only meaningful once it is learnt."""
        return float(np.median([window.period_ms for window in self.baseline]))

    def add_round(self, position: int, seq: int, gap_us: int, dur_us: int, at: float, limits: Thresholds) -> None:
        """One member's words about one round; the round counts when all known members have spoken."""
        if seq <= self._newest_closed and seq not in self._open:
            return
        entry = self._open.setdefault(seq, {})
        entry[position] = (gap_us, dur_us)
        if len(entry) >= len(self.members):
            del self._open[seq]
            self._newest_closed = max(self._newest_closed, seq)
            self._close(entry, at, limits)
        while len(self._open) > ROUNDS_OPEN_MAX:
            self._open.popitem(last=False)

    def _close(self, entry: _Round, at: float, limits: Thresholds) -> None:
        self.rounds_seen += 1
        if self.rounds_seen <= limits.warmup_rounds:
            return
        spent_us = [gap + dur for gap, dur in entry.values()]
        self.longest_round_s = max(self.longest_round_s, max(spent_us) / 1e6)
        self._ready.append(entry)
        self._ready_s += float(np.median(spent_us)) / 1e6
        if len(self._ready) >= limits.window_rounds and self._ready_s >= limits.window_s:
            self._end_window(at, limits)

    def _end_window(self, at: float, limits: Thresholds) -> None:
        nothing = (np.nan, np.nan)
        told = np.array([[entry.get(place, nothing) for place in self.members] for entry in self._ready])
        heard = ~np.isnan(told[:, :, 0]).all(axis=0)
        means = np.full((len(self.members), 2), np.nan)
        means[heard] = np.nanmean(told[:, heard], axis=0) / 1e3
        least, most = np.full(len(self.members), np.nan), np.full(len(self.members), np.nan)
        least[heard], most[heard] = (of(told[:, heard, 1], axis=0) / 1e3 for of in (np.nanmin, np.nanmax))
        period_ms = float(np.nanmean(means.sum(axis=1)))
        window = Window(len(self._ready), means[:, 0], means[:, 1], period_ms, at, least, most)
        self._ready, self._ready_s = [], 0.0
        self.windows.append(window)
        if len(self.baseline) < limits.baseline_windows:
            self.baseline.append(window)


@dataclass(slots=True)
class JobHistory:
    """One attempt (`job_id`, `restart`) of a job, as its ranks' reports tell it.

    `topology`: None where the nodes tell it themselves. `ranks_max`: as many as its nodes can hold. A job that claims a
    greater world is not believed.
    """

    job_id: int
    restart: int
    limits: Thresholds
    first_seen_at: float
    ranks_max: int = RANKS_MAX
    world_size: int | None = None
    uid: int | None = None
    ranks: dict[int, RankNow] = field(default_factory=dict)
    comms: dict[int, CommHistory] = field(default_factory=dict)
    conflicts: set[int] = field(default_factory=set)
    last_report_at: float = 0.0
    steps: StepHistory = field(default_factory=StepHistory)
    witnessed: Witnessed = field(default_factory=Witnessed)
    network: NetworkHistory = field(default_factory=NetworkHistory)
    topology: Topology | None = field(default_factory=Topology)

    def observe(
        self,
        node: str,
        boot_id: str,
        sample: wire.JobSample,
        measured_at: float,
        network: wire.NetworkFacts | None = None,
    ) -> None:
        """Take in one node's words. Raises AgentFault (reason `columns` or `ranks`) where the tables are unsound."""
        ranks = unpack(sample.ranks, wire.RANK_DTYPE, wire.RANKS_MAX)
        comms = unpack(sample.comms, wire.COMM_DTYPE, wire.COMM_ROWS_MAX)
        rounds = unpack(sample.rounds, wire.ROUND_DTYPE, wire.ROUND_ROWS_MAX)
        if (comms["rank_row"] >= len(ranks)).any() or (rounds["comm_row"] >= len(comms)).any():
            raise AgentFault("a table row points outside its table", reason="columns")
        self.uid = sample.uid
        self.last_report_at = max(self.last_report_at, measured_at)
        owned = [self._observe_rank(node, boot_id, row, measured_at) for row in ranks]
        self.network.observe(node, owned, sample, network, measured_at)
        self.steps.observe((rank.step for rank in self.ranks.values()), measured_at)
        placed = [self._observe_comm(row, owned[int(row["rank_row"])], measured_at) for row in comms]
        for row in rounds:
            place = placed[int(row["comm_row"])]
            gap, dur = int(row["gap_us"]), int(row["dur_us"])
            if place is not None and dur != _NULL_U4 and gap != _NULL_U4:
                comm, position = place
                comm.add_round(position, int(row["seq"]), gap, dur, measured_at, self.limits)

    def _observe_rank(self, node: str, boot_id: str, row: np.void, at: float) -> int | None:
        """The rank that a row speaks for, or None where it cannot be taken at its word."""
        rank, world = int(row["rank"]), int(row["world_size"])
        if not 0 <= rank < max(world, 1) <= self.ranks_max:
            return None
        known = self.ranks.get(rank)
        if known is not None and known.node != node and at - known.measured_at < self.limits.stale_after_s:
            self.conflicts.add(rank)
            return None
        if known is not None and at < known.measured_at:
            return rank
        if known is not None and at == known.measured_at and row["process_state"] == ord("X"):
            return None  # left behind by a process that another has taken the place of
        self.world_size = world if self.world_size is None else max(self.world_size, world)
        letter = int(row["process_state"])
        gpu = int(row["gpu"])
        self.ranks[rank] = RankNow(
            rank=rank,
            node=node,
            boot_id=boot_id,
            gpu=gpu if gpu >= 0 else None,
            pid=int(row["pid"]),
            process_state=chr(letter) if 32 < letter < 127 else "",
            measured_at=at,
            step=step_of_row(row),
            end=_end_of_row(row, at),
        )
        return rank

    def _observe_comm(self, row: np.void, rank: int | None, at: float) -> tuple[CommHistory, int] | None:
        comm_id, size, position = int(row["comm_id"]), int(row["comm_size"]), int(row["comm_rank"])
        if rank is None or not 0 < size <= self.ranks_max or position >= size:
            return None
        comm = self.comms.get(comm_id)
        if comm is None:
            if len(self.comms) >= COMMS_MAX:
                return None
            comm = self.comms[comm_id] = CommHistory(comm_id, size)
        if comm.size != size:
            return None
        age = int(row["age_us"])
        known = comm.members.get(position)
        if known is None or at >= known.measured_at:
            comm.members[position] = MemberNow(
                rank=rank,
                comm_rank=position,
                state=int(row["state"]),
                seq=int(row["seq"]),
                done_seq=_known_long(int(row["done_seq"])),
                since=at - (age / 1e6 if age != _NULL_U8 else 0.0),
                op=int(row["op"]),
                count=int(row["count"]),
                signature=_known(int(row["signature"])) or None,  # 0: the library did not tell
                send=_known(int(row["send"])),
                recv=_known(int(row["recv"])),
                idle_seq=_known_long(int(row["idle_seq"])),
                errors=_known(int(row["errors"])),
                measured_at=at,
            )
        return comm, position

    @property
    def quiet_since(self) -> float | None:
        """When anybody last entered or left a round; None while nobody has told anything."""
        times = [member.since for comm in self.comms.values() for member in comm.members.values()]
        return max(times) if times else None

    @property
    def paths_above(self) -> Topology:
        """The switches above the job's nodes."""
        return topology_of(self.network.uplinks) if self.topology is None else self.topology

    @property
    def longest_round_s(self) -> float:
        """The longest healthy round of any communicator, own time included."""
        return max((comm.longest_round_s for comm in self.comms.values()), default=0.0)

    @property
    def rounds_seen(self) -> int:
        """Rounds that all known members ended, over all communicators."""
        return sum(comm.rounds_seen for comm in self.comms.values())

    def exits(self) -> tuple[ExitFacts, ...]:
        """Of the ranks that have ended, by rank; times from when the first of them did."""
        ends = [rank.end for _, rank in sorted(self.ranks.items()) if rank.end is not None]
        zero = min((end.ended_ms for end in ends if end.ended_ms is not None), default=0.0)
        return tuple(
            end if end.ended_ms is None else msgspec.structs.replace(end, ended_ms=end.ended_ms - zero) for end in ends
        )

    def all_gone(self) -> bool:
        """Whether the processes of all ranks have ended, as far as their nodes have told."""
        gone = [rank.process_state == "X" or rank.end is not None for rank in self.ranks.values()]
        return len(gone) == self.world_size and all(gone)

    def nodes(self) -> list[str]:
        """Names of the nodes that spoke for this attempt, sorted."""
        return sorted({rank.node for rank in self.ranks.values()})

    def stale(self, now: float) -> list[int]:
        """Ranks whose newest words are too old to judge by, sorted."""
        return sorted(r.rank for r in self.ranks.values() if now - r.measured_at > self.limits.stale_after_s)


def _end_of_row(row: np.void, at: float) -> ExitFacts | None:
    """What a row tells of its process's end."""

    def told(name: str) -> int | None:
        value = int(row[name])
        return None if value == null_of(wire.RANK_DTYPE[name]) else value

    ended_us, code, signal = told("ended_us"), told("exit_code"), told("exit_signal")
    if ended_us is None:
        return None
    return ExitFacts(
        world_rank=int(row["rank"]),
        pid=int(row["pid"]),
        ended_ms=max(0.0, at * 1e3 - ended_us / 1e3),
        exit_code=code if code is not None and code <= 255 else None,
        signal=signal if signal is not None and 0 < signal < 128 else None,
        oom_kills=told("oom_kills"),
    )


def _known(value: int) -> int | None:
    return None if value == _NULL_U4 else value


def _known_long(value: int) -> int | None:
    return None if value == _NULL_U8 else value
