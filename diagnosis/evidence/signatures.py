"""What operation a rank runs, as one text: `AllReduce bf16 16777216`, with `root=3` behind it where a root is told.

Equal texts mean equal operations. A part that is not told is `?`; two texts contradict each other only in parts that
both tell. Where nothing is told there is no text at all.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Final

NOT_TOLD: Final = "?"
_ROOT: Final = "root="


@dataclass(frozen=True, slots=True)
class Signature:
    """The parts. `count`: elements, `root`: the rank that sends or receives alone; None: not told."""

    op: str | None = None
    dtype: str | None = None
    count: int | None = None
    root: int | None = None


def signature_text(signature: Signature) -> str | None:
    """The text, None where nothing is told. White space inside a word becomes `_`."""
    if signature == Signature():
        return None
    parts = [_word(signature.op), _word(signature.dtype), NOT_TOLD if signature.count is None else str(signature.count)]
    if signature.root is not None:
        parts.append(f"{_ROOT}{signature.root}")
    return " ".join(parts)


def signature_parts(text: str) -> Signature:
    """The inverse of `signature_text`; a text of another make is an operation of that name."""
    parts = text.split(" ")
    if len(parts) not in (3, 4) or (len(parts) == 4 and not parts[3].startswith(_ROOT)):
        return Signature(op=_word(text))
    root = _whole(parts[3].removeprefix(_ROOT)) if len(parts) == 4 else None
    return Signature(_told(parts[0]), _told(parts[1]), _whole(parts[2]), root)


def contradict(one: str, other: str) -> bool:
    """Whether both tell some part and tell it differently."""
    pairs = zip(astuple(signature_parts(one)), astuple(signature_parts(other)), strict=True)
    return any(a is not None and b is not None and a != b for a, b in pairs)


def _word(word: str | None) -> str:
    return "_".join(word.split()) or NOT_TOLD if word is not None else NOT_TOLD


def _told(word: str) -> str | None:
    return None if word == NOT_TOLD else word


def _whole(digits: str) -> int | None:
    return int(digits) if digits.isascii() and digits.removeprefix("-").isdecimal() and len(digits) < 20 else None
