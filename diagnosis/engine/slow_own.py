"""Stragglers judged: what the rank or node whose own time grew suffers from, by fusion of witnesses.

The job's own words (frames, summaries) are one witness however many they are: they say who, and what kind of
trouble. Only what the node says of its hardware makes that a hardware fault, and only where it explains the loss: a
throttled GPU under a rank that waits for its data loader is evidence of a throttled GPU and of nothing else.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from diagnosis.contracts.incident import Floats
from diagnosis.contracts.verdict import DOMAIN_OF_CAUSE, Culprit, EvidenceItem
from diagnosis.engine import words
from diagnosis.engine.blame import Blame
from diagnosis.engine.network import nic_of
from diagnosis.engine.patterns import Pattern
from diagnosis.engine.slow_case import Case
from diagnosis.engine.witnesses import Finding

GPU_CAUSES = ("gpu_clock_throttle", "hbm_degraded", "gpu_fault", "pcie_degraded")
HOST_CAUSES = ("storage_stall", "host_contention")
STALLED = ("dataloader_starvation", "storage_stall")
FROM_HOST = ("dataloader_starvation", "storage_stall", "host_contention", "")
NODE_PART_MIN = 0.75
# How often such a verdict was right on drills of all kinds under bad conditions (`docs/accuracy.md`, "harsh"), a little
# less where a cluster may be worse than a drill. An unknown cause is no verdict to act on, however right the rank is.
FUNCTION, HOST, FUNCTION_AND_HOST = 0.95, 0.93, 0.97
GPU, GPU_AND_FUNCTION, NOBODY_SAYS = 0.95, 0.97, 0.6
CONFIRMED = 0.3
MINOR = 0.5


def find_own(case: Case, blame: Blame) -> list[Culprit]:
    """The ranks and nodes whose own time is to blame, most guilty first.

    In a synchronous job a rank that is a little late beside one that is very late costs nothing: without a cause of its
    own it is not named.
    """
    culprits: list[tuple[int, Culprit]] = []
    done: set[int] = set()
    for rank in blame.ranks:
        if rank in done:
            continue
        together = _whole_node(case, rank, blame)
        done |= set(together)
        culprit = _of_node(case, together, blame) if together else _of_rank(case, rank, blame)
        if culprit.cause == "unknown" and case.slow.role[rank] in blame.roles:
            continue
        if culprit.domain != "hardware" and _refuted(case, rank, blame):
            continue
        culprits.append((rank, culprit))
    if not culprits and not blame.comms and not case.slow.compared:
        culprits = _stage_nodes(case, blame)
    blame.imbalance = bool(blame.roles) and not culprits
    greatest = max((case.slow.excess_ms[rank] for rank, _ in culprits), default=0.0)
    return [
        culprit
        for rank, culprit in culprits
        if culprit.cause != "unknown"
        or (case.slow.excess_ms[rank] >= MINOR * greatest and blame.part_of_rank[rank] >= MINOR)
    ]


def _stage_nodes(case: Case, blame: Blame) -> list[tuple[int, Culprit]]:
    """Nodes that are slower than all others by most of the loss, and that say why themselves.

    Without a baseline only peers can be compared, and a node that is a whole pipeline stage has none. That its stage
    takes longer is no fault; that its functions wait for data by as much as is lost, and others' do not, is.
    """
    slow, job, culprits = case.slow, case.job, []
    for number, name in enumerate(job.node_names):
        mine = np.flatnonzero(job.node == number)
        stage = slow.role[mine[0]] if len(mine) else -1
        others = np.flatnonzero(np.isfinite(slow.own_ms) & (slow.role != stage))
        if not np.array_equal(mine, np.flatnonzero(slow.role == stage)) or not len(others):
            continue
        own, usual, lost = _middle(slow.own_ms[mine]), _middle(slow.own_ms[others]), _middle(slow.lost_ms[mine])
        part = (own - usual) / lost if lost > 0 else np.nan
        pattern = _pattern(case, int(mine[0]), set(mine.tolist()), own - usual) if part >= MINOR else None
        if pattern is not None and pattern.cause in STALLED:
            text = f"ranks of {name} spend {own:.1f} ms of their own a round ({usual:.1f} ms elsewhere)"
            case.evidence.append(EvidenceItem(kind="own_time", text=text, value=round(part, 2)))
            blame.ranks += [int(rank) for rank in mine]
            culprits.append((int(mine[0]), _node(case, name, min(part, 1.0), pattern)))
    return culprits


def _middle(values: Floats) -> float:
    told = values[np.isfinite(values)]
    return float(np.median(told)) if len(told) else np.nan


def _refuted(case: Case, rank: int, blame: Blame) -> bool:
    """Whether the profile says that a rank's functions take as long as its peers', unless nobody is slower than it."""
    if case.patterns is None or rank == blame.ranks[0]:
        return False
    pattern = case.patterns.of(rank, set(blame.ranks))
    return pattern is not None and not _confirmed(case, rank, pattern, case.slow.excess_ms[rank])


def _confirmed(case: Case, rank: int, pattern: Pattern, excess_ms: float) -> bool:
    """Whether what grew in a rank's profile is a good part of what its own time grew by (ms per unit)."""
    return bool(pattern.grown_ms >= CONFIRMED * excess_ms * case.slow.units_per_step[rank])


