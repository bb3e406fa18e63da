"""What the NCCL plugin writes for what NCCL does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from diagnosis.contracts import probeframe
from diagnosis.contracts.probeframe import DUR_OPEN, Algo, Dtype, Op, Proto, StepState, Transport, Untold
from node_daemon.native.nccl.masks import Event
from tests.integration.gloo_double import rounds
from tests.integration.nccl_double import ALL, COMM_ID, INTERFACES, Double, Driver, build, running

SEND_GPU, SEND_WAIT, RECV_WAIT, RECV_FLUSH, RECV_GPU, IN_PROGRESS, SEND_PEER = 8, 9, 10, 11, 12, 19, 20
STEP_BYTES = 1 << 19


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> Double:
    return build(tmp_path_factory.getbasetemp())


@pytest.fixture
def driver(double: Double, tmp_path: Path) -> Iterator[Driver]:
    with running(double, tmp_path) as program:
        assert program.ask(f"comm a {COMM_ID} 16 3") == f"0 1 {ALL}"
        yield program


def numbers(slot: np.void, *names: str) -> list[int]:
    return [int(slot[name]) for name in names]


@pytest.mark.parametrize("interface", INTERFACES)
def test_whole_collectives_are_told_alike_by_every_interface(double: Double, tmp_path: Path, interface: int) -> None:
    with running(double, tmp_path, interface, FAKE_NCCL_VERSION="23207") as driver:
        driver.ask(f"comm a {COMM_ID} 16 3")
        driver.ask("allreduce a 5 8 14")
        header, slot, channels = driver.frame().header, driver.slot(), driver.channels()
    assert (header["transport"], header["library"], header["library_version"]) == (Transport.NCCL, b"NCCL", 23207)
    assert numbers(slot, "comm_size", "comm_rank", "enqueued", "started", "done") == [16, 3, 5, 5, 5]
    assert numbers(slot, "op", "dtype", "algo", "proto", "root", "count") == [
        Op.ALL_REDUCE,
        Dtype.FLOAT32,
        Algo.RING,
        Proto.SIMPLE,
        probeframe.ROOT_NONE,
        1 << 20,
    ]
    assert numbers(slot, "send_steps", "recv_steps", "bytes") == [5 * 8 * 14, 5 * 8 * 14, 5 * 8 * 14 * STEP_BYTES]
    assert channels["send_steps"].tolist() == [70] * 8 + [0] * 24
    assert channels["recv_steps"].tolist() == [70] * 8 + [0] * 24
    assert set(channels["peer"][:8].tolist()) == {4}
    assert not channels["send_state"].any() and not channels["recv_state"].any()
    assert [entry["seq"] for entry in rounds(slot)] == [1, 2, 3, 4, 5]
    assert {(entry["gap_us"], entry["dur_us"]) for entry in rounds(slot)[1:]} == {(4, 2)}
    assert numbers(slot, "dur_sum_ns", "unknown") == [5 * 2000, Untold.ERRORS]


def test_a_round_is_signed_as_readers_sign_it(driver: Driver) -> None:
    calls = [
        ("AllReduce", Op.ALL_REDUCE, -1),
        ("Broadcast", Op.BROADCAST, 5),
        ("ReduceScatter", Op.REDUCE_SCATTER, -1),
        ("AllGather", Op.ALL_GATHER, -1),
        ("AlltoAll", Op.ALL_TO_ALL, -1),
        ("Reduce", Op.REDUCE, 5),
    ]
    for name, op, root in calls:
        driver.coll(name, function=name, datatype="ncclBfloat16", count=24, root=5)
        slot = driver.slot()
        assert numbers(slot, "op", "dtype", "root", "count") == [op, Dtype.BFLOAT16, root, 24]
        (signature,) = probeframe.signatures(
            *(slot[[field]][field].reshape(1) for field in ("op", "dtype", "count", "root"))
        )
        assert rounds(slot)[-1]["signature"] == signature


def test_a_kernel_that_does_not_end_shows_its_channel(driver: Driver) -> None:
    driver.coll("x", channels=3)
    for channel in range(3):
        driver.kernel("x", channel, 5_000_000, 5_250_000 if channel != 1 else None)
    slot, channels = driver.slot(), driver.channels()
    assert channels["kernel_us"][:4].tolist() == [250, DUR_OPEN, 250, 0]
    assert numbers(slot, "enqueued", "started", "done") == [1, 1, 0]
    assert slot["open"]["seq"].tolist() == [0, 1]
    assert rounds(slot)[0]["dur_us"] == DUR_OPEN
    driver.ask("state x.k1 22 5400000")
    driver.ask("end x.k1")
    slot = driver.slot()
    assert numbers(slot, "done", "dur_sum_ns") == [1, 400_000]
    assert rounds(slot)[0]["dur_us"] == 400
    assert not slot["open"]["seq"].any()


def test_own_time_is_the_gap_on_the_gpu_and_spans_communicators(driver: Driver) -> None:
    driver.ask("comm b 0xb 4 1")
    driver.coll("x")
    driver.kernel("x", 0, 1_000_000, 1_100_000)
    driver.coll("y", comm="b")
    driver.kernel("y", 0, 1_300_000, 1_900_000, comm="b")
    driver.coll("z")
    driver.kernel("z", 0, 2_600_000, 2_700_000)
    assert [entry["gap_us"] for entry in rounds(driver.slot())] == [0, 700]
    assert [entry["gap_us"] for entry in rounds(driver.slot(0xB))] == [200]
    assert int(driver.slot()["gap_sum_ns"]) == 700_000


def test_a_launch_is_over_as_a_whole_and_with_it_all_earlier_ones(driver: Driver) -> None:
    driver.coll("lost", channels=2)  # NCCL never tells its kernels
    driver.begin("p.api", "a", Event.COLL_API, function="AllReduce", datatype="ncclInt8", count=1)
    driver.begin("q.api", "a", Event.COLL_API, function="AllGather", datatype="ncclInt8", count=1)
    driver.begin("g", "a", Event.GROUP)
    for name in ("q", "p"):  # sorted by size, not by the order of the calls
        driver.begin(name, "a", Event.COLL, f"{name}.api", channels=1, group="g")
    driver.kernel("q", 0, 1000, 9000)
    assert numbers(driver.slot(), "enqueued", "done") == [3, 0]
    driver.kernel("p", 1, 1000, None)
    assert numbers(driver.slot(), "started", "done") == [3, 0]
    driver.ask("state p.k1 22 9000")
    driver.ask("end p.k1")
    assert numbers(driver.slot(), "started", "done") == [3, 3]


def test_an_earlier_round_in_a_later_launch_of_the_group_is_not_over(driver: Driver) -> None:
    for name in ("p", "q"):
        driver.begin(f"{name}.api", "a", Event.COLL_API, function="AllReduce", datatype="ncclInt8", count=1)
    for name in ("q", "p"):
        driver.begin(f"{name}.group", "a", Event.GROUP)
        driver.begin(name, "a", Event.COLL, f"{name}.api", channels=1, group=f"{name}.group")
    driver.kernel("q", 0, 1000, 9000)
    assert numbers(driver.slot(), "enqueued", "done") == [2, 0]
    driver.kernel("p", 0, 9000, 12000)
    assert numbers(driver.slot(), "enqueued", "done") == [2, 1]
    driver.coll("next")
    driver.kernel("next", 0, 13000, 14000)
    assert numbers(driver.slot(), "enqueued", "done") == [3, 3]


def step(driver: Driver, name: str, op: str, *states: int, end: bool = True) -> None:
    driver.begin(name, "a", Event.PROXY_STEP, op)
    for state in states:
        driver.ask(f"state {name} {state} {STEP_BYTES}")
    if end:
        driver.ask(f"end {name}")


def proxy(driver: Driver, name: str, task: str, channel: int, send: int) -> None:
    assert driver.begin(name, "a", Event.PROXY_OP, task, channel=channel, send=send, peer=4 if send else 2)
    driver.ask(f"state {name} {IN_PROGRESS} 0")


@pytest.mark.parametrize(
    ("send", "states", "waits_for"),
    [
        (1, (SEND_GPU,), StepState.OWN_GPU),
        (1, (SEND_GPU, SEND_PEER, SEND_PEER, SEND_PEER), StepState.PEER_CREDIT),
        (1, (SEND_GPU, SEND_PEER, SEND_WAIT), StepState.FABRIC),
        (0, (RECV_WAIT,), StepState.FABRIC),
        (0, (RECV_WAIT, RECV_FLUSH), StepState.OWN_GPU),
        (0, (RECV_WAIT, RECV_FLUSH, RECV_GPU), StepState.OWN_GPU),
    ],
)
def test_the_newest_step_s_state_says_what_a_channel_waits_for(
    driver: Driver, send: int, states: tuple[int, ...], waits_for: StepState
) -> None:
    way, other = ("send", "recv") if send else ("recv", "send")
    driver.coll("x", channels=1)
    proxy(driver, "op", "x", 6, send)
    step(driver, "first", "op", *((SEND_GPU, SEND_PEER, SEND_WAIT) if send else (RECV_WAIT, RECV_FLUSH, RECV_GPU)))
    assert driver.channels()[6][f"{way}_state"] == StepState.NONE
    step(driver, "stuck", "op", *states, end=False)
    channel, slot = driver.channels()[6], driver.slot()
    assert numbers(channel, f"{way}_state", f"{way}_steps", f"{other}_state", f"{other}_steps") == [waits_for, 1, 0, 0]
    assert [numbers(entry, "seq", f"{way}_steps") for entry in slot["open"]] == [[0, 0], [1, 1]]
    assert int(slot["bytes"]) == STEP_BYTES * (send + (SEND_WAIT in states))


def test_one_step_under_way_keeps_its_state_when_an_earlier_one_ends(driver: Driver) -> None:
    driver.coll("x", channels=1)
    proxy(driver, "op", "x", 0, 1)
    step(driver, "one", "op", SEND_GPU, SEND_WAIT, end=False)
    step(driver, "two", "op", SEND_GPU, SEND_PEER, end=False)
    driver.ask("end one")
    assert numbers(driver.channels()[0], "send_steps", "send_state") == [1, StepState.PEER_CREDIT]
    driver.ask("end two")
    assert numbers(driver.channels()[0], "send_steps", "send_state") == [2, StepState.NONE]


def test_transfers_for_another_process_are_not_this_rank_s(driver: Driver) -> None:
    driver.coll("x", channels=1)
    assert not driver.begin("foreign", "a", Event.PROXY_OP, "0xdeadbeef", pid=driver.pid + 1, channel=1, send=1)
    assert not driver.begin("step", "a", Event.PROXY_STEP, "-")
    assert not driver.channels()["send_steps"].any()


def test_point_to_point_is_no_round_but_its_steps_count(driver: Driver) -> None:
    driver.begin("g", "a", Event.GROUP)
    driver.begin("p", "a", Event.P2P, channels=1, group="g")
    proxy(driver, "op", "p", 2, 1)
    step(driver, "s", "op", SEND_GPU, SEND_WAIT)
    driver.kernel("p", 2, 1_000_000, 3_000_000)
    slot = driver.slot()
    assert numbers(slot, "enqueued", "done", "send_steps") == [0, 0, 1]
    assert numbers(driver.channels()[2], "send_steps", "kernel_us") == [1, 2000]
    assert driver.frame().header["last_leave_ns"] > 0
    driver.coll("x")
    driver.kernel("x", 0, 3_500_000, 3_600_000)
    assert rounds(driver.slot())[0]["gap_us"] == 500


def test_an_all_to_all_made_of_point_to_point_tasks_is_a_round_that_ends(driver: Driver) -> None:
    driver.begin("x.api", "a", Event.COLL_API, function="AlltoAll", datatype="ncclInt8", count=1)
    driver.begin("g", "a", Event.GROUP)
    for task in ("s", "r"):
        driver.begin(task, "a", Event.P2P, channels=1, group="g")
    driver.kernel("s", 0, 1000, 2000)
    assert numbers(driver.slot(), "enqueued", "done") == [1, 0]
    driver.kernel("r", 1, 1000, 2000)
    assert numbers(driver.slot(), "enqueued", "done") == [1, 1]


def test_what_a_graph_captured_is_no_round(driver: Driver) -> None:
    driver.coll("x")
    driver.kernel("x", 0, 1000, 2000)
    driver.coll("captured", captured=1)
    for replay in range(3):
        driver.begin("g", "a", Event.GROUP)
        driver.begin("t", "a", Event.COLL, "captured.api", channels=1, group="g")
        driver.kernel("t", 0, 3000 + replay, 4000)
    driver.coll("y")
    driver.kernel("y", 0, 5000, 6000)
    slot = driver.slot()
    assert numbers(slot, "enqueued", "done", "unknown") == [2, 2, Untold.GRAPHS | Untold.ERRORS]


def test_without_kernel_events_ends_and_times_are_untold(double: Double, tmp_path: Path) -> None:
    calls = str(int(Event.COLL | Event.COLL_API))
    with running(double, tmp_path, TOCSIN_NCCL_EVENTS=calls) as driver:
        driver.ask(f"comm a {COMM_ID} 4 1")
        driver.ask("allreduce a 3 2 2")
        slot = driver.slot()
    assert numbers(slot, "enqueued", "done", "dur_sum_ns") == [3, 0, 0]
    assert Untold(int(slot["unknown"])) == Untold.DONE | Untold.TIMES | Untold.STEPS | Untold.ERRORS


def test_without_kernel_events_the_ends_of_transfers_tell_the_end(double: Double, tmp_path: Path) -> None:
    transfers = str(int(Event.COLL | Event.COLL_API | Event.PROXY_OP))
    with running(double, tmp_path, TOCSIN_NCCL_EVENTS=transfers) as driver:
        driver.ask(f"comm a {COMM_ID} 4 1")
        driver.ask("allreduce a 3 2 2")
        slot = driver.slot()
    assert numbers(slot, "enqueued", "started", "done", "dur_sum_ns", "send_steps") == [3, 3, 3, 0, 0]
    assert Untold(int(slot["unknown"])) == Untold.DONE | Untold.TIMES | Untold.STEPS | Untold.ERRORS
    assert {entry["dur_us"] for entry in rounds(slot)} == {DUR_OPEN}


def ask_for(driver: Driver, events: int, seconds: float) -> None:
    until_s = int(time.monotonic() + seconds)
    with driver.frame_path().open("r+b") as file:
        file.seek(probeframe.CONTROL_OFFSET)
        file.write(probeframe.control_word(events, until_s).to_bytes(8, "little"))


def test_the_control_word_widens_the_mask_for_its_time(double: Double, tmp_path: Path) -> None:
    with running(double, tmp_path, TOCSIN_NCCL_EVENTS="-", FAKE_NCCL_VERSION="23102") as driver:
        standing = int(Event.COLL | Event.COLL_API | Event.PROXY_OP)
        assert driver.ask(f"comm a {COMM_ID} 4 1") == f"0 1 {standing}"
        ask_for(driver, Event.KERNEL_CH | Event.PROXY_STEP | Event.NET_PLUGIN, 30)
        driver.ask("allreduce a 2 2 2")
        assert driver.ask("mask") == str(standing | Event.KERNEL_CH | Event.PROXY_STEP)  # no more than the table allows
        assert driver.frame().header["event_mask"] == standing | Event.KERNEL_CH | Event.PROXY_STEP
        ask_for(driver, Event.KERNEL_CH, -1)
        driver.ask("allreduce a 1 2 2")
        assert driver.ask("mask") == str(standing)
        ask_for(driver, Event.KERNEL_CH, 2 * probeframe.WIDEN_S_MAX)
        driver.ask("allreduce a 1 2 2")
        assert driver.ask("mask") == str(standing)


def test_the_call_that_widens_the_mask_was_still_made_under_the_old_one(double: Double, tmp_path: Path) -> None:
    with running(double, tmp_path, TOCSIN_NCCL_EVENTS="-", FAKE_NCCL_VERSION="23102") as driver:
        driver.ask(f"comm a {COMM_ID} 4 1")
        ask_for(driver, Event.KERNEL_CH, 30)
        driver.coll("x")
        assert int(driver.ask("mask")) & Event.KERNEL_CH
        assert Untold(int(driver.slot()["unknown"])) & Untold.DONE  # nothing will tell its end
        driver.coll("y")
        assert not Untold(int(driver.slot()["unknown"])) & Untold.DONE
        ask_for(driver, Event.KERNEL_CH, -1)
        driver.coll("z")
        assert not int(driver.ask("mask")) & Event.KERNEL_CH
        assert not Untold(int(driver.slot()["unknown"])) & Untold.DONE
        driver.kernel("y", 0, 1000, 2000)
        assert numbers(driver.slot(), "enqueued", "done") == [3, 2]
        driver.kernel("z", 0, 3000, 4000)
        assert numbers(driver.slot(), "enqueued", "done") == [3, 3]


def test_a_new_communicator_does_not_end_what_was_asked_for(double: Double, tmp_path: Path) -> None:
    with running(double, tmp_path, TOCSIN_NCCL_EVENTS="-", FAKE_NCCL_VERSION="23102") as driver:
        driver.ask(f"comm a {COMM_ID} 4 1")
        ask_for(driver, Event.KERNEL_CH, 30)
        driver.ask("allreduce a 1 1 1")
        widened = driver.ask("mask")
        driver.ask("comm b 7 4 1")
        driver.ask("allreduce a 1 1 1")
        assert driver.ask("mask") == widened


def test_a_mask_that_another_hand_has_set_stays(double: Double, tmp_path: Path) -> None:
    with running(double, tmp_path, TOCSIN_NCCL_EVENTS="-") as driver:
        driver.ask(f"comm a {COMM_ID} 4 1")
        by_ras = int(Event.COLL | Event.COLL_API | Event.PROXY_STEP)
        driver.ask(f"mask {by_ras}")
        driver.ask("allreduce a 3 2 2")
        assert driver.ask("mask") == str(by_ras)
        slot = driver.slot()
        assert driver.frame().header["event_mask"] == by_ras
        assert Untold(int(slot["unknown"])) & (Untold.TIMES | Untold.STEPS) == Untold.TIMES


@pytest.mark.parametrize(
    ("environment", "rank", "world_size"),
    [({}, 3, 16), ({"RANK": "7", "WORLD_SIZE": "32"}, 7, 32), ({"RANK": "7"}, 3, 16)],
)
def test_the_rank_is_torchrun_s_word_or_that_of_the_first_communicator(
    double: Double, tmp_path: Path, environment: dict[str, str], rank: int, world_size: int
) -> None:
    with running(double, tmp_path, 5, **environment) as driver:
        driver.ask(f"comm a {COMM_ID} 16 3")
        driver.ask("comm b 0xb 2 1")
        header = driver.frame().header
    assert (header["rank"], header["world_size"], header["pid"]) == (rank, world_size, driver.pid)
