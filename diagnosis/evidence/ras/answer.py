"""One answer of NCCL's RAS (bytes) as facts; two answers as what stands in both.

The answer is a line per command (`OK`, `SERVER PROTOCOL 2`, `ERROR: ...`), then the report: JSON where NCCL has it
(2.28.7 and newer), else text, which older releases give although JSON was asked for. Nothing in it is trusted: it comes
out of the job's own processes, and some releases tell nonsense (ranks by the billion). What contradicts itself is left
out and noted.

What RAS cannot tell, whatever it says: it counts launches and not completions, knows no sends and receives and no
launches of a captured graph, and shows a moment. A healthy job that races shows a mismatch too; so it is asked twice,
and only what both answers say is left (`standing`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from diagnosis.contracts.gathered import (
    COMMS_MAX,
    NOTES_MAX,
    TEXT_CHARS_MAX,
    RasComm,
    RasDifference,
    RasFacts,
    RasProcess,
    RasRank,
)
from diagnosis.evidence.ras.as_json import read_json
from diagnosis.evidence.ras.as_text import read_text

ANSWER_BYTES_MAX: Final = 8 << 20
"""Some 14,000 ranks as JSON; the text form of any job fits."""
_ACKNOWLEDGED: Final = (b"OK", b"SERVER PROTOCOL", b"ERROR:", b"BUSY")


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. `counts`: launches by communicator and rank, all operations together; JSON only. `refusals`: NCCL's
    words on commands that it does not know."""

    facts: RasFacts
    counts: Mapping[str, Mapping[int, int]]
    refusals: tuple[str, ...]


def read_answer(content: bytes) -> Answer:
    """The facts of what RAS sent on one connection. State "garbage" where that is no report of RAS."""
    refusals, report = _after_acknowledgements(content)
    counts: Mapping[str, Mapping[int, int]] = {}
    if report.lstrip().startswith(b"{"):
        facts, counts = read_json(report)
    else:
        facts = read_text(report.decode(errors="replace"))
    comms = sorted(facts.comms, key=_importance)
    if len(comms) > COMMS_MAX:
        facts = noted(facts, f"{len(comms) - COMMS_MAX} communicators are not listed here")
    return Answer(msgspec.structs.replace(facts, comms=comms[:COMMS_MAX]), counts, refusals)


def _after_acknowledgements(content: bytes) -> tuple[tuple[str, ...], bytes]:
    refusals: list[str] = []
    at = 0
    while at < len(content):
        end = content.find(b"\n", at)
        line = content[at : end if end >= 0 else len(content)].strip()
        if line and not line.startswith(_ACKNOWLEDGED):
            break
        if line.startswith((b"ERROR:", b"BUSY")) and len(refusals) < NOTES_MAX:
            refusals.append(line[:TEXT_CHARS_MAX].decode(errors="replace"))
        if end < 0:
            at = len(content)
            break
        at = end + 1
    return tuple(refusals), content[at:]


def _importance(comm: RasComm) -> tuple[bool, bool, int]:
    """Those that something is wrong with come first, then the large ones."""
    return (not comm.missing and not comm.missing_count, not comm.differs, -(comm.size or 0))


def noted(facts: RasFacts, *more: str) -> RasFacts:
    """The facts with more notes, as far as there is room."""
    return msgspec.structs.replace(facts, notes=[*facts.notes, *(note[:TEXT_CHARS_MAX] for note in more)][:NOTES_MAX])


def standing(first: Answer, second: Answer, apart_s: float) -> RasFacts:
    """What both answers say, in the words of the second; `moved` tells whose launches went on in between.

    A difference stands where the same members say the same in both. Who is missing in one only is not missing.
    """
    facts, before = second.facts, first.facts
    if facts.state != "ok" or before.state != "ok":
        return facts if before.state == "ok" else before
    known = {comm.hash: comm for comm in before.comms}
    comms = [
        _stands(comm, known.get(comm.hash), _moved(first.counts.get(comm.hash), second.counts.get(comm.hash)))
        for comm in facts.comms
    ]
    silent = {(process.host, process.pid) for process in before.processes}
    return msgspec.structs.replace(
        facts,
        answers=2,
        apart_s=round(apart_s, 1),
        comms=comms,
        processes=[process for process in facts.processes if (process.host, process.pid) in silent],
    )


def _stands(comm: RasComm, before: RasComm | None, moved: bool | None) -> RasComm:
    if before is None:
        return msgspec.structs.replace(comm, missing=[], missing_count=None, differs=[], alike=None, moved=moved)
    former = {rank.rank for rank in before.missing}
    both = comm.missing_count is not None and before.missing_count is not None
    return msgspec.structs.replace(
        comm,
        missing=[rank for rank in comm.missing if rank.rank in former],
        missing_count=min(comm.missing_count or 0, before.missing_count or 0) if both else None,
        differs=[one for one in comm.differs if _key(one) in {_key(other) for other in before.differs}],
        alike=comm.alike if comm.alike == before.alike else None,
        moved=moved,
    )


def _key(difference: RasDifference) -> tuple[object, ...]:
    values = [
        (value.value, value.ranks, tuple(sorted(rank.rank for rank in value.listed))) for value in difference.values
    ]
    return (difference.what, *values)


def _moved(before: Mapping[int, int] | None, after: Mapping[int, int] | None) -> bool | None:
    """Whether any member launched something in between; None where the counts are not told."""
    if not before or not after:
        return None
    return any(after[rank] != count for rank, count in before.items() if rank in after)


def shrunk(facts: RasFacts, listed_max: int, comms_max: int) -> RasFacts:
    """Less of the same, where it must fit: so many ranks by name in each list, so many communicators."""

    def short(comm: RasComm) -> RasComm:
        differs = [
            RasDifference(
                what=one.what,
                values=[msgspec.structs.replace(value, listed=_few(value.listed, listed_max)) for value in one.values],
            )
            for one in comm.differs
        ]
        return msgspec.structs.replace(comm, missing=comm.missing[:listed_max], differs=differs)

    return msgspec.structs.replace(
        facts, comms=[short(comm) for comm in facts.comms[:comms_max]], processes=facts.processes[:listed_max]
    )


def map_ranks(
    facts: RasFacts, place: Callable[[str, RasRank], RasRank], who: Callable[[RasProcess], int | None]
) -> RasFacts:
    """The facts with each rank that they name as `place(communicator, rank)`, and each process as `who` knows it."""
    comms = [
        msgspec.structs.replace(
            comm,
            missing=[place(comm.hash, rank) for rank in comm.missing],
            differs=[
                RasDifference(
                    what=one.what,
                    values=[
                        msgspec.structs.replace(value, listed=[place(comm.hash, rank) for rank in value.listed])
                        for value in one.values
                    ],
                )
                for one in comm.differs
            ],
        )
        for comm in facts.comms
    ]
    processes = [msgspec.structs.replace(one, world_rank=who(one)) for one in facts.processes]
    return msgspec.structs.replace(facts, comms=comms, processes=processes)


def _few(listed: list[RasRank], most: int) -> list[RasRank]:
    """A list that is cut would name some of those meant as if they were all: then nobody is named."""
    return listed if len(listed) <= most else []
