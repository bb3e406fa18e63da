"""The verdict on a slow-down: classes S1, S2 and S3, causes by fusion of witnesses, and what the fault costs.

The job's own words (frames, summaries) are one witness however many they are. They say *who* and *what kind of
trouble*; only what the node says of its hardware makes that a hardware fault, and only where it explains the loss: a
throttled GPU under a rank that waits for its data loader is evidence of a throttled GPU and of nothing else.
"""

from __future__ import annotations

import numpy as np

from diagnosis.contracts.incident import Floats
from diagnosis.contracts.verdict import DOMAIN_OF_CAUSE, Action, Culprit, EvidenceItem, Verdict
from diagnosis.engine import words
from diagnosis.engine.blame import Blame
from diagnosis.engine.lanes import Lanes, Longs, by_kind
from diagnosis.engine.network import Guilty, find_guilty, nic_of
from diagnosis.engine.patterns import Pattern, Patterns
from diagnosis.engine.slowness import Slowness, loss_per_step_ms
from diagnosis.engine.thresholds import Thresholds
from diagnosis.engine.witnesses import Finding, Witnesses, gather

GPU_CAUSES = ("gpu_clock_throttle", "hbm_degraded", "gpu_fault", "pcie_degraded")
HOST_CAUSES = ("storage_stall", "host_contention")
FROM_HOST = ("dataloader_starvation", "storage_stall", "host_contention", "")
NODE_PART_MIN = 0.75
NEARLY_ALL = 0.8
CONFIRMED = 0.3
UNEVEN_MIN = 0.03
UNEVEN_GROWTH = 3.0


class _Case:
    """One slow-down being decided: what every step needs."""

    def __init__(self, lanes: Lanes, slow: Slowness, limits: Thresholds, unseen: list[str]) -> None:
        self.lanes = lanes
        self.slow = slow
        self.limits = limits
        self.unseen = unseen
        self.job = lanes.incident.job
        self.witnesses: Witnesses = gather(lanes.incident, limits)
        summaries = lanes.incident.summaries
        self.patterns = Patterns(summaries, slow.role) if summaries is not None and len(summaries.rank) else None
        self.loss_ms = loss_per_step_ms(slow, lanes.incident)
        self.evidence = [
            EvidenceItem(
                kind="round_time",
                text=f"the job takes {slow.ratio:.2f} times as long as at baseline, {self.loss_ms:.0f} ms a step more",
                value=round(slow.ratio, 3),
            )
        ]

    def cite(self, finding: Finding, against: bool = False) -> None:
        """Note what a node says."""
        witness = {"kmsg": "kernel", "ib": "network", "host": "kernel"}.get(finding.source, "nvml")
        self.evidence.append(EvidenceItem(kind=finding.cause, text=finding.text, witness=witness, against=against))


def decide(lanes: Lanes, slow: Slowness, blame: Blame, limits: Thresholds, unseen: list[str]) -> Verdict:
    """The verdict on a job that is slower than it was."""
    case = _Case(lanes, slow, limits, unseen)
    own = _own_time(case, blame)
    network = _network(case, blame)
    if own and not network:
        # A rank that is slow outside its rounds is slow inside them as well and keeps others there, and noise is larger
        # in a slower job: where no witness speaks of the network, there is no second fault.
        blame.comms = []
    if network and max(float(slow.transfer_part[comm]) for comm in blame.comms) >= NEARLY_ALL:
        # The network explains the loss: a rank that explains little of it, and for no reason, is noise.
        own = [c for c in own if c.cause != "unknown"]
    if not own:
        blame.ranks = []
    if not own and not network and (blame.everybody >= limits.blame_share_min or _uneven(slow)):
        return _nobody(case, blame)
    class_ = _class_of(blame)
    culprits = own + network
    if class_ is None:
        return _nobody(case, blame)
    action = _action(case, culprits, blame)
    return Verdict(
        job_id=case.job.job_id,
        anomaly="slow",
        class_=class_,
        culprits=culprits,
        victims={"ranks": max(0, lanes.world - len(blame.ranks))},
        action=action,
        summary=words.slow_summary(slow.ratio, case.loss_ms, culprits, action),
        evidence=case.evidence,
        unseen=unseen,
    )


