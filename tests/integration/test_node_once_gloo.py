"""`tocsin node --once` beside a real job: a stopped rank stands first, and the others wait for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.integration.test_gloo_probe_torch import DEADLINE_S, eventually
from tests.integration.test_steps_gloo import training

STOPPED = 2
PROGRAM = "from controller.cli.main import main; main()"


def told(base: Path, *arguments: str) -> str:
    """What the command prints, as a person runs it."""
    command = [sys.executable, "-c", PROGRAM, "node", "--once", "--frame-root", str(base / "root"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def ranks(base: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(told(base, "--json", "--seconds", "0"))["ranks"]
    return found


def test_a_stopped_rank_stands_first_and_everybody_waits_for_it(tmp_path: Path) -> None:
    with training(tmp_path, 4, "layered") as job:
        eventually(lambda: len(job.look()) == 4, "the job trains")
        eventually(lambda: not any(rank["odd"] for rank in ranks(tmp_path)), "nobody is odd")
        healthy = ranks(tmp_path)
        assert [rank["process"] in ("R", "S") for rank in healthy] == [True] * 4
        pid = next(rank["pid"] for rank in healthy if rank["rank"] == STOPPED)
        os.kill(pid, signal.SIGSTOP)
        try:
            # A rank that is stopped inside a round keeps the others there, and the probe's own words tell for whom.
            eventually(lambda: all(kept(rank) for rank in ranks(tmp_path) if rank["rank"] != STOPPED), "they wait")
            now = ranks(tmp_path)
            assert now[0]["rank"] == STOPPED
            assert now[0]["odd"][0] == "the process is stopped (T)"
            assert {rank["rank"] for rank in now if rank["odd"]} == {STOPPED}
            waits = {rank["rank"]: rank["comms"][0]["waits_for"][0].split(" (")[0] for rank in now[1:]}
            met = {rank: follow(rank, waits) for rank in waits}
            assert set(met.values()) == {f"rank {STOPPED}"}
            table = told(tmp_path, "--seconds", "0").splitlines()
            assert table[1].startswith("!4242.0")
            assert "T stopped" in table[1]
        finally:
            os.kill(pid, signal.SIGCONT)


def kept(rank: dict[str, Any]) -> bool:
    """Inside a round for a while, and it is seen for whom."""
    comm = rank["comms"][0]
    return (comm["inside_s"] or 0) > 1 and bool(comm["waits_for"])


def follow(rank: int, waits: dict[int, str]) -> str:
    """The end of the way from one to whom it waits for."""
    name = waits[rank]
    for _ in waits:
        name = waits.get(int(name.removeprefix("rank ")), name) if name != f"rank {STOPPED}" else name
    return name
