"""A watched job as an incident: cheap questions every cycle, the whole engine only when something looks wrong.

Every second two numbers of every job are compared: how long nobody has entered or left a round (a hang is suspected
after `bound_s`), and the round time of the newest windows against the baseline (`slow_windows`). Only then is the
history laid out as columns (`diagnosis.contracts.incident`) and judged like any other incident.

What is fresh counts: words older than `stale_after_s` are left out, so a rank whose node is silent is unseen and not
stuck.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Final

import numpy as np

from diagnosis.contracts.incident import Communicators, Frames, HealthTable, Incident, Job, Kind, State
from diagnosis.contracts.probeframe import Op
from diagnosis.contracts.report import CommState, GpuFacts
from diagnosis.contracts.verdict import Verdict
from diagnosis.engine import words
from diagnosis.engine.gathered import PINGS_KEPT_S
from diagnosis.engine.history import CommHistory, Floats, JobHistory, MemberNow, Window
from diagnosis.engine.thresholds import Thresholds
from diagnosis.engine.verdict import judge
from diagnosis.evidence.signatures import NOT_TOLD

GpusOfNode = Mapping[str, Mapping[int, GpuFacts]]
"""Fresh NVML facts by node and GPU index; a node or GPU that is absent told nothing lately."""
SUSPECTS_MAX: Final = 8
_MS: Final = 1000.0
_STATES: Final = {
    CommState.NONE: State.NONE,
    CommState.RUNNING: State.RUNNING,
    CommState.ENQUEUED: State.ENQUEUED,
    CommState.DONE: State.DONE,
}
_OPS: Final = {op.value: op.name for op in Op}
_NVML_COLUMNS: Final = (
    "sm_clock_mhz",
    "sm_clock_max_mhz",
    "mem_clock_mhz",
    "mem_clock_max_mhz",
    "clocks_event_reasons",
    "temperature_c",
    "power_w",
    "utilization_pct",
)
_Row = dict[str, float]


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """A verdict and the incident that it was given on; None where nothing looked wrong and nothing was laid out."""

    verdict: Verdict
    incident: Incident | None


def diagnose(history: JobHistory, gpus: GpusOfNode, now: float) -> Verdict:
    """The verdict on one job attempt. `anomaly` "none" where there is nothing to say."""
    return examine(history, gpus, now).verdict


def examine(history: JobHistory, gpus: GpusOfNode, now: float) -> Judged:
    """The verdict on one job attempt, with what it was given on."""
    notes = _unseen(history, now)
    if _quiet(history, now, 1.0):
        judged = _judge_hang(history, gpus, now, 1.0, notes)
        if judged.verdict.anomaly != "none":
            return judged
    recent = slow_windows(history, now)
    if recent:
        limits = replace(history.limits, slow_job_min=0.0)
        incident = _incident(history, _slow_rows(history, recent), gpus, now, notes, limits, now - PINGS_KEPT_S)
        began = min(windows[0].ended_at - windows[0].rounds * windows[0].period_ms / _MS for windows in recent.values())
        usual_ms = history.steps.usual_ms(began)
        return _judge(replace(incident, job=replace(incident.job, step_ms=np.nan if usual_ms is None else usual_ms)))
    return Judged(Verdict(job_id=history.job_id, anomaly="none", unseen=list(notes)), None)


def examine_ended(
    history: JobHistory, gpus: GpusOfNode, now: float, ended: str, lost_nodes: Iterable[str] = ()
) -> Judged:
    """The verdict on an attempt that has ended; `ended` as in `Incident`. The last words of every rank count, old as
    they may be, and what each ran last, whether it came to its end or not."""
    rows = [
        (member.rank, 0, number, _now_of(member, now, 0, 0))
        for number, comm in enumerate(history.comms.values())
        for member in comm.members.values()
    ]
    incident = _incident(history, rows, gpus, now, _unseen(history, now), history.limits, now, over=True)
    return _judge(replace(incident, ended=ended, lost_nodes=tuple(sorted(lost_nodes))))


def incident_of(history: JobHistory, gpus: GpusOfNode, now: float) -> Incident:
    """The job as it is now, with the thresholds that it is watched by: `judge` says of it what `diagnose` says.

    Where something looks wrong that is what `examine` judged; else the baseline and the newest windows, or, of a job
    that has none yet or stands still, the newest words of every rank.
    """
    judged = examine(history, gpus, now)
    if judged.incident is not None:
        return judged.incident
    recent = {
        comm.comm_id: windows for comm in history.comms.values() if (windows := _recent(comm, now, history.limits))
    }
    rows = _slow_rows(history, recent) or _hang_rows(history, now)
    limits = replace(_hang_limits(history, 1.0), slow_job_min=history.limits.slow_ratio - 1)
    return _incident(history, rows, gpus, now, _unseen(history, now), limits, now - PINGS_KEPT_S)


def _judge(incident: Incident) -> Judged:
    return Judged(judge(incident), incident)


def suspicion(history: JobHistory, now: float, share: float) -> Verdict | None:
    """What would be said of a hang once a job has been quiet for `share` of its bound; None: no suspicion.

    Asked before anybody would end the job, since afterwards there is nothing left to ask.
    """
    if not _quiet(history, now, share):
        return None
    verdict = _judge_hang(history, {}, now, share, ()).verdict
    return verdict if verdict.anomaly == "hang" else None


def suspects(history: JobHistory, verdict: Verdict) -> list[int]:
    """Ranks worth asking for stacks on suspicion of a hang."""
    named = sorted(culprit.rank for culprit in verdict.culprits if culprit.rank is not None)
    return named or sorted(history.ranks)[:SUSPECTS_MAX]


def bound_s(history: JobHistory) -> float:
    """How long a job may be quiet before that is suspicious."""
    limits = history.limits
    if history.rounds_seen <= limits.warmup_rounds:
        return max(limits.startup_floor_s, limits.hang_floor_s)
    return max(limits.hang_floor_s, limits.hang_factor * history.longest_round_s)


def _quiet(history: JobHistory, now: float, share: float) -> bool:
    since = history.quiet_since
    return since is not None and now - since >= share * bound_s(history)


def slow_windows(history: JobHistory, now: float) -> dict[int, list[Window]]:
    """The newest windows of each communicator that knows its baseline, if any of them is lastingly slow; else empty."""
    limits = history.limits
    recent = {comm.comm_id: _recent(comm, now, limits) for comm in history.comms.values()}
    told = {comm_id: windows for comm_id, windows in recent.items() if windows}
    return told if any(_is_slow(history.comms[comm_id], windows, limits) for comm_id, windows in told.items()) else {}


def _recent(comm: CommHistory, now: float, limits: Thresholds) -> list[Window]:
    windows = list(comm.windows)[-limits.windows :]
    ready = comm.learnt(limits) and len(windows) >= limits.windows and comm.baseline[-1] not in windows
    return windows if ready and now - windows[-1].ended_at <= limits.stale_after_s else []


def _is_slow(comm: CommHistory, windows: list[Window], limits: Thresholds) -> bool:
    base_ms = comm.baseline_ms
    spread_ms = float(np.median([abs(window.period_ms - base_ms) for window in comm.baseline]))
    floor_ms = max(limits.slow_ratio * base_ms, base_ms + limits.noise_factor * spread_ms)
    periods = [window.period_ms for window in windows]
    return bool(np.median(periods) > floor_ms and min(periods) > (base_ms + floor_ms) / 2)


def _judge_hang(history: JobHistory, gpus: GpusOfNode, now: float, share: float, notes: tuple[str, ...]) -> Judged:
    """The engine's word on a job that has been quiet for a part of its bound."""
    limits, quiet_since = _hang_limits(history, share), history.quiet_since
    pinged_since = now if quiet_since is None else quiet_since
    over = any(rank.end is not None for rank in history.ranks.values())  # what those ran who ended of it counts as well
    return _judge(_incident(history, _hang_rows(history, now), gpus, now, notes, limits, pinged_since, over))


