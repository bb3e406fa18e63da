"""NCCL's RAS as a witness of a hang: what it says for or against those whom the frames name. Evidence, never a verdict.

RAS knows who has launched how many collectives, and who does not answer. It prints the smaller group, which may be the
one that is ahead, so who is behind is worked out here: whoever has launched less than the most. It counts launches and
not completions: that all are alike speaks against "never entered" and for "stopped inside". That launches went on
between its two answers speaks against any hang. It sees no sends and receives and nothing of captured graphs, so it is
silent where it has no counts. It answers out of the job's own processes: a drain needs another witness.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np

from diagnosis.contracts.gathered import NOBODY_LISTENS, RasComm, RasDifference, RasFacts, RasValue
from diagnosis.contracts.incident import Incident
from diagnosis.contracts.verdict import EvidenceItem, Verdict
from diagnosis.engine import words

KIND: Final = "ras"
WITNESS: Final = "ras"
ITEMS_MAX: Final = 8


@dataclass(slots=True)
class _Said:
    """Ranks of the job by what RAS says of them, each with the words for it. `behind_unnamed`: somebody is behind whom
    RAS does not list."""

    silent: dict[int, str] = field(default_factory=dict)
    behind: dict[int, str] = field(default_factory=dict)
    ahead: dict[int, str] = field(default_factory=dict)
    behind_unnamed: bool = False


def bear_witness(incident: Incident, verdict: Verdict) -> Verdict:
    """The verdict with what RAS says of it. Only of a hang, and only what two answers agree on counts."""
    facts = incident.ras
    if facts is None or verdict.anomaly != "hang":
        return verdict
    if facts.state == "absent" and facts.notes in ([], [NOBODY_LISTENS]):
        return verdict  # a job over gloo has none
    if facts.state != "ok":
        why = f": {'; '.join(facts.notes[:ITEMS_MAX])}" if facts.notes else ""
        return msgspec.structs.replace(verdict, unseen=[*verdict.unseen, f"NCCL's RAS is {facts.state}{why}"])
    unseen = [*verdict.unseen, *(f"NCCL's RAS: {note}" for note in facts.notes[:ITEMS_MAX])]
    if facts.answers < 2:
        return msgspec.structs.replace(verdict, unseen=[*unseen, "NCCL's RAS was asked once only: it says nothing yet"])
    items = _items(incident, verdict, facts)
    return msgspec.structs.replace(verdict, evidence=[*verdict.evidence, *items[:ITEMS_MAX]], unseen=unseen)


def _items(incident: Incident, verdict: Verdict, facts: RasFacts) -> list[EvidenceItem]:
    said = _said(facts)
    moving = sum(comm.moved is True for comm in facts.comms)
    items = []
    if moving:
        text = f"launches went on in {_communicators(moving)} between two answers of NCCL's RAS"
        items.append(_item(text, against=True))
    named = sorted({culprit.rank for culprit in verdict.culprits if culprit.rank is not None})
    for rank in named:
        item = _about(rank, incident, verdict, facts, said)
        if item is not None:
            items.append(item)
    others = sorted((said.silent.keys() | said.behind.keys()) - set(named))
    if others:
        items.append(_about_others(others, said, bool(named)))
    if not named and not others and not moving and _all_alike(facts):
        items.append(_item("all ranks have launched as many operations by NCCL's RAS, and all answer it"))
    return items


def _item(text: str, against: bool = False) -> EvidenceItem:
    return EvidenceItem(kind=KIND, text=text, witness=WITNESS, against=against)


def _about(rank: int, incident: Incident, verdict: Verdict, facts: RasFacts, said: _Said) -> EvidenceItem | None:
    """For or against one who is named; None where RAS tells nothing of it."""
    if rank in said.silent:
        return _item(f"rank {rank} {said.silent[rank]}")
    if rank in said.behind:
        return _item(f"rank {rank} {said.behind[rank]}")
    if rank in said.ahead and (said.behind or said.behind_unnamed):
        return _item(f"rank {rank} {said.ahead[rank]}", against=True)
    if _alike_everywhere(rank, incident, facts):
        text = f"rank {rank} has launched as many operations as all the others by NCCL's RAS, and answers it"
        return _item(text, against=verdict.class_ != "H3")
    return None


def _about_others(others: list[int], said: _Said, beside: bool) -> EvidenceItem:
    """Those whom RAS names and the verdict does not. They may be victims of another round: no word against anybody."""
    first = others[0]
    how = said.silent.get(first) or said.behind[first]
    more = f"; {words.ranks(others[1:])} too are silent or behind" if len(others) > 1 else ""
    return _item(f"{'besides, ' if beside else ''}rank {first} {how}{more}")


def _said(facts: RasFacts) -> _Said:
    said = _Said()
    apart = f"{facts.apart_s:.0f} s apart" if facts.apart_s is not None else "twice"
    for process in facts.processes:
        if process.world_rank is not None:
            how = "is considered dead" if process.dead else "gives no answer"
            said.silent.setdefault(process.world_rank, f"{how} by NCCL's RAS, asked {apart}")
    for comm in facts.comms:
        for rank in comm.missing:
            if rank.world_rank is not None:
                said.silent.setdefault(
                    rank.world_rank, f"is missing in {comm.hash} by NCCL's RAS ({comm.heard} of {comm.size} answer)"
                )
        for difference in comm.differs:
            if difference.what != "status":
                _compare(comm, difference, said)
    return said


def _compare(comm: RasComm, difference: RasDifference, said: _Said) -> None:
    """Who has launched less than the most, and who the most; told for those who are listed."""
    counted = [(value.value, value) for value in difference.values if isinstance(value.value, int)]
    if len(counted) < 2:
        return
    most = max(count for count, _ in counted)
    at_most = sum(value.ranks for count, value in counted if count == most)
    for count, value in counted:
        if count < most:
            text = f"has launched {count} {difference.what}, {_members(at_most)} of {comm.hash} {most} by NCCL's RAS"
            said.behind_unnamed |= not _list(value, said.behind, text)
        else:
            text = f"is ahead in {difference.what} ({most} launched in {comm.hash}) by NCCL's RAS"
            _list(value, said.ahead, text)


def _list(value: RasValue, where: dict[int, str], text: str) -> bool:
    """Whether all who say so are known."""
    known = [rank.world_rank for rank in value.listed if rank.world_rank is not None]
    for rank in known:
        where.setdefault(rank, text)
    return len(known) == value.ranks


def _members(count: int) -> str:
    return "1 member" if count == 1 else f"{count} members"


def _communicators(count: int) -> str:
    return "1 communicator" if count == 1 else f"{count} communicators"


def _is_alike(comm: RasComm) -> bool:
    return comm.alike is True and comm.missing_count == 0 and comm.moved is False and bool(comm.launched)


def _all_alike(facts: RasFacts) -> bool:
    return bool(facts.comms) and facts.comms_told == len(facts.comms) and all(_is_alike(comm) for comm in facts.comms)


def _alike_everywhere(rank: int, incident: Incident, facts: RasFacts) -> bool:
    """Whether RAS tells that all members of all communicators of a rank are there and have launched the same."""
    comms = incident.communicators
    of_member = np.repeat(np.arange(len(comms.ids)), np.diff(comms.start))
    mine = {comms.ids[at] for at in np.unique(of_member[comms.member == rank])}
    told = {comm.hash: comm for comm in facts.comms}
    return bool(mine) and all(name in told and _is_alike(told[name]) for name in mine)
