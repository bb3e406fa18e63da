"""The demo promises to remove everything however it ends: here by signals, several of them, at its busiest moments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lab import network, sweep

ROOT = Path(__file__).parents[2]
SIGNALS = 5
PERIOD_S = 0.1


def _what_is_left(pid: int) -> list[str]:
    """What carries the tag of that process's labs."""
    directories = [path for root in (sweep.LABS, sweep.SHARED_MEMORY) for path in root.glob(f"tocsin-lab-{pid}-*")]
    return [*map(str, directories), *(name for name in network.namespaces() if name.startswith(f"tocsin-{pid}-"))]


@pytest.mark.parametrize("moment", ["starting", "cluster up", "submitted"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_nothing_is_left_by_a_demo_that_is_ended_early(moment: str, number: signal.Signals) -> None:
    demo = subprocess.Popen(
        ["env", "--default-signal", sys.executable, "-m", "tests.lab.demo"],  # whatever the caller of the tests ignores
        env={**os.environ, "FAULT": "none"},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert demo.stdout is not None
    try:
        assert any(moment in line for line in demo.stdout), "the demo ended before its time"
        for _ in range(SIGNALS):  # an impatient person presses ^C again while everything is being removed
            demo.send_signal(number)
            time.sleep(PERIOD_S)
        rest, _ = demo.communicate(timeout=60)
    finally:
        demo.kill()
        demo.wait(10)
    assert demo.returncode == 128 + number, rest
    assert rest.splitlines()[-1] == "everything is removed"
    assert _what_is_left(demo.pid) == []
