"""Communicators of the probe: ids that members agree on, and 16 slots for however many groups a process makes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from diagnosis.contracts import probeframe
from tests.integration.gloo_double import (
    ALLREDUCE,
    FLOAT,
    Double,
    Driver,
    build,
    only_slot,
    rounds,
    running,
    whole_round,
)


@pytest.fixture(scope="session")
def double(tmp_path_factory: pytest.TempPathFactory) -> Double:
    return build(tmp_path_factory.getbasetemp())


@pytest.fixture
def driver(double: Double, tmp_path: Path) -> Iterator[Driver]:
    with running(double, tmp_path) as program:
        yield program


def identities(driver: Driver) -> list[tuple[int, int, int]]:
    return [(int(s["comm_id"]), int(s["comm_size"]), int(s["comm_rank"])) for s in driver.frame().slots]


def test_members_agree_on_ids_without_talking_and_other_groups_get_others(double: Double, tmp_path: Path) -> None:
    told: list[dict[str, int]] = []
    for rank in (0, 1):
        with running(double, tmp_path) as program:
            program.ask(f"group world {rank} 4")  # torch leaves the world's list empty
            program.ask(f"group first {rank} 2 0,1")
            program.ask(f"group second {rank} 2 0,1")
            program.ask(f"group third {rank} 2 0,1")
            if rank == 0:  # one member uses the first group late, and never the third
                order = ["world", "second", "first"]
            else:
                program.ask(f"group alone 0 2 1,{rank + 2}")
                order = ["first", "second", "third", "world", "alone"]
            ids: dict[str, int] = {}
            for name in order:
                before = {comm_id for comm_id, *_ in identities(program)} if ids else set()
                whole_round(program, name)
                (ids[name],) = {comm_id for comm_id, *_ in identities(program)} - before
            told.append(ids)
    zero, one = told
    assert {name: one[name] for name in zero} == zero
    assert len(set(one.values())) == 5
    assert 0 not in one.values()


def test_a_group_of_unknown_members_is_not_followed(driver: Driver) -> None:
    driver.ask("group world 1 4")
    driver.ask("group helper 0 2")  # no list, and not the world's size: anyone's
    whole_round(driver, "world")
    whole_round(driver, "helper")
    assert [slot["comm_size"] for slot in driver.frame().slots] == [4]
    assert driver.frame().header["works_lost"] == 1


def test_an_ended_group_frees_its_slot_and_the_next_with_its_members_has_another_id(driver: Driver) -> None:
    driver.ask("group world 1 4 0,1,2,3")
    whole_round(driver, "world")
    ((first, *_),) = identities(driver)
    driver.ask("end world")
    assert identities(driver) == []
    driver.ask("group again 1 4 0,1,2,3")
    whole_round(driver, "again")
    ((second, *_),) = identities(driver)
    assert first != second
    assert only_slot(driver)["enqueued"] == 1


def test_rounds_that_never_ran_do_not_outlive_their_group(driver: Driver) -> None:
    driver.ask("group world 1 4 0,1,2,3")
    for i in range(600):
        driver.ask(f"enqueue world w{i} {ALLREDUCE} {FLOAT} 8")
    driver.ask("end world")
    driver.ask("group again 1 4 0,1,2,3")
    for i in range(600):
        driver.ask(f"enqueue again v{i} {ALLREDUCE} {FLOAT} 8")
    assert driver.frame().header["works_lost"] == 0


def test_with_more_groups_than_slots_the_idlest_gives_way_and_keeps_its_numbers(driver: Driver) -> None:
    names = [f"g{i}" for i in range(20)]
    for i, name in enumerate(names):
        driver.ask(f"group {name} 0 2 0,{i + 1}")
    for turn in range(3):
        for name in names:
            driver.ask("advance 10")
            whole_round(driver, name)
        frame = driver.frame()
        assert len(frame.slots) == probeframe.SLOT_COUNT
        assert {int(slot["done"]) for slot in frame.slots} == {turn + 1}
        assert all([r["seq"] for r in rounds(slot)] == list(range(1, turn + 2)) for slot in frame.slots)
    assert frame.header["slots_reused"] == 4 + 20 + 20
    assert frame.header["works_lost"] == 0


def test_a_group_that_finds_only_busy_slots_is_counted_and_goes_on_with_the_right_number(driver: Driver) -> None:
    for i in range(16):
        driver.ask(f"group g{i} 0 2 0,{i + 1}")
        driver.ask(f"enqueue g{i} w{i} {ALLREDUCE} {FLOAT} 8")
    driver.ask("group late 0 3 0,1,2")
    whole_round(driver, "late")
    assert driver.frame().header["works_lost"] == 1
    driver.ask("start w3")
    driver.ask("finish w3")
    whole_round(driver, "late")
    (late,) = (slot for slot in driver.frame().slots if slot["comm_size"] == 3)
    assert [int(late[name]) for name in ("enqueued", "started", "done")] == [2, 2, 2]
    assert [r["seq"] for r in rounds(late)] == [2]


def test_threads_that_drive_slots_from_group_to_group_lose_no_round(driver: Driver) -> None:
    names = [f"g{i}" for i in range(24)]
    for i, name in enumerate(names):
        driver.ask(f"group {name} 0 2 0,{i + 1}")
    driver.ask("realtime")
    driver.ask(f"storm {','.join(names)} 6 {24 * 500} 1")
    assert driver.frame().header["slots_reused"] > 100
    for name in names:
        whole_round(driver, name)
        newest = max(driver.frame().slots, key=lambda slot: int(slot["t_enqueued_ns"]))
        assert [int(newest[field]) for field in ("enqueued", "started", "done")] == [6 * 500 + 1] * 3
    assert driver.frame().header["works_lost"] == 0
