"""A gate before Slurm's commands, so that a test can stop the controller exactly between two of its acts.

The gate is a directory to put first on the controller's PATH. It holds a wrapper (`native/gate.sh`) under the name of
each command; every call is noted with its time. Rules look for words in the call ("requeue", "update NodeName").
"""

from __future__ import annotations

import itertools
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.lab import system
from tests.lab.system import eventually

WRAPPER = Path(__file__).parent / "native" / "gate.sh"
COMMANDS = ("sbatch", "scancel", "scontrol", "sinfo", "squeue")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a Slurm command: when (seconds since the epoch) and the whole command line."""

    at: float
    line: str


class ScontrolGate:
    """Makes the gate in `directory`, which must not exist yet."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._rules = directory / "rules"
        self._numbers = itertools.count(1)
        self._rules.mkdir(parents=True)
        (directory / "calls").touch()
        for command in COMMANDS:
            shutil.copy(WRAPPER, directory / command)
            (directory / command).chmod(0o755)

    def path(self, environment: dict[str, str]) -> dict[str, str]:
        """The PATH that leads through the gate, for `popen_controller(env=...)`."""
        return {"PATH": f"{self.directory}:{environment['PATH']}"}

    def block(self, words: str, *, after: bool = False) -> Path:
        """Hold every call with these words: before it reaches Slurm, or `after` Slurm has obeyed. Returns the rule."""
        return self._rule("after" if after else "before", words)

    def fail(self, words: str, times: int) -> Path:
        """Let the next `times` calls with these words fail without reaching Slurm."""
        return self._rule("fail", words, times)

    def wait_blocked(self, rule: Path, timeout_s: float = 30.0) -> None:
        """Wait until a call is held by this rule."""
        eventually(lambda: self._waiting(rule.name), timeout_s, f"a call held: {rule.read_text()!r}")

    def release(self, rule: Path) -> None:
        """Take a rule away; calls that it holds go on."""
        rule.unlink(missing_ok=True)

    def drop(self) -> None:
        """Take all rules away; calls that are held give up with an error and never reach Slurm (again)."""
        drop = self.directory / "drop"
        drop.touch()
        eventually(lambda: not self._waiting("*"), 10, "held calls gone")
        for rule in self._rules.glob("*.rule"):
            rule.unlink()
        drop.unlink()

    def calls(self, words: str = "") -> list[Call]:
        """All calls so far with these words in them, in order."""
        lines = (self.directory / "calls").read_text(errors="replace").splitlines()
        split = [line.partition(" ") for line in lines]
        return [Call(float(at), line) for at, _, line in split if words in line]

    def _waiting(self, rule: str) -> list[Path]:
        """A file for each call that is held now; its name ends in the wrapper's pid."""
        files = self._rules.glob(f"{rule}.waiting.*")
        return [path for path in files if (call := system.stat(int(path.suffix[1:]))) and call.state not in "ZX"]

    def _rule(self, kind: str, words: str, times: int = 0) -> Path:
        number = next(self._numbers)
        part, rule = self._rules / f"{number}.part", self._rules / f"{number}.rule"
        part.write_text(f"{kind}\n{words}\n{times}\n")
        return part.rename(rule)
