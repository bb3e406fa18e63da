"""The verdict on a slow-down: classes S1, S2 and S3, whom the network's part falls on, and what should be done."""

from __future__ import annotations

import numpy as np

from diagnosis.contracts.incident import Floats
from diagnosis.contracts.verdict import DOMAIN_OF_CAUSE, NIC_CAUSES, Action, Culprit, EvidenceItem, Verdict
from diagnosis.engine import words
from diagnosis.engine.blame import Blame
from diagnosis.engine.lanes import Lanes, Longs, by_kind
from diagnosis.engine.network import Guilty, find_guilty, nic_of
from diagnosis.engine.slow_case import Case
from diagnosis.engine.slow_own import find_own
from diagnosis.engine.slowness import Slowness
from diagnosis.engine.thresholds import Thresholds

NEARLY_ALL = 0.8
UNEVEN_MIN = 0.03
UNEVEN_GROWTH = 3.0
ALIKE_MAX = 0.03
VARIED_MIN = 0.06
# How often such a verdict was right (see `slow_own`). A place known by sets of communicators or flows alone is a guess.
NIC, PLACE, CHANGED, CHANGED_UNCOMPARED, UNEVEN, UNSURE = 0.97, 0.95, 0.93, 0.85, 0.65, 0.5


def decide(lanes: Lanes, slow: Slowness, blame: Blame, limits: Thresholds, unseen: list[str]) -> Verdict:
    """The verdict on a job that is slower than it was."""
    case = Case(lanes, slow, limits, unseen)
    own = find_own(case, blame)
    network = _network(case, blame)
    if not network:
        blame.comms = [comm for comm in blame.comms if slow.transfer_steady[comm]]
    if own and not network:
        # A rank that is slow outside its rounds is slow inside them as well and keeps others there, and noise is larger
        # in a slower job: where no witness speaks of the network, there is no second fault.
        blame.comms = []
    if network and max(float(slow.transfer_part[comm]) for comm in blame.comms) >= NEARLY_ALL:
        # The network explains the loss: a rank that explains little of it, and for no reason, is noise.
        own = [c for c in own if c.cause != "unknown"]
    if (
        own
        and max(blame.part_of_rank.values(), default=0.0) >= NEARLY_ALL
        and all(c.cause == "unknown" for c in network)
    ):
        network, blame.comms = [], []
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


def _nobody(case: Case, blame: Blame) -> Verdict:
    """The loss is nobody's own: the whole job changed, or the evidence does not say."""
    slow = case.slow
    want = "a profiling window of all ranks, round trips and NIC counters: no own time and no transfer explains it"
    culprits, action = [], Action(kind="collect", collect=want)
    job_wide = _job_wide(case, blame)
    if job_wide is not None:
        cause, confidence, text = job_wide
        case.evidence.append(EvidenceItem(kind="own_time", text=text))
        culprits = [Culprit(kind="job", cause=cause, domain="workload", confidence=confidence)]
        action = Action(kind="notify")
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


def _job_wide(case: Case, blame: Blame) -> tuple[str, float, str] | None:
    """Cause, confidence and words where the work itself has changed; None where that is not seen."""
    slow = case.slow
    if blame.everybody >= case.limits.blame_share_min:
        part = 100 * min(blame.everybody, 1)
        return "workload_change", CHANGED, f"all ranks' own time grew alike and explains {part:.0f} % of the loss"
    if blame.imbalance:
        roles = f"{len(blame.roles)} of {len(set(slow.role.tolist()))} roles"
        return "workload_imbalance", UNEVEN, f"all ranks of {roles} have become slower alike"
    if _uneven(slow):
        return "workload_imbalance", UNEVEN, "times of their own of ranks of the same role are uneven"
    if not slow.compared and slow.varied >= VARIED_MIN and not blame.comms:
        text = "no rank and no transfer stands out, and times of their own differ from sample to sample on all ranks"
        return "workload_change", CHANGED_UNCOMPARED, text
    if _alike(slow) and not blame.comms:
        text = "no rank and no transfer stands out, and ranks of the same role need alike times of their own"
        return "workload_change", CHANGED_UNCOMPARED, text
    return None


def _uneven(slow: Slowness) -> bool:
    """Whether own times of peers lie much further apart than they did at baseline, with nobody standing out."""
    if not slow.compared:
        return False
    now, base = (_spread(own, slow.role) for own in (slow.own_ms, slow.own_base_ms))
    return now >= UNEVEN_MIN and now >= UNEVEN_GROWTH * base


def _alike(slow: Slowness) -> bool:
    """Whether own times have no baseline, are told of nearly all ranks, and lie close together within each role."""
    told = float(np.isfinite(slow.own_ms).mean())
    if slow.compared or told < NEARLY_ALL:
        return False
    return _spread(slow.own_ms, slow.role) <= ALIKE_MAX and _spread(slow.own_ms, slow.role, 0.9) <= 3 * ALIKE_MAX


def _spread(own: Floats, role: Longs, quantile: float = 0.5) -> float:
    """A quantile, over all ranks, of how far own times lie from their role's median, as a part of it."""
    apart = np.full(len(own), np.nan)
    for members in by_kind(np.arange(len(role)), role):
        told = members[np.isfinite(own[members]) & (own[members] > 0)]
        if len(told):
            apart[told] = np.abs(own[told] / np.median(own[told]) - 1)
    apart = apart[np.isfinite(apart)]
    return float(np.quantile(apart, quantile)) if len(apart) else 0.0


# -- network ---------------------------------------------------------------------------------------------------------


def _network(case: Case, blame: Blame) -> list[Culprit]:
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


def _of_guilty(case: Case, guilty: Guilty, blame: Blame) -> Culprit:
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
            node=guilty.place.node,
            cause=cause,
            domain=domain,
            confidence=PLACE,
            lost_ms_per_step=lost,
        )
    if guilty.rank is None:
        return Culprit(
            kind="node", node=guilty.node, cause=cause, domain=domain, confidence=UNSURE, lost_ms_per_step=lost
        )
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
        confidence=NIC if guilty.findings else UNSURE,
        lost_ms_per_step=lost,
    )


# -- action ----------------------------------------------------------------------------------------------------------


def _action(case: Case, culprits: list[Culprit], blame: Blame) -> Action:
    drain = sorted(
        {
            c.node
            for c in culprits
            if c.node is not None and (c.domain == "hardware" or (c.kind == "nic" and c.cause in NIC_CAUSES))
        }
    )
    network = [c for c in culprits if c.domain == "network"]
    flag = "nic" if any(c.kind == "nic" for c in network) else "fabric" if network else None
    beyond = sorted({c.node for c in culprits if c.kind == "link" and c.node is not None})
    if drain:
        return Action(kind="drain", nodes=drain, requeue=True, exclude=sorted({*drain, *beyond}), flag=flag)
    if beyond:  # nothing of the node's own is at fault, but elsewhere the job is rid of that link
        return Action(kind="requeue", requeue=True, exclude=beyond, flag=flag)
    if culprits and any(c.cause != "unknown" for c in culprits):
        return Action(kind="notify", flag=flag)
    if blame.comms and not culprits:
        ids = case.lanes.incident.communicators.ids
        want = f"flows, round trips and NIC counters of the members of {ids[blame.comms[0]]}"
        return Action(kind="collect", flag="fabric", collect=want)
    who = words.ranks(blame.ranks) if blame.ranks else "the suspects"
    return Action(kind="collect", flag=flag, collect=f"a profile and counters of {who}: no second witness says why")
