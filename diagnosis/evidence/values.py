"""Words and numbers out of JSON that may hold anything.

The quick way decodes a line straight into a typed struct. Where that fails because a field has another type, is NaN or
is too large for its type, the slow way decodes it loosely and mends it: what cannot be the field's value becomes null,
which is "not told", and the fault is noted. A line that is no JSON object at all is skipped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Final, Generic, TypeVar

import msgspec

from diagnosis.evidence.notes import Notes

T = TypeVar("T", bound=msgspec.Struct)
Special = Mapping[str, Callable[[object], object]]
MALFORMED: Final = "not a JSON object, skipped"
ODD_VALUE: Final = "a value of the wrong kind is taken as unknown"
_INTEGER_MAX: Final = 1 << 63


def number(value: object) -> float | None:
    """A finite number, or None. A yes or no is not a number, nor is a number in quotes."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer of hundreds of digits
        return None


def integer(value: object) -> int | None:
    """A whole number of 64 bits, or None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, float) and value.is_integer() and abs(value) < _INTEGER_MAX:
        return int(value)
    return value if isinstance(value, int) and -_INTEGER_MAX <= value < _INTEGER_MAX else None


def text(value: object) -> str | None:
    """A word. A whole number is taken as its digits: ids come both ways."""
    if isinstance(value, str):
        return value
    whole = integer(value)
    return None if whole is None else str(whole)


def loose(line: bytes) -> object:
    """Any JSON, with NaN and infinities as null.

    Raises: ValueError (no JSON, bad UTF-8, nested too deep or a number of absurd length).
    """
    try:
        return json.loads(line, parse_constant=lambda _: None)
    except RecursionError:
        raise ValueError("nested too deep") from None


_MENDERS: Final[dict[object, Callable[[object], object]]] = {
    float | None: number,
    int | None: integer,
    str | None: text,
}


def mend(raw: object, kind: type[T], special: Special | None = None) -> T:
    """`raw` as the struct; a value that its field cannot have is left out. `special`: by field name, what makes the
    value (for lists and maps).

    Raises: ValueError (raw is not an object).
    """
    if not isinstance(raw, dict):
        raise ValueError("not an object")
    values: dict[str, object] = {}
    for field in msgspec.structs.fields(kind):
        value = raw.get(field.encode_name)
        if value is not None:
            make = (special or {}).get(field.name) or _MENDERS[field.type]
            values[field.name] = make(value)
    return kind(**values)


class Decoder(Generic[T]):
    """Lines, or whole documents, of one kind as structs."""

    def __init__(self, kind: type[T], special: Special | None = None) -> None:
        self._kind = kind
        self._special = special
        self._decoder = msgspec.json.Decoder(kind)

    def decode(self, file: str, at: int, line: bytes, notes: Notes) -> T | None:
        """The struct, or None (noted) where the bytes are nothing of the sort. `at`: the line's number, 0: none."""
        try:
            return self._decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pass
        try:
            made = mend(loose(line), self._kind, self._special)
        except ValueError:
            notes.skip(file, MALFORMED, at)
            return None
        notes.add(file, ODD_VALUE, at)
        return made
