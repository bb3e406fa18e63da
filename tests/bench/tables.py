"""Rows of examined drills as Markdown tables, and tables into a page between its markers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

from tests.bench.examined import ENGINE, Row
from tests.grading import Grade

CLASSES: Final = ("H1", "H2", "H3", "S1", "S2", "S3", "job-wide", "no fault")
FAULTS: Final = ("H1", "H2", "H3", "S1", "S2", "S3")
BINS: Final = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.01)
Z_95: Final = 1.96


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table: the first column is text, the others are numbers."""
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def share(right: int, count: int) -> str:
    """A share in percent, or a dash where nothing was counted."""
    return f"{100 * right / count:.1f} %" if count else "-"


def interval(right: int, count: int) -> str:
    """Wilson's 95 % interval of a share, in percent."""
    if not count:
        return "-"
    p, z2 = right / count, Z_95 * Z_95
    middle = (p + z2 / (2 * count)) / (1 + z2 / count)
    half = Z_95 * math.sqrt(p * (1 - p) / count + z2 / (4 * count * count)) / (1 + z2 / count)
    return f"{100 * max(0.0, middle - half):.1f} to {100 * min(1.0, middle + half):.1f}"


def judged(rows: Iterable[Row]) -> list[tuple[Row, Grade]]:
    """Rows that have a grade."""
    return [(row, row.grade) for row in rows if row.grade is not None]


def _line(name: str, rows: Sequence[Row]) -> list[str]:
    graded = judged(rows)
    count = len(graded)
    located = sum(grade.located for _, grade in graded)
    wanted = [row for row, _ in graded if row.to_drain]
    return [
        name,
        str(count),
        share(located, count),
        interval(located, count),
        share(sum(grade.class_ok for _, grade in graded), count),
        share(sum(grade.cause for _, grade in graded), count),
        share(sum(grade.abstained for _, grade in graded), count),
        f"{sum(row.drained for row in wanted)} of {len(wanted)}" if wanted else "-",
        str(sum(bool(grade.false_drain) for _, grade in graded)),
    ]


HEAD: Final = ("", "drills", "located", "95 % interval", "class", "cause", "abstained", "drained", "false drains")


def by_class(rows: Sequence[Row]) -> str:
    """Accuracy by class of the truth, all faults and all drills."""
    lines = [_line(name, [row for row in rows if row.class_ == name]) for name in CLASSES]
    lines.append(_line("**faults H1 to S3**", [row for row in rows if row.class_ in FAULTS]))
    lines.append(_line("**all**", rows))
    return table(HEAD, lines)


def by_kind(rows: Sequence[Row]) -> str:
    """Accuracy by kind of drill."""
    kinds = sorted({row.kind for row, _ in judged(rows)}, key=lambda kind: (_class_of(rows, kind), kind))
    return table(
        HEAD, [_line(f"{_class_of(rows, kind)} {kind}", [r for r in rows if r.kind == kind]) for kind in kinds]
    )


def _class_of(rows: Sequence[Row], kind: str) -> str:
    return next(row.class_ for row in rows if row.kind == kind)


def confusion(rows: Sequence[Row]) -> str:
    """Which causes are named for which: drills with a guilty place, by the first right cause."""
    lines = []
    chosen = [(row, grade) for row, grade in judged(rows) if row.place and row.causes]
    for cause in sorted({row.causes[0] for row, _ in chosen}):
        of = [(row, grade) for row, grade in chosen if row.causes[0] == cause]
        wrong = Counter(row.said for row, grade in of if not grade.cause and row.said != "nobody")
        right = sum(grade.cause for _, grade in of)
        nobody = sum(row.said == "nobody" and not grade.cause for row, grade in of)
        instead = ", ".join(f"{name} {count}" for name, count in wrong.most_common())
        lines.append([cause, str(len(of)), str(right), str(nobody), instead])
    return table(("true cause", "drills", "right", "nobody named", "named instead"), lines)


