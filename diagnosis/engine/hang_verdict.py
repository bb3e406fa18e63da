"""The verdict on a hang: classes H1, H2 and H3, with the hardware's word where it has one."""

from __future__ import annotations

import numpy as np

from diagnosis.contracts.verdict import DOMAIN_OF_CAUSE, Action, Culprit, EvidenceItem, Verdict
from diagnosis.engine import dead_paths, exits, words
from diagnosis.engine.accused import name_gpus
from diagnosis.engine.cuts import Cut, find_cut
from diagnosis.engine.lanes import Lanes
from diagnosis.engine.shapes import usual_steps
from diagnosis.engine.thresholds import Thresholds
from diagnosis.engine.waits import GONE, HALTED, Stall
from diagnosis.engine.witnesses import Finding, Witnesses, gather

HARDWARE = ("gpu_fault", "nvlink_fault", "nic_fault")
# How sure, by what the verdict rests on. Drills bear out at least that much (13,280 hangs, 2,080 of them with a fifth
# of the reports or fields missing). Where all were right, the number says what drills cannot: that more can go wrong.
SEEN_BY_KERNEL = 0.97  # the kernel tells the state of the very process
DIFFERENT_CALL = 0.97  # a signature against the majority: 3,838 of 3,838 right
GPU_NAMED = 0.97  # the hardware's own word, where the counts point or only one member can be meant: 2,370 of 2,370
NOT_ENTERED = 0.95  # waited for, and inside nothing: 1,757 of 1,760, in the rest a second one was stuck as well
CROSSED = 0.95  # calls that contradict each other, one rank against the rest: 929 of 929
BROKEN_AND_NEEDED = 0.95  # the one broken thing that a standing round goes through: 467 of 467
FELL_SILENT = 0.9  # 960 of 960, but what silences a collector may do so at that moment
COUNTS = 0.9  # transfer steps told on both sides of the cut: 886 of 886, no second witness
KILLED_NEAR = 0.9  # waited for, and the kernel killed or lost some process of its node
NOT_BEGUN = 0.75  # called, and its GPU never began it: its stream waits for something that nobody tells; not drilled
CIRCLE = 0.85  # a circle that takes rounds for not begun because no step was made
NEVER_HEARD = 0.85  # the one member that was never heard: 960 of 960, none of them with another unheard one
COUNTS_BOUNDED = 0.8  # transfer steps of which some are bounds: 49 of 51
COUNTS_OF_SEVERAL = 0.5  # the lowest told in a tree, with one beneath it of which nothing is told: 4 of 7
VAGUE = 0.6  # not entered, but it does not tell where it stands; not drilled
FIRM = 0.85
"""From here on a culprit is no guess: it stands beside others, and before what is silent."""
EVIDENCE_MAX = 12


