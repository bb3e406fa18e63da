"""One slow-down being decided: what every step of the verdict needs, and the evidence as it gathers."""

from __future__ import annotations

import numpy as np

from diagnosis.contracts.verdict import EvidenceItem
from diagnosis.engine.behaviour import unusual
from diagnosis.engine.lanes import Lanes
from diagnosis.engine.patterns import Patterns
from diagnosis.engine.slowness import Slowness, loss_per_step_ms
from diagnosis.engine.thresholds import Thresholds
from diagnosis.engine.witnesses import Finding, Witnesses, gather

HOURS = 24


class Case:
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

        if np.isfinite(slow.ratio) and slow.ratio > 1:
            hours = lanes.world * HOURS * (1 - 1 / slow.ratio)
            self.evidence.append(
                EvidenceItem(kind="cost", text=f"that is {hours:.0f} GPU-hours a day", value=round(hours))
            )
        for one in unusual(summaries, slow.role)[:4] if summaries is not None else ():
            where = "all ranks" if one.rank is None else f"rank {one.rank}"
            text = f"{one.function} behaves unusually on {where}: {100 * one.beta:.0f} % of the critical path"
            self.evidence.append(EvidenceItem(kind="behaviour", text=text, value=round(one.distance, 2)))

    def cite(self, finding: Finding, against: bool = False) -> None:
        """Note what a node says."""
        witness = {"kmsg": "kernel", "ib": "network", "host": "kernel"}.get(finding.source, "nvml")
        self.evidence.append(EvidenceItem(kind=finding.cause, text=finding.text, witness=witness, against=against))
