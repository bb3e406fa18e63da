"""How much of any input is read. Beyond a limit the rest is left out and said so; nothing fails because of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from diagnosis.contracts.incident import UNKNOWN
from diagnosis.evidence.notes import Notes

MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes and counts. The defaults hold a million ranks; a test sets smaller ones."""

    line_bytes_max: int = 8 * MIB
    lines_max: int = 1 << 23  # of one file
    skipped_max: int = 50_000  # lines of one file that are nothing; then the rest is nothing either
    document_bytes_max: int = 256 * MIB  # a file that is read as one: JSON document, pickle, parquet
    total_bytes_max: int = 4096 * MIB
    names_max: int = 1 << 22  # different communicators, nodes, operators, links: each
    name_chars_max: int = 256
    members_max: int = 1 << 24
    frames_max: int = 1 << 22
    rows_max: int = 1 << 23
    rows_per_frame_max: int = 4096
    observations_max: int = 1 << 22
    kernel_lines_max: int = 100_000
    kernel_line_chars_max: int = 4096
    groups_max: int = 1 << 20


DEFAULT: Final = Limits()


class Allowance:
    """The bytes that one reading may take from all its files together."""

    def __init__(self, bytes_max: int) -> None:
        self.left = bytes_max

    def meter(self, file: str, chunks: Iterable[bytes], notes: Notes) -> Iterator[bytes]:
        """The same chunks until the allowance is used up; that is noted once for the file."""
        for chunk in chunks:
            if len(chunk) > self.left:
                notes.add(file, "the rest is not read: the input is larger than the reader's limit")
                return
            self.left -= len(chunk)
            yield chunk


class Names:
    """Words as small numbers, in the order in which they came first. A word that is too long, or one too many, is
    unknown (-1)."""

    def __init__(self, limits: Limits) -> None:
        self._index: dict[str, int] = {}
        self._limits = limits

    def index(self, name: str | None) -> int:
        """The number of `name`."""
        if name is None:
            return UNKNOWN
        known = self._index.get(name)
        if known is not None:
            return known
        if len(self._index) >= self._limits.names_max or len(name) > self._limits.name_chars_max:
            return UNKNOWN
        self._index[name] = len(self._index)
        return self._index[name]

    def find(self, name: str | None) -> int:
        """The number of `name` if it is known already."""
        return UNKNOWN if name is None else self._index.get(name, UNKNOWN)

    def all(self) -> tuple[str, ...]:
        """All words by their number."""
        return tuple(self._index)

    def __len__(self) -> int:
        return len(self._index)
