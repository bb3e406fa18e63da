"""What valgrind's callgrind counted: instructions by object file and function, and who called whom.

The format is "Callgrind Format Specification" of Valgrind's manual: names are told once and are numbers from then on;
the line after `calls=` holds what the call cost inside, which is not the caller's own.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

Place = tuple[str, str]
"""Object file and function."""
_NAMED = re.compile(r"(c?)(ob|fn)=\((\d+)\)(?: (.*))?")
_COST = re.compile(r"[-+*\d]\S* (\d+)")


@dataclass(frozen=True, slots=True)
class Profile:
    """`cost`: instructions in each function, without those of what it calls. `calls`: from an object file, to whom."""

    cost: Counter[Place] = field(default_factory=Counter)
    calls: Counter[tuple[str, Place]] = field(default_factory=Counter)

    def of(self, library: Path) -> Counter[str]:
        """Instructions by function of one object file."""
        return Counter({function: cost for (place, function), cost in self.cost.items() if place == str(library)})

    def called_by(self, library: Path) -> Counter[Place]:
        """How often one object file called functions of others."""
        found = {to: n for (caller, to), n in self.calls.items() if caller == str(library) and to[0] != str(library)}
        return Counter(found)


def read(path: Path) -> Profile:
    """Callgrind's output."""
    names: dict[tuple[str, str], str] = {}
    here, called = {"ob": "", "fn": ""}, {"ob": "", "fn": ""}
    profile, inside_a_call = Profile(), False
    for line in path.read_text().splitlines():
        if named := _NAMED.match(line):
            is_callee, kind, number, name = named.groups()
            names[kind, number] = name or names[kind, number]
            (called if is_callee else here)[kind] = names[kind, number]
        elif line.startswith("calls="):
            to = (called["ob"] or here["ob"], called["fn"])
            profile.calls[here["ob"], to] += int(line[6:].split()[0])
            called, inside_a_call = {"ob": "", "fn": ""}, True
        elif cost := _COST.match(line):
            if not inside_a_call:
                profile.cost[here["ob"], here["fn"]] += int(cost[1])
            inside_a_call = False
    return profile
