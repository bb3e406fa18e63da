"""A newcomer's machine is enough: `make demo` in a fresh Debian, by `fresh_debian.sh`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "fresh_debian.sh"
TIMEOUT_S = 1500


@pytest.mark.acceptance
@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a Debian to run in")
def test_the_demo_runs_in_a_fresh_minbase_debian_with_each_fault() -> None:
    done = subprocess.run([SCRIPT, "s1", "h1", "h2", "none"], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.rstrip().endswith("fresh: all well")