def _class_of(blame: Blame) -> str | None:
    if blame.ranks and blame.comms:
        return "S3"
    if blame.ranks:
        return "S1"
    return "S2" if blame.comms else None


def _nobody(case: _Case, blame: Blame) -> Verdict:
    """The loss is nobody's own: the whole job changed, or the evidence does not say."""
    slow, limits = case.slow, case.limits
    changed = blame.everybody >= limits.blame_share_min
    culprits = []
    if (blame.imbalance or _uneven(slow)) and not changed:
        text = "ranks of the same role need more unlike times of their own than they did"
        if blame.imbalance:
            text = f"all ranks of {len(blame.roles)} of {len(set(slow.role.tolist()))} roles have become slower alike"
        case.evidence.append(EvidenceItem(kind="own_time", text=text))
        culprits = [Culprit(kind="job", cause="workload_imbalance", domain="workload", confidence=0.7)]
        action = Action(kind="notify")
    elif changed:
        text = f"all ranks' own time grew alike and explains {100 * min(blame.everybody, 1):.0f} % of the loss"
        case.evidence.append(EvidenceItem(kind="own_time", text=text, value=round(blame.everybody, 2)))
        culprits = [Culprit(kind="job", cause="workload_change", domain="workload", confidence=0.8)]
        action = Action(kind="notify")
    else:
        want = "a profiling window of all ranks, round trips and NIC counters: no own time and no transfer explains it"
        action = Action(kind="collect", collect=want)
    return Verdict(
        job_id=case.job.job_id,
        anomaly="slow",
        class_=None,
        culprits=culprits,
        victims={"ranks": case.lanes.world},
        action=action,
        summary=words.slow_summary(slow.ratio, case.loss_ms, culprits, action),
        evidence=case.evidence,
        unseen=case.unseen,
    )


def _uneven(slow: Slowness) -> bool:
    """Whether own times of peers lie much further apart than they did at baseline, with nobody standing out."""
    if not slow.compared:
        return False
    now, base = (_spread(own, slow.role) for own in (slow.own_ms, slow.own_base_ms))
    return now >= UNEVEN_MIN and now >= UNEVEN_GROWTH * base


def _spread(own: Floats, role: Longs) -> float:
    """Relative spread of own times around their role's median, over all ranks."""
    apart = np.full(len(own), np.nan)
    for members in by_kind(np.arange(len(role)), role):
        told = members[np.isfinite(own[members]) & (own[members] > 0)]
        if len(told):
            apart[told] = np.abs(own[told] / np.median(own[told]) - 1)
    apart = apart[np.isfinite(apart)]
    return float(np.median(apart)) if len(apart) else 0.0


# -- own time --------------------------------------------------------------------------------------------------------


def _own_time(case: _Case, blame: Blame) -> list[Culprit]:
    culprits: list[Culprit] = []
    done: set[int] = set()
    for rank in blame.ranks:
        if rank in done:
            continue
        together = _whole_node(case, rank, blame)
        done |= set(together)
        culprit = _of_node(case, together, blame) if together else _of_rank(case, rank, blame)
        if culprit.cause == "unknown" and (case.slow.role[rank] in blame.roles or _refuted(case, rank, blame)):
            continue
        culprits.append(culprit)
    blame.imbalance = bool(blame.roles) and not culprits
    return culprits


def _refuted(case: _Case, rank: int, blame: Blame) -> bool:
    """Whether the profile says that a rank's functions take as long as its peers', unless nobody is slower than it."""
    if case.patterns is None or rank == blame.ranks[0]:
        return False
    pattern = case.patterns.of(rank, set(blame.ranks))
    grown_ms = case.slow.excess_ms[rank] * case.slow.units_per_step[rank]
    return pattern is not None and pattern.grown_ms < CONFIRMED * grown_ms