def calibration(rows: Sequence[Row]) -> str:
    """The first culprit's confidence against being right (place and cause)."""
    said = [
        (row, grade, grade.confidence)
        for row, grade in judged(rows)
        if grade.confidence is not None and row.said != "nobody"
    ]
    lines = []
    for low, high in pairwise(BINS):
        of = [(grade, sure) for _, grade, sure in said if low <= sure < high]
        if of:
            mean = sum(sure for _, sure in of) / len(of)
            right = sum(grade.located and grade.cause for grade, _ in of)
            placed = sum(grade.located for grade, _ in of)
            words = f"{low:.2f} to {min(high, 1.0):.2f}"
            lines.append([words, str(len(of)), f"{100 * mean:.0f} %", share(placed, len(of)), share(right, len(of))])
    return table(("confidence", "verdicts", "mean", "located", "located and cause right"), lines)


def traps(rows: Sequence[Row]) -> str:
    """What is said where nobody is guilty."""
    kinds = sorted({row.kind for row, _ in judged(rows)})
    lines = [_trap_line(kind, [pair for pair in judged(rows) if pair[0].kind == kind]) for kind in kinds]
    return table(
        ("", "drills", "false alarms", "hardware or network blamed", "anybody named", "false drains"),
        [*lines, _trap_line("**all**", judged(rows))],
    )


def _trap_line(name: str, graded: list[tuple[Row, Grade]]) -> list[str]:
    counts = (
        sum(row.anomaly == "none" and row.said_anomaly != "none" for row, _ in graded),
        sum(any(why.endswith("blamed") for why in grade.why) for _, grade in graded),
        sum(row.somebody for row, _ in graded),
        sum(bool(grade.false_drain) for _, grade in graded),
    )
    return [name, str(len(graded)), *map(str, counts)]


def peers(rows: Sequence[Row]) -> str:
    """All methods on the same inputs: exactly the guilty, by class, where ranks or nodes are guilty; then innocents."""
    methods = [name for name, _ in next((row.scores for row in rows if row.scores), ())]
    lines = []
    for method in methods:
        found = [(row, dict(row.scores)[method]) for row in rows if row.scores]
        placed = [(row, score) for row, score in found if row.place in ("rank", "node")]
        cells = [method if method != ENGINE else f"**{ENGINE}**"]
        for name in FAULTS:
            of = [score for row, score in placed if row.class_ == name]
            cells.append(share(sum(score.exact for score in of), len(of)))
        cells.append(share(sum(score.exact for _, score in placed), len(placed)))
        cells.append(share(sum(score.named for _, score in placed), len(placed)))
        cells.append(share(sum(score.class_ok for _, score in placed), len(placed)))
        cells.append(f"{sum(score.innocents for _, score in placed) / max(1, len(placed)):.1f}")
        nobody = [score for row, score in found if not row.place]
        cells.append(share(sum(score.innocents > 0 for score in nobody), len(nobody)))
        lines.append(cells)
    counts = Counter(row.class_ for row in rows if row.scores and row.place in ("rank", "node"))
    head = ["exactly the guilty", *(f"{name} ({counts[name]})" for name in FAULTS)]
    return table(
        [*head, "all", "all, others named too", "class right", "innocents a drill", "blames where nobody is guilty"],
        lines,
    )


def curve(rows: Sequence[Row], words: Callable[[float], str]) -> str:
    """A line per point of a curve."""
    points = sorted({row.task.point[1] for row in rows})
    lines = [_line(words(at), [row for row in rows if row.task.point[1] == at]) for at in points]
    return table(HEAD, lines)


def write(page: Path, name: str, text: str) -> None:
    """Puts `text` between the markers called `name`. Raises ValueError where the page has none."""
    begin, end = f"<!-- measured: {name} -->\n", f"<!-- end of {name} -->"
    head, found, rest = page.read_text().partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{page.name} has no place for {name}")
    page.write_text(f"{head}{begin}\n{text}\n{end}{tail}")