def _hang_limits(history: JobHistory, share: float) -> Thresholds:
    """The bound as a plain floor: the rounds that it follows from are not among the newest words."""
    return replace(history.limits, hang_floor_s=0.999 * share * bound_s(history), hang_factor=0.0)


def _unseen(history: JobHistory, now: float) -> tuple[str, ...]:
    notes = []
    stale = history.stale(now)
    if stale:
        nodes = sorted({history.ranks[rank].node for rank in stale})
        notes.append(f"no fresh report from {words.ranks(stale)} on {', '.join(nodes[: words.NAMES_MAX])}")
    world = history.world_size or 0
    if len(history.ranks) < world:
        notes.append(f"{world - len(history.ranks)} of {world} ranks never reported")
    if history.conflicts:
        notes.append(f"{words.ranks(sorted(history.conflicts))} claimed by more than one node")
    return tuple(notes)


# -- rows: (rank, sample, communicator, columns) ---------------------------------------------------------------------

_Rows = list[tuple[int, int, int, _Row]]


def _hang_rows(history: JobHistory, now: float) -> _Rows:
    """The newest words of every fresh rank."""
    limits, rows = history.limits, []
    for number, comm in enumerate(history.comms.values()):
        members = [(member, history.ranks[member.rank]) for member in comm.members.values()]
        fresh = [
            member
            for member, rank in members
            if now - rank.measured_at <= limits.stale_after_s and member.measured_at == rank.measured_at
        ]
        entered = [member.seq for member in fresh]
        bounds = (min(entered, default=0), max(entered, default=0))
        rows += [(member.rank, 0, number, _now_of(member, now, *bounds)) for member in fresh]
    return rows