class _Case:
    """One hang being decided: what every step needs."""

    def __init__(self, lanes: Lanes, stall: Stall, limits: Thresholds, unseen: list[str]) -> None:
        self.lanes = lanes
        self.stall = stall
        self.unseen = unseen
        self.ends = exits.ends_of(lanes.incident)
        self.job = lanes.incident.job
        self.witnesses: Witnesses = name_gpus(gather(lanes.incident, limits), lanes.incident)
        seconds = stall.quiet_ms / 1000
        quiet = f"for {seconds:.1f} s" if np.isfinite(seconds) else "for an unknown time"
        waiting = int(stall.waiting.sum())
        self.evidence = [
            EvidenceItem(
                kind="quiet", text=f"{waiting} ranks wait inside a round; nothing moved {quiet}", value=seconds
            )
        ]

    def where(self, rank: int) -> tuple[str | None, int | None, str | None]:
        """Node, GPU and NIC of a rank, None unknown."""
        node = int(self.job.node[rank])
        gpu = int(self.job.gpu[rank])
        name = self.job.node_names[node] if node >= 0 else None
        if gpu < 0:
            return name, None, None
        return name, gpu, self.job.nic_of_gpu.get(gpu, f"mlx5_{gpu}")

    def about(self, rank: int, causes: tuple[str, ...]) -> list[Finding]:
        """What its node says about a rank's GPU, NIC and processes."""
        node, gpu, nic = self.where(rank)
        if node is None:
            return []
        return [finding for finding in self.witnesses.about(node, gpu, nic) if finding.cause in causes]

    def culprit(self, rank: int, cause: str, confidence: float, kind: str = "rank") -> Culprit:
        """A culprit that is a rank, or its GPU or NIC."""
        node, gpu, nic = self.where(rank)
        domain = DOMAIN_OF_CAUSE[cause]
        own_nic = nic if cause.startswith("nic") else None
        return Culprit(
            kind=kind, rank=rank, node=node, gpu=gpu, nic=own_nic, cause=cause, domain=domain, confidence=confidence
        )

    def verdict(self, class_: str | None, culprits: list[Culprit], action: Action) -> Verdict:
        """The verdict, with its words."""
        victims = max(0, self.lanes.world - len({c.rank for c in culprits if c.rank is not None}))
        return Verdict(
            job_id=self.job.job_id,
            anomaly="hang",
            class_=class_,
            culprits=culprits,
            victims={"ranks": victims},
            action=action,
            summary=words.hang_summary(class_, culprits, action, self.stall.quiet_ms),
            evidence=self.evidence,
            unseen=self.unseen,
        )


def decide(lanes: Lanes, stall: Stall, limits: Thresholds, unseen: list[str]) -> Verdict:
    """The verdict on a stall."""
    case = _Case(lanes, stall, limits, unseen)
    # Of several that have ended the later ones may be the first one's victims, ended inside a round or by a launcher.
    firsts = exits.firsts_of(case.ends, exits.erred_of(lanes, stall.now), case.job.node)
    if firsts:
        stall.roots = [rank for rank in stall.roots if rank not in case.ends or rank in firsts] or stall.roots
    if stall.roots:
        return _not_entered(case)
    if stall.left:
        return _left_inside(case)
    # What the program did wrong is proven by its calls; all else about who waits for whom may be a dead path's doing.
    proven = bool(stall.operations or stall.undecided) or stall.crossed
    dead = [] if proven else _dead_links(case)
    if dead:
        return _stands_inside(case, dead)
    if stall.divergent:
        return _divergent(case)
    if stall.undecided or (stall.circle and not stall.receivers):
        return _undecided(case)
    inside = _find_inside(case)
    firm = any(culprit.confidence >= FIRM for culprit in inside)
    dead = [] if proven or firm else _dead_between(case)
    if stall.silent and not firm and not dead:
        return _silent(case)
    return _stands_inside(case, dead or inside)


def _divergent(case: _Case) -> Verdict:
    stall = case.stall
    for rank in stall.divergent[:16]:
        runs = stall.operations.get(rank, "waits in another communicator than all the others, who wait for it")
        case.evidence.append(EvidenceItem(kind="operation", text=f"rank {rank} runs {runs}"))
    sure = DIFFERENT_CALL if stall.operations else CROSSED if stall.crossed else CIRCLE
    culprits = [case.culprit(rank, "program_divergence", sure) for rank in stall.divergent]
    return case.verdict("H2", culprits, Action(kind="notify"))


def _undecided(case: _Case) -> Verdict:
    stall = case.stall
    if stall.circle:
        text = f"{words.ranks(stall.circle)} wait for each other in a circle"
    else:
        text = f"in {len(stall.undecided)} communicators the members run different operations and none is the majority"
    case.evidence.append(EvidenceItem(kind="operation", text=text))
    who = words.ranks(stall.circle) if stall.circle else "all members"
    return case.verdict("H2", [], Action(kind="collect", collect=f"the call stacks of {who}"))


