"""Every fault of a TOML file at once, each with its file, line and key.

`tomllib` gives values without positions and pydantic gives faults by key path. `key_lines` joins them: a small scanner
walks the text once more and notes on which line each key path begins. It runs only on text that `tomllib` has already
accepted, so it may take correct syntax for granted.

Values are never repeated in a fault unless they are numbers or booleans: a misspelt key may hold a secret.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from diagnosis.contracts.errors import OperatorFault

FILE_BYTES_MAX: Final = 1 << 20
KeyPath = tuple[str | int, ...]
M = TypeVar("M", bound=BaseModel)
_SYNTAX_LINE: Final = re.compile(r"\s*\(at line (\d+), column \d+\)$")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of one file. `line` None: it belongs to no line; `key` "": it belongs to no key."""

    path: str
    line: int | None
    key: str
    text: str

    def __str__(self) -> str:
        place = self.path if self.line is None else f"{self.path}:{self.line}"
        return f"{place}: {self.key}: {self.text}" if self.key else f"{place}: {self.text}"


class ConfigFault(OperatorFault):
    """A file with at least one fault; `faults` in the order of their lines, the text one fault a line."""

    def __init__(self, faults: list[Fault]) -> None:
        super().__init__("\n".join(str(fault) for fault in faults), reason="configuration")
        self.faults = faults


def load_model(path: Path, model: type[M], only: Collection[str] | None = None) -> M:
    """The file's content as `model`; with `only`, as if nothing but these top-level keys stood in it.

    Raises ConfigFault with all faults of what is looked at.
    """
    text = _read(path)
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigFault([_syntax_fault(path, text, error)]) from error
    except RecursionError as error:
        raise ConfigFault([Fault(str(path), None, "", "nested too deeply")]) from error
    if only is not None:
        values = {key: value for key, value in values.items() if key in only}
    try:
        return model.model_validate(values)
    except ValidationError as error:
        lines = key_lines(text)
        faults = [_fault(path, detail, lines, model) for detail in error.errors(include_url=False)]
        raise ConfigFault(sorted(faults, key=lambda fault: (fault.line or 0, fault.key))) from error


def top_level_keys(path: Path) -> set[str]:
    """The names at the top of a TOML file, empty where it cannot be read as one."""
    try:
        return set(tomllib.loads(_read(path)))
    except (ConfigFault, tomllib.TOMLDecodeError, RecursionError):
        return set()


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigFault([Fault(str(path), None, "", f"cannot be read: {error.strerror}")]) from error
    if len(data) > FILE_BYTES_MAX:
        raise ConfigFault([Fault(str(path), None, "", f"longer than {FILE_BYTES_MAX} bytes")])
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigFault([Fault(str(path), line, "", "not UTF-8")]) from error


def _syntax_fault(path: Path, text: str, error: tomllib.TOMLDecodeError) -> Fault:
    """tomllib tells the line only inside its text, or says "at end of document"."""
    message = str(error)
    found = _SYNTAX_LINE.search(message)
    if found is None:
        return Fault(str(path), text.rstrip("\n").count("\n") + 1, "", f"not TOML: {message}")
    return Fault(str(path), int(found[1]), "", f"not TOML: {message[: found.start()]}")


def _fault(path: Path, detail: ErrorDetails, lines: dict[KeyPath, int], model: type[BaseModel]) -> Fault:
    location: KeyPath = tuple(detail["loc"])
    known = next(location[:end] for end in range(len(location), -1, -1) if location[:end] in lines or end == 0)
    return Fault(str(path), lines.get(known), _dotted(location), _words(detail, location, model))