def _whole_node(case: _Case, rank: int, blame: Blame) -> list[int]:
    """The named ranks of this rank's node, when they are most of it and more than one; else nothing."""
    node = case.job.node[rank]
    if node < 0:
        return []
    mine = np.flatnonzero(case.job.node == node)
    named = [int(r) for r in mine if int(r) in blame.part_of_rank]
    whole = len(mine) > 1 and len(named) >= NODE_PART_MIN * len(mine) and len(mine) < case.lanes.world
    return named if whole else []


def _note_own(case: _Case, rank: int, part: float) -> None:
    slow = case.slow
    base = slow.own_base_ms[rank]
    text = (
        f"rank {rank} spends {slow.own_ms[rank]:.1f} ms of its own a round"
        f" ({base:.1f} ms {'at baseline' if slow.compared else 'for its peers'});"
        f" that explains {100 * part:.0f} % of the loss"
    )
    case.evidence.append(EvidenceItem(kind="own_time", text=text, value=round(part, 2)))


def _of_node(case: _Case, ranks: list[int], blame: Blame) -> Culprit:
    first = ranks[0]
    node = case.job.node_names[case.job.node[first]]
    _note_own(case, first, blame.part_of_rank[first])
    text = f"{len(ranks)} ranks of {node} are late alike: {words.ranks(ranks)}"
    case.evidence.append(EvidenceItem(kind="node", text=text))
    pattern = _pattern(case, first, blame)
    cause, confidence = _cause_of_host(case, node, pattern)
    lost = blame.part_of_rank[first] * case.loss_ms
    return Culprit(
        kind="node",
        node=node,
        cause=cause,
        domain=DOMAIN_OF_CAUSE[cause],
        confidence=confidence,
        lost_ms_per_step=round(lost, 1),
    )


def _pattern(case: _Case, rank: int, blame: Blame) -> Pattern | None:
    if case.patterns is None:
        return None
    pattern = case.patterns.of(rank, set(blame.ranks))
    if pattern is not None and pattern.part > 0:
        case.evidence.append(EvidenceItem(kind="pattern", text=f"rank {rank}: {pattern.text}"))
    return pattern


def _cause_of_host(case: _Case, node: str, pattern: Pattern | None) -> tuple[str, float]:
    """The cause where the trouble is on the host: what the host says, else what the job's functions say."""
    said = [f for f in case.witnesses.of_node.get(node, ()) if f.cause in HOST_CAUSES and f.entity == ""]
    hint = pattern.cause if pattern is not None else ""
    if hint in ("gc_stall", "allocator_stall"):
        return hint, 0.85
    if hint in FROM_HOST and said:
        order = sorted(said, key=lambda finding: HOST_CAUSES.index(finding.cause))
        for finding in order:
            case.cite(finding)
        return order[0].cause, 0.93 if hint else 0.8
    if hint in ("dataloader_starvation", "storage_stall"):
        return hint, 0.85
    for finding in said:
        case.cite(finding)
    if said:
        return said[0].cause, 0.75
    return "unknown", 0.5


def _of_rank(case: _Case, rank: int, blame: Blame) -> Culprit:
    part = blame.part_of_rank[rank]
    node, gpu, _ = nic_of(case.lanes, rank)
    _note_own(case, rank, part)
    pattern = _pattern(case, rank, blame)
    kind, cause, confidence = "rank", "unknown", 0.6
    said = _gpu_witness(case, rank, pattern) if node is not None else None
    if said is not None:
        kind, cause, confidence = "gpu", said.cause, 0.97 if pattern is not None else 0.93
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


def _gpu_witness(case: _Case, rank: int, pattern: Pattern | None) -> Finding | None:
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


def _told(case: _Case, node: str, gpu: int) -> bool:
    """Whether NVML said anything about a GPU."""
    nvml, names = case.lanes.incident.nvml, case.job.node_names
    if nvml is None:
        return False
    return any(nvml.entity[row] == gpu for row in np.flatnonzero(nvml.node == names.index(node)))


