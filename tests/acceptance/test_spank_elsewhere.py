"""The SPANK plugin with other versions of Slurm: each in the Debian that has it, by `spank_elsewhere.sh`."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "spank_elsewhere.sh"
TIMEOUT_S = 900


@pytest.mark.acceptance
@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a Debian to run in")
@pytest.mark.parametrize(("suite", "version"), [("trixie", "24.11"), ("forky", "26.05")])
def test_the_plugin_compiles_and_attaches_in_another_slurm(suite: str, version: str) -> None:
    done = subprocess.run([SCRIPT, suite], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    assert f"slurm-wlm {version}." in done.stdout
    assert re.search(r"^[1-9]\d passed, 1 deselected", done.stdout, re.MULTILINE), done.stdout[-2000:]
    assert done.stdout.rstrip().endswith("fresh: all well")
