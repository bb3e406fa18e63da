"""`job.json` as `Job`: where each rank runs, as far as it is told."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from diagnosis.contracts.exits import ENDED_WORDS
from diagnosis.contracts.incident import UNKNOWN, WORLD_MAX, Ints, Job
from diagnosis.evidence.bundle import files
from diagnosis.evidence.bundle.files import JobFile
from diagnosis.evidence.limits import Limits, Names
from diagnosis.evidence.notes import Notes
from diagnosis.evidence.values import Decoder

_DECODER = Decoder(
    JobFile,
    {
        "nodes": files.mended_names,
        "gpus": files.mended_indices,
        "groups": files.mended_groups,
        "nic_of_gpu": files.mended_map,
        "thresholds": files.mended_numbers,
        "unseen": files.mended_names,
        "lost_nodes": files.mended_names,
    },
)
_FIDELITIES = ("full", "nccl")
_GPU_MAX = 1 << 16
_UNSEEN_MAX, _UNSEEN_CHARS_MAX = 32, 300
_THRESHOLDS_MAX = 64
_LOST_MAX = 1024


def read_job(file: str, content: bytes, notes: Notes) -> JobFile | None:
    """The file, or None (noted) where it is no JSON object."""
    return _DECODER.decode(file, 0, content, notes)


def world_size(raw: JobFile, rank_seen_max: int, notes: Notes) -> int:
    """Number of ranks: as told, else as many as there are nodes or ranks to be seen. At most `WORLD_MAX`."""
    told = raw.world_size
    if told is not None and 0 < told <= WORLD_MAX:
        return told
    if told is not None:
        notes.add(files.JOB, f"world_size {told} is not possible and taken as unknown")
    return min(max(rank_seen_max + 1, len(raw.nodes or ()), len(raw.gpus or ())), WORLD_MAX)


def build_job(raw: JobFile, world: int, nodes: Names, limits: Limits, notes: Notes) -> Job:
    """The job of `world` ranks; its nodes are added to `nodes`. `node_names` is set by whoever knows all nodes."""
    for name, values in (("nodes", raw.nodes), ("gpus", raw.gpus)):
        if values is not None and len(values) != world:
            notes.add(files.JOB, f"{name} has {len(values)} entries for {world} ranks")
    fidelity = raw.fidelity or "full"
    if fidelity not in _FIDELITIES:
        notes.add(files.JOB, "fidelity is none that is known and taken as nccl, the lesser one")
        fidelity = "nccl"
    return Job(
        job_id=raw.job_id,
        world_size=world,
        node_names=(),
        node=_per_rank([nodes.index(name) for name in (raw.nodes or ())[:world]], world),
        gpu=_per_rank([_gpu(gpu) for gpu in (raw.gpus or ())[:world]], world),
        fidelity=fidelity,
        groups=_groups(raw, world, limits, notes),
        nic_of_gpu={int(gpu): nic for gpu, nic in (raw.nic_of_gpu or {}).items() if _is_gpu(gpu)},
        step_ms=raw.step_ms if raw.step_ms is not None and 0 < raw.step_ms < math.inf else math.nan,
    )


def told_unseen(raw: JobFile) -> tuple[str, ...]:
    """What whoever wrote the bundle could not see, in their words."""
    return tuple(line[:_UNSEEN_CHARS_MAX] for line in (raw.unseen or ())[:_UNSEEN_MAX] if line)


def told_ended(raw: JobFile, notes: Notes) -> str:
    """How the job ended, "" where it runs, or ended in a way that is nobody's fault."""
    if not raw.ended or raw.ended in ENDED_WORDS:
        return raw.ended or ""
    notes.add(files.JOB, "ended is no word for a job that ended by itself and passed over")
    return ""


def told_lost_nodes(raw: JobFile) -> tuple[str, ...]:
    """Nodes that Slurm had lost when the job ended."""
    return tuple(name for name in (raw.lost_nodes or ())[:_LOST_MAX] if name)


def told_thresholds(raw: JobFile, notes: Notes) -> dict[str, float]:
    """Those that are possible: finite and not below zero."""
    told = list((raw.thresholds or {}).items())[:_THRESHOLDS_MAX]
    sound = {name: value for name, value in told if value is not None and 0 <= value < math.inf}
    notes.add(files.JOB, "an impossible threshold is taken as the default", count=len(told) - len(sound))
    return sound


def _gpu(gpu: int | None) -> int:
    return gpu if gpu is not None and 0 <= gpu < _GPU_MAX else UNKNOWN


def _is_gpu(digits: str) -> bool:
    return digits.isascii() and digits.isdecimal() and len(digits) < 6


def _per_rank(values: Sequence[int], world: int) -> Ints:
    out = np.full(world, UNKNOWN, np.int32)
    out[: len(values)] = values
    return out


def _groups(raw: JobFile, world: int, limits: Limits, notes: Notes) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Groups whose ranks exist and, within one kind, occur once. A kind that breaks this is left out as a whole."""
    out: dict[str, tuple[tuple[int, ...], ...]] = {}
    members = 0
    for kind, groups in (raw.groups or {}).items():
        ranks = [rank for group in groups for rank in group]
        members += len(ranks)
        if members > min(limits.members_max, limits.groups_max * 16):
            notes.add(files.JOB, "groups are larger than the reader's limit and left out")
            break
        if any(not 0 <= rank < world for rank in ranks) or len(set(ranks)) != len(ranks):
            notes.add(files.JOB, f"group {kind[:16]} names ranks that do not exist, or one twice, and is left out")
            continue
        out[kind] = tuple(tuple(group) for group in groups if group)
    return out
