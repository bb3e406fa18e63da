"""The words of a remediation: a case (what was decided), the acts done for it, and the next step.

`plan.next_step` is called again and again with what is observed; it answers with one `Act`, with `Wait`, or with the
end. Nothing is remembered between calls except the ledger's acts, so a crash anywhere changes nothing: what Slurm
shows decides, not memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Case:
    """What the policy decided about one attempt of one job. `restart` is the attempt that failed.

    `drain`: nodes to drain with `reason`; `avoid`: nodes the requeued job must not get (a superset of `drain`).
    `progressing`: the job still makes progress, so ending it has a price (signal to checkpoint first).
    """

    incident: str
    job_id: int
    submit_time: str
    restart: int
    anomaly: str
    drain: tuple[str, ...]
    avoid: tuple[str, ...]
    requeue: bool
    reason: str
    progressing: bool
    decided_at: float


@dataclass(frozen=True, slots=True)
class ActRecord:
    """One line of the ledger. `outcome` None: intent written, result not known (in flight, or we died)."""

    seq: int
    incident: str
    kind: str
    target: str
    args: dict[str, str]
    intent_at: float
    outcome: str | None = None  # ok | failed | None
    detail: str = ""
    concluded_at: float | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Act:
    """Do this one thing. `kind` is the name of the backend's method; `why` goes into the ledger."""

    kind: str
    target: str
    args: dict[str, str] = field(default_factory=dict)
    why: str = ""


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do until the world changes. `why` is shown to people."""

    why: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a case. `outcome`: resolved | partly | abandoned (a person must look) | recovered (the job went on by
    itself) | withdrawn (nothing was done, and nothing is left to do)."""

    outcome: str
    text: str


Step = Act | Wait | Finished
