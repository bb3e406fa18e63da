"""`tocsin drill`: an exam whose answer is known. A simulated incident as a bundle, its truth, and the verdict on it.

The truth lies beside the bundle and not in it, so that no reader can take it for evidence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from controller.cli import sides
from controller.cli.diagnose import diagnose_paths
from controller.cli.words import clean, printable
from diagnosis.contracts.errors import OperatorFault
from diagnosis.contracts.verdict import Verdict
from diagnosis.drill import Drill, Limits, draw, files

BUNDLE: Final = "bundle"
TRUTH: Final = "truth.json"
LINKS_MAX: Final = 6
BLAMED_DOMAINS: Final = ("hardware", "network")


class Exam(msgspec.Struct, kw_only=True):
    """Answer of `tocsin drill` ("tocsin.drill/1"). The verdict and what follows from it are null if nobody judged.

    `same_culprits`: exactly the guilty are named, and no hardware where nobody is; of links, one that is right, or a
    switch at its end, among a few. `same_anomaly`: anomaly and class, too, are among those that are right.
    `false_drains`: nodes that the verdict would drain and must not.
    """

    kind: str
    seed: int
    bundle: str
    truth_file: str
    truth: dict[str, Any]
    verdict: Verdict | None = None
    same_culprits: bool | None = None
    same_anomaly: bool | None = None
    false_drains: list[str] | None = None
    schema: str = "tocsin.drill/1"

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong; so it is where nobody judged."""
        return self.verdict is None or bool(self.same_culprits and self.same_anomaly and not self.false_drains)


def examine(kind: str | None, seed: int, limits: Limits, out: Path | None, judged: bool) -> Exam:
    """Make a drill (None: of a kind drawn by weight), write it to `out` and, if wanted, judge what was written.

    Raises: OperatorFault (no such drill, or it cannot be written).
    """
    drill = draw(seed, limits) if kind is None else Drill(seed, kind, limits)
    folder = out or Path(f"drill-{drill.kind}-{seed}")
    _write(drill, folder)
    exam = Exam(
        kind=drill.kind,
        seed=seed,
        bundle=printable(folder / BUNDLE),
        truth_file=printable(folder / TRUTH),
        truth=drill.truth,
    )
    if judged:
        verdict = exam.verdict = diagnose_paths([folder / BUNDLE])
        exam.same_culprits = same_culprits(drill.truth, verdict)
        exam.same_anomaly = same_anomaly(drill.truth, verdict)
        exam.false_drains = sorted(set(verdict.action.nodes) & set(drill.truth["must_not_drain"]))
    return exam


def _write(drill: Drill, folder: Path) -> None:
    """Into a folder that does not exist yet, or is empty."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise OperatorFault(f"{folder} is not empty: nothing is overwritten, name another directory")
        (folder / BUNDLE).mkdir()
        for name, content in files(drill).items():
            (folder / BUNDLE / name).write_bytes(content)
        told = {"kind": drill.kind, "seed": drill.seed, **drill.truth}
        (folder / TRUTH).write_bytes(msgspec.json.format(msgspec.json.encode(told)) + b"\n")
    except (OSError, ValueError) as error:
        raise OperatorFault(f"{folder}: {getattr(error, 'strerror', None) or error}") from error


def same_culprits(truth: Mapping[str, Any], verdict: Verdict) -> bool:
    """See `Exam`."""
    named = verdict.culprits
    if truth["kind"] == "link":
        ends = {end for link in truth["links"] for end in (link, *link.split("-"))}
        places = {place for culprit in named for place in (culprit.link, culprit.switch) if place is not None}
        near = any(place in ends or set(truth["links"]) & set(place.split("-")) for place in places)
        return near and len(places) <= LINKS_MAX
    if truth["kind"] == "node" and truth["nodes"]:
        return {culprit.node for culprit in named} == set(truth["nodes"])
    if truth["ranks"]:
        return {culprit.rank for culprit in named} == set(truth["ranks"])
    return not any(culprit.kind != "job" and culprit.domain in BLAMED_DOMAINS for culprit in named)


def same_anomaly(truth: Mapping[str, Any], verdict: Verdict) -> bool:
    """See `Exam`."""
    if verdict.anomaly != truth["anomaly"] and verdict.anomaly not in truth["any_of"]:
        return False
    right = {truth["class"], *truth["any_of"]}
    return truth["class"] is None or verdict.anomaly in truth["any_of"] or verdict.class_ in right


def exam_lines(exam: Exam) -> Iterator[str]:
    """For a terminal."""
    yield f"drill {exam.kind}, seed {exam.seed}"
    yield f"bundle {clean(exam.bundle)}, truth {clean(exam.truth_file)}"
    if exam.verdict is None:
        return
    yield ""
    right, told = _truth_words(exam.truth), sides.shown(exam.verdict)
    yield from sides.table(("TRUTH", "VERDICT"), right, told, [])
    yield ""
    yield clean(exam.verdict.summary)
    yield f"same culprits: {'yes' if exam.same_culprits else 'no'}"
    if not exam.same_anomaly:
        yield "same anomaly and class: no"
    if exam.false_drains:
        yield clean(f"would drain {sides.listed(exam.false_drains)}, which must not be drained")


def _truth_words(truth: Mapping[str, Any]) -> dict[str, str]:
    guilty = [f"rank {rank}" for rank in truth["ranks"]] if truth["kind"] == "rank" else []
    guilty = guilty or [*truth["links"]] or ([*truth["nodes"]] if truth["kind"] == "node" else [])
    also = f" (or {', '.join(truth['any_of'])})" if truth["any_of"] else ""
    return {
        "anomaly": f"{truth['anomaly']}{also}",
        "class": truth["class"] or sides.NONE,
        "culprits": sides.listed(guilty),
        "causes": " or ".join(truth["causes"]) or sides.NONE,
        "action": truth["action"],
    }
