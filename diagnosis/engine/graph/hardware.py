"""What culprits are made of and what speaks of them: GPU, NIC, node, link, switch; findings; functions that grew."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from diagnosis.contracts.incident import Summaries
from diagnosis.contracts.verdict import Culprit
from diagnosis.engine import words
from diagnosis.engine.graph.draft import AGAINST, EXPLAINED_BY, PASSES_THROUGH, RUNS_ON, Draft, node_id
from diagnosis.engine.network import nic_of
from diagnosis.engine.patterns import Patterns
from diagnosis.engine.thresholds import Thresholds
from diagnosis.engine.verdict import Analysis
from diagnosis.engine.witnesses import Finding, Witnesses, gather

FINDINGS_MAX: Final = 3
FUNCTIONS_MAX: Final = 3
FUNCTION_PART_MIN: Final = 0.1
NICS_MAX: Final = 1
CULPRIT, HARDWARE, FINDING, PATH, FUNCTION = 0, 3, 3, 4, 5
_SOURCES: Final = {"kmsg": "kernel log", "ib": "NIC counters", "host": "host", "nvml": "NVML"}


class Hardware:
    """Draws culprits and what stands behind them."""

    def __init__(self, draft: Draft, analysis: Analysis, limits: Thresholds) -> None:
        self._draft = draft
        self._analysis = analysis
        self._lanes = analysis.lanes
        self._cited = {item.text: item.against for item in analysis.verdict.evidence}
        wrong = analysis.verdict.anomaly != "none"
        self._witnesses = gather(analysis.lanes.incident, limits) if wrong else Witnesses({})
        self._patterns: Patterns | None = None
        named = analysis.blame.ranks if analysis.blame is not None else []
        self._named = set(named)

    def by_own_time(self, culprit: Culprit) -> bool:
        """Whether a culprit of a slow-down is one by its ranks' own time rather than by its network."""
        return culprit.domain != "network" and bool(self.named_ranks(culprit))

    def named_ranks(self, culprit: Culprit) -> list[int]:
        """The ranks whose own time makes a culprit: it itself, or those of its node."""
        if culprit.rank is not None:
            return [culprit.rank] if culprit.rank in self._named else []
        job = self._lanes.incident.job
        on_node = culprit.kind == "node" and culprit.node in job.node_names
        node = job.node_names.index(culprit.node) if on_node and culprit.node is not None else -2
        return sorted(rank for rank in self._named if job.node[rank] == node)

    def place(self, rank: int) -> str:
        """ "GPU3 of gpu007"."""
        node, gpu, _ = nic_of(self._lanes, rank)
        if node is None:
            return ""
        return node if gpu is None else f"GPU{gpu} of {node}"

    # -- culprits ----------------------------------------------------------------------------------------------------

    def anchor(self, culprit: Culprit) -> str:
        """Draw a culprit with what it runs on; the node at which waiting for it ends.

        That is a rank where the rank is late or missing, else the thing itself.
        """
        cause = words.CAUSES.get(culprit.cause, culprit.cause)
        cost = culprit.lost_ms_per_step
        lost = f"costs {cost:,.0f} ms a step" if cost is not None else ""
        details = [cause, lost, f"{culprit.confidence * 100:.0f} % sure"]
        if culprit.rank is not None and (culprit.kind == "rank" or self._is_late(culprit)):
            return self._rank(culprit, culprit.rank, details)
        kind = culprit.kind
        if kind == "node":
            ranks = self.named_ranks(culprit)
            details.insert(0, words.ranks(ranks) if ranks else "")
        return self._thing(kind, culprit, details)

    def _is_late(self, culprit: Culprit) -> bool:
        """Whether the GPU of a culprit shows as a rank that is late or missing."""
        return culprit.kind == "gpu" and (self._analysis.stall is not None or culprit.rank in self._named)

    def _rank(self, culprit: Culprit, rank: int, details: list[str]) -> str:
        key, slow = node_id("rank", rank), self._analysis.slow
        role = "culprit" if culprit.kind == "rank" else "hardware"
        own = []
        if slow is not None and rank in self._named and math.isfinite(slow.own_ms[rank]):
            than = f" ({slow.own_base_ms[rank]:.1f} {'before' if slow.compared else 'for its peers'})"
            own = [
                f"own time {slow.own_ms[rank]:.1f} ms a round{than if math.isfinite(slow.own_base_ms[rank]) else ''}"
            ]
        if culprit.kind == "rank":
            own = [*own, *details]
        self._draft.add(key, "rank", "culprit", f"rank {rank}", own, importance=CULPRIT)
        if culprit.gpu is not None and culprit.node is not None:
            gpu = self._gpu(culprit.node, culprit.gpu, details if culprit.kind == "gpu" else [], role)
            self._draft.link(key, gpu, RUNS_ON)
        elif culprit.node is not None:
            self._draft.link(key, self._node(culprit.node), RUNS_ON)
        return key

    def _gpu(self, node: str, gpu: int, details: list[str], role: str) -> str:
        key = node_id("gpu", f"{node}/{gpu}")
        role = "culprit" if role == "hardware" and details else "hardware"
        importance = CULPRIT if role == "culprit" else HARDWARE
        self._draft.add(key, "gpu", role, f"GPU{gpu} of {node}", details, importance=importance)
        self._draft.link(key, self._node(node), RUNS_ON)
        return key

    def _node(self, node: str) -> str:
        return self._draft.add(node_id("node", node), "node", "hardware", f"node {node}", importance=HARDWARE)

    def _thing(self, kind: str, culprit: Culprit, details: list[str]) -> str:
        """A culprit that is no rank: GPU, NIC, node, link, switch, the job."""
        if kind == "gpu" and culprit.node is not None and culprit.gpu is not None:
            return self._gpu(culprit.node, culprit.gpu, details, "hardware")
        if kind == "nic":
            key = self._nic(culprit.node or "", culprit.nic or "NIC", details)
            if culprit.node is not None:
                self._draft.link(key, self._node(culprit.node), RUNS_ON)
            return key
        name = {"node": culprit.node, "link": culprit.link, "switch": culprit.switch}.get(kind) or "the whole job"
        label = name if kind == "job" else f"{kind} {name}"
        return self._draft.add(node_id(kind, name), kind, "culprit", label, details, importance=CULPRIT)

    def _nic(self, node: str, nic: str, details: list[str]) -> str:
        role, importance = ("culprit", CULPRIT) if details else ("hardware", PATH)
        label = f"{nic} of {node}" if node else nic
        return self._draft.add(node_id("nic", f"{node}/{nic}"), "nic", role, label, details, importance=importance)

    # -- network -----------------------------------------------------------------------------------------------------

    def touches(self, culprit: Culprit, comm: int) -> bool:
        """Whether a communicator has to do with a culprit: its rank or node is in it, or its flows pass through."""
        lanes = self._lanes
        members = lanes.rank[lanes.of_comm(comm)]
        if culprit.rank is not None:
            return bool((members == culprit.rank).any())
        if culprit.kind == "node":
            names = lanes.incident.job.node_names
            node = names.index(culprit.node) if culprit.node in names else -2
            return bool((lanes.incident.job.node[members] == node).any())
        return bool(self._flows(culprit, comm))

    def path(self, culprit: Culprit, anchor: str, comm: int, key: str) -> None:
        """How a communicator comes to pass through a link or switch: the NICs of its flows, and the link's ends."""
        fabric = self._lanes.incident.fabric
        if fabric is None or culprit.kind not in ("link", "switch"):
            return
        for flow in self._flows(culprit, comm)[:NICS_MAX]:
            rank = int(fabric.src[flow])
            node, _, nic = nic_of(self._lanes, rank) if 0 <= rank < self._lanes.world else (None, None, None)
            if node is not None and nic is not None:
                passed = self._nic(node, nic, [])
                self._draft.link(key, passed, PASSES_THROUGH)
                self._draft.link(passed, anchor, PASSES_THROUGH)
        if culprit.kind == "link" and culprit.link in fabric.links:
            at = fabric.links.index(culprit.link)
            for end in dict.fromkeys((fabric.a[at], fabric.b[at])):
                if end not in self._lanes.incident.job.node_names:
                    label, switch = f"switch {end}", node_id("switch", end)
                    self._draft.add(switch, "switch", "hardware", label, importance=PATH)
                    self._draft.link(anchor, switch, PASSES_THROUGH)

    def _flows(self, culprit: Culprit, comm: int) -> list[int]:
        """Flows of a communicator through a link or switch, the slowest first."""
        fabric = self._lanes.incident.fabric
        if fabric is None:
            return []
        if culprit.kind == "link":
            through = [at for at, name in enumerate(fabric.links) if name == culprit.link]
        else:
            ends = zip(fabric.a, fabric.b, strict=True)
            through = [at for at, pair in enumerate(ends) if culprit.switch in pair]
        flow_of = np.repeat(np.arange(len(fabric.comm)), np.diff(fabric.path_start))
        flows = np.unique(flow_of[np.isin(fabric.path, through)])
        flows = flows[fabric.comm[flows] == comm]
        order = np.argsort(np.nan_to_num(fabric.gbps[flows], nan=np.inf), kind="stable")
        return [int(flow) for flow in flows[order]]

    # -- what explains a culprit -------------------------------------------------------------------------------------

    def explain(self, culprit: Culprit, anchor: str) -> None:
        """The findings and functions behind a culprit."""
        for number, finding in enumerate(self._findings(culprit)):
            against = self._cited[finding.text]
            source = _SOURCES.get(finding.source, finding.source)
            about = self._about(finding, anchor)
            self._finding(about, f"{culprit.node} {number}", source, finding.text, against)
        for number, (source, text) in enumerate(self._other_words(culprit, anchor)):
            self._finding(anchor, f"{anchor} {source} {number}", source, text, False)
        summaries = self._lanes.incident.summaries
        ranks = self.named_ranks(culprit)
        if summaries is not None and ranks and self._analysis.slow is not None:
            self._functions(summaries, ranks[0], anchor)

    def _findings(self, culprit: Culprit) -> list[Finding]:
        """What nodes say of a culprit and the verdict cites."""
        if culprit.node is None:
            return []
        _, gpu, nic = nic_of(self._lanes, culprit.rank) if culprit.rank is not None else (None, None, None)
        said = self._witnesses.about(culprit.node, gpu, nic)
        return [finding for finding in said if finding.text in self._cited][:FINDINGS_MAX]

    def _about(self, finding: Finding, anchor: str) -> str:
        """The node that a finding is about, if it is drawn; else the culprit."""
        if isinstance(finding.entity, int):
            key = node_id("gpu", f"{finding.node}/{finding.entity}")
        elif finding.entity:
            key = node_id("nic", f"{finding.node}/{finding.entity}")
        else:
            key = node_id("node", finding.node)
        return key if key in self._draft.graph else anchor

    def _other_words(self, culprit: Culprit, anchor: str) -> list[tuple[str, str]]:
        """What is known of a culprit from elsewhere: the kernel on its process, operations, flows."""
        stall, told = self._analysis.stall, []
        if culprit.rank is not None and stall is not None:
            state = self._lanes.incident.process_state.get(culprit.rank, "")
            if state:
                told.append(("kernel", f"the process is {words.PROCESS_STATES.get(state, f'in state {state}')}"))
            if culprit.rank in stall.operations:
                told.append(("operation", f"runs {stall.operations[culprit.rank]}"))
        name = culprit.link or culprit.switch
        for item in self._analysis.verdict.evidence:
            if item.kind == "flows" and name is not None and f"through {name} " in item.text:
                told.append(("flows", item.text))
        return told[:FINDINGS_MAX]

    def _finding(self, about: str, name: str, source: str, text: str, against: bool) -> None:
        key = node_id("finding", f"{source} {name}")
        details = [text, "does not explain the loss" if against else ""]
        self._draft.add(key, "finding", "finding", source, details, importance=FINDING)
        self._draft.link(about, key, AGAINST if against else EXPLAINED_BY)

    def _functions(self, summaries: Summaries, rank: int, anchor: str) -> None:
        """The functions that take longer on a rank than on its peers, by what they cost a step."""
        slow = self._analysis.slow
        workers = np.flatnonzero(summaries.rank == rank)
        if slow is None or not len(workers):
            return
        if self._patterns is None:
            self._patterns = Patterns(summaries, slow.role)
        per_step = self._patterns.per_step_ms
        known = (summaries.rank >= 0) & (summaries.rank < self._lanes.world)
        role = np.where(known, slow.role[np.where(known, summaries.rank, 0)], -1)
        peers = (role == slow.role[rank]) & ~np.isin(summaries.rank, sorted(self._named))
        own = np.isin(np.array(summaries.kind), ("compute", "host", "memcpy"))
        table = np.where(np.isnan(per_step[peers]), 0.0, per_step[peers])
        if not len(table):
            return
        grown = np.where(own, np.nan_to_num(per_step[workers[0]]) - np.median(table, axis=0), 0.0)
        grown = np.maximum(grown, 0.0)
        for at in np.argsort(-grown, kind="stable")[:FUNCTIONS_MAX]:
            if grown[at] >= FUNCTION_PART_MIN * grown.sum() and grown[at] > 0:
                name = summaries.operator_names[at]
                detail = f"{grown[at]:,.1f} ms more a step than on its peers"
                key = self._draft.add(
                    node_id("function", f"{name} of rank {rank}"),
                    "function",
                    "finding",
                    name,
                    [detail],
                    importance=FUNCTION,
                )
                self._draft.link(anchor, key, EXPLAINED_BY, float(grown[at]), "ms a step")