def _not_entered(case: _Case) -> Verdict:
    stall, culprits, drain = case.stall, [], set()
    for rank in stall.roots:
        culprit = _root(case, rank)
        culprits.append(culprit)
        if culprit.domain == "hardware" and culprit.node is not None:
            drain.add(culprit.node)
    nodes = sorted({culprit.node for culprit in culprits if culprit.node is not None})
    if drain:
        return case.verdict("H1", culprits, Action(kind="drain", nodes=sorted(drain), requeue=True, exclude=nodes))
    return case.verdict("H1", culprits, Action(kind="requeue", requeue=True, exclude=nodes))


def _root(case: _Case, rank: int) -> Culprit:
    stall, waiters = case.stall, case.stall.waiters.get(rank, 0)
    kept_out = bool(case.lanes.ranks_in(stall.now.pending & stall.now.kept_out)[rank])
    where = "stands inside a round" if rank in stall.entered else "has not entered the round"
    where = "has called the round and its GPU has not begun it, nor runs another" if kept_out else where
    text = f"rank {rank} {where}; {waiters} ranks wait for it and it waits for nobody"
    case.evidence.append(EvidenceItem(kind="wait_for", text=text, value=float(waiters)))
    state = case.lanes.incident.process_state.get(rank, "")
    if state:
        doing = words.PROCESS_STATES.get(state, f"in state {state}")
        text = f"the kernel says that the process of rank {rank} is {doing}"
        case.evidence.append(EvidenceItem(kind="process", text=text, witness="kernel"))
    broken = [f for f in case.about(rank, ("gpu_fault", "nvlink_fault")) if f.decisive]
    if broken:
        _cite(case, broken)
        return case.culprit(rank, broken[0].cause, GPU_NAMED, "gpu")
    incident, end = case.lanes.incident, case.ends.get(rank)
    case.evidence += exits.cite(incident, rank, end)
    killed, gone = case.about(rank, ("process_exit",)), state in GONE or end is not None
    _cite(case, killed)
    if gone or ((killed or exits.oom_kills_of(incident, rank)) and state not in HALTED):
        return case.culprit(rank, "process_exit", SEEN_BY_KERNEL if gone else KILLED_NEAR)
    seen = VAGUE if stall.vague else NOT_BEGUN if kept_out else NOT_ENTERED
    return case.culprit(rank, "process_stuck", SEEN_BY_KERNEL if state in HALTED else seen)


def _left_inside(case: _Case) -> Verdict:
    """Ranks that all others left behind in a round: their hardware, or the path over which the end of it should come.

    gloo's ring ends with a word from the neighbour: one that a black hole swallows keeps a rank inside for ever.
    """
    culprits = []
    for rank in case.stall.left:
        text = f"rank {rank} is alone inside a round that all other members have left"
        case.evidence.append(EvidenceItem(kind="wait_for", text=text))
        found = _broken(case, [rank], None)
        if found is not None:
            _cite(case, [found[1]])
        cause = found[1].cause if found is not None else "unknown"
        culprits.append(case.culprit(rank, cause, GPU_NAMED if found is not None else COUNTS))
    if all(culprit.cause == "unknown" for culprit in culprits):
        culprits = _dead_links(case) or _dead_between(case) or culprits
    return case.verdict("H3", culprits, _action_inside(culprits))


def _cite(case: _Case, findings: list[Finding]) -> None:
    for finding in findings[:4]:
        witness = "kernel" if finding.source == "kmsg" else "network" if finding.source == "ib" else "nvml"
        case.evidence.append(EvidenceItem(kind=finding.cause, text=finding.text, witness=witness))