def _whole_node(case: Case, rank: int, blame: Blame) -> list[int]:
    """The named ranks of this rank's node that are late alike, when they are most of it; else nothing."""
    node = case.job.node[rank]
    if node < 0:
        return []
    mine = np.flatnonzero(case.job.node == node)
    named = [int(r) for r in mine if int(r) in blame.part_of_rank]
    greatest = max((case.slow.excess_ms[r] for r in named), default=0.0)
    named = [r for r in named if case.slow.excess_ms[r] >= MINOR * greatest]
    whole = rank in named and len(mine) > 1 and len(named) >= NODE_PART_MIN * len(mine) and len(mine) < case.lanes.world
    return named if whole else []


def _note_own(case: Case, rank: int, part: float) -> None:
    slow = case.slow
    base = slow.own_base_ms[rank]
    text = (
        f"rank {rank} spends {slow.own_ms[rank]:.1f} ms of its own a round"
        f" ({base:.1f} ms {'at baseline' if slow.compared else 'for its peers'});"
        f" that explains {100 * part:.0f} % of the loss"
    )
    case.evidence.append(EvidenceItem(kind="own_time", text=text, value=round(part, 2)))


def _of_node(case: Case, ranks: list[int], blame: Blame) -> Culprit:
    first = ranks[0]
    node = case.job.node_names[case.job.node[first]]
    _note_own(case, first, blame.part_of_rank[first])
    text = f"{len(ranks)} ranks of {node} are late alike: {words.ranks(ranks)}"
    case.evidence.append(EvidenceItem(kind="node", text=text))
    return _node(
        case, node, blame.part_of_rank[first], _pattern(case, first, set(blame.ranks), case.slow.excess_ms[first])
    )


def _node(case: Case, node: str, part: float, pattern: Pattern | None) -> Culprit:
    cause, confidence = _cause_of_host(case, node, pattern)
    return Culprit(
        kind="node",
        node=node,
        cause=cause,
        domain=DOMAIN_OF_CAUSE[cause],
        confidence=confidence,
        lost_ms_per_step=round(part * case.loss_ms, 1),
    )


def _pattern(case: Case, rank: int, suspects: set[int], excess_ms: float) -> Pattern | None:
    """What grew in a rank's profile, with a cause only if it is a good part of what its own time grew by."""
    if case.patterns is None:
        return None
    pattern = case.patterns.of(rank, suspects)
    if pattern is not None and not _confirmed(case, rank, pattern, excess_ms):
        return replace(pattern, cause="", part=0.0)
    if pattern is not None and pattern.part > 0:
        case.evidence.append(EvidenceItem(kind="pattern", text=f"rank {rank}: {pattern.text}"))
    return pattern


