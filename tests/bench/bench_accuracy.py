"""How often the engine is right, on drills that it was not tuned on: tables and curves (`docs/accuracy.md`).

    python -m tests.bench.bench_accuracy                     a sample of 100 drills, about a minute
    python -m tests.bench.bench_accuracy --part mixed        1,000 drills at each fidelity, simpler methods beside them
    python -m tests.bench.bench_accuracy --part harsh        the same under worse conditions, for calibration
    python -m tests.bench.bench_accuracy --part traps        300 drills without a guilty one at each fidelity
    python -m tests.bench.bench_accuracy --part curves       by effect, noise, missing reports, null fields
    python -m tests.bench.bench_accuracy --part dumps        flight-recorder dumps, beside PyTorch's analyser

Drills are seeded and independent of each other; development used seeds below a million, these are from there on. Each
part takes less than half an hour on two cores. `--drills N` changes the number (of a point, in curves), `--write` puts
the tables into the page, `--failures` lists the drills that were not right: with `--seed N` below a million, so that
nobody learns from what the tables are made of.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from tests.bench import flight_peers, tables
from tests.bench.examined import Progress, Row, Task, examine_all

PAGE: Final = Path(__file__).parents[2] / "docs" / "accuracy.md"
FIDELITIES: Final = {"full": "full fidelity", "nccl": "NCCL fidelity"}
HELD_OUT: Final = {
    "sample": 1_000_000,
    "mixed": 1_000_000,
    "traps": 2_000_000,
    "curves": 3_000_000,
    "harsh": 4_000_000,
    "dumps": 0,
}
EFFECT_LEAST, EFFECT_MOST = 0.2, 0.45
NOISE: Final = 0.05
EFFECT: Final = 0.25
INNOCENT: Final = (
    "healthy",
    "checkpoint",
    "recompilation",
    "startup",
    "idle_end",
    "evaluation",
    "spike",
    "stage_imbalance",
    "sequence_imbalance",
    "workload_imbalance",
    "workload_change",
    "power_cap",
    "innocent_finding",
    "jobwide_throttle",
)
SLOW: Final = (
    "gpu_clock_throttle",
    "hbm_degraded",
    "pcie_degraded",
    "unknown_slow",
    "allocator_stall",
    "gc_stall",
    "dataloader_starvation",
    "storage_stall",
    "host_contention",
    "two_slow",
    "nic_degraded",
    "transceiver_errors",
    "nic_fault",
    "pfc_storm",
    "ecmp_polarization",
    "link_fault",
    "link_congestion",
    "nvlink_slow",
    "mixed",
)
STUCK: Final = (
    "process_stuck",
    "process_exit",
    "several_stuck",
    "wrong_op",
    "wrong_count",
    "wrong_dtype",
    "wrong_root",
    "wrong_order",
    "gpu_xid",
    "gpu_silent",
    "nvlink_down",
    "nic_down",
    "link_cut",
)
CURVES: Final[dict[str, tuple[float, ...]]] = {
    "effect": (0.03, 0.05, 0.08, 0.12, 0.2, 0.3),
    "noise": (0.0, 0.02, 0.05, 0.1, 0.2),
    "missing": (0.0, 0.05, 0.1, 0.2),
    "nulls": (0.0, 0.05, 0.1, 0.2),
}
TITLES: Final = {
    "effect": "Effect: share of the step that is lost (slow faults)",
    "noise": "Noise: sigma of the logarithm of own times (slow faults)",
    "missing": "Missing: share of ranks that sent nothing (hangs and slow faults)",
    "nulls": "Nulls: share of measured fields that are null (hangs and slow faults)",
}


def drawn_effect(seed: int) -> float:
    """The share of the step that a drill of the mixed draw shall lose: 20 to 45 %."""
    return round(float(np.random.default_rng([seed, 0xEF]).uniform(EFFECT_LEAST, EFFECT_MOST)), 4)


def mixed_tasks(fidelity: str, first: int, count: int) -> list[Task]:
    """Kinds by their weight, effects of 20 % and more, 5 % noise; the rest as the simulator draws it."""
    return [
        Task(seed, None, {"effect": drawn_effect(seed), "noise": NOISE, "fidelity": fidelity}, peers=True)
        for seed in range(first, first + count)
    ]


def harsh_tasks(fidelity: str, first: int, count: int) -> list[Task]:
    """Kinds by their weight under conditions that a cluster may have: small effects, noise, losses."""
    tasks = []
    for seed in range(first, first + count):
        rng = np.random.default_rng([seed, 0xBAD])
        limits = {
            "effect": round(float(rng.uniform(0.05, 0.45)), 4),
            "noise": round(float(rng.uniform(0.01, 0.15)), 4),
            "missing": round(float(rng.uniform(0.0, 0.15)), 4),
            "nulls": round(float(rng.uniform(0.0, 0.15)), 4),
            "fidelity": fidelity,
        }
        tasks.append(Task(seed, None, limits))
    return tasks


def trap_tasks(fidelity: str, first: int, count: int) -> list[Task]:
    """Kinds without a guilty one, in turn."""
    return [
        Task(first + at, INNOCENT[at % len(INNOCENT)], {"noise": NOISE, "fidelity": fidelity}) for at in range(count)
    ]


def curve_tasks(name: str, fidelity: str, first: int, count: int) -> list[Task]:
    """The same seeds and kinds at every point."""
    kinds = SLOW if name in ("effect", "noise") else STUCK + SLOW
    base: dict[str, Any] = {"effect": EFFECT, "noise": NOISE, "missing": 0.0, "nulls": 0.0, "world_max": 128}
    base["fidelity"] = fidelity
    return [
        Task(first + at, kinds[at % len(kinds)], base | {name: value}, point=(name, value))
        for value in CURVES[name]
        for at in range(count)
    ]


class Bench:
    """What the command line asks for."""

    def __init__(self, options: argparse.Namespace, part: str) -> None:
        self.options = options
        self.first = HELD_OUT[part] if options.seed is None else options.seed

    def rows(self, name: str, tasks: list[Task]) -> list[Row]:
        """Drills examined, those that were not right told on request."""
        rows = examine_all(tasks, self.options.processes, Progress(name, len(tasks)))
        for row in rows if self.options.failures else ():
            grade = row.grade
            if row.failed or (grade is not None and (grade.why or not grade.cause or grade.false_drain)):
                said = row.failed or (grade and (*grade.why, f"cause {row.said}, not {row.causes}", *grade.false_drain))
                sys.stdout.write(f"{row.task.seed} {row.kind or row.task.kind} {row.task.limits}: {said}\n")
        return rows

    def tell(self, name: str, text: str) -> None:
        """A section, on standard output or in the page."""
        sys.stdout.write(f"\n{text}\n")
        if self.options.write:
            tables.write(PAGE, name, text)

    def sample(self) -> None:
        """A little of the mixed part."""
        for fidelity, words in FIDELITIES.items():
            rows = self.rows(words, mixed_tasks(fidelity, self.first, self.options.drills or 50))
            sys.stdout.write(f"\n{words}\n\n{tables.by_class(rows)}\n{tables.peers(rows)}\n")

    def mixed(self) -> None:
        """Tables by class, kind, cause; confidence; simpler methods."""
        for fidelity, words in FIDELITIES.items():
            rows = self.rows(words, mixed_tasks(fidelity, self.first, self.options.drills or 1000))
            told = self._made(rows)
            parts = {
                "": tables.by_class(rows),
                "By kind of fault:": tables.by_kind(rows),
                "Causes:": tables.confusion(rows),
                "Confidence of the first culprit against being right:": tables.calibration(rows),
                "Other methods on the same inputs (drills in brackets):": tables.peers(rows),
            }
            text = told + "".join(f"\n{title}\n\n{part}" if title else f"\n{part}" for title, part in parts.items())
            self.tell(f"mixed {fidelity}", text)

    @staticmethod
    def _made(rows: list[Row]) -> str:
        """What the drills turned out to be."""
        lost = [row.lost for row in rows if row.place and np.isfinite(row.lost)]
        short = sum(value < EFFECT_LEAST - 0.02 for value in lost)
        return (
            f"{len(tables.judged(rows))} drills; {sum(bool(row.failed) for row in rows)} more could not be made or "
            f"judged. The {len(lost)} slow faults with a guilty one cost {100 * np.median(lost):.0f} % of the time "
            f"(median); {short} of them less than 18 %: a fault that cannot cost what is wanted costs what it can.\n"
        )

    def harsh(self) -> None:
        """Tables by class and confidence where everything is worse at once."""
        for fidelity, words in FIDELITIES.items():
            rows = self.rows(f"harsh, {words}", harsh_tasks(fidelity, self.first, self.options.drills or 1000))
            title = "Confidence of the first culprit against being right:"
            self.tell(f"harsh {fidelity}", f"{tables.by_class(rows)}\n{title}\n\n{tables.calibration(rows)}")

    def traps(self) -> None:
        """Drills in which nobody is guilty."""
        for fidelity, words in FIDELITIES.items():
            rows = self.rows(f"traps, {words}", trap_tasks(fidelity, self.first, self.options.drills or 300))
            self.tell(f"traps {fidelity}", tables.traps(rows))

    def curves(self) -> None:
        """Accuracy by effect, noise, missing reports and null fields."""
        for name in CURVES:
            parts = []
            for fidelity, words in FIDELITIES.items():
                rows = self.rows(f"{name}, {words}", curve_tasks(name, fidelity, self.first, self.options.drills or 64))
                parts.append(f"{TITLES[name]}, {words}:\n\n{tables.curve(rows, lambda at: f'{100 * at:.0f} %')}")
            self.tell(f"curve {name}", "\n".join(parts))

    def dumps(self) -> None:
        """Flight-recorder dumps of real jobs."""
        self.tell("dumps", flight_peers.report())


def main() -> None:
    """The part that is asked for, or all but the sample."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bench_accuracy")
    parser.add_argument(
        "--part", choices=("sample", "mixed", "harsh", "traps", "curves", "dumps", "all"), default="sample"
    )
    parser.add_argument("--drills", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--failures", action="store_true")
    options = parser.parse_args()
    parts: dict[str, Callable[[Bench], None]] = {
        "mixed": Bench.mixed,
        "harsh": Bench.harsh,
        "traps": Bench.traps,
        "curves": Bench.curves,
        "dumps": Bench.dumps,
        "sample": Bench.sample,
    }
    for name in ("mixed", "harsh", "traps", "curves", "dumps") if options.part == "all" else (options.part,):
        parts[name](Bench(options, name))


if __name__ == "__main__":
    main()
