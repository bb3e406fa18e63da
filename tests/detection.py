"""How long faults of the matrix took to be told: the matrix notes each run in a file, and this makes the table of it.

rm -f build/fault-matrix.tsv
.venv/bin/python -m pytest -m acceptance tests/integration/test_fault_matrix.py
.venv/bin/python -m tests.detection
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

FILE = Path(__file__).parents[1] / "build" / "fault-matrix.tsv"
_NONE = "-"


@dataclass(frozen=True, slots=True)
class Told:
    """One fault in one job. `first_s`: from the fault to the first incident, `right_s`: to the verdict that names the
    right class and all culprits, `steps`: training steps meanwhile. None: it did not come."""

    case: str
    launcher: str
    ranks: int
    first_s: float | None
    right_s: float | None
    steps: int | None


def note(told: Told, file: Path = FILE) -> None:
    """Add one line to the file."""
    file.parent.mkdir(exist_ok=True)
    words = [told.case, told.launcher, str(told.ranks)]
    words += [_NONE if one is None else f"{one:.1f}" for one in (told.first_s, told.right_s)]
    words.append(_NONE if told.steps is None else str(told.steps))
    with file.open("a") as lines:
        lines.write("\t".join(words) + "\n")


def read(file: Path = FILE) -> list[Told]:
    """All lines of the file."""
    found = []
    for line in file.read_text().splitlines():
        case, launcher, ranks, first_s, right_s, steps = line.split("\t")
        first, right = (None if one == _NONE else float(one) for one in (first_s, right_s))
        found.append(Told(case, launcher, int(ranks), first, right, None if steps == _NONE else int(steps)))
    return found


def table(runs: Iterable[Told]) -> str:
    """A row for each case, launcher and number of ranks, as Markdown."""
    groups: dict[tuple[str, int, str], list[Told]] = {}
    for one in runs:
        groups.setdefault((one.launcher, one.ranks, one.case), []).append(one)
    lines = [
        "| case | ranks | right | fault to first incident, s | fault to right verdict, s | steps meanwhile |",
        "|---|---|---|---|---|---|",
    ]
    for (launcher, ranks, case), told in sorted(groups.items()):
        right = sum(one.right_s is not None for one in told)
        where = f"{ranks}" if launcher == "fork" else f"{ranks}, {launcher}"
        spans = [_span([one.first_s for one in told]), _span([one.right_s for one in told])]
        steps = _span([one.steps for one in told if one.right_s is not None], 0)
        lines.append(f"| {case} | {where} | {right} of {len(told)} | {spans[0]} | {spans[1]} | {steps} |")
    return "\n".join(lines) + "\n"


def _span(values: Iterable[float | None], digits: int = 1) -> str:
    """Least, median and greatest."""
    known = [one for one in values if one is not None]
    if not known:
        return ""
    three = (min(known), median(known), max(known)) if len(known) > 1 else known
    return " / ".join(f"{one:.{digits}f}" for one in three)


if __name__ == "__main__":
    sys.stdout.write(table(read()))
