"""The table of the fault matrix."""

from __future__ import annotations

from pathlib import Path

from tests.detection import Told, note, read, table


def test_a_row_holds_least_median_and_greatest_and_how_many_were_right(tmp_path: Path) -> None:
    file = tmp_path / "build" / "runs.tsv"
    for right_s in (3.0, 7.0, None, 4.0):
        note(Told("S2 delay", "fork", 4, 2.0, right_s, 31), file)
    note(Told("H1 stopped", "torchrun", 8, None, 9.25, None), file)
    assert table(read(file)).splitlines()[2:] == [
        "| S2 delay | 4 | 3 of 4 | 2.0 / 2.0 / 2.0 | 3.0 / 4.0 / 7.0 | 31 / 31 / 31 |",
        "| H1 stopped | 8, torchrun | 1 of 1 |  | 9.2 |  |",
    ]
