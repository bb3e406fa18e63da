"""One PyTorch flight-recorder dump (version 2.x, from JSON or a pickle) as typed entries; nothing in it is trusted.

A dump does not say whose it is: its file's name does. Counters are numbers in a pickle and strings in JSON. An
operation has ended if its state is "completed" (NCCL) or it is `retired` (gloo, whose state never leaves "scheduled";
an operation that ended by failing is retired too).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Final

from diagnosis.contracts.incident import WORLD_MAX
from diagnosis.evidence.notes import Notes
from diagnosis.evidence.signatures import Signature, signature_text
from diagnosis.evidence.values import integer

ENTRIES_MAX: Final = 100_000
GROUPS_MAX: Final = 4096
TENSORS_MAX: Final = 64
DIMENSIONS_MAX: Final = 16
WORD_CHARS_MAX: Final = 128
KEYS: Final = ("pg_config", "pg_status", "entries")
"""What a dump has at its top; one with none of them is no dump."""

_UNEQUAL_SIZES: Final = ("all_to_all", "alltoall", "gather", "scatter")
_PAIR: Final = re.compile(r"(?P<what>send|recv) (?P<me>\d{1,7})(?:->|<-)(?P<other>\d{1,7})")
_RANK_IN_NAME: Final = re.compile(r"rank[^0-9]{0,2}(\d{1,7})", re.IGNORECASE)
_LAST_NUMBER: Final = re.compile(r"(\d{1,7})\D*$")
_RANK_DIGITS: Final = re.compile(r"\d{1,7}")
_ON_HOST: Final = ("gloo:", "mpi:")
_NS_MAX: Final = 1 << 63
Raw = Mapping[object, object]


@dataclass(frozen=True, slots=True)
class Entry:
    """One operation. `number`: its place among the collectives of its group; `pair`: (source, destination) within the
    group for a send or receive; `called_ns`: when it was called by the node's clock, 0: not told; `on_host`: of a
    library that works on the CPU."""

    group: str
    number: int
    ended: bool
    signature: str | None
    pair: tuple[int, int] | None
    called_ns: int
    on_host: bool


@dataclass(slots=True)
class Dump:
    """One rank's dump.

    `entries`: those that say where the rank stands: of NCCL, what has not ended, and the newest of each group that has;
    of a library on the host, all collectives. `ended`: how many collectives of a group have ended; `first_ns`,
    `last_ns`: when the first and the last operation were called, 0 not told.

    `members`: ranks by name of the group, `kind`: what sort of group a name is; `status`: number of the newest
    operation that has ended, by the rank's own number of a group; `own_number`: that number by the group's name;
    `whole`: nothing was dropped before the first entry; `hidden`: operations that were numbered but not recorded
    (gloo's sends and receives).
    """

    rank: int
    is_json: bool
    entries: list[Entry] = field(default_factory=list)
    ended: Counter[str] = field(default_factory=Counter)
    first_ns: int = 0
    last_ns: int = 0
    members: dict[str, Sequence[int]] = field(default_factory=dict)
    kind: dict[str, str] = field(default_factory=dict)
    status: dict[int, int] = field(default_factory=dict)
    own_number: dict[str, int] = field(default_factory=dict)
    whole: bool = False
    hidden: Counter[str] = field(default_factory=Counter)

    @property
    def stands_at(self) -> Entry | None:
        """The earliest operation that has not ended."""
        return next((entry for entry in self.entries if not entry.ended), None)


def rank_of_name(name: str) -> int | None:
    """The rank that a file's name tells: behind the word "rank", else its last number."""
    base = name.rsplit("/", 1)[-1][-WORD_CHARS_MAX:]
    found = _RANK_IN_NAME.search(base) or _LAST_NUMBER.search(base)
    return int(found[1]) if found and int(found[1]) < WORLD_MAX else None


def read_dump(file: str, raw: object, is_json: bool, notes: Notes) -> Dump | None:
    """One decoded dump; None (noted) where it is none or does not say whose it is."""
    rank = rank_of_name(file)
    if not isinstance(raw, dict) or not any(key in raw for key in KEYS):
        notes.add(file, "plain data, but not a flight-recorder dump")
        return None
    if rank is None:
        notes.add(file, "a flight-recorder dump whose file name has no rank: whose it is cannot be known")
        return None
    dump = Dump(rank, is_json)
    for name, group in _items(raw.get("pg_config")):
        if isinstance(name, str) and isinstance(group, dict):
            dump.members[name[:WORD_CHARS_MAX]] = _ranks(group.get("ranks"))
            dump.kind[name[:WORD_CHARS_MAX]] = _word(group.get("desc"))
    for number, status in _items(raw.get("pg_status")):
        own = _whole(number)
        ended = _whole(status.get("last_completed_collective")) if isinstance(status, dict) else None
        if own is not None and ended is not None:
            dump.status[own] = ended
    entries = raw.get("entries")
    entries = entries if isinstance(entries, list | tuple) else ()
    _Walk(dump, file, notes).over(entries[:ENTRIES_MAX])
    notes.add(file, "more operations than the reader's limit", count=max(0, len(entries) - ENTRIES_MAX))
    first = entries[0] if entries else None
    dump.hidden = _hidden(dump, entries)
    dump.whole = not dump.status if first is None else isinstance(first, dict) and _whole(first.get("record_id")) == 0
    return dump


class _Walk:
    """Over the raw entries of a dump, in order. Most of them have ended and only the last of each group still says
    something; so only that one is kept, and of what has not ended the first of each group."""

    def __init__(self, dump: Dump, file: str, notes: Notes) -> None:
        self._dump = dump
        self._file = file
        self._notes = notes
        self._last_ended: dict[str, Raw] = {}
        self._blocked: set[tuple[str, bool]] = set()

    def over(self, entries: Sequence[object]) -> None:
        for raw in entries:
            group = raw.get("process_group") if isinstance(raw, dict) else None
            if not isinstance(raw, dict) or not isinstance(group, list | tuple) or len(group) < 1:
                self._notes.add(self._file, "an entry without a process group is skipped")
                continue
            name = _word(group[0])
            own = raw.get("pg_id")
            if own is not None and name not in self._dump.own_number and (number := _whole(own)) is not None:
                self._dump.own_number[name] = number
                self._dump.kind.setdefault(name, _word(group[1]) if len(group) > 1 else "")
            self._take(name, raw)
        for name, raw in self._last_ended.items():
            self._keep(name, raw)

    def _take(self, name: str, raw: Raw) -> None:
        operation, dump = _word(raw.get("profiling_name")), self._dump
        called_ns = raw.get("time_created_ns")
        if type(called_ns) is int and 0 < called_ns < _NS_MAX:
            dump.first_ns = min(dump.first_ns or called_ns, called_ns)
            dump.last_ns = max(dump.last_ns, called_ns)
        is_pair = "->" in operation or "<-" in operation
        if not _has_ended(raw):
            if (name, is_pair) in self._blocked:
                return
            self._blocked.add((name, is_pair))
            if (before := self._last_ended.pop(name, None)) is not None:
                self._keep(name, before)
        elif is_pair:
            return
        else:
            dump.ended[name] += 1
            if not operation.startswith(_ON_HOST):
                self._last_ended[name] = raw
                return
        self._keep(name, raw)

    def _keep(self, name: str, raw: Raw) -> None:
        number, operation = _whole(raw.get("collective_seq_id")), _word(raw.get("profiling_name"))
        if number is None or not operation:
            self._notes.add(self._file, "an entry without operation or number is skipped")
            return
        op = operation.rpartition(":")[2]
        pair = _PAIR.search(op)
        ends = (int(pair["me"]), int(pair["other"])) if pair else None
        receives = pair is not None and pair["what"] == "recv"
        self._dump.entries.append(
            Entry(
                group=name,
                number=number,
                ended=_has_ended(raw),
                signature=None if ends else _signature(op, raw),
                pair=ends[::-1] if ends and receives else ends,
                called_ns=max(_whole(raw.get("time_created_ns")) or 0, 0),
                on_host=operation.startswith(_ON_HOST),
            )
        )


def _has_ended(raw: Raw) -> bool:
    return raw.get("state") == "completed" or raw.get("retired") is True


def _hidden(dump: Dump, entries: Sequence[object]) -> Counter[str]:
    """Operations of a library on the host that have a number between two entries of a group, but no entry."""
    before: dict[str, int] = {}
    hidden: Counter[str] = Counter()
    for raw in entries[:ENTRIES_MAX] if any(entry.on_host for entry in dump.entries) else ():
        group, number = (raw.get("process_group"), _whole(raw.get("op_id"))) if isinstance(raw, dict) else (None, None)
        if number is not None and isinstance(group, list | tuple) and group:
            name = _word(group[0])
            hidden[name] += max(0, number - before.get(name, number) - 1)
            before[name] = number
    return +hidden


def _signature(op: str, raw: Raw) -> str | None:
    """Operation, type and elements of the input. Where members may rightly differ in size, the size is not told."""
    plain = op.lstrip("_")
    sizes, types = raw.get("input_sizes"), raw.get("input_dtypes")
    count = None
    if not plain.startswith(_UNEQUAL_SIZES) and isinstance(sizes, list | tuple):
        count = sum(_elements(size) for size in sizes[:TENSORS_MAX])
    first = types[0] if isinstance(types, list | tuple) and types else None
    return signature_text(Signature(plain, _word(first) or None, count))


def _elements(size: object) -> int:
    product = 1
    for length in size[:DIMENSIONS_MAX] if isinstance(size, list | tuple) else ():
        product *= integer(length) or 0
    return product


def _ranks(value: object) -> Sequence[int]:
    """From "[0, 1]" or a list; those that are possible, each once."""
    if isinstance(value, str):
        return _ranks_of_text(value)
    whole = [integer(one) for one in value] if isinstance(value, list | tuple) else []
    return tuple(dict.fromkeys(rank for rank in whole if rank is not None and 0 <= rank < WORLD_MAX))


@lru_cache(maxsize=64)  # every dump tells the same groups
def _ranks_of_text(text: str) -> Sequence[int]:
    ranks = (int(one[0]) for one in islice(_RANK_DIGITS.finditer(text), WORLD_MAX))
    return tuple(dict.fromkeys(rank for rank in ranks if rank < WORLD_MAX))


def _whole(value: object) -> int | None:
    """A whole number, also where JSON has it as a string."""
    if isinstance(value, str) and len(value) < 20 and value.isascii() and value.removeprefix("-").isdecimal():
        return integer(int(value))
    return integer(value)


def _word(value: object) -> str:
    return value[:WORD_CHARS_MAX] if isinstance(value, str) else ""


def _items(value: object) -> Iterator[tuple[object, object]]:
    return islice(value.items(), GROUPS_MAX) if isinstance(value, dict) else iter(())
