"""A job that ended by itself: who made it end, from the frames that were left behind and what the kernel says.

When one rank dies, all others die of it: their connections break, their rounds end with an error, their launcher ends
them. So an exit code or a signal alone accuses nobody. What tells is order and cause:

1. Calls that contradict each other in a round that did not end well are the program's doing, whoever died of it first
   (class H2); the majority is right, and a tie names nobody.
2. Hardware that is broken for certain, and a node that Slurm has lost, explain the end of their ranks.
3. Else whoever ended first. A rank in whose rounds an error arose before it ended has been told by its peers that
   something is wrong: it is a victim, however early it went. Ends on one node are ordered by one clock; those on
   different nodes only where they are further apart than reports can be late.

More than half of all ranks that end together were ended from outside (a step cancelled, a signal to the job), and ranks
that leave without an error, a signal or anybody waiting have just ended: both are no anomaly.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from diagnosis.contracts.exits import GONE, REQUEUED
from diagnosis.contracts.incident import Kind
from diagnosis.contracts.verdict import DOMAIN_OF_CAUSE, Action, Culprit, EvidenceItem, Verdict
from diagnosis.engine import words
from diagnosis.engine.accused import name_gpus
from diagnosis.engine.exits import cite, ends_of, erred_of, firsts_of, how
from diagnosis.engine.lanes import Bools, Lanes, newest
from diagnosis.engine.thresholds import Thresholds
from diagnosis.engine.waits import NAMED_MAX, Stall, differ, vote
from diagnosis.engine.witnesses import Finding, gather

# How sure; none of it is drilled, all of it is less than certain.
DIFFERENT_CALL: Final = 0.97  # a signature against the majority, as in a hang
HARDWARE: Final = 0.95
LOST_NODE: Final = 0.9
FIRST_BY_SIGNAL: Final = 0.97  # the kernel says that a signal ended it, and that it was the first of all
FIRST_OF_SOME: Final = 0.9  # of other ranks nobody knows when they ended
SEVERAL: Final = 0.85  # more than one at the same time
FIRST_UNSEEN_HOW: Final = 0.85
FIRST_BY_ITSELF: Final = 0.8  # it left while others needed it, and nobody had told it of trouble
ONLY_UNTOLD: Final = 0.75  # nobody knows who ended first, but it alone was not told of trouble


def decide(lanes: Lanes, limits: Thresholds, unseen: list[str]) -> Verdict:
    """The verdict on an incident whose job has ended (`Incident.ended`)."""
    return _Case(lanes, limits, unseen).decide()


class _Case:
    """The frames left behind, the ends, and the verdict in the making."""

    def __init__(self, lanes: Lanes, limits: Thresholds, unseen: list[str]) -> None:
        self.lanes, self.incident, self.job = lanes, lanes.incident, lanes.incident.job
        self.unseen = unseen
        self.now = newest(lanes)
        self.erred: Bools = erred_of(lanes, self.now)
        self.inside: Bools = lanes.ranks_in(self.now.pending)
        self.ends = {rank: end for rank, end in ends_of(self.incident).items() if rank < lanes.world}
        witnesses = name_gpus(gather(self.incident, limits), self.incident).of_node
        self.findings = [finding for node in self.job.node_names for finding in witnesses.get(node, ())]
        word = {GONE: "that it still runs", REQUEUED: "that it waits for another start"}.get(self.incident.ended)
        text = f"all processes have ended, and Slurm says {word or self.incident.ended}"
        self.evidence = [EvidenceItem(kind="ended", text=text, witness="slurm")]

    def decide(self) -> Verdict:
        """In the order of the module's text."""
        return self._divergence() or self._hardware() or self._lost_nodes() or self._first()

    # -- the program -------------------------------------------------------------------------------------------------

    def _divergence(self) -> Verdict | None:
        lanes, now = self.lanes, self.now
        nobody, nothing = np.zeros(lanes.world, np.bool_), np.zeros(lanes.count, np.int8)
        stalled = np.zeros(lanes.comms, np.bool_)
        stall = Stall(np.nan, stalled, nobody, nobody, now, nothing, nobody)
        collective = lanes.incident.communicators.kind[lanes.comm] != Kind.P2P
        counted = now.heard & collective & (now.signature >= 0) & ~np.isnan(now.seq)
        failed = counted & (now.pending | (np.nan_to_num(now.errors) > 0))
        for comm in np.flatnonzero(differ(lanes, now, counted)):
            members = lanes.of_comm(int(comm))
            here = np.arange(members.start, members.stop)[counted[members]]
            for seq in np.unique(now.seq[here[failed[here]]]):
                vote(lanes, stall, int(comm), here[now.seq[here] == seq])
        if stall.divergent:
            for rank in stall.divergent[:16]:
                text = f"rank {rank} ran {stall.operations[rank]}"
                self.evidence.append(EvidenceItem(kind="operation", text=text))
            guilty = [self._culprit(rank, "program_divergence", DIFFERENT_CALL) for rank in stall.divergent]
            return self._failed("H2", guilty, Action(kind="notify"), "it ran another operation than the others")
        if stall.undecided:
            text = f"in {len(stall.undecided)} communicators the members ran different operations, none is the majority"
            self.evidence.append(EvidenceItem(kind="operation", text=text))
            return self._failed("H2", [], Action(kind="collect", collect="the error output and stacks of all members"))
        return None

    # -- nodes -------------------------------------------------------------------------------------------------------

    def _hardware(self) -> Verdict | None:
        causes = {"gpu_fault", "nvlink_fault"} | ({"nic_fault"} if self.erred.any() else set())
        broken = [finding for finding in self.findings if finding.decisive and finding.cause in causes]
        if not broken:
            return None
        by_place = {(finding.node, finding.entity): finding for finding in reversed(broken)}
        guilty = [self._broken(finding) for _, finding in sorted(by_place.items(), key=str)][:NAMED_MAX]
        for finding in broken[:4]:
            witness = {"kmsg": "kernel", "ib": "network"}.get(finding.source, "nvml")
            self.evidence.append(EvidenceItem(kind=finding.cause, text=finding.text, witness=witness))
        nodes = sorted({finding.node for finding in broken})
        flag = "nic" if any(finding.cause == "nic_fault" for finding in broken) else None
        return self._failed("H3", guilty, Action(kind="drain", nodes=nodes, exclude=nodes, flag=flag))

    def _broken(self, finding: Finding) -> Culprit:
        cause, place = finding.cause, finding.entity
        node = Culprit(kind="node", node=finding.node, cause=cause, domain=DOMAIN_OF_CAUSE[cause], confidence=HARDWARE)
        if cause == "nic_fault" and isinstance(place, str) and place:
            return msgspec.structs.replace(node, kind="nic", nic=place)
        if not isinstance(place, int):
            return node
        at = self.job.node_names.index(finding.node)
        ranks = np.flatnonzero((self.job.node == at) & (self.job.gpu == place))
        return msgspec.structs.replace(node, kind="gpu", rank=int(ranks[0]) if len(ranks) == 1 else None, gpu=place)

    def _lost_nodes(self) -> Verdict | None:
        if self.incident.ended != "NODE_FAIL":
            return None
        lost = [name for name in self.incident.lost_nodes if name in self.job.node_names]
        for name in lost[:4]:
            self.evidence.append(EvidenceItem(kind="node", text=f"Slurm has lost node {name}", witness="slurm"))
        guilty = [Culprit(kind="node", node=name, confidence=LOST_NODE) for name in lost]
        want = f"console and management log of {', '.join(lost[: words.NAMES_MAX])}" if lost else "slurmctld's log"
        action = Action(kind="collect", collect=want, exclude=lost)
        return self._failed(None, guilty, action, "Slurm has lost it")

    # -- who ended first ---------------------------------------------------------------------------------------------

    def _first(self) -> Verdict:
        signalled = [rank for rank, end in self.ends.items() if end.signal is not None]
        if not (signalled or self.erred.any() or self.inside.any()):
            return self._nothing("Its ranks left it by themselves, nobody in the middle of an operation.")
        if self.incident.ended == REQUEUED:
            return self._nothing("Slurm has ended this attempt and starts the job anew.")
        firsts, lead_ms = self._firsts()
        if not firsts:
            return self._alone_untold() or self._nobody()
        if len(firsts) == 1:
            return self._named(firsts[0], lead_ms)
        hows = {(self.ends[rank].signal, self.ends[rank].exit_code) for rank in firsts}
        together = len(hows) == 1 and self.ends[firsts[0]].signal is not None
        if not together:
            return self._nobody()
        if 2 * len(firsts) > self.lanes.world:
            return self._nothing(
                f"It was ended from outside: {words.ranks(firsts)} at once ({how(self.ends[firsts[0]])})."
            )
        self._cite(firsts)
        guilty = [self._culprit(rank, "process_exit", SEVERAL) for rank in firsts[:NAMED_MAX]]
        return self._failed(None, guilty, Action(kind="notify"), f"it {how(self.ends[firsts[0]])} before the others")

    def _firsts(self) -> tuple[list[int], float]:
        """Those that may have ended first, and by how many ms they led."""
        firsts = firsts_of(self.ends, self.erred, self.job.node)
        times = {rank: end.ended_ms for rank, end in self.ends.items() if end.ended_ms is not None}
        others = [at for rank, at in times.items() if rank not in firsts]
        return firsts, min(others) - min(times[rank] for rank in firsts) if firsts and others else np.nan

    def _named(self, rank: int, lead_ms: float) -> Verdict:
        end = self.ends[rank]
        needed = self.erred.copy() | self.inside
        needed[rank] = False
        if self.erred[rank] or not (end.signal is not None or needed.any()):
            return self._nobody()
        self._cite([rank])
        if lead_ms > 0:
            text = f"it ended {lead_ms:.0f} ms before any other, as far as clocks tell"
            self.evidence.append(EvidenceItem(kind="first", text=text, value=lead_ms, witness="kernel"))
        if needed.any():
            text = f"{int(needed.sum())} other ranks stood in a round or left one with an error, this one saw none"
            self.evidence.append(EvidenceItem(kind="error", text=text, value=float(needed.sum())))
        if end.signal is not None:
            sure = FIRST_BY_SIGNAL if self._all_timed() else FIRST_OF_SOME
        else:
            sure = FIRST_UNSEEN_HOW if end.exit_code is None else FIRST_BY_ITSELF
        return self._failed(
            None, [self._culprit(rank, "process_exit", sure)], Action(kind="notify"), f"it {how(end)} before the others"
        )

    def _all_timed(self) -> bool:
        return sum(end.ended_ms is not None for end in self.ends.values()) == self.lanes.world

    def _alone_untold(self) -> Verdict | None:
        """Nobody knows when they ended: the one that no error reached, where one reached all others."""
        heard = self.lanes.ranks_in(self.now.heard)
        untold = np.flatnonzero(heard & ~self.erred)
        if len(untold) != 1 or int(self.erred.sum()) < 2 or int(heard.sum()) < self.lanes.world:
            return None
        rank = int(untold[0])
        self._cite([rank])
        text = f"rounds of all ranks but rank {rank} ended with an error"
        self.evidence.append(EvidenceItem(kind="error", text=text))
        guilty = [self._culprit(rank, "process_exit", ONLY_UNTOLD)]
        return self._failed(None, guilty, Action(kind="notify"), "it ended before any error reached it")

    def _cite(self, ranks: list[int]) -> None:
        for rank in ranks[:4]:
            self.evidence += cite(self.incident, rank, self.ends.get(rank))
        nodes = {self._where(rank)[0] for rank in ranks}
        killed = [one for one in self.findings if one.cause == "process_exit" and one.node in nodes]
        self.evidence += [EvidenceItem(kind="kernel_log", text=one.text, witness="kernel") for one in killed[:4]]

    # -- words -------------------------------------------------------------------------------------------------------

    def _where(self, rank: int) -> tuple[str | None, int | None]:
        node, gpu = int(self.job.node[rank]), int(self.job.gpu[rank])
        return self.job.node_names[node] if node >= 0 else None, gpu if gpu >= 0 else None

    def _culprit(self, rank: int, cause: str, confidence: float) -> Culprit:
        node, gpu = self._where(rank)
        domain = DOMAIN_OF_CAUSE[cause]
        return Culprit(kind="rank", rank=rank, node=node, gpu=gpu, cause=cause, domain=domain, confidence=confidence)

    def _nobody(self) -> Verdict:
        seen = sorted(self.ends)
        unknown = [rank for rank in range(min(self.lanes.world, NAMED_MAX)) if rank not in self.ends]
        whose = words.ranks(unknown) if unknown and seen else "all ranks"
        want = f"the error output of {whose}, and the kernel log of their nodes"
        return self._failed(None, [], Action(kind="collect", collect=want))

    def _nothing(self, summary: str) -> Verdict:
        return Verdict(job_id=self.job.job_id, anomaly="none", summary=summary, unseen=self.unseen)

    def _failed(self, class_: str | None, guilty: list[Culprit], action: Action, why: str = "") -> Verdict:
        ranks = {culprit.rank for culprit in guilty if culprit.rank is not None}
        return Verdict(
            job_id=self.job.job_id,
            anomaly="failed",
            class_=class_,
            culprits=guilty,
            victims={"ranks": max(0, self.lanes.world - len(ranks))},
            action=action,
            summary=words.failed_summary(guilty, action, why),
            evidence=self.evidence,
            unseen=self.unseen,
        )
