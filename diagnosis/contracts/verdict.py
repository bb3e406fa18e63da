"""The verdict: who is to blame, why, how sure, and what should be done. Its JSON form is "tocsin.verdict/1"."""

from __future__ import annotations

from typing import Final

import msgspec

SCHEMA: Final = "tocsin.verdict/1"

DOMAIN_OF_CAUSE: Final[dict[str, str]] = {
    **dict.fromkeys(("gpu_clock_throttle", "hbm_degraded", "gpu_fault", "nvlink_fault", "pcie_degraded"), "hardware"),
    **dict.fromkeys(
        (
            "nic_fault",
            "nic_degraded",
            "transceiver_errors",
            "pfc_storm",
            "ecmp_polarization",
            "link_fault",
            "link_congestion",
        ),
        "network",
    ),
    **dict.fromkeys(
        (
            "allocator_stall",
            "gc_stall",
            "host_contention",
            "process_stuck",
            "process_exit",
            "program_divergence",
        ),
        "software",
    ),
    **dict.fromkeys(("dataloader_starvation", "workload_imbalance", "workload_change"), "workload"),
    "storage_stall": "io",
    "unknown": "unknown",
}
"""Every cause and the domain it belongs to. Only `hardware` and a node's own NIC may ever drain a node."""

NIC_CAUSES: Final = frozenset({"nic_fault", "nic_degraded", "transceiver_errors", "pfc_storm"})
"""Causes of the network that lie in a node's own card: pause frames that it sends are its own trouble, those that it
receives are the fabric's."""


class Culprit(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=False):
    """The narrowest thing that the evidence supports. `confidence` in 0..1."""

    kind: str  # rank | gpu | node | nic | link | switch | job
    cause: str = "unknown"
    domain: str = "unknown"
    confidence: float = 0.0
    rank: int | None = None
    node: str | None = None
    gpu: int | None = None
    nic: str | None = None
    link: str | None = None
    switch: str | None = None
    lost_ms_per_step: float | None = None


class Action(msgspec.Struct, kw_only=True, frozen=True):
    """What the evidence calls for. Policy decides whether it is done."""

    kind: str = "none"  # drain | requeue | notify | collect | none
    nodes: list[str] = []  # to drain
    requeue: bool = False
    exclude: list[str] = []  # to be avoided by the requeued job, drained or not
    flag: str | None = None  # nic | fabric: tell the network owner
    collect: str | None = None  # what to gather from whom


class EvidenceItem(msgspec.Struct, kw_only=True, frozen=True):
    """One observation. `witness` names who saw it: what a job can write is one witness however often it speaks."""

    kind: str
    text: str
    value: float | None = None
    witness: str = "job"  # job | ras (the job's word too) | nvml | kernel | slurm | network | probe
    against: bool = False


class Verdict(msgspec.Struct, kw_only=True, frozen=True):
    """See the module. `anomaly`: none | hang | slow | failed. `class`: H1 H2 H3 S1 S2 S3 or null."""

    job_id: int | None
    anomaly: str
    class_: str | None = msgspec.field(default=None, name="class")
    culprits: list[Culprit] = []
    victims: dict[str, int] = {}
    action: Action = Action()
    summary: str = ""
    evidence: list[EvidenceItem] = []
    unseen: list[str] = []
    elapsed_ms: float | None = None
    schema: str = SCHEMA


def says_the_same(one: Verdict, other: Verdict) -> bool:
    """Whether two verdicts name the same and call for the same, however sure they are and whatever it costs."""
    named = [
        [msgspec.structs.replace(culprit, confidence=0.0, lost_ms_per_step=None) for culprit in verdict.culprits]
        for verdict in (one, other)
    ]
    return (one.class_, one.action) == (other.class_, other.action) and named[0] == named[1]


def worth_an_incident(verdict: Verdict) -> bool:
    """A job that hangs or failed always is; one that is slow only where something in it can be named."""
    named = any(culprit.kind != "job" for culprit in verdict.culprits)
    return verdict.anomaly in ("hang", "failed") or (verdict.anomaly == "slow" and named)


def slurm_entity(culprit: Culprit) -> str:
    """The culprit as one word of a Slurm reason: no colon, no space ("GPU5", "mlx5_3", "rank13", a node name)."""
    if culprit.gpu is not None and culprit.domain == "hardware":
        return f"GPU{culprit.gpu}"
    if culprit.nic is not None:
        return culprit.nic
    if culprit.rank is not None:
        return f"rank{culprit.rank}"
    return culprit.node or culprit.link or culprit.switch or "job"
