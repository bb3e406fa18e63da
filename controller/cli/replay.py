"""`tocsin replay`: incidents of the past judged anew, on what was kept of them, by the rules of this program.

The rules are this program's code and the `[detect]` values of the configuration where they are known. When an incident
opens is decided on the job's whole history, of which only the outcome is kept: the thresholds for that (`OPENING`) stay
what they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol, TypeVar
from urllib.parse import quote

import msgspec

from controller.cli import sides
from controller.cli.client import Refused, ask
from controller.cli.inputs import read_packed
from controller.cli.words import clean
from controller.store.base import Incident
from controller.store.readonly import StateCopy
from controller.web.words import moment
from diagnosis.contracts.errors import OperatorFault
from diagnosis.contracts.verdict import Verdict
from diagnosis.engine.thresholds import Thresholds
from diagnosis.engine.verdict import judge
from diagnosis.evidence.gather import gather, lead

T = TypeVar("T")
INCIDENTS_MAX: Final = 1000
"""As many as the controller lists at once."""
OPENING: Final = ("hang_floor_s", "hang_factor", "startup_floor_s", "slow_job_min")
UNSEEN_MAX: Final = 40


class Source(Protocol):
    """Where incidents and their inputs come from: a running controller, or a state file."""

    def incidents(self, limit: int) -> list[Incident]: ...

    def incident(self, number: str) -> Incident | None: ...

    def inputs(self, number: str) -> bytes | None: ...


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """One incident. `new` null: it was not judged, `note` says why. `changed`: names of `sides.MATTERS`."""

    incident: str
    job_id: int | None = None
    opened_at: float | None = None
    old: Verdict | None = None
    new: Verdict | None = None
    changed: list[str] = []
    note: str = ""


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `tocsin replay` ("tocsin.replay/1")."""

    incidents: list[Replayed]
    same: int
    changed: int
    not_judged: int
    schema: str = "tocsin.replay/1"

    @property
    def all_same(self) -> bool:
        """Whether every verdict stands: nothing changed, all that were named are known, and some could be judged."""
        known = all(one.old is not None for one in self.incidents)
        return self.changed == 0 and known and (self.same > 0 or not self.incidents)


class Controller:
    """Of a running controller. Its calls raise Unreachable, and Refused for other reasons than absence."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    def incidents(self, limit: int) -> list[Incident]:
        """Newest first."""
        return _decoded(ask(self._socket, "GET", f"/incidents?limit={limit}"), list[Incident])

    def incident(self, number: str) -> Incident | None:
        """None: not known."""
        answer = self._ask(f"/incidents/{quote(number, safe='')}")
        return None if answer is None else _decoded(answer, _Detail).incident

    def inputs(self, number: str) -> bytes | None:
        """None: not kept."""
        return self._ask(f"/incidents/{quote(number, safe='')}/bundle")

    def _ask(self, url: str) -> bytes | None:
        try:
            return ask(self._socket, "GET", url)
        except Refused as refusal:
            if refusal.status == 404:
                return None
            raise


class _Detail(msgspec.Struct):
    incident: Incident


def _decoded(answer: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(answer, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        text = f"the controller's answer cannot be read: {error}; are both of the same version?"
        raise OperatorFault(text) from error


@contextmanager
def opened(db: Path | None, socket: Path) -> Iterator[Source]:
    """A state file where one is named, else the controller. Raises OperatorFault where the file cannot be read."""
    if db is None:
        yield Controller(socket)
        return
    with StateCopy(db) as copy:
        yield copy


def chosen(source: Source, numbers: Sequence[str], since: float | None) -> Iterator[tuple[str, Incident | None]]:
    """The incidents that were named, or all that were opened after `since`, newest first; at most `INCIDENTS_MAX`."""
    if numbers:
        for number in dict.fromkeys(numbers):
            yield number, source.incident(number)
        return
    for incident in source.incidents(INCIDENTS_MAX):
        if since is None or incident.opened_at >= since:
            yield incident.id, incident


def replayed(
    source: Source, which: Iterable[tuple[str, Incident | None]], present: Thresholds | None
) -> Iterator[Replayed]:
    """Each of them judged anew. `present`: thresholds in force; None: those that were kept with the inputs."""
    for number, incident in which:
        if incident is None:
            yield Replayed(incident=number, note="no such incident")
            continue
        known = Replayed(incident=number, job_id=incident.job_id, opened_at=incident.opened_at, old=incident.verdict)
        packed = source.inputs(number)
        if packed is None:
            yield msgspec.structs.replace(known, note="its inputs are not kept, or no longer")
            continue
        new = judged_again(number, packed, present)
        if new is None:
            yield msgspec.structs.replace(known, note="its inputs cannot be read")
        else:
            yield msgspec.structs.replace(known, new=new, changed=sides.changed(incident.verdict, new))


def judged_again(number: str, packed: bytes, present: Thresholds | None) -> Verdict | None:
    """The verdict on a bundle as `.tar.zst`. None: there is nothing readable in it."""
    refused: list[str] = []
    evidence = gather(read_packed(f"{number}.tar.zst", packed, lambda name, why: refused.append(f"{name}: {why}")))
    if evidence.incident is None:
        return None
    limits = kept = Thresholds.told(evidence.incident.thresholds)
    if present is not None:
        limits = replace(present, **{name: getattr(kept, name) for name in OPENING})
    return lead([judge(evidence.incident, limits)], (*refused[:UNSEEN_MAX], *evidence.unseen))


def summed(done: Sequence[Replayed]) -> Replay:
    """All of them with their counts."""
    judged = [one for one in done if one.new is not None]
    changed = sum(bool(one.changed) for one in judged)
    return Replay(incidents=list(done), same=len(judged) - changed, changed=changed, not_judged=len(done) - len(judged))


def replay_lines(one: Replayed) -> Iterator[str]:
    """One incident for a terminal: a line if nothing changed, else both verdicts."""
    at = f"{moment(one.opened_at)}  job {one.job_id}" if one.opened_at is not None else ""
    head = f"{clean(one.incident)}  {at}".rstrip()
    if one.old is None or one.new is None:
        yield f"{head}  NOT JUDGED: {one.note}"
        return
    new = sides.shown(one.new)
    if not one.changed:
        what = " ".join(new[matter] for matter in ("anomaly", "class") if new[matter] != sides.NONE)
        yield f"{head}  same: {what}, {new['culprits']}"
        return
    yield f"{head}  CHANGED: {', '.join(one.changed)}"
    yield from (f"  {line}" for line in sides.table(("OLD", "NEW"), sides.shown(one.old), new, one.changed))


def sum_line(replay: Replay) -> str:
    """The counts for a terminal."""
    if not replay.incidents:
        return "no incidents"
    return f"{replay.same} same, {replay.changed} changed, {replay.not_judged} not judged"
