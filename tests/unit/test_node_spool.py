"""The spool keeps what it can, within its bounds, whatever the disk does."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from node_daemon.spool import Spool, Spooled


def report(sample: int, epoch: int = 1000, body: bytes = b"x" * 100, mono_ns: int = 0) -> Spooled:
    return Spooled(epoch, sample, "boot-a", mono_ns, 0, body)


def opened(directory: Path, *, reports_max: int = 100, bytes_max: int = 1 << 20) -> Spool:
    spool = Spool(directory, reports_max=reports_max, bytes_max=bytes_max)
    spool.open()
    return spool


def drained(spool: Spool) -> list[tuple[int, int]]:
    found = []
    while (oldest := spool.oldest()) is not None:
        found.append((oldest.epoch, oldest.sample))
        spool.remove(oldest)
    return found


def test_reports_come_out_in_the_order_of_their_measurement(tmp_path: Path) -> None:
    spool = opened(tmp_path / "spool")
    for item in (report(3), report(2), report(10), report(1, epoch=1001), report(9, epoch=999)):
        spool.put(item)
    assert drained(spool) == [(999, 9), (1000, 2), (1000, 3), (1000, 10), (1001, 1)]
    assert (len(spool), spool.bytes, list((tmp_path / "spool").iterdir())) == (0, 0, [])


def test_the_oldest_go_and_are_counted_when_there_are_too_many(tmp_path: Path) -> None:
    spool = opened(tmp_path, reports_max=3)
    for sample in range(5):
        spool.put(report(sample))
    assert spool.dropped == 2
    assert drained(spool) == [(1000, 2), (1000, 3), (1000, 4)]


def test_the_size_in_bytes_is_bounded_too(tmp_path: Path) -> None:
    spool = opened(tmp_path, bytes_max=1000)
    for sample in range(20):
        spool.put(report(sample))
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) == spool.bytes <= 1000
    assert spool.dropped == 20 - len(spool)
    assert drained(spool)[-1] == (1000, 19)


def test_a_report_that_is_put_twice_is_kept_once(tmp_path: Path) -> None:
    spool = opened(tmp_path)
    spool.put(report(1))
    size = spool.bytes
    spool.put(report(1))
    assert (len(spool), spool.bytes) == (1, size)


def test_a_restart_takes_up_what_was_left(tmp_path: Path) -> None:
    former = opened(tmp_path)
    for sample in range(5):
        former.put(report(sample))
    spool = opened(tmp_path, reports_max=4)
    assert (len(spool), spool.dropped) == (4, 1)
    assert drained(spool) == [(1000, 1), (1000, 2), (1000, 3), (1000, 4)]


def test_garbage_is_dropped_and_counted_and_strangers_are_left_alone(tmp_path: Path) -> None:
    opened(tmp_path).put(report(5))
    sound = next(tmp_path.iterdir())
    (tmp_path / f"{1:019d}-{1:010d}.report").write_bytes(b"")
    (tmp_path / f"{1:019d}-{2:010d}.report").write_bytes(os.urandom(500))
    (tmp_path / f"{1:019d}-{3:010d}.report").write_bytes(sound.read_bytes())
    (tmp_path / f"{1:019d}-{4:010d}.report").write_bytes(sound.read_bytes()[:-1])
    (tmp_path / f"{1:019d}-{5:010d}.report").mkdir()
    (tmp_path / f"{1:019d}-{6:010d}.report.part").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("of a person")
    spool = opened(tmp_path)
    assert drained(spool) == [(1000, 5)]
    assert spool.dropped == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{1:019d}-{5:010d}.report", "notes.txt"]


def test_a_file_that_goes_away_is_a_lost_report_and_no_crash(tmp_path: Path) -> None:
    spool = opened(tmp_path)
    spool.put(report(1))
    spool.put(report(2))
    min(tmp_path.iterdir()).unlink()
    assert drained(spool) == [(1000, 2)]
    assert spool.dropped == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A place with room for a few reports only: a file system of 16 KiB, without root a limit on each file's size."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() == 0:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(disk)], check=True, timeout=10)
        try:
            yield disk
        finally:
            subprocess.run(["umount", str(disk)], check=True, timeout=10)
    else:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        try:
            yield disk
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_costs_reports_and_never_the_daemon(small_disk: Path) -> None:
    spool = opened(small_disk)
    for sample in range(20):
        spool.put(report(sample))
    assert spool.dropped >= 10
    assert len(spool) + spool.dropped == 20
    assert len(drained(spool)) == 20 - spool.dropped
    assert list(small_disk.iterdir()) == []


def test_a_directory_that_cannot_be_written_costs_reports(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    spool = Spool(tmp_path / "file" / "spool", reports_max=10, bytes_max=1000)
    with pytest.raises(OSError, match="Not a directory"):
        spool.open()
    spool.put(report(1))
    assert (spool.dropped, spool.oldest()) == (1, None)


def test_age_runs_by_the_monotonic_clock_and_across_a_boot_by_the_wall_clock() -> None:
    item = Spooled(1, 1, "boot-a", 5_000_000_000, 100_000_000_000, b"")
    assert item.age_ms("boot-a", 7_500_000_000, 0) == 2500
    assert item.age_ms("boot-b", 1_000_000_000, 160_000_000_000) == 60_000
    assert item.age_ms("boot-b", 1_000_000_000, 90_000_000_000) == 0
