"""The reason of a drain: who owns it, why, in one line that `sinfo -R` shows.

    tocsin:<incident>:<check>:<entity>:<action> <text>

`tocsin:` is the mark of ownership. What does not begin with it belongs to somebody else, and what begins with it is
undone only while the whole of it is still what we wrote. Slurm itself appends ` : reboot issued` and the like when a
node is rebooted; these words change nothing about who owns the reason. Whatever else is appended does: somebody, or
Slurm for a fault of its own, has had a say since.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

PREFIX: Final = "tocsin:"
CHARS_MAX: Final = 200
_WORD: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_FORM: Final = re.compile(
    r"tocsin:(?P<incident>[\w.-]+):(?P<check>[\w.-]+):(?P<entity>[\w.-]+):(?P<action>[\w.-]+)(?: (?P<text>.*))?",
    re.ASCII,
)
_UNSAFE: Final = re.compile(r"[^ -~]|[\"'`|\\]")
_BY_SLURM: Final = re.compile(r"(?: : reboot [a-zA-Z ]+)+$")


@dataclass(frozen=True, slots=True)
class Reason:
    """The parts of one of our reasons. `check`: a check id or a cause; `entity`: `GPU5`, `mlx5_3`, `rank13`."""

    incident: str
    check: str
    entity: str
    action: str
    text: str = ""

    def __str__(self) -> str:
        """One line of at most CHARS_MAX printable ASCII characters, without quotes, pipes and backslashes.

        Raises ValueError where one of the four words is not a word: letters, digits, `._-`.
        """
        words = (self.incident, self.check, self.entity, self.action)
        for word in words:
            if not _WORD.fullmatch(word):
                raise ValueError(f"{word!r} cannot stand in a reason")
        text = " ".join(_UNSAFE.sub(" ", self.text).replace(" : ", " - ").split())
        return f"{PREFIX}{':'.join(words)} {text}"[:CHARS_MAX].rstrip(" :")


def word(text: str) -> str:
    """`text` as one word of a reason; what cannot stand in one becomes `_`."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", text, flags=re.ASCII).lstrip("._-")[:64] or "unnamed"


def parse(reason: str) -> Reason | None:
    """The parts of a reason of ours, Slurm's suffixes aside; None where it is not ours or not of this form."""
    found = _FORM.fullmatch(without_suffix(reason))
    if found is None:
        return None
    return Reason(found["incident"], found["check"], found["entity"], found["action"], found["text"] or "")


def with_action(reason: str, action: str) -> str:
    """The same reason with another action. Raises ValueError where `reason` is not one of ours."""
    parts = parse(reason)
    if parts is None:
        raise ValueError(f"{reason!r} is not a reason of tocsin")
    return str(replace(parts, action=action))


def without_suffix(reason: str) -> str:
    """The reason as it was written, without what Slurm appended for reboots."""
    return _BY_SLURM.sub("", reason.strip())


def is_ours(reason: str) -> bool:
    """Whether tocsin wrote it, for whatever incident."""
    return reason.startswith(PREFIX)


def is_exactly_ours(reason: str, expected: str) -> bool:
    """Whether it is still word for word what we wrote."""
    return is_ours(expected) and without_suffix(reason) == expected
