"""A look at the local ranks for a person: what each process does, in which round it is, and what is odd about it.

Needs no controller, no daemon and no configuration, and changes nothing: no directory is made, no frame removed. It
looks for a few seconds, for a step's time is known only by watching some. What could not be read is told beside what
could (`NodeNow.unread`): silence is not health.

Odd is what another rank on this node contradicts (it has entered rounds that this one has not while this one waits
nowhere, or runs another operation in the same round), and what the kernel says of the process. Who waits for whom
stands in gloo's frames by itself, in NCCL's where the transfer steps are on; and whoever is inside a round waits for
those that have not entered it. Ranks of other nodes are not seen: what is odd among them is for the controller.
"""

from __future__ import annotations

import os
import pwd
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from diagnosis.contracts import probeframe
from diagnosis.contracts.errors import OperatorFault
from diagnosis.contracts.probeframe import (
    COUNT_UNKNOWN,
    PEER_UNKNOWN,
    Dtype,
    Op,
    StepState,
    Transport,
    Untold,
    WaitState,
)
from diagnosis.contracts.report import GpuFacts, HardwareFacts
from diagnosis.evidence.steps import Step
from node_daemon.collectors.frames import FrameReader, FrameSample, JobFrames, Sweep
from node_daemon.collectors.nvml import NvmlSource
from node_daemon.collectors.process import STATE_GONE, STATE_UNKNOWN, Processes
from node_daemon.settings import SETTINGS
from node_daemon.step_watch import StepWatch
from node_daemon.summarise import Steps, newest_signature

LOOK_EVERY_S: Final = 0.1
NVML_DEADLINE_S: Final = 3.0
KEEP_FOR_EVER_S: Final = 1e9
WAITS_MAX: Final = 8
FRAME_ROOT: Final = Path(SETTINGS["frame_root"].default)
STATE_WORDS: Final = {
    "R": "running",
    "S": "asleep",
    "D": "in the kernel",
    "T": "stopped",
    "t": "traced",
    "Z": "ended",
    "X": "gone",
    "I": "idle",
}
ODD_STATES: Final = {"X": 5, "Z": 5, "T": 5, "t": 5, "D": 2}
BEHIND, OTHER_OPERATION, ERRORS = 4, 4, 3
BEHIND_FOR_S: Final = 1.0
"""In a healthy job somebody is always a little behind."""


class CommNow(msgspec.Struct, kw_only=True):
    """One communicator of a rank. None: not known. `inside_s`: since it entered the open round that it entered last;
    `idle_s`: since the process left any. `waits_for`: in words, most certain first."""

    comm: str
    size: int
    position: int
    transport: str
    entered: int
    done: int | None
    op: str | None
    dtype: str | None
    count: int | None
    inside_s: float | None
    idle_s: float | None
    errors: int | None
    waits_for: list[str] = []
    odd: list[str] = []


class RankNow(msgspec.Struct, kw_only=True):
    """One process. `process`: the kernel's word, None where it does not vouch for it. `odd`: why to look here first."""

    job_id: int
    restart: int
    user: str
    rank: int | None
    world_size: int | None
    local_rank: int | None
    pid: int
    process: str | None
    gpu: int | None
    step_ms: float | None = None
    step_jitter_ms: float | None = None
    step_round: int | None = None
    step_rounds: int | None = None
    comms: list[CommNow] = []
    odd: list[str] = []
    weight: int = 0


class NodeNow(msgspec.Struct, kw_only=True):
    """All ranks of the node, the odd ones first, its GPUs, and what could not be read, in sentences."""

    schema: str = "tocsin.node/1"
    node: str
    watched_s: float
    ranks: list[RankNow]
    gpus: HardwareFacts
    unread: list[str]


def node_of(frame_root: Path, host: str) -> str:
    """The node whose frames lie here: the only one, or that of this host's name. Raises OperatorFault."""
    try:
        names = sorted(entry.name for entry in frame_root.iterdir() if entry.is_dir() and not entry.is_symlink())
    except OSError as error:
        raise OperatorFault(
            f"{frame_root}: {error.strerror}: no node daemon has run here, or it has another frame_root",
            reason="frame_root",
        ) from error
    short = host.partition(".")[0]
    if short in names:
        return short
    if len(names) == 1:
        return names[0]
    found = f"there are {', '.join(names[:8])}" if names else "it is empty"
    raise OperatorFault(f"{frame_root}: no directory of {short}, {found}: give --node", reason="frame_root")


