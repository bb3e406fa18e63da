"""The benchmark of accuracy measures what it says: rows, shares, the simpler methods, and where its tables go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diagnosis.drill import Drill, Limits
from tests.bench import tables
from tests.bench.baselines import Blamed, ccl_d, fastest_rank, z_score
from tests.bench.examined import ENGINE, Task, examine
from tests.judged import judge_drill

SMALL: dict[str, Any] = {
    "world_max": 32,
    "effect": 0.4,
    "noise": 0.01,
    "missing": 0.0,
    "nulls": 0.0,
    "fidelity": "full",
}


def test_one_slow_gpu_is_found_by_all_methods() -> None:
    done = judge_drill(Drill(3, "unknown_slow", Limits(**SMALL)))
    guilty = frozenset(done.drill.truth["ranks"])
    assert len(guilty) == 1
    assert ccl_d(done.incident) == Blamed("S1", guilty)
    assert fastest_rank(done.incident) == Blamed("S1", guilty)
    assert guilty <= z_score(done.incident).ranks


def test_who_never_enters_the_only_communicator_that_stands_is_found_by_the_rules_of_one_communicator() -> None:
    drill = next(
        d for d in (Drill(seed, "process_stuck", Limits(**SMALL)) for seed in range(20)) if len(d.layout.families) <= 2
    )
    blamed = ccl_d(judge_drill(drill).incident)
    assert blamed.class_ == "H1"
    assert blamed.ranks >= frozenset(drill.truth["ranks"])


def test_a_row_tells_what_was_true_and_what_was_said() -> None:
    row = examine(Task(5, "gpu_clock_throttle", SMALL, peers=True))
    assert (row.kind, row.class_, row.place, row.anomaly, row.failed) == (
        "gpu_clock_throttle",
        "S1",
        "rank",
        "slow",
        "",
    )
    assert row.lost == pytest.approx(0.4, abs=0.05)
    assert row.said == "gpu_clock_throttle" and row.to_drain and row.drained
    score = dict(row.scores)[ENGINE]
    assert score.exact and score.named and score.class_ok and score.innocents == 0


def test_a_drill_that_cannot_be_is_told_apart_from_one_that_is_wrong() -> None:
    row = examine(Task(5, "link_cut", SMALL | {"world_max": 16}))
    assert row.failed.startswith("no such drill") and row.grade is None
    assert "| **all** | 0 | - |" in tables.by_class([row])


def test_shares_come_with_their_interval() -> None:
    assert tables.share(9, 12) == "75.0 %"
    assert tables.interval(9, 12) == "46.8 to 91.1"
    assert tables.interval(5, 5) == "56.6 to 100.0"


def test_tables_go_between_their_markers_and_nowhere_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- measured: x -->\nold\n<!-- end of x -->\nb\n")
    tables.write(page, "x", "new")
    tables.write(page, "x", "newer")
    assert page.read_text() == "a\n<!-- measured: x -->\n\nnewer\n<!-- end of x -->\nb\n"
    with pytest.raises(ValueError, match="no place for y"):
        tables.write(page, "y", "new")
