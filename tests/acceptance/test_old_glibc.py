"""Both probes in a container with an old C library, by `old_glibc.sh`: attached where frames can be seen, else off."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "old_glibc.sh"
TIMEOUT_S = 600


@pytest.mark.acceptance
@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a Debian to run in")
def test_the_probes_attach_in_a_container_with_glibc_2_31_or_stay_off() -> None:
    done = subprocess.run([SCRIPT, "bullseye"], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "GLIBC 2.31" in done.stdout and "attached: 1-" in done.stdout
    assert done.stdout.rstrip().endswith("fresh: all well")
