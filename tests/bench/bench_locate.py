"""How long it takes to locate one hung and one slow rank, by size of the job: from columns to verdict.

Prints a table; the last line gives the exponent of growth between the two greatest sizes. Each size runs in its own
process, so that the peak of memory is its own.
"""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import time

from diagnosis.engine.verdict import judge
from tests.fleet import Fault, job

SIZES = (1_024, 4_096, 16_384, 102_400, 1_048_576)
REPEATS = 5


def measure(world: int) -> dict[str, float]:
    """Best times in ms and the peak of memory in MB; fails if the verdict is wrong."""
    guilty = world // 3
    result: dict[str, float] = {"world": world}
    for name, fault, class_ in (
        ("hang", Fault(stuck=guilty), "H1"),
        ("slow", Fault(slow=(guilty, 1.5)), "S1"),
    ):
        incident = job(world, fault=fault)
        best = math.inf
        for _ in range(REPEATS if world <= 200_000 else 2):
            start = time.perf_counter()
            verdict = judge(incident)
            best = min(best, time.perf_counter() - start)
        named = [culprit.rank for culprit in verdict.culprits]
        if verdict.class_ != class_ or named != [guilty]:
            raise SystemExit(f"wrong verdict at {world}: {verdict.class_} {named} {verdict.summary}")
        result[f"{name}_ms"] = 1000 * best
    result["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return result


def main() -> None:
    """All sizes, or the one that is named."""
    if len(sys.argv) > 1:
        sys.stdout.write(json.dumps(measure(int(sys.argv[1]))))
        return
    rows = []
    sys.stdout.write("     ranks   hang ms   slow ms   peak MB\n")
    for world in SIZES:
        done = subprocess.run(
            [sys.executable, "-m", "tests.bench.bench_locate", str(world)],
            stdout=subprocess.PIPE,
            check=True,
            timeout=600,
        )
        row = json.loads(done.stdout)
        rows.append(row)
        sys.stdout.write(f"{row['world']:10.0f} {row['hang_ms']:9.1f} {row['slow_ms']:9.1f} {row['peak_mb']:9.0f}\n")
        sys.stdout.flush()
    small, large = rows[-2], rows[-1]
    ratio = math.log(large["world"] / small["world"])
    exponents = [math.log(large[name] / small[name]) / ratio for name in ("hang_ms", "slow_ms")]
    sys.stdout.write(f"growth exponent: hang {exponents[0]:.2f}, slow {exponents[1]:.2f}\n")


if __name__ == "__main__":
    main()
