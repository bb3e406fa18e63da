"""What the policy must know beside the verdict and the cluster: plain values, gathered by the control loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from remediation.policy.case import ActRecord, Case


@dataclass(frozen=True, slots=True)
class Finding:
    """For `decide`: which attempt the verdict is about, and what is being done elsewhere.

    `since`: when this verdict was first reached. `open_cases`: all unfinished cases. `recent`: the ledger of the last
    24 hours, all incidents. `given_up`: the incident in which acting on this attempt was abandoned, if any.
    """

    incident: str
    submit_time: str
    restart: int
    since: float
    open_cases: tuple[Case, ...] = ()
    recent: tuple[ActRecord, ...] = ()
    given_up: str | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """For `next_step`: what the node daemons see.

    `stepping_elsewhere`: all ranks of the job's present attempt, a later one than the case's, have been seen to
    advance. `recovered`: the case's own attempt is healthy again, by itself. `old_ranks_gone`: per node whether no
    process of the case's attempt is left there; None while nobody can tell.
    """

    stepping_elsewhere: bool = False
    recovered: bool = False
    old_ranks_gone: Mapping[str, bool | None] = field(default_factory=dict)
