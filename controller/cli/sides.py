"""Two verdicts side by side: what each says about one matter, as values to compare and as words to show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec

from controller.cli.words import clean, columns
from controller.notify.message import who
from controller.web.words import percent
from diagnosis.contracts.verdict import Action, Culprit, Verdict

MATTERS: Final = ("anomaly", "class", "culprits", "causes", "confidence", "action")
SHOWN_MAX: Final = 6
NONE: Final = "none"


class Side(NamedTuple):
    """One matter of one verdict. `value` is compared, `words` are shown."""

    value: object
    words: str


def sides(verdict: Verdict) -> dict[str, Side]:
    """What a verdict says on each of `MATTERS`."""
    culprits = verdict.culprits
    return {
        "anomaly": Side(verdict.anomaly, verdict.anomaly),
        "class": Side(verdict.class_, verdict.class_ or NONE),
        "culprits": Side([_place(culprit) for culprit in culprits], listed([who(culprit) for culprit in culprits])),
        "causes": Side(
            [(culprit.cause, culprit.domain) for culprit in culprits],
            listed(list(dict.fromkeys(culprit.cause for culprit in culprits))),
        ),
        "confidence": Side(
            [round(culprit.confidence * 100) for culprit in culprits],
            listed(list(dict.fromkeys(percent(culprit.confidence) for culprit in culprits))),
        ),
        "action": Side(msgspec.structs.replace(verdict.action, collect=None), _action(verdict.action)),
    }


def changed(old: Verdict, new: Verdict) -> list[str]:
    """The matters on which two verdicts differ. Their sentences may differ all the same."""
    before, after = sides(old), sides(new)
    return [matter for matter in MATTERS if before[matter].value != after[matter].value]


def table(titles: tuple[str, str], left: dict[str, str], right: dict[str, str], marked: list[str]) -> Iterator[str]:
    """Lines of three columns: the matter, with a star where it is `marked`, and both sides."""
    rows = [(("* " if matter in marked else "  ") + matter, left[matter], right.get(matter, "")) for matter in left]
    yield from columns([("", *titles), *rows])


def shown(verdict: Verdict) -> dict[str, str]:
    """The words of a verdict on each matter."""
    return {matter: clean(side.words) for matter, side in sides(verdict).items()}


def listed(names: list[str]) -> str:
    """A few names and how many more there are."""
    more = f" and {len(names) - SHOWN_MAX} more" if len(names) > SHOWN_MAX else ""
    return ", ".join(names[:SHOWN_MAX]) + more or NONE


def _place(culprit: Culprit) -> tuple[object, ...]:
    return culprit.kind, culprit.rank, culprit.node, culprit.gpu, culprit.nic, culprit.link, culprit.switch


def _action(action: Action) -> str:
    parts = [f"{action.kind} {listed(action.nodes)}" if action.nodes else action.kind]
    if action.requeue and action.kind != "requeue":
        parts.append("requeue")
    if action.exclude:
        parts.append(f"without {listed(action.exclude)}")
    if action.flag:
        parts.append(f"flag {action.flag}")
    return ", ".join(parts)