def _cause_of_host(case: Case, node: str, pattern: Pattern | None) -> tuple[str, float]:
    """The cause where the trouble is on the host: what the host says, else what the job's functions say."""
    said = [f for f in case.witnesses.of_node.get(node, ()) if f.cause in HOST_CAUSES and f.entity == ""]
    hint = pattern.cause if pattern is not None else ""
    if hint in ("gc_stall", "allocator_stall"):
        return hint, FUNCTION
    if hint in FROM_HOST and said:
        order = sorted(said, key=lambda finding: HOST_CAUSES.index(finding.cause))
        for finding in order:
            case.cite(finding)
        return order[0].cause, FUNCTION_AND_HOST if hint else HOST
    if hint in ("dataloader_starvation", "storage_stall"):
        return hint, FUNCTION
    for finding in said:
        case.cite(finding)
    if said:
        return said[0].cause, HOST
    return "unknown", NOBODY_SAYS


def _of_rank(case: Case, rank: int, blame: Blame) -> Culprit:
    part = blame.part_of_rank[rank]
    node, gpu, _ = nic_of(case.lanes, rank)
    _note_own(case, rank, part)
    pattern = _pattern(case, rank, set(blame.ranks), case.slow.excess_ms[rank])
    kind, cause, confidence = "rank", "unknown", NOBODY_SAYS
    said = _gpu_witness(case, rank, pattern) if node is not None else None
    if said is not None:
        kind, cause, confidence = "gpu", said.cause, GPU_AND_FUNCTION if pattern is not None else GPU
    elif node is not None and not (pattern is not None and pattern.cause in GPU_CAUSES):
        cause, confidence = _cause_of_host(case, node, pattern)
    return Culprit(
        kind=kind,
        rank=rank,
        node=node,
        gpu=gpu,
        cause=cause,
        domain=DOMAIN_OF_CAUSE[cause],
        confidence=confidence,
        lost_ms_per_step=round(part * case.loss_ms, 1),
    )


def _gpu_witness(case: Case, rank: int, pattern: Pattern | None) -> Finding | None:
    """The finding about a rank's GPU that explains its excess, None where there is none. All are cited."""
    node, gpu, _ = nic_of(case.lanes, rank)
    if node is None or gpu is None:
        return None
    found = [f for f in case.witnesses.about(node, gpu, None) if f.cause in GPU_CAUSES and f.entity == gpu]
    convicts = [finding for finding in found if _explains(case, rank, finding, pattern)]
    for finding in found:
        case.cite(finding, against=finding not in convicts)
    if not found and _told(case, node, gpu):
        text = f"GPU{gpu} of {node} says nothing unusual of itself"
        case.evidence.append(EvidenceItem(kind="gpu", text=text, witness="nvml", against=True))
    if pattern is not None and pattern.cause:
        same = [finding for finding in convicts if finding.cause == pattern.cause]
        convicts = same or convicts
    return convicts[0] if convicts else None


def _told(case: Case, node: str, gpu: int) -> bool:
    """Whether NVML said anything about a GPU."""
    nvml, names = case.lanes.incident.nvml, case.job.node_names
    if nvml is None:
        return False
    return any(nvml.entity[row] == gpu for row in np.flatnonzero(nvml.node == names.index(node)))


def _explains(case: Case, rank: int, finding: Finding, pattern: Pattern | None) -> bool:
    """Whether a finding fits what the rank does. The summary's word counts most; else the size must fit."""
    if pattern is not None and pattern.part > 0:
        fits = {
            "gpu_clock_throttle": ("gpu_clock_throttle", "hbm_degraded"),
            "hbm_degraded": ("hbm_degraded",),
            "pcie_degraded": ("pcie_degraded", "dataloader_starvation"),
            "gpu_fault": ("hbm_degraded", "gpu_clock_throttle"),
        }[finding.cause]
        if pattern.cause and pattern.cause not in fits:
            return False
    if finding.cause != "gpu_clock_throttle":
        return True
    slow = case.slow
    base = slow.own_base_ms[rank]
    if not np.isfinite(base) or slow.excess_ms[rank] <= 0:
        return True
    return bool((finding.scale - 1) * base >= case.limits.clock_explains_min * slow.excess_ms[rank])
