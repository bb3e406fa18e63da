"""An incident in a few lines for a chat: who, why, how sure, what was done or would be done, how long it took. Pure.

A notice is made once per change of an incident and kept in the outbox; its text is made when it is sent.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from controller.store.base import Incident
from diagnosis.contracts.verdict import Culprit, EvidenceItem, Verdict
from remediation.policy.case import ActRecord

EVIDENCE_LINES_MAX: Final = 3
CULPRITS_MAX: Final = 4
ACTS_MAX: Final = 12
DIGEST_LINES_MAX: Final = 20
LINE_CHARS_MAX: Final = 400
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]+")
_ACTS: Final = {
    "drain": "drain {}",
    "set_down": "set {} DOWN, it alone kept the job from starting",
    "undown": "bring {} back from DOWN",
    "resume": "return {} to service",
    "signal": "tell job {} to save its state",
    "requeue": "requeue job {}",
    "set_exclude": "keep job {} off the bad nodes",
    "start_in": "let job {} start at once instead of after Slurm's delay",
    "release": "release job {}",
}
_FAULTS: Final = {"hang": "hangs", "slow": "is slow", "failed": "failed"}


class ActDone(msgspec.Struct, frozen=True, kw_only=True):
    """One act of the ledger as others see it. `after_s`: since the incident was opened; `outcome` None: not known."""

    kind: str
    target: str
    outcome: str | None
    after_s: float
    detail: str = ""


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """One change of one incident. As JSON it is what a `format = "json"` webhook gets ("tocsin.notice/1")."""

    key: str
    incident: str
    change: str
    at: float
    title: str
    lines: list[str]
    job_id: int
    restart: int
    user: str | None
    nodes: list[str]
    mode: str
    verdict: Verdict
    decision: str
    outcome: str | None
    outcome_text: str
    acts: list[ActDone]
    elapsed_s: float
    schema: str = "tocsin.notice/1"


def notice(incident: Incident, change: str, acts: Sequence[ActRecord], at: float) -> Notice:
    """What is to be told of the incident now. `change` is a short word: "opened", "acting", "closed"..."""
    done = [
        ActDone(
            kind=act.kind,
            target=act.target,
            outcome=act.outcome,
            after_s=round((act.concluded_at or act.intent_at) - incident.opened_at, 1),
            detail=act.detail,
        )
        for act in acts
    ]
    elapsed_s = round((incident.closed_at or at) - incident.opened_at, 1)
    return Notice(
        key=f"{incident.id}:{change}",
        incident=incident.id,
        change=change,
        at=at,
        title=_title(incident, elapsed_s),
        lines=_lines(incident, done),
        job_id=incident.job_id,
        restart=incident.restart,
        user=incident.user,
        nodes=incident.nodes,
        mode=incident.mode,
        verdict=incident.verdict,
        decision=incident.decision,
        outcome=incident.outcome,
        outcome_text=incident.outcome_text,
        acts=done,
        elapsed_s=elapsed_s,
    )


def text(told: Notice) -> str:
    """The notice as plain text, one line a fact, safe to show: no control characters, no mention of anybody."""
    return "\n".join(plain(line) for line in (told.title, *told.lines))


def digest_text(notices: Sequence[Notice]) -> str:
    """Many notices in one message: a line each."""
    more = len(notices) - DIGEST_LINES_MAX
    lines = [f"tocsin: {len(notices)} messages at once", *(told.title for told in notices[:DIGEST_LINES_MAX])]
    if more > 0:
        lines.append(f"... and {more} more: tocsin incidents")
    return "\n".join(plain(line) for line in lines)


def plain(line: str) -> str:
    """One harmless line. A zero-width space after `@` keeps a name from calling everybody in a channel."""
    return _CONTROL.sub(" ", line)[:LINE_CHARS_MAX].replace("@", "@\u200b")


def who(culprit: Culprit) -> str:
    """ "rank 5, GPU1 of gpu003"; "node gpu003"; "link leaf1-spine2"."""
    parts = [] if culprit.rank is None else [f"rank {culprit.rank}"]
    place = next(
        (
            f"{name}{value}" if kind == "gpu" else f"{name} {value}"
            for kind, name, value in (("gpu", "GPU", culprit.gpu), ("nic", "NIC", culprit.nic))
            if value is not None
        ),
        "",
    )
    if culprit.node is not None:
        place = f"{place} of {culprit.node}" if place else f"node {culprit.node}"
    parts += [place] if place else []
    parts += [f"link {culprit.link}"] if culprit.link else []
    parts += [f"switch {culprit.switch}"] if culprit.switch else []
    return ", ".join(parts) or "the whole job"


def _title(incident: Incident, elapsed_s: float) -> str:
    owner = f" ({incident.user})" if incident.user else ""
    fault = _FAULTS.get(incident.verdict.anomaly, incident.verdict.anomaly)
    if incident.outcome is None:
        return f"tocsin {incident.id}: job {incident.job_id}{owner} {fault}"
    return f"tocsin {incident.id}: job {incident.job_id}{owner} {fault}: {incident.outcome} after {elapsed_s:g} s"


def _lines(incident: Incident, done: list[ActDone]) -> list[str]:
    verdict = incident.verdict
    lines = [_culprit(culprit) for culprit in verdict.culprits[:CULPRITS_MAX]] or ["Who: not known yet"]
    if len(verdict.culprits) > CULPRITS_MAX:
        lines.append(f"and {len(verdict.culprits) - CULPRITS_MAX} more")
    lines.append(f"Why: {verdict.summary}")
    lines += [_evidence(item) for item in _strongest(verdict.evidence)]
    if incident.decision:
        lines.append(f"Decided ({incident.mode}): {incident.decision}")
    lines += [_act(act) for act in done[-ACTS_MAX:]]
    if incident.outcome_text:
        lines.append(f"End: {incident.outcome_text}")
    lines.append(f"More: tocsin show {incident.id}")
    return lines


def _culprit(culprit: Culprit) -> str:
    lost = f", {culprit.lost_ms_per_step:.0f} ms lost per step" if culprit.lost_ms_per_step else ""
    return f"Who: {who(culprit)}: {culprit.cause} ({culprit.domain}), {culprit.confidence:.0%} sure{lost}"


def _strongest(evidence: list[EvidenceItem]) -> list[EvidenceItem]:
    """Evidence of different witnesses first: two witnesses say more than one who speaks twice."""
    first_of_witness: dict[tuple[str, bool], EvidenceItem] = {}
    for item in evidence:
        first_of_witness.setdefault((item.witness, item.against), item)
    chosen = list(first_of_witness.values())
    chosen += [item for item in evidence if item not in chosen]
    return chosen[:EVIDENCE_LINES_MAX]


def _evidence(item: EvidenceItem) -> str:
    return f"- {item.witness}{' (against)' if item.against else ''}: {item.text}"


def _act(act: ActDone) -> str:
    words = _ACTS.get(act.kind, act.kind + " {}").format(act.target)
    if act.outcome == "ok":
        return f"Done: {words} (at {act.after_s:g} s)"
    detail = f", {act.detail}" if act.detail else ""
    return f"{'Failed' if act.outcome else 'Tried'}: {words} (at {act.after_s:g} s{detail})"