def _explains(case: _Case, rank: int, finding: Finding, pattern: Pattern | None) -> bool:
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


# -- network ---------------------------------------------------------------------------------------------------------


def _network(case: _Case, blame: Blame) -> list[Culprit]:
    if not blame.comms:
        return []
    slow, ids = case.slow, case.lanes.incident.communicators.ids
    for comm in blame.comms[:4]:
        base = slow.transfer_base_ms[comm]
        than = f"{base:.2f} ms at baseline" if np.isfinite(base) else "less in others of its kind"
        text = (
            f"a transfer in communicator {ids[comm]} takes {slow.transfer_ms[comm]:.2f} ms ({than});"
            f" that explains {100 * min(1.0, slow.transfer_part[comm]):.0f} % of the loss"
        )
        case.evidence.append(EvidenceItem(kind="transfer", text=text, value=round(float(slow.transfer_part[comm]), 2)))
    return [_of_guilty(case, guilty, blame) for guilty in find_guilty(case.lanes, slow, blame, case.witnesses)]


def _of_guilty(case: _Case, guilty: Guilty, blame: Blame) -> Culprit:
    for finding in guilty.findings[:4]:
        case.cite(finding)
    if guilty.place is not None:
        case.evidence.append(EvidenceItem(kind="flows", text=guilty.place.text, witness="network"))
    part = min(1.0, max(float(case.slow.transfer_part[comm]) for comm in blame.comms))
    lost = round(part * case.loss_ms, 1)
    cause = "link_fault" if guilty.cause == "lossy_path" else guilty.cause
    domain = DOMAIN_OF_CAUSE[cause]
    if guilty.place is not None and guilty.place.kind in ("link", "switch"):
        return Culprit(
            kind=guilty.place.kind,
            link=guilty.place.name if guilty.place.kind == "link" else None,
            switch=guilty.place.name if guilty.place.kind == "switch" else None,
            cause=cause,
            domain=domain,
            confidence=0.85,
            lost_ms_per_step=lost,
        )
    if guilty.rank is None:
        return Culprit(kind="node", node=guilty.node, cause=cause, domain=domain, confidence=0.5, lost_ms_per_step=lost)
    node, gpu, nic = nic_of(case.lanes, guilty.rank)
    of_gpu = domain == "hardware"
    return Culprit(
        kind="gpu" if of_gpu else "nic",
        rank=guilty.rank,
        node=node,
        gpu=gpu,
        nic=None if of_gpu else nic,
        cause=cause,
        domain=domain,
        confidence=0.93 if guilty.findings else 0.6,
        lost_ms_per_step=lost,
    )


# -- action ----------------------------------------------------------------------------------------------------------

NIC_CONVICTED = ("nic_fault", "nic_degraded", "transceiver_errors")


def _action(case: _Case, culprits: list[Culprit], blame: Blame) -> Action:
    drain = sorted(
        {
            c.node
            for c in culprits
            if c.node is not None and (c.domain == "hardware" or (c.kind == "nic" and c.cause in NIC_CONVICTED))
        }
    )
    network = [c for c in culprits if c.domain == "network"]
    flag = "nic" if any(c.kind == "nic" for c in network) else "fabric" if network else None
    if drain:
        return Action(kind="drain", nodes=drain, requeue=True, exclude=drain, flag=flag)
    if culprits and any(c.cause != "unknown" for c in culprits):
        return Action(kind="notify", flag=flag)
    if blame.comms and not culprits:
        ids = case.lanes.incident.communicators.ids
        want = f"flows, round trips and NIC counters of the members of {ids[blame.comms[0]]}"
        return Action(kind="collect", flag="fabric", collect=want)
    who = words.ranks(blame.ranks) if blame.ranks else "the suspects"
    return Action(kind="collect", flag=flag, collect=f"a profile and counters of {who}: no second witness says why")
