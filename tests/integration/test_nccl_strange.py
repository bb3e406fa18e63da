"""What a job or a release of NCCL may do that nobody would think of: the plugin counts on, and the job goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from node_daemon.native.nccl.masks import masks_for
from tests.integration.gloo_double import rounds
from tests.integration.nccl_double import ALL, COMM_ID, Double, Driver, build, running

LIVES = 100_000
SECOND_NS = 1_000_000_000


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> Double:
    return build(tmp_path_factory.getbasetemp())


@pytest.fixture
def driver(double: Double, tmp_path: Path) -> Iterator[Driver]:
    with running(double, tmp_path) as program:
        yield program


def test_more_communicators_than_a_handle_can_count_live_one_after_the_other(driver: Driver) -> None:
    driver.ask(f"comm a {COMM_ID} 16 3")
    driver.coll("old")
    driver.ask("finalize a")
    assert driver.ask(f"lives {LIVES}") == str(LIVES)
    driver.ask("end old")
    driver.ask(f"comm b {COMM_ID} 16 3")
    driver.ask("allreduce b 3 2 2")
    frame = driver.frame()
    assert [int(slot["comm_id"]) for slot in frame.slots] == [COMM_ID]
    assert [int(frame.slots[0][name]) for name in ("enqueued", "started", "done", "send_steps")] == [3, 3, 3, 12]
    assert (frame.header["slots_reused"], frame.header["works_lost"]) == (0, 0)
    driver.finish()


@pytest.mark.parametrize(("ranks", "rank"), [(0, 0), (-1, 0), (4, -1), (4, 4), (-(2**31), 5), (4, 2**31 + 1)])
def test_a_communicator_of_impossible_ranks_is_off_and_told_success(driver: Driver, ranks: int, rank: int) -> None:
    assert driver.ask(f"comm odd {COMM_ID} {ranks} {rank}").split()[:2] == ["0", "0"]
    driver.ask("allreduce odd 1 2 2")
    assert driver.ask("finalize odd") == "0"
    assert len(driver.frame().slots) == 0
    driver.ask("comm a 7 4 1")
    driver.ask("allreduce a 1 2 2")
    assert int(driver.slot(7)["done"]) == 1
    driver.finish()


def test_two_initialisations_and_two_ends_of_one_communicator_are_one(driver: Driver) -> None:
    driver.ask(f"comm a {COMM_ID} 16 3")
    assert driver.ask(f"comm again {COMM_ID} 16 3").split()[:2] == ["0", "0"]
    driver.ask("allreduce again 1 2 2")
    driver.ask("finalize again")
    driver.ask("allreduce a 2 2 2")
    assert int(driver.slot()["done"]) == 2
    driver.ask("finalize a")
    driver.ask(f"comm next {COMM_ID} 16 3")
    driver.ask("finalize a")
    driver.ask("allreduce next 1 2 2")
    assert int(driver.slot()["done"]) == 1
    driver.finish()


@pytest.mark.parametrize("first", ["22907", "23007"])
def test_each_of_two_releases_in_one_process_is_asked_for_what_is_safe_with_it(
    double: Double, tmp_path: Path, first: str
) -> None:
    """torch brings one and another library its own; what the one delivers for nothing ends the program in the other."""
    with running(double, tmp_path, 6, FAKE_NCCL_VERSION=first, TOCSIN_NCCL_EVENTS="") as driver:
        for number, release in enumerate((first, "22907", "23007", first)):
            driver.ask(f"release {release}")
            row = masks_for(int(release))
            assert row is not None
            assert driver.ask(f"comm c{number} {COMM_ID + number} 4 1") == f"0 1 {int(row.standing)}"
            assert int(driver.frame().header["event_mask"]) == row.standing
        driver.finish()


@pytest.mark.parametrize("stamp", [(1 << 64) - 1, 10**15])
def test_one_wrong_stamp_of_the_gpu_does_not_take_away_the_own_times_after_it(driver: Driver, stamp: int) -> None:
    assert driver.ask(f"comm a {COMM_ID} 16 3") == f"0 1 {ALL}"
    now_ns = 3600 * SECOND_NS
    for number in range(6):
        driver.coll(f"x{number}")
        begun_ns = stamp if number == 2 else now_ns + number * 1_000_000
        driver.kernel(f"x{number}", 0, begun_ns, now_ns + number * 1_000_000 + 400_000)
    told = {int(entry["seq"]): (int(entry["gap_us"]), int(entry["dur_us"])) for entry in rounds(driver.slot())}
    assert told[2] == told[5] == told[6] == (600, 400)
    driver.finish()
