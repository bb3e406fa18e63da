"""From the history of a job and the facts of its nodes to one verdict. Pure: the same inputs give the same verdict."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from diagnosis.contracts.report import GpuFacts
from diagnosis.contracts.verdict import DOMAIN_OF_CAUSE, Action, Culprit, EvidenceItem, Verdict
from diagnosis.engine import explain
from diagnosis.engine.hangs import GONE, STOPPED, Hang, Root, find_hang
from diagnosis.engine.hardware import clock_ratio, slowdown_reasons
from diagnosis.engine.history import JobHistory
from diagnosis.engine.slows import Slowdown, Straggler, find_slowdown

GpusOfNode = Mapping[str, Mapping[int, GpuFacts]]
"""Fresh NVML facts by node and GPU index; a node or GPU that is absent told nothing lately."""


def diagnose(history: JobHistory, gpus: GpusOfNode, now: float) -> Verdict:
    """The verdict on one job attempt. `anomaly` "none" where there is nothing to say."""
    hang = find_hang(history, now)
    if hang is not None:
        return _hang_verdict(history, hang, now)
    slow = find_slowdown(history, now)
    if slow is not None:
        return _slow_verdict(history, slow, gpus, now)
    return Verdict(job_id=history.job_id, anomaly="none", unseen=_unseen(history, now))


def suspects(history: JobHistory, now: float, share: float) -> list[int]:
    """Ranks worth asking for stacks once a job has been quiet for `share` of its bound; empty: no suspicion.

    Asked before anybody would end the job, since afterwards there is nothing left to ask.
    """
    hang = find_hang(history, now, share)
    if hang is None:
        return []
    named = [root.rank.rank for root in hang.roots] + [rank.rank for rank in hang.divergent]
    return sorted(named) if named else sorted(history.ranks)[:8]


def _unseen(history: JobHistory, now: float) -> list[str]:
    notes = []
    stale = history.stale(now)
    if stale:
        notes.append(f"no fresh report from {explain.ranks(stale)}")
    world = history.world_size or 0
    if len(history.ranks) < world:
        notes.append(f"{world - len(history.ranks)} of {world} ranks never reported")
    if history.conflicts:
        notes.append(f"{explain.ranks(sorted(history.conflicts))} claimed by more than one node")
    return notes


def _hang_verdict(history: JobHistory, hang: Hang, now: float) -> Verdict:
    unseen = _unseen(history, now) + [f"not heard in a round: {name}" for name in hang.missing[:8]]
    evidence = [
        EvidenceItem(
            kind="quiet",
            text=f"nobody has entered or left a round for {hang.quiet_s:.1f} s; {hang.waiting} ranks wait inside one",
            value=round(hang.quiet_s, 1),
        )
    ]
    culprits: list[Culprit] = []
    action = Action(kind="collect", collect=explain.collect_for_hang(hang))
    if hang.class_ == "H1":
        culprits = [_stuck(root) for root in hang.roots]
        evidence += [item for root in hang.roots for item in _stuck_evidence(root)]
        nodes = sorted({root.rank.node for root in hang.roots})
        action = Action(kind="requeue", requeue=True, exclude=nodes)
    elif hang.class_ == "H2":
        culprits = [
            Culprit(
                kind="rank",
                rank=rank.rank,
                node=rank.node,
                gpu=rank.gpu,
                cause="program_divergence",
                domain="software",
                confidence=0.9,
            )
            for rank in hang.divergent
        ]
        action = Action(kind="notify")
    return Verdict(
        job_id=history.job_id,
        anomaly="hang",
        class_=hang.class_,
        culprits=culprits,
        victims={"ranks": max(0, len(history.ranks) - len(culprits))},
        action=action,
        summary=explain.hang_sentence(hang, culprits),
        evidence=evidence,
        unseen=unseen,
    )


def _stuck(root: Root) -> Culprit:
    state = root.rank.process_state
    certain = state in STOPPED or state in GONE
    cause = "process_exit" if state in GONE else "process_stuck"
    return Culprit(
        kind="rank",
        rank=root.rank.rank,
        node=root.rank.node,
        gpu=root.rank.gpu,
        cause=cause,
        domain=DOMAIN_OF_CAUSE[cause],
        confidence=0.97 if certain else 0.85,
    )


def _stuck_evidence(root: Root) -> list[EvidenceItem]:
    rank = root.rank
    where = "entered the round but does not move" if root.entered else "has not entered the round"
    items = [
        EvidenceItem(
            kind="wait_for",
            text=f"rank {rank.rank} {where}; {root.waiters} ranks wait for it and it waits for nobody",
            value=float(root.waiters),
        )
    ]
    if rank.process_state:
        words = explain.PROCESS_STATES.get(rank.process_state, f"in state {rank.process_state}")
        items.append(
            EvidenceItem(
                kind="process",
                text=f"the kernel of {rank.node} says process {rank.pid} of rank {rank.rank} is {words}",
                witness="kernel",
            )
        )
    return items


def _slow_verdict(history: JobHistory, slow: Slowdown, gpus: GpusOfNode, now: float) -> Verdict:
    evidence = [
        EvidenceItem(
            kind="round_time",
            text=f"a round takes {slow.period_ms:.0f} ms, {slow.ratio:.2f} times the {slow.base_ms:.0f} ms at baseline",
            value=round(slow.ratio, 2),
        )
    ]
    culprits: list[Culprit] = []
    drain: set[str] = set()
    for straggler in slow.stragglers:
        culprit, items = _judge_straggler(straggler, slow, gpus, history)
        culprits.append(culprit)
        evidence += items
        if culprit.domain == "hardware":
            drain.add(straggler.rank.node)
    if drain:
        nodes = sorted(drain)
        action = Action(kind="drain", nodes=nodes, requeue=True, exclude=nodes)
    elif culprits:
        action = Action(kind="notify")
    else:
        action = Action(
            kind="collect", collect="no rank's own time explains the loss: round trips, flows, NIC counters"
        )
    return Verdict(
        job_id=history.job_id,
        anomaly="slow",
        class_="S1" if culprits else None,
        culprits=culprits,
        victims={"ranks": max(0, len(history.ranks) - len(culprits))},
        action=action,
        summary=explain.slow_sentence(slow, culprits),
        evidence=evidence,
        unseen=_unseen(history, now),
    )


def _judge_straggler(
    straggler: Straggler, slow: Slowdown, gpus: GpusOfNode, history: JobHistory
) -> tuple[Culprit, list[EvidenceItem]]:
    rank = straggler.rank
    own = EvidenceItem(
        kind="own_time",
        text=(
            f"rank {rank.rank} spends {straggler.gap_ms:.0f} ms of its own before each round"
            f" ({straggler.gap_base_ms:.0f} ms at baseline)"
            f" and waits {straggler.dur_ms:.0f} ms inside, the others {straggler.others_dur_ms:.0f} ms"
        ),
        value=round(straggler.share, 2),
    )
    culprit = Culprit(
        kind="rank",
        rank=rank.rank,
        node=rank.node,
        gpu=rank.gpu,
        confidence=round(0.6 + 0.3 * straggler.share, 2),
        lost_ms_per_step=round(straggler.share * slow.lost_ms, 1),
    )
    facts = gpus.get(rank.node, {}).get(rank.gpu) if rank.gpu is not None else None
    if facts is None:
        nothing = EvidenceItem(
            kind="gpu",
            text=f"no fresh NVML facts of rank {rank.rank}'s GPU on {rank.node}",
            witness="nvml",
            against=True,
        )
        return culprit, [own, nothing]
    item, convicts = _clock_evidence(straggler, facts, gpus, history)
    if convicts:
        culprit = Culprit(
            kind="gpu",
            rank=rank.rank,
            node=rank.node,
            gpu=rank.gpu,
            cause="gpu_clock_throttle",
            domain="hardware",
            confidence=0.97,
            lost_ms_per_step=culprit.lost_ms_per_step,
        )
    return culprit, [own, item]


def _clock_evidence(
    straggler: Straggler, facts: GpuFacts, gpus: GpusOfNode, history: JobHistory
) -> tuple[EvidenceItem, bool]:
    """NVML's witness on a straggler's GPU, and whether a low clock explains the loss.

    It does when the clock is low for an abnormal reason, lower than the peers' clocks, and by as much as it takes.
    """
    limits, ratio, reasons = history.limits, clock_ratio(facts), slowdown_reasons(facts)
    name = f"GPU{facts.index} of {straggler.rank.node}"
    if ratio is None:
        text = f"NVML does not tell the clock of {name}"
        return EvidenceItem(kind="gpu_clock", text=text, witness="nvml", against=True), False
    peers = [
        value
        for other in history.ranks.values()
        if other.rank != straggler.rank.rank and other.gpu is not None
        for peer in [gpus.get(other.node, {}).get(other.gpu)]
        for value in [clock_ratio(peer) if peer is not None else None]
        if value is not None
    ]
    low = ratio <= limits.clock_ratio_max and (not peers or ratio <= limits.clock_ratio_max * float(np.median(peers)))
    excess_ms = straggler.gap_ms - straggler.gap_base_ms
    explained = (1 / ratio - 1) * straggler.gap_base_ms / max(excess_ms, 1e-9)
    convicts = low and bool(reasons) and explained >= limits.clock_explains_min
    why = f" ({', '.join(reasons)})" if reasons else ", without an abnormal reason"
    text = f"{name} runs at {facts.sm_clock_mhz} of {facts.sm_clock_max_mhz} MHz{why}"
    return EvidenceItem(
        kind="gpu_clock", text=text, value=round(ratio, 2), witness="nvml", against=not convicts
    ), convicts
