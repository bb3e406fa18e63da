"""Grades one verdict against the truth of a drill or of a labelled bundle (the form is told in `docs/drill.md`).

`located`: right anomaly, class and exactly the guilty; `cause`: one of the right causes is named; `false_drain`: nodes
that the verdict would drain and should not. Abstaining ("not enough") is a miss of `located`, never a false drain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diagnosis.contracts.verdict import Verdict

BLAMED_KINDS = ("rank", "node", "nic", "gpu")
LINKS_MAX = 6


@dataclass(frozen=True, slots=True)
class Grade:
    """See the module. `why`: what is not located, in words; `abstained`: nobody was named where somebody is guilty."""

    why: tuple[str, ...]
    class_ok: bool
    cause: bool
    false_drain: tuple[str, ...]
    abstained: bool
    confidence: float | None

    @property
    def located(self) -> bool:
        """Everything but the cause is right."""
        return not self.why


def grade(truth: Mapping[str, Any], verdict: Verdict) -> Grade:
    """The grade of a verdict."""
    why = []
    others = truth["any_of"]
    if verdict.anomaly != truth["anomaly"] and verdict.anomaly not in others:
        why.append(f"anomaly {verdict.anomaly} and not {truth['anomaly']}")
    class_ok = _class_ok(truth, verdict)
    if not class_ok:
        why.append(f"class {verdict.class_} and not {truth['class']}")
    why += _misplaced(truth, verdict)
    drains = set(verdict.action.nodes) if verdict.action.kind == "drain" else set()
    false = (drains & set(truth["must_not_drain"])) | (drains - set(truth["nodes"]))
    guilty = bool(truth["ranks"] or truth["nodes"] or truth["links"])
    return Grade(
        why=tuple(why),
        class_ok=class_ok,
        cause=_cause_ok(truth, verdict),
        false_drain=tuple(sorted(false)),
        abstained=guilty and not verdict.culprits,
        confidence=max((culprit.confidence for culprit in verdict.culprits), default=None),
    )


def _class_ok(truth: Mapping[str, Any], verdict: Verdict) -> bool:
    if truth["class"] is not None:
        return bool(verdict.class_ == truth["class"] or verdict.class_ in truth["any_of"])
    classes = [word for word in truth["any_of"] if word[:1] in "HS" and word[1:].isdigit()]
    return not classes or verdict.class_ in classes


def _misplaced(truth: Mapping[str, Any], verdict: Verdict) -> list[str]:
    ranks = {c.rank for c in verdict.culprits if c.rank is not None and c.kind in ("rank", "nic", "gpu")}
    nodes = {c.node for c in verdict.culprits if c.node is not None}
    links = {name for c in verdict.culprits for name in (c.link, c.switch) if name is not None}
    if truth["kind"] == "rank" and truth["ranks"]:
        wrong = f"ranks {sorted(ranks)[:6]} and not {sorted(truth['ranks'])[:6]}"
        return [] if ranks == set(truth["ranks"]) else [wrong]
    if truth["kind"] == "node" and truth["nodes"]:
        return [] if nodes == set(truth["nodes"]) else [f"nodes {sorted(nodes)[:4]} and not {truth['nodes']}"]
    if truth["kind"] == "link":
        near = any(_near(want, got) for want in truth["links"] for got in links)
        return [] if near and len(links) <= LINKS_MAX else [f"links {sorted(links)[:4]} and not {truth['links'][:4]}"]
    blamed = [c for c in verdict.culprits if c.kind in BLAMED_KINDS and c.domain in ("hardware", "network")]
    return [f"{blamed[0].kind} {blamed[0].rank} of {blamed[0].node} blamed"] if blamed else []


def _near(want: str, got: str) -> bool:
    """A link and a switch at its end count as the same place."""
    return want == got or got in want.split("-") or want in got.split("-")


def _cause_ok(truth: Mapping[str, Any], verdict: Verdict) -> bool:
    named = {culprit.cause for culprit in verdict.culprits}
    if not truth["causes"] or named & set(truth["causes"]):
        return True
    return truth["anomaly"] == "none" and not named