def look(
    frame_root: Path,
    node: str,
    seconds: float,
    *,
    hardware: Callable[[], HardwareFacts] | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> NodeNow:
    """Look for `seconds`, at least once. Raises OperatorFault where the node's directory cannot be read."""
    if not (frame_root / node).is_dir():
        raise OperatorFault(f"{frame_root / node}: there is no such directory: nothing is watched", reason="frame_root")
    reader = FrameReader(frame_root, node, Processes(), gone_keep_s=KEEP_FOR_EVER_S, idle_keep_s=KEEP_FOR_EVER_S)
    watch, began = StepWatch(), time.monotonic()
    gpus = _Aside(hardware or NvmlSource().read)
    reader.collect()  # what looks unfinished is told of the second look on
    while True:
        sweep = reader.collect()
        steps = watch.look(sweep.jobs)
        watched_s = time.monotonic() - began
        if watched_s + LOOK_EVERY_S > seconds:
            break
        sleep(LOOK_EVERY_S)
    facts = gpus.result(NVML_DEADLINE_S)
    return NodeNow(
        node=node,
        watched_s=round(watched_s, 1),
        ranks=ranks_of(sweep, steps),
        gpus=facts,
        unread=list(_unread(sweep, facts, frame_root / node)),
    )


class _Aside:
    """A call on a thread that may never come back."""

    def __init__(self, call: Callable[[], HardwareFacts]) -> None:
        self._found: list[HardwareFacts] = []
        self._thread = threading.Thread(target=lambda: self._found.append(call()), daemon=True)
        self._thread.start()

    def result(self, deadline_s: float) -> HardwareFacts:
        self._thread.join(deadline_s)
        hung = HardwareFacts("hung", f"the NVIDIA driver gave no answer within {deadline_s:g} s")
        return self._found[0] if self._found else hung


def _unread(sweep: Sweep, gpus: HardwareFacts, directory: Path) -> Iterator[str]:
    if os.geteuid() != 0:
        yield f"not root: only jobs of {_user(os.geteuid())} are read"
    words = {
        "owner": "belong to somebody else",
        "symlink": "are links",
        "unreadable": "could not be opened",
        "too_many": "were too many to read",
        "name": "have no name of a job or a frame",
        "version": "are of another version of the probe",
    }
    for reason, count in sorted(sweep.refused.items()):
        yield f"{count} of the entries below {directory} {words.get(reason, f'are no frames ({reason})')}"
    unseen = sum(frame.state == STATE_UNKNOWN for job in sweep.jobs for frame in job.frames)
    if unseen:
        yield f"{unseen} processes cannot be seen from here (another pid namespace, or not the user's)"
    if gpus.state != "ok":
        what = "GPUs: no NVIDIA driver library" if gpus.state == "absent" else f"GPUs: {gpus.state}"
        yield f"{what}{f' ({gpus.detail})' if gpus.detail and gpus.state != 'absent' else ''}"


def ranks_of(sweep: Sweep, steps: Steps) -> list[RankNow]:
    """Every process, the odd ones first, then those that have been inside a round the longest."""
    jobs = [_Job(job) for job in sweep.jobs]
    ranks = [job.rank(one, steps.get((one.pid, one.start_ticks))) for job in jobs for one in job.job.frames]
    ranks.sort(key=lambda rank: (-rank.weight, -_longest_inside(rank), rank.job_id, rank.rank or 0, rank.pid))
    return ranks


def _longest_inside(rank: RankNow) -> float:
    return max((comm.inside_s or 0.0 for comm in rank.comms), default=0.0)


def _odd_state(letter: str | None) -> list[str]:
    return [f"the process is {STATE_WORDS[letter]} ({letter})"] if letter is not None and letter in ODD_STATES else []


class _Job:
    """What the frames of one job say together. Per communicator: `members` (position to rank) and `newest` (position to
    the round entered last); `marks`: signatures by (communicator, round)."""

    def __init__(self, job: JobFrames) -> None:
        self.job = job
        self.members: dict[int, dict[int, int]] = defaultdict(dict)
        self.newest: dict[int, dict[int, int]] = defaultdict(dict)
        self.marks: dict[tuple[int, int], list[int]] = defaultdict(list)
        for frame in job.frames:
            for slot, mark in zip(frame.slots, newest_signature(frame.slots).tolist(), strict=True):
                comm, place, entered = int(slot["comm_id"]), int(slot["comm_rank"]), int(slot["enqueued"])
                self.members[comm][place] = int(frame.header["rank"])
                self.newest[comm][place] = entered
                self.marks[comm, entered].append(mark)

    def rank(self, frame: FrameSample, step: Step | None) -> RankNow:
        """The process of a frame."""
        letter = None if frame.state == STATE_UNKNOWN else chr(frame.state)
        comms = [_comm(frame, slot) for slot in frame.slots]
        weight = ODD_STATES.get(letter or "", 0)
        waits = any(comm.inside_s is not None for comm in comms)
        for slot, mark, comm in zip(frame.slots, newest_signature(frame.slots).tolist(), comms, strict=True):
            weight = max(weight, self._judge(comm, int(slot["comm_id"]), mark, waits))
            if comm.inside_s is not None:
                comm.waits_for = self._waits(frame, slot, comm)
        comms.sort(key=lambda comm: (not comm.odd, comm.inside_s is None, -(comm.inside_s or 0.0), comm.idle_s or 0.0))
        header = frame.header
        return RankNow(
            job_id=self.job.job_id,
            restart=self.job.restart,
            user=_user(self.job.uid),
            rank=_known(header["rank"]),
            world_size=_known(header["world_size"]),
            local_rank=_known(header["local_rank"]),
            pid=frame.pid,
            process=letter,
            gpu=_known(header["gpu"]),
            step_ms=round(step.step_ns / 1e6, 3) if step else None,
            step_jitter_ms=round(step.jitter_ns / 1e6, 3) if step and step.jitter_ns is not None else None,
            step_round=step.round if step else None,
            step_rounds=step.rounds if step else None,
            comms=comms,
            odd=[*_odd_state(letter), *(word for comm in comms for word in comm.odd)],
            weight=weight,
        )

    def _judge(self, comm: CommNow, comm_id: int, mark: int, waits: bool) -> int:
        """Notes what is odd, and says how much."""
        weight = 0
        ahead = max(self.newest[comm_id].values(), default=0) - comm.entered
        if ahead > 0 and not waits and (comm.idle_s or 0.0) >= BEHIND_FOR_S:
            comm.odd.append(f"has not entered round {comm.entered + 1}, others here are {ahead} ahead")
            weight = BEHIND
        alike = self.marks[comm_id, comm.entered]
        if comm.inside_s is not None and 2 * alike.count(mark) < len(alike):
            comm.odd.append(f"runs another operation in round {comm.entered} than most here")
            weight = OTHER_OPERATION
        if comm.errors:
            comm.odd.append(f"{comm.errors} rounds failed")
            weight = max(weight, ERRORS)
        return weight

    def _waits(self, frame: FrameSample, slot: np.void, comm: CommNow) -> list[str]:
        """Who has not entered the round, and whom the probe saw it wait for."""
        comm_id = int(slot["comm_id"])
        why = {place: "not there" for place, seq in sorted(self.newest[comm_id].items()) if seq < comm.entered}
        why |= {place: word for place, word in _seen_waiting(frame, slot).items() if place not in why}
        members = self.members[comm_id]
        names = [
            f"rank {members[place]}" if members.get(place, -1) >= 0 else f"member {place} of {comm.size}"
            for place in why
        ]
        return [f"{name} ({word})" for name, word in zip(names, why.values(), strict=True)][:WAITS_MAX]


def _comm(frame: FrameSample, slot: np.void) -> CommNow:
    entered, done = int(slot["enqueued"]), min(int(slot["done"]), int(slot["enqueued"]))
    ends_seen = not int(slot["unknown"]) & Untold.DONE
    inside = ends_seen and done < entered and frame.state != STATE_GONE
    left_ns = int(frame.header["last_leave_ns"])
    count, op, dtype = int(slot["count"]), int(slot["op"]), int(slot["dtype"])
    return CommNow(
        comm=f"{int(slot['comm_id']):016x}",
        size=int(slot["comm_size"]),
        position=int(slot["comm_rank"]),
        transport=_word(Transport, int(frame.header["transport"])) or "unknown",
        entered=entered,
        done=done if ends_seen else None,
        op=_word(Op, op),
        dtype=_word(Dtype, dtype),
        count=None if count == COUNT_UNKNOWN else count,
        inside_s=_age_s(frame.read_ns, int(slot["t_enqueued_ns"])) if inside else None,
        idle_s=None if inside else _age_s(frame.read_ns, max(left_ns, int(slot["t_enqueued_ns"]))),
        errors=None if int(slot["unknown"]) & Untold.ERRORS else int(slot["errors"]),
    )


def _seen_waiting(frame: FrameSample, slot: np.void) -> dict[int, str]:
    """Position of each peer that the probe saw it wait for, and why."""
    if int(frame.header["transport"]) == Transport.NCCL:
        if int(slot["unknown"]) & Untold.STEPS:
            return {}
        channels = probeframe.channels_of(np.array([slot]))[0]
        held = channels[(channels["send_state"] == StepState.PEER_CREDIT) & (channels["peer"] != PEER_UNKNOWN)]
        return {int(peer): "takes nothing" for peer in held["peer"]}
    words = {int(WaitState.SEND): "takes nothing", int(WaitState.RECV): "sends nothing"}
    lanes = slot["lanes"][(slot["lanes"]["used"] != 0) & (slot["lanes"]["wait_state"] != WaitState.NONE)]
    return {int(lane["peer"]): words.get(int(lane["wait_state"]), "waits for it") for lane in lanes}


def _word(kind: type[Op | Dtype | Transport], value: int) -> str | None:
    words = {one.value: one.name.lower() for one in kind}
    return None if value == 0 else words.get(value)


def _known(value: np.int32) -> int | None:
    return int(value) if int(value) >= 0 else None


def _age_s(now_ns: int, then_ns: int) -> float | None:
    return round(max(0, now_ns - then_ns) / 1e9, 1) if then_ns else None


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def gpu_of(rank: RankNow, gpus: HardwareFacts) -> GpuFacts | None:
    """NVML's words about the GPU that the rank says it uses."""
    return next((gpu for gpu in _told(gpus) if gpu.index == rank.gpu), None)


def _told(gpus: HardwareFacts) -> Iterable[GpuFacts]:
    return gpus.gpus if gpus.state == "ok" else ()