def _now_of(member: MemberNow, now: float, entered_by_all: int, entered_by_any: int) -> _Row:
    """The newest words of a member, and what follows from the others' where its probe does not see the ends of rounds.

    A round that a fresh member has not entered is over for nobody. Who stands before it while others are in it is late
    in the program, which all run alike: whatever still keeps a GPU busy kept nobody else from entering.
    """
    state, done = _STATES.get(member.state, State.UNKNOWN), member.done_seq
    if done is None and entered_by_all < entered_by_any:
        late = member.seq == entered_by_all
        state, done = State.DONE if late else State.ENQUEUED, entered_by_all
    return {
        "state": state,
        "seq": float(member.seq),
        "done_seq": np.nan if done is None else float(done),
        "age_ms": max(0.0, now - member.since) * _MS,
        "rounds": 0.0,
        "send": np.nan if member.send is None else float(member.send),
        "recv": np.nan if member.recv is None else float(member.recv),
        "idle_seq": np.nan if member.idle_seq is None else float(member.idle_seq),
        "errors": np.nan if member.errors is None else float(member.errors),
    }


def _slow_rows(history: JobHistory, recent: dict[int, list[Window]]) -> _Rows:
    """Two samples of every member: its baseline and its newest windows, each as one second of such rounds."""
    rows: _Rows = []
    for number, comm in enumerate(history.comms.values()):
        if comm.comm_id not in recent:
            continue
        for sample, windows in enumerate((comm.baseline, recent[comm.comm_id])):
            rounds = _MS / float(np.median([window.period_ms for window in windows]))
            gap, dur, least, most = (
                _median(windows, name, len(comm.members)) for name in ("gap_ms", "dur_ms", "dur_min_ms", "dur_max_ms")
            )
            for place, member in enumerate(comm.members.values()):
                newest = member.seq if member.done_seq is None else member.done_seq
                row = {"state": State.DONE, "seq": float(newest), "rounds": rounds}
                row |= {"gap_ms": rounds * gap[place], "dur_ms": rounds * dur[place], "dur_min_ms": least[place]}
                row |= {"dur_max_ms": most[place]}
                rows.append((member.rank, sample, number, row))
    return rows


def _median(windows: Iterable[Window], name: str, members: int) -> Floats:
    """Per member, the median over windows; NaN where a member said nothing in any."""
    windows = list(windows)
    table = np.full((len(windows), members), np.nan)
    for row, window in zip(table, windows, strict=True):
        values: Floats = getattr(window, name)
        row[: len(values)] = values
    heard = ~np.isnan(table).all(axis=0)
    result = np.full(members, np.nan)
    result[heard] = np.nanmedian(table[:, heard], axis=0)
    return result


# -- columns ---------------------------------------------------------------------------------------------------------


def _incident(
    history: JobHistory,
    rows: _Rows,
    gpus: GpusOfNode,
    now: float,
    notes: tuple[str, ...],
    limits: Thresholds,
    pinged_since: float,
    over: bool = False,
) -> Incident:
    job, topology = _job(history), history.paths_above
    comms = list(history.comms.values())
    members = [[member.rank for _, member in sorted(comm.members.items())] for comm in comms]
    count = len(comms)
    return Incident(
        job=job,
        communicators=Communicators(
            ids=tuple(f"{comm.comm_id:#x}" for comm in comms),
            start=np.concatenate([[0], np.cumsum([len(ranks) for ranks in members])]).astype(np.int64),
            member=np.array([rank for ranks in members for rank in ranks], np.int32),
            kind=np.full(count, Kind.COLLECTIVE, np.uint8),
            algo=("",) * count,
            transport=("NET",) * count,
        ),
        frames=_frames(history, rows, over),
        process_state={rank.rank: rank.process_state for rank in history.ranks.values() if rank.process_state},
        nvml=_nvml(gpus, job.node_names),
        ib=history.network.ports(job.node_names, now, limits.stale_after_s),
        fabric=history.network.fabric(topology, now, limits.stale_after_s, history.witnessed.pings_since(pinged_since)),
        thresholds=asdict(limits),
        unseen=(*notes, *history.network.unseen_ways(topology)),
        ras=history.witnessed.ras_since(history.quiet_since),
        flights=history.witnessed.flights_since(history.quiet_since),
        processes=history.witnessed.processes_since(history.quiet_since),
        exits=history.exits(),
    )