def _silent(case: _Case) -> Verdict:
    stall, silent = case.stall, case.stall.silent
    text = f"all that are heard wait for a round that only {words.ranks(silent)} can have missed, and that is silent"
    case.evidence.append(EvidenceItem(kind="silent", text=text))
    killed = [rank for rank in silent if case.about(rank, ("process_exit",))]
    guilty = silent if len(silent) == 1 else killed
    if len(guilty) != 1:
        return case.verdict("H1", [], Action(kind="collect", collect=f"a report from {words.ranks(silent)}"))
    broken = [f for f in case.about(guilty[0], ("gpu_fault",)) if f.decisive]
    _cite(case, broken or case.about(guilty[0], ("process_exit",)))
    sure = GPU_NAMED if broken else FELL_SILENT if stall.fell_silent else NEVER_HEARD
    cause = "gpu_fault" if broken else "process_exit"
    if not broken and not killed and stall.mute[guilty[0]]:
        cause, sure = "process_stuck", VAGUE
    culprit = case.culprit(guilty[0], cause, sure)
    exclude = [culprit.node] if culprit.node is not None else []
    return case.verdict("H1", [culprit], Action(kind="requeue", requeue=True, exclude=exclude))


def _find_inside(case: _Case) -> list[Culprit]:
    """Who holds up the rounds that all have entered: the cut of each round, then open transfers."""
    culprits: list[Culprit] = []
    usual = usual_steps(case.lanes)
    for comm in case.stall.innermost:
        cut = find_cut(case.lanes, case.stall.now, case.stall.begun, comm, usual)
        size = int(case.lanes.sizes[comm])
        text = f"all {size} members are inside the round of communicator {_name(case, cut)}: {cut.counts}"
        if len(case.evidence) < EVIDENCE_MAX:
            case.evidence.append(EvidenceItem(kind="steps", text=text))
        known = {(culprit.rank, culprit.node, culprit.link) for culprit in culprits}
        culprits += [c for c in _from_cut(case, cut) if (c.rank, c.node, c.link) not in known]
    if all(culprit.confidence < FIRM for culprit in culprits):
        return _from_broken(case) or culprits
    # One fault explains a stall: a guess beside a conviction is none.
    return [culprit for culprit in culprits if culprit.confidence >= FIRM]


def _stands_inside(case: _Case, culprits: list[Culprit]) -> Verdict:
    if not culprits:
        want = "transfer steps, socket queues and NIC counters of all members: all have entered the round"
        return case.verdict(None, [], Action(kind="collect", collect=want))
    return case.verdict("H3", culprits, _action_inside(culprits))


def _action_inside(culprits: list[Culprit]) -> Action:
    nodes = sorted({c.node for c in culprits if c.node is not None})
    convicted = sorted(
        {
            c.node
            for c in culprits
            if c.node is not None and c.kind != "link" and (c.domain == "hardware" or c.cause == "nic_fault")
        }
    )
    flag = "nic" if any(c.nic for c in culprits) else "fabric" if any(c.link or c.switch for c in culprits) else None
    if convicted:
        return Action(kind="drain", nodes=convicted, requeue=True, exclude=nodes, flag=flag)
    if all(culprit.cause == "unknown" for culprit in culprits):
        want = (
            f"GPU state, kernel log and stacks of {words.ranks(sorted(c.rank for c in culprits if c.rank is not None))}"
        )
        return Action(kind="collect", collect=want, exclude=nodes, flag=flag)
    return Action(kind="requeue" if nodes else "notify", requeue=bool(nodes), exclude=nodes, flag=flag)


def _name(case: _Case, cut: Cut) -> str:
    return case.lanes.incident.communicators.ids[cut.comm]


def _from_cut(case: _Case, cut: Cut) -> list[Culprit]:
    """Who is guilty of a cut: the suspect of the counts, the hardware that says it is broken, or the link between."""
    lanes = case.lanes
    suspects = list(cut.ranks) or list(cut.edge or ())
    members = [int(rank) for rank in lanes.rank[lanes.of_comm(cut.comm)]]
    broken = _broken(case, suspects, cut.comm) or _broken(case, members, cut.comm)
    if broken is not None:
        rank, finding = broken
        _cite(case, [finding])
        meant = finding.entity != "" or rank in suspects or len(_ranks_on_node(case, members, rank)) == 1
        if meant:
            return [case.culprit(rank, finding.cause, GPU_NAMED, "nic" if finding.cause == "nic_fault" else "gpu")]
        node, cause = case.where(rank)[0], finding.cause
        domain = DOMAIN_OF_CAUSE[cause]
        return [Culprit(kind="node", node=node, cause=cause, domain=domain, confidence=BROKEN_AND_NEEDED)]
    if cut.ranks:
        alone = len(cut.ranks) == 1 or cut.edge is not None
        sure = COUNTS if cut.sure else COUNTS_BOUNDED if alone else COUNTS_OF_SEVERAL
        return [case.culprit(cut.ranks[0], "unknown", sure)]
    return [_link(case, cut.edge)] if cut.edge else []


