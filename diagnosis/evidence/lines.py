"""Bytes in chunks as lines, or as one document, within a limit and without ever holding more than it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from diagnosis.evidence.limits import Limits
from diagnosis.evidence.notes import Notes


def numbered_lines(file: str, chunks: Iterable[bytes], limits: Limits, notes: Notes) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their number from 1. A line longer than the limit is noted and passed over: at
    most the limit and one chunk of it are held. It ends early where too many lines had to be skipped."""
    number = 1
    held: list[bytes] = []
    size = 0
    for chunk in chunks:
        start = 0
        while True:
            end = chunk.find(b"\n", start)
            piece = chunk[start:] if end < 0 else chunk[start:end]
            size += len(piece)
            if size <= limits.line_bytes_max:
                held.append(piece)
            else:
                held.clear()
            if end < 0:
                break
            if size > limits.line_bytes_max:
                notes.skip(file, "the line is longer than the reader's limit and skipped", number)
            elif line := b"".join(held).strip():
                yield number, line
            held.clear()
            size = 0
            number += 1
            start = end + 1
            if number > limits.lines_max or notes.skipped(file) > limits.skipped_max:
                notes.add(file, f"the rest from line {number} on is not read: too many lines, or too many faults")
                return
    if size > limits.line_bytes_max:
        notes.skip(file, "the line is longer than the reader's limit and skipped", number)
    elif line := b"".join(held).strip():
        yield number, line


def document(file: str, chunks: Iterable[bytes], limits: Limits, notes: Notes) -> bytes | None:
    """The whole file, or None (noted) where it is larger than a document may be."""
    held: list[bytes] = []
    size = 0
    for chunk in chunks:
        size += len(chunk)
        if size > limits.document_bytes_max:
            notes.add(file, "the file is larger than the reader's limit and left out")
            return None
        held.append(chunk)
    return b"".join(held)
