"""The table of NCCL events that are safe, and its copy for the plugin."""

from __future__ import annotations

import pytest

from node_daemon.native.nccl.masks import (
    HEADER_PATH,
    INTERFACES,
    TABLE,
    Event,
    masks_for,
    masks_unknown,
    render,
)

PROXIED = Event.PROXY_OP | Event.PROXY_STEP | Event.NET_PLUGIN
"""Delivered by the network proxy's thread."""


def test_the_header_file_is_what_the_generator_writes_today() -> None:
    assert HEADER_PATH.read_text() == render(), "run python -m node_daemon.native.nccl.masks"


def test_the_rows_ascend_and_each_says_why() -> None:
    assert [row.code for row in TABLE] == sorted({row.code for row in TABLE})
    assert all(row.why for row in TABLE)
    assert [row.interface for row in TABLE] == sorted(row.interface for row in TABLE)
    assert {row.interface for row in TABLE} == set(INTERFACES)


def test_every_row_counts_rounds_and_widens_what_stands() -> None:
    for row in TABLE:
        assert row.standing & Event.COLL, row
        assert row.interface == 4 or row.standing & Event.COLL_API, row
        assert row.standing & ~row.widest == 0, row
        assert row.needs_shm & ~row.widest == 0, row


def test_no_interface_is_asked_for_events_that_it_does_not_have() -> None:
    newest = {4: Event.NET_PLUGIN, 5: Event.KERNEL_LAUNCH, 6: Event.CE_BATCH, 7: Event.KERNEL_PHASE}
    for row in TABLE:
        assert row.widest < 2 * newest[row.interface], row


@pytest.mark.parametrize(
    ("version", "never"),
    [
        (22707, Event.KERNEL_CH),  # "Proxy append out of bounds" (issue 2039)
        (23003, PROXIED | Event.KERNEL_CH),  # crash with mask 4095 over several nodes (issue 2112)
        (23007, PROXIED | Event.KERNEL_CH),
        (23300, PROXIED | Event.KERNEL_CH),  # nobody has tried it
    ],
)
def test_what_has_crashed_jobs_is_not_even_asked_for(version: int, never: Event) -> None:
    row = masks_for(version)
    assert row is not None
    assert not row.widest & never


@pytest.mark.parametrize(
    ("version", "stands"),
    [(22809, True), (22907, True), (23102, False), (23203, False)],  # 0.44 % on 2.29.7, 10.49 % on 2.31.2 (issue 2355)
)
def test_kernel_events_stand_only_where_they_are_cheap(version: int, stands: bool) -> None:
    row = masks_for(version)
    assert row is not None
    assert bool(row.standing & Event.KERNEL_CH) == stands
    assert row.widest & Event.KERNEL_CH


def test_kernel_events_need_dev_shm_as_long_as_the_proxy_delivers_them() -> None:
    for row in TABLE:
        by_proxy = row.interface < 7
        assert bool(row.needs_shm & Event.KERNEL_CH) == bool(by_proxy and row.widest & Event.KERNEL_CH), row


def test_a_release_without_the_interfaces_has_no_row() -> None:
    assert masks_for(22605) is None
    assert masks_for(22700) is TABLE[0]
    assert masks_for(29999) is TABLE[-1]


def test_where_the_release_is_unknown_only_what_all_of_its_interface_allow_is_on() -> None:
    standing, widest, needs_shm = masks_unknown(6)
    assert (standing, widest) == (Event.COLL | Event.COLL_API, Event.COLL | Event.COLL_API)  # because of 2.30
    assert needs_shm & Event.KERNEL_CH
    for interface in INTERFACES:
        standing, widest, _ = masks_unknown(interface)
        for row in (row for row in TABLE if row.interface == interface):
            assert standing & ~row.standing == 0
            assert widest & ~row.widest == 0


def test_the_page_tells_the_table_as_it_is() -> None:
    page = (HEADER_PATH.parents[3] / "docs" / "probe-frame.md").read_text()
    names = {name.replace("_", "").lower(): event for event in Event if (name := event.name)}
    told = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 6 and cells[2] in {f"v{interface}" for interface in INTERFACES} | {"v5, v6"}:
            for release in cells[1].split(", "):
                stands, more = (
                    Event(sum(names.get(word.strip().lower(), 0) for word in cell.split(","))) for cell in cells[3:5]
                )
                told[release] = (stands, stands | more)
    rows = {".".join(map(str, row.since[:2])): (row.standing, row.widest) for row in TABLE}
    assert told == {**{release: rows[release] for release in rows if release != "2.33"}, "newer": rows["2.33"]}
