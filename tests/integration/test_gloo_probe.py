"""The probe on a stand-in for torch, where time, threads, failures and library versions are the test's to choose."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from diagnosis.contracts import probeframe
from diagnosis.contracts.probeframe import Dtype, Op, WaitState
from tests.integration.gloo_double import (
    ALLREDUCE,
    FLOAT,
    Double,
    Driver,
    build,
    only_slot,
    probe_library,
    rounds,
    running,
    whole_round,
)

# c10d::OpType and c10::ScalarType, as torch numbers them.
BROADCAST, REDUCE, ALLGATHER, GATHER, SCATTER, ALLTOALL, BARRIER = 0, 3, 4, 7, 8, 10, 15
INT64, BF16, INT16 = 4, 15, 2


@pytest.fixture(scope="session")
def double(tmp_path_factory: pytest.TempPathFactory) -> Double:
    return build(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def old_double(tmp_path_factory: pytest.TempPathFactory) -> Double:
    return build(tmp_path_factory.getbasetemp(), old=True)


@pytest.fixture
def driver(double: Double, tmp_path: Path) -> Iterator[Driver]:
    with running(double, tmp_path) as program:
        yield program


def test_every_interposed_name_is_one_that_the_installed_torch_defines() -> None:
    torch_library = Path(pytest.importorskip("torch").__file__).parent / "lib" / "libtorch_cpu.so"
    assert hooked_names() - defined_names(torch_library) == set()


def test_the_double_defines_every_interposed_name(double: Double) -> None:
    assert hooked_names() - defined_names(double.directory / "libtorch_cpu.so") == set()


def defined_names(library: Path) -> set[str]:
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], check=True, capture_output=True, text=True, timeout=120
    ).stdout
    return {line.split()[-1] for line in listed.splitlines()}


def hooked_names() -> set[str]:
    return defined_names(probe_library())


def test_the_library_needs_only_the_c_library() -> None:
    told = subprocess.run(
        ["readelf", "-d", str(probe_library())], check=True, capture_output=True, text=True, timeout=10
    ).stdout
    needed = {line.split("[")[1].rstrip("]") for line in told.splitlines() if "(NEEDED)" in line}
    assert needed <= {"libc.so.6", "libdl.so.2", "libpthread.so.0"}


def test_no_file_is_made_before_the_first_collective(driver: Driver) -> None:
    driver.ask("group world 1 4 0,1,2,3")
    assert not driver.frame_path().exists()
    whole_round(driver, "world")
    assert driver.frame_path().stat().st_mode & 0o7777 == 0o600
    assert driver.frame_path().stat().st_size == probeframe.FILE_BYTES


@pytest.mark.parametrize(
    ("op_type", "dtype", "side", "expected"),
    [
        (ALLREDUCE, FLOAT, "inputs", (Op.ALL_REDUCE, Dtype.FLOAT32)),
        (BROADCAST, INT64, "inputs", (Op.BROADCAST, Dtype.INT64)),
        (REDUCE, BF16, "inputs", (Op.REDUCE, Dtype.BFLOAT16)),
        (ALLGATHER, INT16, "inputs", (Op.ALL_GATHER, Dtype.OTHER)),
        (SCATTER, FLOAT, "outputs", (Op.SCATTER, Dtype.FLOAT32)),
        (ALLTOALL, FLOAT, "inputs", (Op.ALL_TO_ALL, Dtype.FLOAT32)),
        (200, 44, "inputs", (Op.UNKNOWN, Dtype.OTHER)),
    ],
)
def test_a_round_tells_its_operation_type_and_count(
    driver: Driver, op_type: int, dtype: int, side: str, expected: tuple[Op, Dtype]
) -> None:
    driver.ask("group world 1 4 0,1,2,3")
    driver.ask(f"enqueue world w {op_type} {dtype} 12345 {side}")
    slots = driver.frame().slots
    assert [slots[name].tolist() for name in ("op", "dtype", "count", "root")] == [
        [value] for value in (*expected, 12345, -1)
    ]
    signatures = probeframe.signatures(slots["op"], slots["dtype"], slots["count"], slots["root"])
    assert [entry["signature"] for entry in rounds(slots[0])] == signatures.tolist()


def test_a_barrier_has_no_elements(driver: Driver) -> None:
    driver.ask("group world 1 4 0,1,2,3")
    driver.ask(f"enqueue world w {BARRIER} {FLOAT} 7")
    slot = only_slot(driver)
    assert (slot["op"], slot["dtype"], slot["count"]) == (Op.BARRIER, Dtype.UNKNOWN, 0)


@pytest.mark.parametrize(("call", "op_type"), [("broadcast", BROADCAST), ("gather", GATHER), ("scatter", SCATTER)])
def test_the_root_is_told_where_torch_tells_it(driver: Driver, call: str, op_type: int) -> None:
    driver.ask("group world 1 4 0,1,2,3")
    driver.ask(f"rooted world {call} 3")
    driver.ask(f"enqueue world w {op_type} {FLOAT} 7")
    assert only_slot(driver)["root"] == 3
    driver.ask(f"enqueue world x {ALLREDUCE} {FLOAT} 7")
    assert only_slot(driver)["root"] == probeframe.ROOT_NONE


def test_times_counters_and_own_time_follow_the_clock(driver: Driver) -> None:
    driver.ask("group world 1 4 0,1,2,3")
    driver.ask(f"enqueue world a {ALLREDUCE} {FLOAT} 8")  # enters at 0
    driver.ask("advance 100")
    driver.ask("start a")
    driver.ask("advance 900")
    driver.ask("finish a")  # leaves at 1,000
    driver.ask("advance 30000")
    driver.ask(f"enqueue world b {ALLREDUCE} {FLOAT} 8")  # 30,000 after leaving a
    driver.ask("advance 2000")
    driver.ask(f"enqueue world c {ALLREDUCE} {FLOAT} 8")  # 2,000 after entering b, which is not over
    slot = only_slot(driver)
    assert [slot[name] for name in ("enqueued", "started", "done")] == [3, 1, 1]
    assert slot["dur_sum_ns"] == 1_000_000
    assert slot["gap_sum_ns"] == 32_000_000
    assert slot["t_enqueued_ns"] - slot["t_done_ns"] == 32_000_000
    assert slot["t_done_ns"] - slot["t_started_ns"] == 900_000
    assert [(r["seq"], r["gap_us"], r["dur_us"]) for r in rounds(slot)] == [
        (1, 0, 1000),
        (2, 30000, probeframe.DUR_OPEN),
        (3, 2000, probeframe.DUR_OPEN),
    ]


def test_own_time_begins_anew_after_an_operation_on_any_communicator(driver: Driver) -> None:
    driver.ask("group world 1 4 0,1,2,3")
    driver.ask("group pair 1 2 0,1")
    whole_round(driver, "world")
    driver.ask("advance 5000")
    whole_round(driver, "pair")
    driver.ask("advance 70")
    driver.ask("step - recv 3 8")  # point-to-point
    driver.ask("advance 30")
    whole_round(driver, "world")
    world, pair = sorted(driver.frame().slots, key=lambda slot: -int(slot["comm_size"]))
    assert [r["gap_us"] for r in rounds(world)] == [0, 30]
    assert [r["gap_us"] for r in rounds(pair)] == [5000]
    assert world["recv_steps"] == 0


def test_an_open_round_shows_its_steps_and_what_it_waits_for(driver: Driver) -> None:
    driver.ask("group world 1 4 0,1,2,3")
    driver.ask(f"enqueue world w {ALLREDUCE} {FLOAT} 8")
    assert only_slot(driver)["open"]["seq"].tolist() == [0, 0]  # entered, not executing
    driver.ask("start w")
    driver.ask("step w send 2 4096")
    driver.ask("step w send 2 4096")
    driver.ask("step w recv 0 4096")
    driver.ask("step w recv 0 4096 held")
    slot = only_slot(driver)
    opened = slot["open"][0]
    assert (opened["seq"], opened["send_steps"], opened["recv_steps"]) == (1, 2, 1)
    assert opened["signature"] == rounds(slot)[0]["signature"] != 0
    assert slot["lanes"][0]["wait_state"] == WaitState.RECV
    driver.ask("advance 250")
    driver.ask("gate done")
    driver.ask("finish w")
    slot = only_slot(driver)
    assert slot["open"]["seq"].tolist() == [0, 0]
    assert slot["bytes"] == 8192
    assert (slot["send_steps"], slot["recv_steps"]) == (2, 2)
    used = {int(lane["peer"]): lane for lane in slot["lanes"] if lane["used"]}
    assert {peer: (int(lane["send_steps"]), int(lane["recv_steps"])) for peer, lane in used.items()} == {
        2: (2, 0),
        0: (0, 2),
    }
    assert used[0]["recv_wait_us"] == 250
    assert all(lane["wait_state"] == WaitState.NONE for lane in used.values())


def test_two_rounds_at_once_keep_their_steps_apart_and_a_third_is_still_counted(driver: Driver) -> None:
    driver.ask("group world 1 4 0,1,2,3")
    for name in "abc":
        driver.ask(f"enqueue world {name} {ALLREDUCE} {FLOAT} 8")
        driver.ask(f"start {name}")
    driver.ask("step a send 2 8")
    driver.ask("step b send 2 8")
    driver.ask("step b send 2 8")
    driver.ask("step c send 2 8")
    slot = only_slot(driver)
    assert {int(o["seq"]): int(o["send_steps"]) for o in slot["open"]} == {1: 1, 2: 2}
    assert slot["send_steps"] == 4
    for name in "bca":
        driver.ask(f"finish {name}")
    slot = only_slot(driver)
    assert (slot["started"], slot["done"], slot["open"]["seq"].tolist()) == (3, 3, [0, 0])


def test_a_lane_is_the_peer_modulo_32(driver: Driver) -> None:
    driver.ask("group world 1 100 " + ",".join(map(str, range(100))))
    driver.ask(f"enqueue world w {ALLREDUCE} {FLOAT} 8")
    driver.ask("start w")
    driver.ask("step w send 70 8")
    driver.ask("finish w")
    lane = only_slot(driver)["lanes"][70 % 32]
    assert (lane["peer"], lane["send_steps"]) == (70, 1)


@pytest.mark.parametrize(
    ("mode", "commands"),
    [
        ("", ["step w recv 0 8 held", "gate throw", "finish w"]),  # the wait throws, the real execute catches
        ("", ["step w send 2 8 held", "gate throw", "finish w"]),
        ("", ["step w recv 0 8 held", "gate aborted", "finish w"]),  # the wait says false
        ("", ["throw w"]),  # something else in the operation throws
        ("through", ["step w recv 0 8 held", "gate throw", "finish w"]),  # execute itself throws
        ("through", ["throw w"]),
    ],
)
def test_a_round_that_fails_is_over_and_counted_and_the_exception_arrives(
    driver: Driver, mode: str, commands: list[str]
) -> None:
    driver.ask("group world 1 4 0,1,2,3")
    driver.ask(f"enqueue world w {ALLREDUCE} {FLOAT} 8")
    driver.ask(f"start w {mode}")
    driver.ask("advance 500")
    answers = [driver.ask(command) for command in commands]
    if mode == "through":
        assert answers[-1].endswith("by the test")
    slot = only_slot(driver)
    assert [int(slot[name]) for name in ("enqueued", "started", "done", "errors")] == [1, 1, 1, 1]
    assert slot["open"]["seq"].tolist() == [0, 0]
    assert not slot["lanes"]["wait_state"].any()
    assert rounds(slot)[0]["dur_us"] == 500
    whole_round(driver, "world")
    slot = only_slot(driver)
    assert [int(slot[name]) for name in ("done", "errors")] == [2, 1]


def test_too_many_rounds_in_flight_are_counted_and_never_seem_to_hang(driver: Driver) -> None:
    driver.ask("group world 1 4 0,1,2,3")
    for i in range(1200):
        driver.ask(f"enqueue world w{i} {ALLREDUCE} {FLOAT} 8")
    lost = int(driver.frame().header["works_lost"])
    assert 1200 - 1024 <= lost < 1200
    for i in range(1200):
        driver.ask(f"start w{i}")
        driver.ask(f"finish w{i}")
    slot = only_slot(driver)
    assert [int(slot[name]) for name in ("enqueued", "started", "done", "errors")] == [1200, 1200, 1200, 0]


def test_the_stride_follows_the_rate_of_rounds(driver: Driver) -> None:
    driver.ask("group world 1 4 0,1,2,3")

    def go(count: int, period_us: int) -> np.void:
        for _ in range(count):
            driver.ask(f"advance {period_us}")
            whole_round(driver, "world")
        return only_slot(driver)

    slot = go(600, 10_000)  # 100 a second
    assert slot["stride"] == 8  # 32 entries of every 8th round span 2.56 s
    recorded = [r["seq"] for r in rounds(slot)]
    assert len(recorded) == probeframe.ROUND_COUNT
    assert all(seq % 8 == 0 for seq in recorded[-16:])
    slot = go(40, 1_500_000)  # slower than one a second: every round counts
    assert slot["stride"] == 1
    assert [r["seq"] for r in rounds(slot)][-30:] == list(range(611, 641))


def test_threads_at_once_lose_no_round_and_no_step(driver: Driver) -> None:
    driver.ask("group world 1 4 0,1,2,3")
    driver.ask("realtime")
    driver.ask("storm world 4 20000 1")
    slot = only_slot(driver)
    total = 4 * 20000
    assert [int(slot[name]) for name in ("enqueued", "started", "done", "errors")] == [total, total, total, 0]
    assert (slot["send_steps"], slot["recv_steps"], slot["bytes"]) == (total, total, 8 * total)
    assert (slot["lanes"][1]["send_steps"], slot["lanes"][2]["recv_steps"]) == (total, total)
    assert slot["open"].tolist() == np.zeros(2, slot["open"].dtype).tolist()
    assert driver.frame().header["works_lost"] == 0


def test_an_older_library_is_followed_as_far_as_it_tells(old_double: Double, tmp_path: Path) -> None:
    environment = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}
    with running(old_double, tmp_path, environment) as program:
        program.ask("group world 1 4")
        whole_round(program, "world")
        program.ask(f"enqueue world w {ALLREDUCE} {FLOAT} 8")
        frame = program.frame()
        (slot,) = frame.slots
        assert [int(slot[name]) for name in ("enqueued", "done", "comm_rank")] == [2, 1, 1]
        assert (slot["op"], slot["dtype"]) == (Op.ALL_REDUCE, Dtype.UNKNOWN)
        assert slot["count"] == probeframe.COUNT_UNKNOWN
        # finishWorkGloo, finishWorkGlooError, groupRanks, aoti_torch_get_numel, aoti_torch_get_dtype
        assert frame.header["symbols_missing"] == (1 << 2 | 1 << 3 | 1 << 13 | 1 << 14 | 1 << 15)
        program.ask("start w")
        program.ask("step w recv 0 8 held")
        program.ask("gate throw")
        program.ask("finish w")
        assert [int(program.frame().slots[0][name]) for name in ("done", "errors")] == [2, 1]
