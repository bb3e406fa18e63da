"""From one incident to one verdict. Pure: the same inputs give the same verdict.

The order of questions: has the job ended (failed)? Does anything stand still (hang)? Is the job slower than it was
(slow)? Else nothing is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diagnosis.contracts.incident import Incident
from diagnosis.contracts.verdict import Verdict
from diagnosis.engine import ended, hang_verdict, probes, slow_verdict
from diagnosis.engine.blame import Blame, attribute
from diagnosis.engine.lanes import Lanes, lay_out
from diagnosis.engine.ras import bear_witness
from diagnosis.engine.slowness import Slowness, measure
from diagnosis.engine.thresholds import Thresholds
from diagnosis.engine.waits import Stall, find_stall

UNSEEN_MAX = 32
SLIGHT = 0.5
UNSTEADY_FACTOR = 3.0


@dataclass(frozen=True, slots=True, eq=False)
class Analysis:
    """A verdict with what led to it: the layout, and the stall, or the measured slow-down and who is blamed for it."""

    verdict: Verdict
    lanes: Lanes
    stall: Stall | None = None
    slow: Slowness | None = None
    blame: Blame | None = None


def judge(incident: Incident, limits: Thresholds | None = None) -> Verdict:
    """The verdict on an incident. `anomaly` "none" where there is nothing to say. Without `limits`: the incident's."""
    return analyse(incident, limits).verdict


def analyse(incident: Incident, limits: Thresholds | None = None) -> Analysis:
    """The verdict on an incident and what led to it. Without `limits`: the incident's.

    Numbers are a job's own and may be anything: what overflows or divides by nothing becomes NaN or infinite, which
    convicts nobody.
    """
    if limits is None:
        limits = Thresholds.told(incident.thresholds)
    with np.errstate(all="ignore"):
        return _analyse(incident, limits)


def _analyse(incident: Incident, limits: Thresholds) -> Analysis:
    lanes = lay_out(incident)
    unseen = unseen_of(lanes)
    if incident.ended:
        return Analysis(ended.decide(lanes, limits, unseen), lanes)
    stall = find_stall(lanes, limits)
    if stall is not None:
        verdict = bear_witness(incident, hang_verdict.decide(lanes, stall, limits, unseen))
        verdict = probes.bear_witness(incident, verdict)
        return Analysis(verdict, lanes, stall=stall)
    slow = measure(lanes)
    if np.isfinite(slow.ratio) and slow.ratio >= 1 + SLIGHT * limits.slow_job_min:
        blame = attribute(lanes, slow, limits)
        verdict = probes.bear_witness(incident, slow_verdict.decide(lanes, slow, blame, limits, unseen))
        chance = UNSTEADY_FACTOR * (slow.unsteady if np.isfinite(slow.unsteady) else 0.0)
        if slow.ratio >= 1 + max(limits.slow_job_min + slow.resolution, chance) or _explained(verdict):
            return Analysis(verdict, lanes, slow=slow, blame=blame)
    summary = "Nothing stands still and the job is as fast as it was."
    if not np.isfinite(slow.ratio):
        summary = "Nothing stands still; there is no earlier sample to compare the job's speed with."
    nothing = Verdict(job_id=incident.job.job_id, anomaly="none", summary=summary, unseen=unseen)
    return Analysis(nothing, lanes, slow=slow)


def _explained(verdict: Verdict) -> bool:
    """Whether all who are named are things with a cause: then a slight slow-down is believed as well."""
    named = verdict.culprits
    return bool(named) and all(culprit.kind != "job" and culprit.cause != "unknown" for culprit in named)


def unseen_of(lanes: Lanes) -> list[str]:
    """What the inputs did not tell, for people."""
    notes = list(lanes.incident.unseen[:UNSEEN_MAX])
    spoke = np.zeros(lanes.world, np.bool_)
    spoke[lanes.incident.frames.rank] = True
    quiet = np.flatnonzero(~spoke)
    if len(quiet):
        first = ", ".join(str(rank) for rank in quiet[:8]) + (", ..." if len(quiet) > 8 else "")
        notes.append(f"{len(quiet)} of {lanes.world} ranks sent no frame: {first}")
    strays = int((lanes.lane_of_row < 0).sum())
    if strays:
        notes.append(f"{strays} words about communicators that do not list their rank")
    return notes
