"""The collector in a program that plays a CUDA job, on a stand-in for CUPTI that ends it where it is misused."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from diagnosis.contracts.kernelwindow import Collect, Request, State, Unseen, Why
from diagnosis.contracts.summary import COMM
from tests.integration.cupti_double.program import COMM as COMM_ID
from tests.integration.cupti_double.program import Built, Program, await_, build, running, soon

SANITIZERS = ("", "address,undefined", "thread")
ERROR = 999
"""What every function of CUPTI answers where there is no driver."""
GEMM, SOFTMAX, REDUCE = range(3)


@pytest.fixture(scope="module", params=SANITIZERS, ids=lambda name: name or "plain")
def checked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.getbasetemp(), request.param)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.getbasetemp())


@pytest.fixture
def program(built: Built, tmp_path: Path) -> Iterator[Program]:
    with running(built, tmp_path) as one:
        yield one


def by_rounds(window: int, first: int, end: int) -> Request:
    return Request(window, soon(), COMM_ID, max(first - 1, 0), first, end)


def rounds(warm: int, first: int, end: int, comm_id: int = COMM_ID) -> Request:
    return Request(1, 0, comm_id, warm, first, end)


def await_enabled(program: Program, kinds: int) -> None:
    """Until so many kinds of records were turned on, in all."""
    await_(lambda: program.ask("calls ActivityEnable") == str(kinds))


def detached(program: Program) -> Why:
    """Why the window is over, with the program making calls as a job does."""
    program.await_state(State.CLOSING)
    await_(lambda: program.ask("call") == "ok" and int(program.control()["done"]) == program.asked)
    return Why(int(program.control()["why"]))


def test_a_window_holds_what_ran_in_its_rounds_and_leaves_nothing_attached(checked: Built, tmp_path: Path) -> None:
    with running(checked, tmp_path) as program:
        program.make_frame()
        for number in (1, 2):  # once more: CUPTI comes back after it was taken out
            start = 100 * number
            program.enter(start)
            program.request(by_rounds(70 + number, start + 10, start + 14))
            program.await_state(State.WAITING)
            assert program.ask("calls ActivityEnable") == str(4 * (number - 1))
            program.ask(f"launch {GEMM} 50")
            program.enter(start + 9)
            program.await_state(State.READY)
            await_enabled(program, 4 * number)
            program.ask(f"launch {SOFTMAX} 7")
            program.enter(start + 10)
            program.await_state(State.RECORDING)
            program.ask(f"launch {GEMM} 30")
            program.ask(f"launch {REDUCE} 4")
            program.enter(start + 14)
            assert detached(program) == Why.NONE
            window = program.window()
            assert int(window.header["window"]) == 70 + number
            assert (int(window.header["first_round"]), int(window.header["end_round"])) == (start + 10, start + 14)
            told = dict(zip(window.names, window.rows, strict=True))
            assert {name: int(row["count"]) for name, row in told.items()} == {
                "gemm": 30,
                "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)": 4,
            }
            assert int(told["gemm"]["total_ns"]) == 30_000 and int(window.header["outside"]) == 7
            assert int(window.rows[1]["kind"]) == COMM
            assert int(window.header["unseen"]) == Unseen.NONE
            assert program.ask("calls Finalize") == str(number)
            assert program.state() == State.DORMANT
        assert (int(program.control()["rank"]), int(program.control()["cupti_version"])) == (5, 130500)
        assert program.finish() == ""


def test_until_it_is_asked_nothing_of_cupti_is_called(program: Program) -> None:
    program.ask(f"launch {GEMM} 100")
    assert program.state() == State.DORMANT
    for function in ("GetVersion", "Subscribe", "ActivityEnable", "ActivityRegisterCallbacks", "GetTimestamp"):
        assert program.ask(f"calls {function}") == "0"
    assert list(program.frames.iterdir()) == [program.file(".cupti.control")]
    program.finish()


def test_without_a_communicator_the_window_is_as_long_as_was_asked_for(program: Program) -> None:
    program.request(Request(1, soon(), duration_ns=50_000_000, collect=Collect.NONE))
    program.await_state(State.RECORDING)
    program.ask(f"launch {GEMM} 10")
    assert detached(program) == Why.NONE
    header = program.window().header
    assert int(header["end_mono_ns"]) - int(header["begin_mono_ns"]) >= 50_000_000
    assert program.ask("calls ActivityEnable") == "3"


def test_gloo_tells_rounds_too_and_a_dead_namesakes_frame_tells_none(program: Program) -> None:
    program.make_frame(ticks=1)
    program.enter(500)
    program.make_frame(suffix=".frame")
    program.enter(3, suffix=".frame")
    program.request(by_rounds(1, 5, 6))
    program.await_state(State.WAITING)
    program.enter(4, suffix=".frame")
    program.await_state(State.READY)
    await_enabled(program, 4)
    program.enter(5, suffix=".frame")
    program.await_state(State.RECORDING)
    program.enter(6, suffix=".frame")
    assert detached(program) == Why.NONE


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("GetVersion", Why.REFUSED),
        ("Subscribe", Why.REFUSED),
        ("ActivityRegisterCallbacks", Why.REFUSED),
        ("ActivityEnable", Why.REFUSED),
    ],
)
def test_where_cupti_refuses_there_is_no_window_and_the_job_goes_on(
    checked: Built, function: str, why: Why, tmp_path: Path
) -> None:
    with running(checked, tmp_path) as program:
        program.ask(f"fail {function} {ERROR}")
        program.request(Request(1, soon(), duration_ns=1_000_000))
        assert program.await_done() == why
        assert int(program.control()["error"]) == ERROR
        assert not program.file(".cupti.window").exists()
        program.ask(f"fail {function} 0")  # nothing was left behind: the next one works
        program.request(Request(2, soon(), duration_ns=1_000_000))
        assert detached(program) == Why.NONE
        program.finish()


@pytest.mark.parametrize(
    "function",
    ["ActivityDisable", "ActivityFlushAll", "ActivityGetNextRecord", "ActivityGetNumDroppedRecords", "GetTimestamp"],
)
def test_where_cupti_fails_within_a_window_the_job_goes_on_too(checked: Built, function: str, tmp_path: Path) -> None:
    with running(checked, tmp_path) as program:
        program.request(Request(1, soon(), duration_ns=200_000_000))
        program.await_state(State.RECORDING)
        program.ask(f"fail {function} {ERROR}")
        program.ask(f"launch {GEMM} 10")
        assert detached(program) == (Why.REFUSED if function == "ActivityFlushAll" else Why.NONE)
        assert program.ask(f"launch {GEMM} 10") == "ok"
        program.finish()


@pytest.mark.parametrize("function", ["EnableDomain", "Finalize", "Unsubscribe"])
def test_where_cupti_will_not_leave_the_job_goes_on_too(built: Built, function: str, tmp_path: Path) -> None:
    with running(built, tmp_path) as program:
        program.ask(f"fail {function} {ERROR}")
        program.request(Request(1, soon(), duration_ns=1_000_000))
        why = detached(program)
        assert why == (Why.ATTACHED if function == "EnableDomain" else Why.NONE)
        assert program.ask(f"launch {GEMM} 10") == "ok"
        program.finish()


def test_a_program_that_makes_no_call_any_more_keeps_cupti_and_its_window(program: Program) -> None:
    program.request(Request(1, soon(), duration_ns=1_000_000))
    assert program.await_done() == Why.ATTACHED
    assert int(program.window().header["why"]) == Why.ATTACHED
    assert (program.ask("calls Finalize"), program.ask("calls Unsubscribe")) == ("0", "1")
    program.ask("call")
    assert program.ask("calls Finalize") == "0"
    program.request(Request(2, soon(), duration_ns=1_000_000))
    assert detached(program) == Why.NONE


def test_another_client_is_left_alone(program: Program) -> None:
    program.ask("other 1")
    program.request(Request(1, soon(), duration_ns=1_000_000))
    assert program.await_done() == Why.OTHER_CLIENT
    assert program.ask("calls ActivityEnable") == "0"
    assert program.ask("calls ActivityRegisterCallbacks") == "0"
    program.ask("other 0")
    program.request(Request(2, soon(), duration_ns=1_000_000))
    assert detached(program) == Why.NONE


def test_tools_of_nsight_are_known_by_their_libraries(built: Built, tmp_path: Path) -> None:
    tool = tmp_path / "libToolsInjection64.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "/dev/null", "-o", str(tool)], check=True, timeout=60)
    frames = tmp_path / "frames"
    frames.mkdir()
    with running(built, frames, LD_PRELOAD=str(tool)) as program:
        program.request(Request(1, soon(), duration_ns=1_000_000))
        assert program.await_done() == Why.OTHER_CLIENT
        assert program.ask("calls Subscribe") == "0"


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"CUDA_INJECTION64_PATH": "/opt/nsys/libToolsInjection64.so"}, Why.OTHER_INJECTION),
        ({"KINETO_USE_DAEMON": "1"}, Why.KINETO),
    ],
    ids=["injection", "kineto"],
)
def test_it_is_off_where_the_program_brings_a_profiler(
    built: Built, environment: dict[str, str], why: Why, tmp_path: Path
) -> None:
    with running(built, tmp_path, **environment) as program:
        assert (program.state(), int(program.control()["why"])) == (State.OFF, why)
        assert len(list(Path(f"/proc/{program.process.pid}/task").iterdir())) == 1
        program.finish()


@pytest.mark.parametrize(
    "environment", [{"TOCSIN_DISABLE": "1"}, {"TOCSIN_FRAME_DIR": ""}, {"TOCSIN_FRAME_DIR": "/nowhere"}], ids=str
)
def test_it_is_not_there_where_it_is_not_wanted(built: Built, environment: dict[str, str], tmp_path: Path) -> None:
    with running(built, tmp_path, **environment) as program:
        assert program.ask(f"launch {GEMM} 10") == "ok"
        assert list(tmp_path.iterdir()) == []
        program.finish()


def test_an_old_cupti_is_not_used(program: Program) -> None:
    program.ask("version 23")
    program.request(Request(1, soon(), duration_ns=1_000_000))
    assert program.await_done() == Why.OLD_CUPTI
    assert program.ask("calls Subscribe") == "0"
    program.ask("version 24")
    program.request(Request(2, soon(), duration_ns=1_000_000))
    assert detached(program) == Why.NONE


@pytest.mark.parametrize("library", ["/nowhere/libcupti.so", "libc.so.6"])
def test_without_cupti_there_is_no_window(built: Built, library: str, tmp_path: Path) -> None:
    with running(built, tmp_path, TOCSIN_CUPTI_LIBRARY=library) as program:
        program.request(Request(1, soon(), duration_ns=1_000_000))
        assert program.await_done() == Why.NO_CUPTI
        program.finish()


def test_requests_that_make_no_sense_and_those_that_come_too_late(program: Program) -> None:
    program.make_frame()
    program.enter(50)
    by_time = Request(1, 0, duration_ns=1_000_000)
    for seconds, request, why in (
        (-1.0, by_time, Why.LATE),
        (10_000.0, by_time, Why.REQUEST),
        (60.0, Request(1, 0), Why.REQUEST),
        (60.0, Request(1, 0, duration_ns=1 << 63), Why.REQUEST),
        (60.0, rounds(10, 9, 12), Why.REQUEST),
        (60.0, rounds(8, 9, 9), Why.REQUEST),
        (60.0, rounds(40, 49, 52), Why.LATE),
        (2.0, rounds(40, 60, 70, COMM_ID + 1), Why.NO_ROUNDS),
        (2.0, rounds(55, 60, 70), Why.DEADLINE),
        (2.0, rounds(50, 60, 70), Why.DEADLINE),
    ):
        program.request(replace(request, deadline_ns=soon(seconds)))
        await_(lambda: program.ask("call") == "ok" and int(program.control()["done"]) == program.asked)
        assert Why(int(program.control()["why"])) == why, request
    assert not program.file(".cupti.window").exists()
    assert program.ask("calls Finalize") == "1"  # of the one that was ready


@pytest.mark.parametrize(
    ("entered", "first", "why"), [(12, 13, Why.NONE), (13, 16, Why.NONE), (17, None, Why.LATE)], ids=str
)
def test_who_is_late_begins_with_the_next_step_that_the_window_has(
    program: Program, entered: int, first: int | None, why: Why
) -> None:
    program.make_frame()
    program.enter(entered)
    program.request(Request(1, soon(), COMM_ID, 9, 10, 19, step_rounds=3))
    if first is None:
        assert program.await_done() == why
        return
    await_enabled(program, 4)
    program.enter(first - 1)
    program.enter(first)
    program.await_state(State.RECORDING)
    program.enter(19)
    assert detached(program) == why
    assert int(program.window().header["first_round"]) == first


def test_rounds_that_stand_still_end_the_window_at_its_deadline(program: Program) -> None:
    program.make_frame()
    program.request(Request(1, soon(3), COMM_ID, 0, 1, 9))
    program.await_state(State.READY)
    program.enter(1)
    program.await_state(State.RECORDING)
    program.ask(f"launch {GEMM} 3")
    program.enter(4)
    assert detached(program) == Why.DEADLINE
    header = program.window().header
    assert (int(header["first_round"]), int(header["end_round"]), int(header["why"])) == (1, 4, Why.DEADLINE)


def test_a_second_request_replaces_one_that_has_not_begun(program: Program) -> None:
    program.make_frame()
    program.request(by_rounds(1, 1000, 1001))
    program.await_state(State.WAITING)
    program.request(Request(2, soon(), duration_ns=1_000_000))
    assert detached(program) == Why.NONE
    assert int(program.window().header["window"]) == 2


@pytest.mark.parametrize("hold", [False, True], ids=["given back", "held"])
def test_records_for_which_there_is_no_room_are_counted(program: Program, hold: bool) -> None:
    program.ask(f"hold {int(hold)}")
    program.make_frame()
    program.request(by_rounds(1, 1, 2))
    await_enabled(program, 4)
    program.enter(1)
    program.await_state(State.RECORDING)
    launched = 150_000  # more than the eight buffers hold
    program.ask(f"launch {GEMM} {launched}")
    program.enter(2)
    assert detached(program) == Why.NONE
    header = program.window().header
    assert int(header["kernels"]) + int(header["dropped"]) == launched
    assert (int(header["dropped"]) > 0) == hold
    assert int(header["unseen"]) == (Unseen.RECORDS if hold else Unseen.NONE)


def test_threads_that_launch_all_the_time_and_a_program_that_ends_within_a_window(
    checked: Built, tmp_path: Path
) -> None:
    with running(checked, tmp_path) as program:
        program.ask("storm 3")
        for window in (1, 2, 3):
            program.request(Request(window, soon(), duration_ns=100_000_000))
            assert program.await_done() == Why.NONE
            told = program.window()
            assert int(told.header["window"]) == window
            counted = sum(int(row["count"]) for row in told.rows)
            assert counted + int(told.header["outside"]) == int(told.header["kernels"]) > 0
            assert int(told.cells["count"].sum()) == counted
        program.request(Request(4, soon(), duration_ns=60_000_000_000))
        program.await_state(State.RECORDING)
        program.finish()
        assert int(program.window().header["window"]) == 3


@pytest.mark.parametrize("armed", [False, True], ids=["dormant", "recording"])
def test_a_fork_is_no_rank_of_its_own(checked: Built, armed: bool, tmp_path: Path) -> None:
    with running(checked, tmp_path) as program:
        if armed:
            program.request(Request(1, soon(), duration_ns=300_000_000))
            program.await_state(State.RECORDING)
        assert program.ask("fork") == "7"
        if not armed:
            program.request(Request(1, soon(), duration_ns=1_000_000))
        assert detached(program) == Why.NONE
        program.finish()


def test_a_full_disk_costs_the_window_and_nothing_else(built: Built, tmp_path: Path) -> None:
    with running(built, tmp_path) as program:
        program.request(Request(1, soon(), duration_ns=300_000_000))
        program.await_state(State.RECORDING)
        program.file(".cupti.window.new").mkdir()
        assert detached(program) == Why.NO_FILE
        assert program.ask(f"launch {GEMM} 1") == "ok"
        program.finish()
