"""The suite's last check: nothing that it started or made is left. As a pytest plugin; `tests/conftest.py` loads it.

Left-overs are processes below this one, mounts, network namespaces, entries of shared memory and lab directories that
were not there at the start. Other people's test runs on the same machine are told apart by the pid in their names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lab import network, sweep, system
from tests.lab.system import LabError, eventually

GRACE_S = 5.0
_PID = re.compile(r"(?<!\d)[1-9]\d{2,9}(?!\d)")
"""A pid in a name, as opposed to a small number or the 001 of a node."""
_BEFORE = pytest.StashKey["Traces"]()
_LEFT = pytest.StashKey[list[str]]()


@dataclass(frozen=True, slots=True)
class Traces:
    """What can be left behind, each as a line for a person."""

    processes: frozenset[str]
    things: frozenset[str]


def traces() -> Traces:
    """What is there now."""
    system.reap_adopted()
    below = [one for one in system.descendants(os.getpid()) if one.state not in "ZX"]
    processes = {f"process {one.pid} {system.command_line(one.pid) or one.comm}" for one in below}
    things = {f"namespace {name}" for name in network.namespaces()}
    things |= {f"mount {line.split()[1]}" for line in Path("/proc/self/mounts").read_text().splitlines()}
    things |= {f"shared memory {path}" for path in sweep.SHARED_MEMORY.iterdir()}
    things |= {f"directory {path}" for path in sweep.LABS.glob(f"{sweep.LAB_PREFIX}*")}
    return Traces(frozenset(processes), frozenset(things))


def left_behind(before: Traces, grace_s: float = GRACE_S) -> list[str]:
    """What is there now and was not before, after waiting up to `grace_s` for it to go by itself."""
    try:
        eventually(lambda: not _new(before), grace_s, "clean")
    except LabError:
        return _new(before)
    return []


def _new(before: Traces) -> list[str]:
    now = traces()
    started = {line for line in now.processes - before.processes if "multiprocessing.resource_tracker" not in line}
    made = now.things - before.things - {f"mount {network.RUN_NETNS}"}
    return sorted(started) + sorted(_without_others(made))


def _without_others(lines: Iterable[str]) -> list[str]:
    """Lines that neither carry the pid of a living process of somebody else nor name a file that one has open."""
    ours = {os.getpid()} | {process.pid for process in system.descendants(os.getpid())}
    others = {process.pid for process in system.all_processes()} - ours

    def foreign(line: str) -> bool:
        if others & {int(number) for number in _PID.findall(line)}:
            return True
        path = Path(line.rpartition(" ")[2])
        return line.startswith("shared memory") and any(system.holds(pid, path) for pid in others)

    return [line for line in lines if not foreign(line)]


def pytest_sessionstart(session: pytest.Session) -> None:
    """Look before; keep orphans in sight; make sure that no test can reach a real cluster by accident."""
    system.become_subreaper()
    os.environ["SLURM_CONF"] = "/nonexistent/tests-reach-only-their-own-lab"
    session.config.stash[_BEFORE] = traces()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Look again; whatever is left fails the run."""
    if _BEFORE not in session.config.stash:
        return
    session.config.stash[_LEFT] = left = left_behind(session.config.stash[_BEFORE])
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name what is left."""
    if left := config.stash.get(_LEFT, []):
        terminalreporter.section("left behind by this run", red=True)
        for line in left:
            terminalreporter.line(line)
