"""What could not be read, for people: a bounded list of lines such as `frames.jsonl:12: the line is not JSON`.

A hostile or broken file may hold a million faults. The same fault of the same file is shown a few times with its line,
then counted; and there are only so many different faults.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

SHOWN_OF_A_KIND_MAX: Final = 3
KINDS_MAX: Final = 100
NAME_CHARS_MAX: Final = 200


class Notes:
    """Collects notes; `lines()` gives them in the order in which each kind came first."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str], list[int]] = {}  # lines that are shown
        self._counts: dict[tuple[str, str], int] = {}
        self._others = 0
        self._quoted: tuple[str, ...] = ()
        self._skipped: Counter[str] = Counter()

    def quote(self, lines: tuple[str, ...]) -> None:
        """What an input itself says that it lacks; it comes first and as it is. The caller bounds it."""
        self._quoted += lines

    def skip(self, file: str, text: str, line: int) -> None:
        """A fault for which a whole line is left out."""
        self._skipped[file] += 1
        self.add(file, text, line)

    def skipped(self, file: str) -> int:
        """How many lines of the file are left out."""
        return self._skipped[file]

    def add(self, file: str, text: str, line: int = 0, count: int = 1) -> None:
        """One fault of `file`; `line` counts from 1, 0: no line. `count`: how often, where it is known at once."""
        if count <= 0:
            return
        kind = (file[:NAME_CHARS_MAX], text)
        if kind not in self._counts:
            if len(self._counts) >= KINDS_MAX:
                self._others += count
                return
            self._counts[kind] = 0
            self._kinds[kind] = []
        self._counts[kind] += count
        if line and len(self._kinds[kind]) < SHOWN_OF_A_KIND_MAX:
            self._kinds[kind].append(line)

    def lines(self) -> tuple[str, ...]:
        """At most `KINDS_MAX * (SHOWN_OF_A_KIND_MAX + 1) + 1` lines besides those that are quoted."""
        out = list(self._quoted)
        for (file, text), count in self._counts.items():
            shown = self._kinds[file, text]
            if not shown:
                out.append(f"{file}: {text}" + (f" ({count} times)" if count > 1 else ""))
                continue
            out.extend(f"{file}:{line}: {text}" for line in shown)
            if count > len(shown):
                out.append(f"{file}: {text}, {count - len(shown)} more")
        if self._others:
            out.append(f"{self._others} other faults are not listed")
        return tuple(out)
