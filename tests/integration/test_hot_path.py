"""What the probes never do once a communicator has worked: allocate, wait for a lock, call the kernel.

*Calls*: callgrind tells whom a probe's code calls, and how much more often in more rounds; that must be the clock, the
functions that it stands in front of or asks, and nobody else: no allocator, no lock of the C library. *Locks*: each
probe has one of its own, for the making and ending of communicators. It is taken here from outside and never given
back, and rounds go on. *The kernel*: rounds on a thread that is ended when it calls it.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import callgrind
from tests.integration import gloo_double, nccl_double
from tests.integration.nccl_double import ALL, COMM_ID
from tests.integration.test_probe_budget import profile as nccl_profile

ROUNDS, STEPS = 200, 14
ALLOCATORS_AND_LOCKS = re.compile(r"alloc|free|_Znwm|_Zna|_Zdl|mutex|rwlock|sem_|cond_|spin|futex|lock$")


@pytest.fixture(scope="module")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> gloo_double.Double:
    return gloo_double.build(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def nccl(tmp_path_factory: pytest.TempPathFactory) -> nccl_double.Double:
    return nccl_double.build(tmp_path_factory.getbasetemp())


def more(few: Counter[callgrind.Place], many: Counter[callgrind.Place]) -> dict[str, int]:
    """Functions by how much more often they are called in `many`; of the C library's variants, the name."""
    grown: Counter[str] = Counter()
    for (_, function), count in (many - few).items():
        grown[re.sub(r"^__(\w+?)_(avx|evex|sse)\w*$|@.*", r"\1", function)] += count
    return dict(grown)


def test_gloo_s_probe_calls_the_clock_and_what_it_stands_before_and_nobody_else(
    gloo: gloo_double.Double, tmp_path: Path
) -> None:
    few, many = (
        callgrind.read(gloo_double.profile(gloo.driver, tmp_path, rounds, STEPS)).called_by(gloo_double.probe_library())
        for rounds in (ROUNDS, 2 * ROUNDS)
    )
    grown = more(few, many)
    clock = grown.pop("clock_gettime")
    assert clock == ROUNDS * (3 + 2 * STEPS)  # entered, started, ended; around each wait for a receive
    once = {name: count for name, count in grown.items() if count == ROUNDS}
    steps = {name: count for name, count in grown.items() if count == ROUNDS * STEPS}
    assert once | steps == grown
    assert len(steps) == 4
    assert all("UnboundBuffer" in name for name in steps)
    assert all("ProcessGroupGloo" in name or name.startswith("aoti_torch_get_") for name in once)


def test_nccl_s_plugin_calls_the_clock_and_compares_names_and_nothing_else(
    nccl: nccl_double.Double, tmp_path: Path
) -> None:
    few, many = (
        nccl_profile(nccl.driver, nccl.plugin, rounds, tmp_path, ALL).called_by(nccl.plugin)
        for rounds in (ROUNDS, 2 * ROUNDS)
    )
    grown = more(few, many)
    assert set(grown) == {"clock_gettime", "strcasecmp"}
    assert grown["clock_gettime"] == 3 * ROUNDS  # called, begun, over


@pytest.mark.parametrize("library", [gloo_double.probe_library, nccl_double.plugin_library])
def test_a_probe_asks_its_c_library_for_no_allocator_and_no_lock_at_all(library: Callable[[], Path]) -> None:
    asked = ["nm", "-D", "--undefined-only", str(library())]
    wanted = subprocess.run(asked, check=True, capture_output=True, text=True).stdout
    names = [line.split()[-1].split("@")[0] for line in wanted.splitlines()]
    assert "clock_gettime" in names
    assert [name for name in names if ALLOCATORS_AND_LOCKS.search(name) and name != "posix_fallocate"] == []


def hold_for_ever(pid: int, library: Path, lock: str) -> None:
    """Take a lock of a running process's library from outside."""
    symbols = subprocess.run(["nm", library], check=True, capture_output=True, text=True).stdout
    (offset,) = (int(line.split()[0], 16) for line in symbols.splitlines() if line.split()[-1] == lock)
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    base = min(int(line.split("-")[0], 16) for line in maps if line.endswith(str(library)))
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        memory.seek(base + offset)
        assert memory.read(4) == bytes(4)
        memory.seek(base + offset)
        memory.write((1).to_bytes(4, "little"))


def test_rounds_of_gloo_wait_for_no_lock(gloo: gloo_double.Double, tmp_path: Path) -> None:
    with gloo_double.running(gloo, tmp_path) as driver:
        driver.ask("group world 0 4 0,1,2,3")
        driver.ask("storm world 1 1 1")
        hold_for_ever(driver.pid, gloo_double.probe_library(), "_ZN6tocsin12_GLOBAL__N_16g_lockE")
        driver.ask(f"storm world 4 {ROUNDS} {STEPS}")
        assert gloo_double.only_slot(driver)["done"] == 1 + 4 * ROUNDS


def test_rounds_of_nccl_wait_for_no_lock_nor_does_the_first_of_a_communicator(
    nccl: nccl_double.Double, tmp_path: Path
) -> None:
    with nccl_double.running(nccl, tmp_path) as driver:
        driver.ask(f"comm a {COMM_ID} 16 3")
        driver.ask("comm b 7 16 3")
        driver.ask("allreduce a 1 2 2")
        hold_for_ever(driver.pid, nccl.plugin, "g_lock")
        driver.ask(f"allreduce a {ROUNDS} 8 {STEPS}")
        driver.ask(f"allreduce b {ROUNDS} 8 {STEPS}")
        assert driver.slot()["done"] == 1 + ROUNDS
        assert driver.frame().header["works_lost"] == ROUNDS  # of b, which got no slot meanwhile


def test_rounds_of_gloo_call_the_kernel_for_nothing(gloo: gloo_double.Double, tmp_path: Path) -> None:
    with gloo_double.running(gloo, tmp_path) as driver:
        driver.ask("realtime")
        driver.ask("group world 0 4 0,1,2,3")
        assert driver.ask(f"strict world {ROUNDS} {STEPS}") == "1"
        assert gloo_double.only_slot(driver)["done"] == 1 + ROUNDS
        driver.ask("calling_clock")  # and if the clock did, it would show
        assert driver.ask(f"strict world {ROUNDS} {STEPS}") == "0"
