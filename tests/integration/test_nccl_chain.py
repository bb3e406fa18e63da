"""Another profiler plugin behind ours: both get what each has asked for, and neither disturbs the other."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from diagnosis.contracts import probeframe
from diagnosis.contracts.probeframe import Untold
from node_daemon.native.nccl.masks import Event
from tests.integration.gloo_double import DEADLINE_S
from tests.integration.nccl_double import COMM_ID, HERE, INCLUDES, INTERFACES, Double, Driver, build, running

SANITIZERS = ("", "address,undefined", "thread")
API = Event.GROUP_API | Event.COLL_API


@pytest.fixture(scope="module", params=SANITIZERS, ids=lambda name: name or "plain")
def checked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Double, Path]:
    """The program and the other plugin, once as they are and once under each sanitizer."""
    base, sanitizer = tmp_path_factory.getbasetemp(), request.param
    return build(base, sanitizer), build_other(base, sanitizer)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Double, Path]:
    base = tmp_path_factory.getbasetemp()
    return build(base), build_other(base)


def build_other(base: Path, sanitizer: str = "", *defined: str) -> Path:
    name = "_".join((sanitizer.replace(",", "_") or "plain", *defined))
    library = base / f"libnccl-profiler-other_{name}.so"
    options = [*([f"-fsanitize={sanitizer}"] if sanitizer else []), *(f"-D{word}" for word in defined)]
    command = ["gcc", "-std=gnu11", "-g", "-Wall", "-Wextra", "-Werror", *options, "-shared", "-fPIC", *INCLUDES]
    subprocess.run([*command, HERE / "other_plugin.c", "-o", library], check=True, timeout=DEADLINE_S)
    return library


def environment(other: Path | str, out: Path, mask: Event) -> dict[str, str]:
    return {"TOCSIN_NCCL_CHAIN": str(other), "OTHER_OUT": str(out), "OTHER_MASK": str(int(mask))}


def counts(out: Path) -> dict[Event, tuple[int, int, int]]:
    """Started, stopped and recorded, of each kind that the other plugin saw."""
    rows = [[int(word) for word in line.split()] for line in out.read_text().splitlines()]
    return {Event(kind): (begun, ended, states) for kind, begun, ended, states in rows if begun or ended or states}


@pytest.mark.parametrize("interface", INTERFACES)
def test_both_see_what_each_has_asked_for(checked: tuple[Double, Path], tmp_path: Path, interface: int) -> None:
    double, other = checked
    asked, own = Event.COLL | Event.PROXY_STEP, Event.COLL | Event.COLL_API | Event.KERNEL_CH
    env = environment(other, tmp_path / "out", asked) | {"TOCSIN_NCCL_EVENTS": str(int(own))}
    with running(double, tmp_path, interface, **env) as driver:
        assert driver.ask(f"comm a {COMM_ID} 16 3") == f"0 1 {int(asked | own)}"
        driver.ask("allreduce a 3 2 14")
        slot = driver.slot()
        assert [int(slot[name]) for name in ("enqueued", "done", "send_steps")] == [3, 3, 3 * 2 * 14]
        driver.ask("finalize a")
        driver.finish()
    seen = counts(tmp_path / "out")
    steps, kinds = 3 * 2 * 2 * 14, Event.GROUP | Event.COLL | Event.PROXY_OP | Event.PROXY_STEP
    assert seen[Event.PROXY_STEP] == (steps, steps, 3 * steps)
    assert seen[Event.COLL] == (3, 3, 0)
    assert set(seen) == set(kinds | API if interface > 4 else kinds)  # and no kernels, for which it did not ask


@pytest.mark.parametrize("interface", INTERFACES)
def test_another_made_for_an_older_nccl_hears_what_it_knows(
    plain: tuple[Double, Path], tmp_path: Path, interface: int
) -> None:
    double, _ = plain
    other = build_other(tmp_path, "", "ONLY_V5")
    with running(double, tmp_path, interface, **environment(other, tmp_path / "out", Event(0xFFFF))) as driver:
        driver.ask(f"comm a {COMM_ID} 16 3")
        driver.ask("allreduce a 3 2 14")
        assert not driver.begin("ce", "a", Event.CE_COLL)
        assert int(driver.slot()["done"]) == 3
        driver.ask("finalize a")
        driver.finish()
    if interface == 4:  # too different: ours is alone
        assert not (tmp_path / "out").exists()
        return
    seen = counts(tmp_path / "out")
    assert seen[Event.COLL] == (3, 3, 0)
    assert Event.CE_COLL not in seen and Event.KERNEL_CH in seen


@pytest.mark.parametrize("named", ["other_plain", "libnccl-profiler-other_plain.so"])
def test_another_is_found_by_name_as_nccl_finds_it(plain: tuple[Double, Path], tmp_path: Path, named: str) -> None:
    double, other = plain
    env = environment(named, tmp_path / "out", Event.COLL) | {"LD_LIBRARY_PATH": str(other.parent)}
    with running(double, tmp_path, 6, **env) as driver:
        alone(driver)
        driver.finish()
    assert counts(tmp_path / "out")[Event.COLL] == (2, 2, 0)


def test_threads_at_once_lose_nothing_of_either(checked: tuple[Double, Path], tmp_path: Path) -> None:
    double, other = checked
    with running(double, tmp_path, 5, **environment(other, tmp_path / "out", Event(0xFF))) as driver:
        for number, name in enumerate(("a", "b")):
            driver.ask(f"comm {name} {COMM_ID + number} 16 3")
        driver.ask("pipelines 60 2 3 a b")
        assert [int(driver.slot(COMM_ID + number)["done"]) for number in range(2)] == [60, 60]
        assert int(driver.slot()["recv_steps"]) == 60 * 2 * 3
        driver.ask("finalize a")
        driver.ask("finalize b")
        driver.finish()
    steps = 2 * 60 * 2 * 2 * 3
    assert counts(tmp_path / "out")[Event.PROXY_STEP] == (steps, steps, 3 * steps)
    assert counts(tmp_path / "out")[Event.KERNEL_CH] == (240, 240, 240)


def test_what_is_asked_for_by_the_daemon_leaves_the_other_s_events_alone(
    plain: tuple[Double, Path], tmp_path: Path
) -> None:
    double, other = plain
    env = environment(other, tmp_path / "out", Event.PROXY_STEP) | {"TOCSIN_NCCL_EVENTS": "-"}
    with running(double, tmp_path, 7, FAKE_NCCL_VERSION="23102", **env) as driver:
        standing = int(driver.ask(f"comm a {COMM_ID} 4 1").split()[2])
        assert standing & Event.PROXY_STEP
        with driver.frame_path().open("r+b") as file:
            file.seek(probeframe.CONTROL_OFFSET)
            until_s = int(time.monotonic()) + 30
            file.write(probeframe.control_word(int(Event.KERNEL_CH), until_s).to_bytes(8, "little"))
        driver.ask("allreduce a 2 1 1")
        assert int(driver.ask("mask")) == standing | Event.KERNEL_CH
        assert Untold(int(driver.slot()["unknown"])) == Untold.ERRORS


def alone(driver: Driver) -> None:
    driver.ask(f"comm a {COMM_ID} 4 1")
    driver.ask("allreduce a 2 1 1")
    assert int(driver.slot()["done"]) == 2
    driver.ask("finalize a")


def test_another_that_fails_leaves_ours_alone(plain: tuple[Double, Path], tmp_path: Path) -> None:
    double, other = plain
    with running(double, tmp_path, 5, OTHER_FAILS="1", **environment(other, tmp_path / "out", Event.COLL)) as driver:
        alone(driver)
        driver.finish()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("named", ["/nowhere/lib.so", "nobody"])
def test_another_that_is_not_there_is_said_to_be_and_no_more(
    plain: tuple[Double, Path], tmp_path: Path, named: str
) -> None:
    double, _ = plain
    env = environment(named, tmp_path / "out", Event.COLL) | {"TOCSIN_PROBE_DEBUG": "1"}
    with running(double, tmp_path, 5, **env) as driver:
        alone(driver)
        assert driver.finish().count("could not be loaded") == 1


def test_the_other_works_on_where_ours_is_off(plain: tuple[Double, Path], tmp_path: Path) -> None:
    double, other = plain
    env = environment(other, tmp_path / "out", Event.COLL | Event.PROXY_OP)
    with running(double, tmp_path / "absent", 5, **env) as driver:
        assert driver.ask(f"comm a {COMM_ID} 4 1") == f"0 1 {int(Event.COLL | Event.PROXY_OP)}"
        driver.ask("allreduce a 2 3 1")
        driver.ask("finalize a")
        driver.finish()
    assert counts(tmp_path / "out")[Event.PROXY_OP] == (12, 12, 12)


def test_handles_that_nobody_gave_out_reach_neither(plain: tuple[Double, Path], tmp_path: Path) -> None:
    double, other = plain
    with running(double, tmp_path, 5, **environment(other, tmp_path / "out", Event(0xFF))) as driver:
        driver.ask(f"comm a {COMM_ID} 4 1")
        driver.coll("x")
        for handle in ("-", "0x1", "0x3", "0x100001", "0xfffffffffffffff1", "0x7f0012345678"):
            driver.ask(f"end {handle}")
            driver.ask(f"state {handle} 22 5")
            for event in (Event.COLL, Event.PROXY_OP, Event.PROXY_STEP, Event.KERNEL_CH):
                driver.begin("h", "a", event, handle)
                driver.ask("end h")
        driver.ask("finalize a")
        for event in (Event.COLL, Event.PROXY_OP):
            assert not driver.begin("late", "a", event, "x")
        driver.finish()