def _from_broken(case: _Case) -> list[Culprit]:
    """Where no steps tell (NVLink under a stock NCCL, point-to-point): the one GPU or NIC that is broken for certain
    and that some round now needs. The sender of an open transfer may have gone on, so only hardware convicts."""
    found: dict[tuple[str, int | str], tuple[int, Finding]] = {}
    for rank in _waiting_ranks_with_findings(case):
        for finding in case.about(rank, HARDWARE):
            if finding.decisive and finding.entity != "" and _needed(case, rank, finding.cause):
                found.setdefault((finding.node, finding.entity), (rank, finding))
    if len(found) != 1:
        return []
    ((rank, finding),) = found.values()
    _cite(case, [finding])
    return [case.culprit(rank, finding.cause, BROKEN_AND_NEEDED, "nic" if finding.cause == "nic_fault" else "gpu")]


def _waiting_ranks_with_findings(case: _Case) -> list[int]:
    names = case.job.node_names
    told = np.isin(case.job.node, [at for at, name in enumerate(names) if name in case.witnesses.of_node])
    return [int(rank) for rank in np.flatnonzero(told & (case.job.node >= 0))]


def _needed(case: _Case, rank: int, cause: str) -> bool:
    """Whether a rank stands in, or others wait for it in, a round that goes through the thing that is broken."""
    lanes = case.lanes
    mine = lanes.comm[lanes.order[lanes.by_rank[rank] : lanes.by_rank[rank + 1]]]
    return any(_goes_through(case, int(comm), rank, cause) for comm in mine[case.stall.stalled[mine]])


def _goes_through(case: _Case, comm: int, rank: int, cause: str) -> bool:
    """Whether the data of a communicator may pass a member's NIC or NVLink; a GPU is always needed."""
    lanes = case.lanes
    transport = lanes.incident.communicators.transport[comm].upper()
    if cause == "nic_fault":
        return transport != "NVLINK"
    if cause == "nvlink_fault" and transport == "NET":
        return len(_ranks_on_node(case, lanes.rank[lanes.of_comm(comm)].tolist(), rank)) > 1
    return True


def _broken(case: _Case, ranks: list[int], comm: int | None) -> tuple[int, Finding] | None:
    """The first rank whose hardware says that it is broken: its own GPU or NIC before anything on its node. What the
    data of the communicator does not go through explains nothing."""
    node_wide = None
    for rank in ranks:
        for finding in case.about(rank, HARDWARE):
            if not finding.decisive or (comm is not None and not _goes_through(case, comm, rank, finding.cause)):
                continue
            if finding.entity != "":
                return rank, finding
            node_wide = node_wide or (rank, finding)
    return node_wide


def _ranks_on_node(case: _Case, members: list[int], rank: int) -> list[int]:
    return [other for other in members if case.job.node[other] == case.job.node[rank]]


def _dead_links(case: _Case) -> list[Culprit]:
    culprits, evidence = dead_paths.in_common(case.lanes.incident)
    case.evidence += evidence
    return culprits


def _dead_between(case: _Case) -> list[Culprit]:
    culprits, evidence = dead_paths.between(case.lanes.incident)
    case.evidence += evidence
    return culprits


def _link(case: _Case, edge: tuple[int, int]) -> Culprit:
    return dead_paths.link_between("-".join(str(case.where(rank)[0]) for rank in edge))