def _words(detail: ErrorDetails, location: KeyPath, model: type[BaseModel]) -> str:
    if detail["type"] == "missing":
        return "missing"
    if detail["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(location[-1]), _names_at(model, location[:-1]), n=1)
        return f"unknown key, did you mean {near[0]}?" if near else "unknown key"
    message = detail["msg"].removeprefix("Value error, ").replace("Input should", "should")
    value = detail.get("input")
    return f"{message}, is {str(value).lower()}" if isinstance(value, bool | int | float) else message


def _names_at(model: type[BaseModel], location: KeyPath) -> list[str]:
    """The keys that may stand at `location`; nothing where the way there is not plain sections and lists."""
    place: Any = model
    for step in location:
        if isinstance(step, int):
            continue
        field = place.model_fields.get(step)
        options = [] if field is None else [field.annotation, *getattr(field.annotation, "__args__", ())]
        place = next((item for item in options if isinstance(item, type) and issubclass(item, BaseModel)), None)
        if place is None:
            return []
    return list(place.model_fields)


def _dotted(location: KeyPath) -> str:
    text = ""
    for step in location:
        text += f"[{step}]" if isinstance(step, int) else f".{step}"
    return text.removeprefix(".")


def key_lines(text: str) -> dict[KeyPath, int]:
    """The line (from 1) where each key path of a correct TOML text begins. Items of arrays have their index."""
    return _Scanner(text).lines


class _Scanner:
    """One pass over correct TOML: tables, arrays of tables, dotted and quoted keys, nested values."""

    _BARE: Final = re.compile(r"[A-Za-z0-9_-]+")
    _SCALAR: Final = re.compile(r"[^,\]}\n#]+")
    _BLANK: Final = re.compile(r"[ \t\r]*")
    _VOID: Final = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")

    def __init__(self, text: str) -> None:
        self.lines: dict[KeyPath, int] = {}
        self._text = text
        self._at = 0
        self._counts: dict[KeyPath, int] = {}  # how often the array of tables has been opened so far
        self._document()

    def _document(self) -> None:
        table: KeyPath = ()
        self._skip(self._VOID)
        while self._at < len(self._text):
            if self._text.startswith("[", self._at):
                table = self._header()
            else:
                self._pair(table)
            self._skip(self._VOID)

    def _header(self) -> KeyPath:
        line = self._line()
        is_array = self._text.startswith("[[", self._at)
        self._at += 2 if is_array else 1
        names = self._key()
        self._at += 2 if is_array else 1
        path: KeyPath = (*self._resolve(names[:-1]), names[-1])
        if is_array:
            index = self._counts.get(path, 0)
            self._counts[path] = index + 1
            self.lines.setdefault(path, line)
            path += (index,)
        self.lines.setdefault(path, line)
        return path

    def _resolve(self, names: tuple[str, ...]) -> KeyPath:
        """Names of a header as a path: where an array of tables is passed, its newest item is meant."""
        path: KeyPath = ()
        for name in names:
            path += (name,)
            if path in self._counts:
                path += (self._counts[path] - 1,)
        return path

    def _pair(self, table: KeyPath) -> None:
        line = self._line()
        names = self._key()
        self._at += 1  # "="
        for end in range(1, len(names) + 1):
            self.lines.setdefault(table + names[:end], line)
        self._value(table + names)

    def _key(self) -> tuple[str, ...]:
        names: list[str] = []
        while True:
            self._skip(self._BLANK)
            bare = self._BARE.match(self._text, self._at)
            if bare:
                names.append(bare[0])
                self._at = bare.end()
            else:
                start = self._at
                self._string()
                names.append(next(iter(tomllib.loads(f"{self._text[start : self._at]} = 0"))))
            self._skip(self._BLANK)
            if not self._text.startswith(".", self._at):
                return tuple(names)
            self._at += 1

    def _value(self, path: KeyPath) -> None:
        self._skip(self._BLANK)
        first = self._text[self._at]
        if first in "\"'":
            self._string()
        elif first == "[":
            self._array(path)
        elif first == "{":
            self._inline_table(path)
        else:
            self._skip(self._SCALAR)

    def _array(self, path: KeyPath) -> None:
        self._at += 1
        index = 0
        self._skip(self._VOID)
        while not self._text.startswith("]", self._at):
            self.lines[(*path, index)] = self._line()
            self._value((*path, index))
            index += 1
            self._separator()
        self._at += 1

    def _inline_table(self, path: KeyPath) -> None:
        self._at += 1
        self._skip(self._VOID)
        while not self._text.startswith("}", self._at):
            self._pair(path)
            self._separator()
        self._at += 1

    def _separator(self) -> None:
        self._skip(self._VOID)
        if self._text.startswith(",", self._at):
            self._at += 1
            self._skip(self._VOID)

    def _string(self) -> None:
        quote = self._text[self._at]
        mark = quote * 3 if self._text.startswith(quote * 3, self._at) else quote
        self._at += len(mark)
        while not self._text.startswith(mark, self._at):
            self._at += 2 if quote == '"' and self._text[self._at] == "\\" else 1
        self._at += len(mark)
        if len(mark) == 3:  # up to two quotes may stand before the closing three
            while self._text.startswith(quote, self._at):
                self._at += 1

    def _skip(self, pattern: re.Pattern[str]) -> None:
        found = pattern.match(self._text, self._at)
        if found:
            self._at = found.end()

    def _line(self) -> int:
        return self._text.count("\n", 0, self._at) + 1
