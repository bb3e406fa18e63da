"""`tocsin diagnose`: files in, one verdict out. All but opening the files and the words is pure and elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from controller.cli.inputs import Named, read_inputs
from controller.cli.words import clean, columns
from controller.notify.message import who
from controller.web.words import number, percent
from diagnosis.contracts.verdict import Action, Culprit, Verdict
from diagnosis.evidence.gather import gather, lead

if TYPE_CHECKING:
    from diagnosis.engine.verdict import Analysis

PROGRESS_EVERY_S: Final = 0.5
UNSEEN_SHOWN_MAX: Final = 40
_ACTIONS: Final = {"drain": "drain", "requeue": "requeue the job", "notify": "tell people", "collect": "collect more"}


class NothingReadable(Exception):
    """None of the inputs is anything that can be read; the text says why, input by input."""


def diagnose_paths(paths: Sequence[Path], draw: Callable[[Analysis | None], None] | None = None) -> Verdict:
    """The verdict on everything below the paths. `draw` is given what led to it (None: tables alone).

    Raises: OperatorFault (a path does not exist), NothingReadable.
    """
    begin = time.perf_counter()
    refused: list[str] = []
    evidence = gather(_with_progress(read_inputs(paths, lambda name, why: refused.append(f"{name}: {why}"))))
    unseen = (*refused[:UNSEEN_SHOWN_MAX], *_more(refused), *evidence.unseen)
    if not evidence.readable:
        raise NothingReadable("\n".join(["nothing readable among the inputs", *map(clean, unseen)]))
    verdicts = list(evidence.verdicts)
    analysis = None
    if evidence.incident is not None:
        from diagnosis.engine.verdict import analyse  # not needed for tables

        analysis = analyse(evidence.incident)
        verdicts.insert(0, analysis.verdict)
    if draw is not None:
        draw(analysis)
    verdict = lead(verdicts, unseen)
    return msgspec.structs.replace(verdict, elapsed_ms=round((time.perf_counter() - begin) * 1000, 1))


def _more(refused: list[str]) -> list[str]:
    count = len(refused) - UNSEEN_SHOWN_MAX
    return [f"{count} more inputs were not read"] if count > 0 else []


def _with_progress(inputs: Iterator[Named]) -> Iterator[Named]:
    """The same; on a terminal, a line on stderr tells of long inputs."""
    if not sys.stderr.isatty():
        yield from inputs
        return
    begin = shown_at = time.monotonic()
    seen_bytes = 0

    def told(name: str, chunks: Iterator[bytes]) -> Iterator[bytes]:
        nonlocal shown_at, seen_bytes
        for chunk in chunks:
            seen_bytes += len(chunk)
            if time.monotonic() - shown_at > PROGRESS_EVERY_S:
                shown_at = time.monotonic()
                sys.stderr.write(f"\r\x1b[Kreading {clean(name)[-60:]}, {seen_bytes >> 20} MB")
                sys.stderr.flush()
            yield chunk

    for name, chunks in inputs:
        yield name, told(name, chunks)
    if shown_at != begin:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


def verdict_lines(verdict: Verdict) -> Iterator[str]:
    """The verdict for a terminal."""
    yield clean(verdict.summary)
    yield ""
    what = f"{verdict.anomaly} {verdict.class_}" if verdict.class_ else verdict.anomaly
    facts = [
        ("job", "" if verdict.job_id is None else str(verdict.job_id)),
        ("what", what),
        ("action", _action(verdict.action)),
        ("victims", f"{verdict.victims['ranks']} ranks" if verdict.victims.get("ranks") else ""),
    ]
    yield from columns([(name.ljust(8), value) for name, value in facts if value])
    for culprit in verdict.culprits:
        yield clean(f"who       {who(culprit)}: {_guilt(culprit)}")
    for item in verdict.evidence:
        yield clean(f"{'against' if item.against else 'evidence':9} {item.witness}: {item.text}")
    for line in verdict.unseen:
        yield clean(f"unseen    {line}")


def _guilt(culprit: Culprit) -> str:
    lost = culprit.lost_ms_per_step
    cost = f", {number(lost, 'ms')} lost per step" if lost is not None else ""
    return f"{culprit.cause} ({culprit.domain}), {percent(culprit.confidence)} sure{cost}"


def _action(action: Action) -> str:
    parts = [_ACTIONS.get(action.kind, "")]
    if action.nodes:
        parts[0] = f"drain {', '.join(action.nodes)}"
    if action.requeue and action.kind != "requeue":
        parts.append("requeue the job")
    if action.exclude:
        parts.append(f"without {', '.join(action.exclude)}")
    if action.collect:
        parts.append(action.collect)
    if action.flag:
        parts.append(f"tell the owner of the {action.flag}")
    return "; ".join(part for part in parts if part) or "none"
