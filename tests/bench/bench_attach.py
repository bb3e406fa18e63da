"""What attaching costs a step: `srun true` with nothing, with the SPANK plugin and with the TaskProlog, turn by turn.

`python -m tests.bench.bench_attach`
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.integration.gloo_double import build
from tests.integration.spank_site import SpankSite
from tests.lab.cluster import TASK_PROLOG, Lab

TURNS = 25
NOTHING, PLUGIN, PROLOG = "nothing", "SPANK plugin", "TaskProlog"


def main() -> None:
    """Prints the median step of each way, and what it adds to a step with nothing."""
    with tempfile.TemporaryDirectory() as directory, Lab(nodes=1, gpus=False) as lab:
        site = SpankSite(lab)
        site.install(build(Path(directory)).directory)
        taken = measure(site)
    plain = statistics.median(taken[NOTHING])
    for way, times in taken.items():
        median, low, high = statistics.median(times), *statistics.quantiles(times, n=10)[::8]
        sys.stdout.write(f"{way:13} {median:6.1f} ms ({low:.1f} to {high:.1f})  {median - plain:+5.1f} ms a step\n")


def measure(site: SpankSite) -> dict[str, list[float]]:
    """Milliseconds of each turn."""
    prolog = site.directory / "task_prolog"
    prolog.write_text(
        f"#!/bin/sh\nTOCSIN_FRAME_ROOT={site.lab.frame_root} TOCSIN_PROBE_LIBRARY={site.gloo} exec {TASK_PROLOG}\n"
    )
    prolog.chmod(0o755)
    taken: dict[str, list[float]] = {NOTHING: [], PLUGIN: [], PROLOG: []}
    for _ in range(TURNS):
        for way, times in taken.items():
            line = f"optional {site.directory}/tocsin_spank.so conf={site.conf}\n"
            site.plugstack.write_text(line if way == PLUGIN else "")
            options = [f"--task-prolog={prolog}"] if way == PROLOG else []
            began = time.perf_counter()
            site.srun("-n1", *options, "/bin/true")
            times.append((time.perf_counter() - began) * 1000)
    return taken


if __name__ == "__main__":
    main()
