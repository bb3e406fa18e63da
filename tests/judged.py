"""A drill read and judged as a user's bundle would be: as bytes of files, read again, judged, graded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from diagnosis.contracts.incident import Incident
from diagnosis.contracts.verdict import Verdict
from diagnosis.drill import Drill, files
from diagnosis.engine.thresholds import Thresholds
from diagnosis.engine.verdict import judge
from diagnosis.evidence.bundle.reader import read_bundle
from tests.grading import Grade, grade


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """A drill with what was read of it, the verdict and its grade."""

    drill: Drill
    incident: Incident
    verdict: Verdict
    grade: Grade


def read(contents: Mapping[str, bytes]) -> Incident:
    """The incident of a bundle's files by name."""
    return read_bundle((name, [content]) for name, content in contents.items())


def verdict_on(contents: Mapping[str, bytes], limits: Thresholds | None = None) -> Verdict:
    """The verdict on a bundle's files by name."""
    return judge(read(contents), limits or Thresholds())


def judge_drill(drill: Drill) -> Judged:
    """The drill through reader, engine and grading."""
    incident = read(files(drill))
    verdict = judge(incident)
    return Judged(drill, incident, verdict, grade(drill.truth, verdict))
