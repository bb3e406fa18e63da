"""How the daemon sees ranks end: real processes of every kind, and what the report tells of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from node_daemon.collectors.doors import Process
from node_daemon.collectors.exits import End, ExitWatch, pidfds_tell
from node_daemon.collectors.proc_events import ProcEvents
from node_daemon.collectors.process import Processes
from tests.lab.system import eventually

OLD_KERNEL = "6.1.0-18-amd64"
WAITS = "import os, sys; os.kill(os.getpid(), 19); sys.exit(7)"
"""A process that stops itself, and ends with 7 when it is continued."""
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {WAITS!r}])
print(child.pid, flush=True)
child.wait()
"""


class Child:
    """A process whose own parent waits for it at once, as launchers do."""

    def __init__(self) -> None:
        self.parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
        assert self.parent.stdout is not None
        self.pid = int(self.parent.stdout.readline())
        stopped = ord("T")
        eventually(lambda: (stat := Processes().stat(self.pid)) is not None and stat.state == stopped, 10, "it stopped")
        stat = Processes().stat(self.pid)
        assert stat is not None
        self.process = Process(0, self.pid, stat.start_ticks, os.getuid(), os.getgid())

    @property
    def key(self) -> tuple[int, int]:
        return self.process.pid, self.process.start_ticks

    def end(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)
        if number not in (signal.SIGKILL, signal.SIGCONT):  # those reach a stopped process, the others wait
            os.kill(self.pid, signal.SIGCONT)

    def gone(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # until its parent has waited for it the number is still its own
            if self.parent.poll() is None:
                os.kill(self.pid, signal.SIGKILL)
        self.parent.wait(10)
        assert self.parent.stdout is not None
        self.parent.stdout.close()


@pytest.fixture
def child() -> Iterator[Child]:
    one = Child()
    yield one
    one.gone()


def ended(watch: ExitWatch, child: Child) -> End:
    """Its end, once it is told how it ended."""
    eventually(
        lambda: (end := watch.ends().get(child.key)) is not None and (end.signal, end.exit_code) != (None, None),
        10,
        "how it ended",
    )
    return watch.ends()[child.key]


def releases() -> list[str]:
    """Kernels to speak to: this one, and as on an older one, by its proc connector."""
    return [os.uname().release, OLD_KERNEL]


@pytest.mark.parametrize("release", releases())
@pytest.mark.parametrize(
    ("number", "told"), [(signal.SIGKILL, (None, 9)), (signal.SIGSEGV, (None, 11)), (signal.SIGCONT, (7, None))]
)
def test_how_a_rank_ended_is_told_though_its_parent_waits_at_once(
    child: Child, release: str, number: signal.Signals, told: tuple[int | None, int | None]
) -> None:
    watch = ExitWatch(release=release)
    try:
        watch.watch([child.process])
        assert watch.ends() == {}
        child.end(number)
        end = ended(watch, child)
        assert (end.exit_code, end.signal) == told
    finally:
        watch.close()


@pytest.mark.parametrize("release", releases())
def test_who_ended_first_is_told_within_milliseconds(release: str) -> None:
    children = [Child() for _ in range(3)]
    watch = ExitWatch(release=release)
    try:
        watch.watch([one.process for one in children])
        for one in reversed(children):
            one.end(signal.SIGKILL)
            one.parent.wait(10)
        at = [ended(watch, one).at_ns for one in children]
        assert at == sorted(at, reverse=True)
        assert len(set(at)) == 3
    finally:
        watch.close()
        for one in children:
            one.gone()


def test_ends_are_kept_for_as_long_as_they_are_asked_for(child: Child) -> None:
    watch = ExitWatch()
    try:
        watch.watch([child.process])
        child.end(signal.SIGKILL)
        assert ended(watch, child).signal == 9
        watch.watch([child.process])
        assert watch.ends().keys() == {child.key}
        watch.watch([])
        assert watch.ends() == {}
    finally:
        watch.close()


def test_a_process_that_was_gone_or_is_another_is_not_told(child: Child) -> None:
    other = Process(1, child.pid, child.process.start_ticks + 1, os.getuid(), os.getgid())
    gone = Process(2, 4_000_000, 5, os.getuid(), os.getgid())
    watch = ExitWatch()
    try:
        watch.watch([other, gone, child.process])
        child.end(signal.SIGKILL)
        ended(watch, child)
        assert watch.ends().keys() == {child.key}
    finally:
        watch.close()


def test_a_zombie_that_was_one_when_first_seen_ended_nobody_knows_when() -> None:
    zombie = subprocess.Popen([sys.executable, "-c", "pass"])
    eventually(lambda: (stat := Processes().stat(zombie.pid)) is not None and stat.state == ord("Z"), 10, "a zombie")
    stat = Processes().stat(zombie.pid)
    assert stat is not None
    watch = ExitWatch()
    try:
        watch.watch([Process(0, zombie.pid, stat.start_ticks, os.getuid(), os.getgid())])
        zombie.wait()
        assert watch.ends() == {}
    finally:
        watch.close()


def test_the_proc_connector_tells_of_those_that_are_watched_alone(child: Child) -> None:
    events = ProcEvents()
    try:
        events.watch([child.pid])
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        assert list(events.ended()) == []
        child.end(signal.SIGKILL)
        child.parent.wait(10)
        told = list(events.ended())
        assert [(one.pid, one.status) for one in told] == [(child.pid, signal.SIGKILL)]
    finally:
        events.close()


@pytest.mark.parametrize(
    ("release", "tells"),
    [("6.1.0-18-amd64", False), ("6.14.11", False), ("6.15.0", True), ("7.0-rc1", True), ("odd", False)],
)
def test_which_kernels_tell_by_the_pidfd(release: str, tells: bool) -> None:
    assert pidfds_tell(release) is tells
