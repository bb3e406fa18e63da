"""Answers as aligned text for a terminal. What jobs and nodes wrote is shown without its control characters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from controller.control.status import IncidentDetail, NodeEvidence, Status
from controller.notify.message import who
from controller.store.base import Incident
from controller.web.words import UNKNOWN, ago, duration, moment, number, percent, ranks_seen, step_time
from diagnosis.contracts.verdict import Verdict

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def columns(rows: Iterable[Sequence[str]]) -> list[str]:
    """Rows as lines whose columns stand below each other; the last column may be long."""
    cleaned = [[clean(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cleaned, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cleaned]


def clean(text: str) -> str:
    """One line without control characters: a stack or a name must not drive the terminal."""
    return _CONTROL.sub("?", text)


def printable(path: Path) -> str:
    """A path as text; it may hold bytes that are none."""
    return str(path).encode(errors="replace").decode()


def status_lines(status: Status) -> Iterator[str]:
    """`tocsin status`."""
    loop, now = status.loop, status.now
    if status.paused:
        paused = status.paused
        why = f": {clean(paused.why)}" if paused.why else ""
        yield f"PAUSED by {clean(paused.who or 'somebody')}, {ago(paused.at, now)}{why}"
    yield f"mode {'paused' if status.paused else loop.mode}, up {duration(now - status.started_at)}"
    yield f"last cycle {ago(loop.cycle_at, now)}, Slurm seen {ago(loop.world_at, now)}"
    if loop.sentence:
        yield clean(loop.sentence)
    for fault in (loop.fault, status.config_fault and f"configuration not reloaded: {status.config_fault}"):
        if fault:
            yield from (f"FAULT {clean(line)}" for line in fault.splitlines())
    outbox = status.outbox
    silent = [node.node for node in status.nodes if node.silent]
    reporting = f"{len(status.nodes) - len(silent)} of {number(loop.nodes_known)} nodes report"
    yield f"{reporting}{f', silent: {_some(silent, 4)}' if silent else ''}; {number(loop.nodes_held)} held by us"
    yield f"{outbox.waiting} messages wait, {outbox.dead} given up" + (
        f" (last failure: {clean(outbox.last_error)})" if outbox.last_error and (outbox.waiting or outbox.dead) else ""
    )
    yield f"{status.incidents_open} incidents open"
    if status.jobs:
        yield ""
        yield from columns(
            [("JOB", "USER", "STATE", "RANKS", "STEP", "ROUND", "NORMAL", "QUIET", "NODES")]
            + [
                (
                    f"{job.job_id}.{job.restart}",
                    job.user or UNKNOWN,
                    job.state,
                    ranks_seen(job.ranks_seen, job.world_size),
                    step_time(job.step_ms, job.step_jitter_ms),
                    number(job.round_ms, "ms"),
                    number(job.baseline_ms, "ms"),
                    duration(job.quiet_s),
                    _some(job.nodes, 4),
                )
                for job in status.jobs
            ]
        )


def incident_lines(incidents: Sequence[Incident]) -> list[str]:
    """`tocsin incidents`."""
    if not incidents:
        return ["no incidents"]
    return columns(
        [("ID", "OPENED (UTC)", "JOB", "USER", "WHAT", "STATE", "WHO")]
        + [
            (
                incident.id,
                moment(incident.opened_at),
                f"{incident.job_id}.{incident.restart}",
                incident.user or UNKNOWN,
                _what(incident.verdict),
                incident.outcome or incident.phase,
                _some([who(culprit) for culprit in incident.verdict.culprits], 2) or "not known",
            )
            for incident in incidents
        ]
    )


def detail_lines(detail: IncidentDetail) -> Iterator[str]:
    """`tocsin show`."""
    incident, verdict = detail.incident, detail.incident.verdict
    yield clean(verdict.summary or "nothing is concluded yet")
    yield ""
    yield from columns(_facts(incident))
    for culprit in verdict.culprits:
        yield clean(f"who       {who(culprit)}: {culprit.cause} ({culprit.domain}), {percent(culprit.confidence)} sure")
    for item in verdict.evidence:
        yield clean(f"{'against' if item.against else 'evidence':9} {item.witness}: {item.text}")
    for line in verdict.unseen:
        yield clean(f"unseen    {line}")
    if incident.timeline:
        yield ""
        yield from columns([(f"+{duration(at - incident.opened_at)}", line) for at, line in incident.timeline])
    if detail.acts:
        yield ""
        yield from columns(
            [("ACT", "WHAT", "TARGET", "RESULT", "AFTER", "WHY")]
            + [
                (
                    str(act.seq),
                    act.kind,
                    act.target,
                    f"{act.outcome or 'not known'} {act.detail}".strip(),
                    duration(act.intent_at - incident.opened_at),
                    act.why,
                )
                for act in detail.acts
            ]
        )
    for row in detail.evidence:
        yield from _evidence_lines(row)


def _facts(incident: Incident) -> list[tuple[str, str]]:
    took = incident.closed_at - incident.opened_at if incident.closed_at is not None else None
    facts = [
        ("incident", incident.id),
        ("job", f"{incident.job_id}.{incident.restart} {incident.user or ''}"),
        ("what", _what(incident.verdict)),
        ("nodes", _some(incident.nodes, 8)),
        ("opened", f"{moment(incident.opened_at)} UTC"),
        ("state", f"{incident.outcome or incident.phase}" + (f" after {duration(took)}" if took is not None else "")),
        ("mode", incident.mode),
        ("decided", incident.decision),
        ("end", incident.outcome_text),
    ]
    return [(name.ljust(8), value) for name, value in facts if value]


def _evidence_lines(row: NodeEvidence) -> Iterator[str]:
    yield ""
    if row.lines:
        yield clean(f"{row.node} gathered {row.kind}:")
        for line in row.lines:
            yield clean(f"  {line}")
        return
    if row.told is None:
        yield clean(f"{row.node} sent {row.size_bytes} bytes of kind {row.kind}")
        return
    for process in row.told.processes:
        where = f", waits in {process.wchan}" if process.wchan else ""
        yield clean(f"{row.node}: rank {process.rank}, pid {process.pid}, state {process.state or UNKNOWN}{where}")
        for title, text in (("python", process.python_stack), ("kernel", process.kernel_stack)):
            for line in (text or "").splitlines():
                yield f"  {title}  {clean(line)}"
        for note in process.notes:
            yield clean(f"  note    {note}")


def _what(verdict: Verdict) -> str:
    return f"{verdict.anomaly} {verdict.class_}" if verdict.class_ else verdict.anomaly


def _some(names: Sequence[str], shown_max: int) -> str:
    more = f" and {len(names) - shown_max} more" if len(names) > shown_max else ""
    return ", ".join(names[:shown_max]) + more