def _job(history: JobHistory) -> Job:
    world = max([history.world_size or 0, *(rank + 1 for rank in history.ranks)])
    names = tuple(history.nodes())
    number = {name: place for place, name in enumerate(names)}
    node, gpu = np.full(world, -1, np.int32), np.full(world, -1, np.int32)
    for rank in history.ranks.values():
        node[rank.rank] = number[rank.node]
        gpu[rank.rank] = -1 if rank.gpu is None else rank.gpu
    nics = history.network.nic_of_gpu({rank.rank: rank.gpu for rank in history.ranks.values()})
    return Job(job_id=history.job_id, world_size=world, node_names=names, node=node, gpu=gpu, nic_of_gpu=nics)


def _frames(history: JobHistory, rows: _Rows, over: bool) -> Frames:
    rows = sorted(rows, key=lambda row: row[:3])
    keys = [row[:2] for row in rows]
    frames = list(dict.fromkeys(keys))
    place = {key: number for number, key in enumerate(frames)}
    comms = list(history.comms.values())
    operation = {
        (member.rank, number): _operation(member, over)
        for number, comm in enumerate(comms)
        for member in comm.members.values()
    }
    known = {text: number for number, text in enumerate(dict.fromkeys(text for text in operation.values() if text))}

    def column(name: str) -> Floats:
        return np.array([row[3].get(name, np.nan) for row in rows], np.float64)

    nothing = np.full(len(rows), np.nan)
    return Frames(
        rank=np.array([rank for rank, _ in frames], np.int32),
        t_ms=np.array([sample * _MS for _, sample in frames], np.float64),
        window_ms=np.full(len(frames), _MS),
        frame=np.array([place[key] for key in keys], np.int32),
        comm=np.array([row[2] for row in rows], np.int32),
        peer=np.full(len(rows), -1, np.int32),
        state=np.array([row[3]["state"] for row in rows], np.uint8),
        signature=np.array([known.get(operation[row[0], row[2]], -1) for row in rows], np.int32),
        signatures=tuple(known),
        seq=column("seq"),
        done_seq=column("done_seq"),
        age_ms=column("age_ms"),
        send=column("send"),
        recv=column("recv"),
        send_rate=nothing,
        recv_rate=nothing,
        rounds=column("rounds"),
        dur_ms=column("dur_ms"),
        dur_min_ms=column("dur_min_ms"),
        dur_max_ms=column("dur_max_ms"),
        gap_ms=column("gap_ms"),
        idle_seq=column("idle_seq"),
        errors=column("errors"),
    )


def _operation(member: MemberNow, over: bool) -> str:
    """The operation of a member's open round as text, "" where it is not told or lies behind others. Of a job that is
    `over`: of its newest round, since an error ends a round as well.

    The probe's hash over all that must agree (type, reduction, root) stands where the type of the elements would.
    """
    is_open = member.done_seq is not None and member.seq == member.done_seq + 1
    if member.signature is None or not (is_open or over) or member.seq == 0:
        return ""
    # The hash leaves the count of an all-to-all out, for each member may choose it.
    count = NOT_TOLD if member.op == Op.ALL_TO_ALL else member.count
    return f"{_OPS.get(member.op, 'UNKNOWN')} hash:{member.signature:#x} {count}"


def _nvml(gpus: GpusOfNode, names: tuple[str, ...]) -> HealthTable:
    number = {name: place for place, name in enumerate(names)}
    facts = [(number[node], gpu) for node in gpus if node in number for gpu in gpus[node].values()]

    def column(name: str) -> Floats:
        values = [getattr(gpu, name) for _, gpu in facts]
        return np.array([np.nan if value is None else float(value) for value in values], np.float64)

    return HealthTable(
        node=np.array([node for node, _ in facts], np.int32),
        entity=tuple(gpu.index for _, gpu in facts),
        values={name: column(name) for name in _NVML_COLUMNS},
    )
