"""The NCCL plugin under all that NCCL, users and machines do to it; also checked by the compiler's sanitizers."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from diagnosis.contracts import probeframe
from node_daemon.native.nccl.masks import Event
from tests.eventually import eventually
from tests.integration.gloo_double import DEADLINE_S, rounds
from tests.integration.nccl_double import ALL, COMM_ID, INTERFACES, NAME, Double, Driver, build, plugin_library, running

SANITIZERS = ("", "address,undefined", "thread")
NUMBERS_MAX = 1 << 32
STEP_BYTES = 1 << 19
"""As the program says of each step."""
EVERY_TYPE = [event for event in Event if event]
EXTREMES = {
    Event.COLL: {"channels": 255},
    Event.P2P: {"channels": 255},
    Event.PROXY_OP: {"channel": 255, "peer": -1},
    Event.KERNEL_CH: {"channel": 255},
}
MADE_UP = ("0x1", "0xfffffffffffffff0", "0x7f0012345678", "0x80002000", "0x1ffff")
"""Handles that nobody gave out."""


@pytest.fixture(scope="module", params=SANITIZERS, ids=lambda name: name or "plain")
def checked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Double:
    """The program and the plugin, once as they are and once under each sanitizer."""
    return build(tmp_path_factory.getbasetemp(), request.param)


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> Double:
    return build(tmp_path_factory.getbasetemp())


@pytest.fixture
def driver(double: Double, tmp_path: Path) -> Iterator[Driver]:
    with running(double, tmp_path) as program:
        program.ask(f"comm a {COMM_ID} 16 3")
        yield program


def figures(slot: np.void) -> list[int]:
    return [int(slot[name]) for name in ("enqueued", "started", "done")]


# -- what NCCL does ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interface", INTERFACES)
def test_no_parent_and_no_handle_is_followed_anywhere(checked: Double, tmp_path: Path, interface: int) -> None:
    with running(checked, tmp_path, interface) as driver:
        driver.ask(f"comm a {COMM_ID} 16 3")
        for parent in ("-", *MADE_UP):
            for event in EVERY_TYPE:
                driver.begin("h", "a", event, parent, **EXTREMES.get(event, {}))
                for state in range(32):
                    driver.ask(f"state h {state} 7")
                    driver.ask(f"state h {state}")
                driver.ask("end h")
                driver.ask("end h")
        for handle in ("-", *MADE_UP):
            assert driver.ask(f"end {handle}") == "0"
            for state in range(40):
                assert driver.ask(f"state {handle} {state} 9") == "0"
        driver.ask("allreduce a 2 2 2")
        enqueued, _, done = figures(driver.slot())
        assert enqueued == done
        driver.finish()


def test_events_after_the_end_of_their_communicator_change_nothing(checked: Double, tmp_path: Path) -> None:
    with running(checked, tmp_path) as driver:
        driver.ask(f"comm a {COMM_ID} 16 3")
        driver.coll("x", channels=2)
        driver.begin("op", "a", Event.PROXY_OP, "x", channel=1, send=1)
        driver.begin("step", "a", Event.PROXY_STEP, "op")
        driver.kernel("x", 0, 1000, None)
        driver.ask("finalize a")
        driver.ask("finalize a")
        driver.ask("comm b 0xb 16 3")  # takes over the place of the one that is gone
        driver.ask("allreduce b 1 1 1")
        before = driver.frame_path().read_bytes()
        for handle in ("step", "op", "x.k0", "x", "x.group", "x.api"):
            driver.ask(f"state {handle} 9 4096")
            driver.ask(f"state {handle} 22 9999")
            driver.ask(f"end {handle}")
        for event in EVERY_TYPE:
            assert not driver.begin("late", "a", event, "x")
        assert driver.frame_path().read_bytes() == before
        assert [int(slot["comm_id"]) for slot in driver.frame().slots] == [0xB]
        driver.finish()


def test_64_communicators_share_16_slots_and_keep_their_figures(checked: Double, tmp_path: Path) -> None:
    with running(checked, tmp_path) as driver:
        for number in range(64):
            assert driver.ask(f"comm c{number} {1000 + number} 16 3") == f"0 1 {ALL}"
        for turn in (1, 2):
            for number in range(64):
                driver.ask(f"allreduce c{number} {number % 3 + 1} 2 2")
                slot = driver.slot(1000 + number)
                assert figures(slot) == [turn * (number % 3 + 1)] * 3
                assert int(slot["send_steps"]) == turn * (number % 3 + 1) * 4
                assert driver.channels(1000 + number)["send_steps"][:2].tolist() == [turn * (number % 3 + 1) * 2] * 2
                assert [entry["seq"] for entry in rounds(slot)] == list(range(1, turn * (number % 3 + 1) + 1))
        frame = driver.frame()
        assert (len(frame.slots), frame.header["slots_reused"], frame.header["works_lost"]) == (16, 112, 0)
        for number in range(64):
            driver.ask(f"finalize c{number}")
        assert len(driver.frame().slots) == 0
        driver.finish()


def test_a_communicator_that_finds_all_slots_busy_is_counted_and_told_later(driver: Driver) -> None:
    for number in range(17):
        driver.ask(f"comm c{number} {1000 + number} 4 1")
        driver.coll(f"x{number}", f"c{number}")
    frame = driver.frame()
    assert (len(frame.slots), frame.header["works_lost"]) == (16, 1)
    for number in range(17):
        driver.kernel(f"x{number}", 0, 1000, 2000, comm=f"c{number}")
    driver.coll("y", "c16")
    assert figures(driver.slot(1016)) == [2, 1, 1]


def test_more_communicators_than_there_is_room_for_are_off_and_that_is_said_once(
    double: Double, tmp_path: Path
) -> None:
    with running(double, tmp_path) as driver:
        for number in range(130):
            followed = number < 128
            assert driver.ask(f"comm c{number} {1000 + number} 4 1").split()[:2] == ["0", str(int(followed))]
        driver.ask("allreduce c129 1 1 1")
        assert len(driver.frame().slots) == 0
        errors = driver.finish()
    assert errors.count("does not follow a communicator") == 1


def test_a_second_rank_of_a_communicator_in_one_process_is_off(driver: Driver) -> None:
    assert driver.ask(f"comm other {COMM_ID} 16 4").split()[:2] == ["0", "0"]
    driver.ask("allreduce other 1 1 1")
    assert len(driver.frame().slots) == 0
    driver.ask("finalize other")
    driver.ask("allreduce a 1 1 1")
    assert int(driver.slot()["comm_rank"]) == 3


@pytest.mark.parametrize(("channels", "shown"), [(32, [14] * 32), (64, [28] * 32)])
def test_32_channels_are_told_apart_and_more_fold(driver: Driver, channels: int, shown: list[int]) -> None:
    driver.ask(f"allreduce a 1 {channels} 14")
    assert driver.channels()["send_steps"].tolist() == shown
    assert driver.channels()["recv_steps"].tolist() == shown
    assert figures(driver.slot()) == [1, 1, 1]


@pytest.mark.parametrize("interface", [4, 7])
def test_threads_at_once_lose_nothing(checked: Double, tmp_path: Path, interface: int) -> None:
    collectives, channels, steps = (300, 4, 3) if "plain" in str(checked.driver) else (100, 4, 3)
    with running(checked, tmp_path, interface) as driver:
        names = ("a", "b", "c", "d")
        for number, name in enumerate(names):
            driver.ask(f"comm {name} {COMM_ID + number} 16 3")
        driver.ask(f"pipelines {collectives} {channels} {steps} {' '.join(names)}")
        for number in range(len(names)):
            slot = driver.slot(COMM_ID + number)
            assert figures(slot) == [collectives] * 3
            total = collectives * channels * steps
            assert (int(slot["send_steps"]), int(slot["recv_steps"])) == (total, total)
            assert driver.channels(COMM_ID + number)["send_steps"].sum() == total
            assert not driver.channels(COMM_ID + number)["send_state"].any()
            assert not slot["open"]["seq"].any()
        driver.finish()


def test_communicators_come_and_go_while_others_work(checked: Double, tmp_path: Path) -> None:
    collectives, names = 400, ("a", "b", "c")
    with running(checked, tmp_path) as driver:
        for number, name in enumerate(names):
            driver.ask(f"comm {name} {COMM_ID + number} 16 3")
        driver.ask(f"churn {collectives} 2 2 {' '.join(names)}")
        for name in names:  # comes back to a slot if it lost it
            driver.ask(f"allreduce {name} 1 2 2")
        frame = driver.frame()
        assert frame.header["slots_reused"] > 0
        assert len(frame.slots) == len(names)
        for number in range(len(names)):
            slot = driver.slot(COMM_ID + number)
            total = (collectives + 1) * 4
            assert figures(slot) == [collectives + 1] * 3
            assert (int(slot["send_steps"]), int(slot["recv_steps"])) == (total, total)
            assert int(slot["bytes"]) == total * STEP_BYTES
            channels = driver.channels(COMM_ID + number)
            assert (channels["send_steps"].sum(), channels["recv_steps"].sum()) == (total, total)
        driver.finish()


def test_nothing_of_it_calls_the_kernel_once_its_communicator_has_worked(driver: Driver) -> None:
    driver.ask("allreduce a 1 2 2")
    assert driver.ask("strict a 200 8 14") == "1"
    assert figures(driver.slot()) == [201] * 3


# -- what a reader sees ------------------------------------------------------------------------------------------------


def told_rounds(path: Path) -> list[tuple[int, int, int]]:
    """(seq, gap, duration) of finished rounds by the daemon's rules: two readings, and what both show."""
    first, second = (probeframe.parse(path.read_bytes()) for _ in range(2))
    if not len(first.slots) or not len(second.slots):
        return []
    again = set(second.slots[0]["rounds"].tolist())
    settled = probeframe.rounds_of(first.slots[0], int(second.slots[0]["enqueued"])).tolist()
    return [(seq, gap, duration) for seq, gap, duration, mark in settled if (seq, gap, duration, mark) in again]


def test_no_reader_ever_sees_half_a_round(driver: Driver) -> None:
    worker = threading.Thread(target=driver.ask, args=("pipelines 30000 2 1 a",))
    worker.start()
    seen: set[tuple[int, int]] = set()
    readings = 0
    while worker.is_alive():
        told = told_rounds(driver.frame_path())
        assert [seq for seq, _, _ in told] == sorted({seq for seq, _, _ in told})
        seen |= {(gap, duration) for seq, gap, duration in told if seq > 1}
        slot = driver.frame().slots
        for one in slot:
            enqueued, started, done = figures(one)
            assert done <= started
            assert done <= enqueued + probeframe.WRITERS_MAX  # read later than `enqueued`
        readings += len(told) > 0
    worker.join()
    assert readings > 5
    assert seen == {(4, 2)}


async def test_a_process_killed_in_the_middle_of_a_write_leaves_a_sound_frame(double: Double, tmp_path: Path) -> None:
    for _ in range(5):
        with running(double, tmp_path) as driver:
            driver.ask(f"comm a {COMM_ID} 16 3")
            worker = threading.Thread(target=_ask_and_die, args=(driver,))
            worker.start()
            await eventually(lambda driver=driver: [one["done"] for one in driver.frame().slots] > [50])  # type: ignore[misc]
            os.kill(driver.pid, signal.SIGKILL)
            worker.join()
            slot = driver.slot()
        enqueued, started, done = figures(slot)
        assert done <= started <= enqueued
        assert enqueued - done <= 66  # the program's queue and what was in hand
        assert {(gap, duration) for seq, gap, duration in told_rounds(driver.frame_path()) if seq > 1} == {(4, 2)}


def _ask_and_die(driver: Driver) -> None:
    with pytest.raises(AssertionError):  # the answer never comes
        driver.ask("pipelines 1000000 2 1 a")


def test_the_frame_can_be_read_while_the_process_is_stopped(driver: Driver) -> None:
    driver.coll("x", channels=2)
    driver.kernel("x", 1, 1000, None)
    os.kill(driver.pid, signal.SIGSTOP)
    try:
        assert figures(driver.slot()) == [1, 1, 0]
        assert driver.channels()["kernel_us"][:2].tolist() == [0, probeframe.DUR_OPEN]
    finally:
        os.kill(driver.pid, signal.SIGCONT)
    driver.finish()


def test_a_frame_that_somebody_removes_is_written_on_unseen(driver: Driver) -> None:
    driver.ask("allreduce a 1 2 2")
    driver.frame_path().unlink()
    driver.ask("allreduce a 5 2 2")
    driver.finish()
    assert not driver.frame_path().exists()


def test_a_forked_child_never_writes_to_its_parent_s_frame(checked: Double, tmp_path: Path) -> None:
    with running(checked, tmp_path) as driver:
        driver.ask(f"comm a {COMM_ID} 16 3")
        driver.ask("allreduce a 2 2 2")
        before = driver.frame_path().read_bytes()
        child, status = map(int, driver.ask("fork a").split())
        assert status == 0
        assert driver.frame_path().read_bytes() == before
        own = driver.frame(child)
        assert (own.header["pid"], [int(slot["comm_id"]) for slot in own.slots]) == (child, [0x77])
        assert figures(own.slots[0]) == [1, 1, 1]
        driver.ask("allreduce a 1 2 2")
        assert figures(driver.slot()) == [3, 3, 3]
        driver.finish()


# -- what is wrong with the machine ------------------------------------------------------------------------------------

SCRIPT = f"comm a {COMM_ID} 4 1\ncomm b 7 4 1\nallreduce a 3 2 2\nfinalize a\nmask\n"
OFF = ["ok 0 0 0", "ok 0 0 0", "ok", "ok 0", "ok 0"]
"""Success all along, no context, and a mask that stays as it was."""


def run_off(double: Double, frames: Path, *wrapper: str, **environment: str) -> str:
    """The script in a process where there can be no frame; what NCCL's log got."""
    env = {"PATH": os.environ["PATH"], "TOCSIN_FRAME_DIR": str(frames), "FAKE_NCCL_VERSION": "22907", **environment}
    program = [*wrapper, str(double.driver), str(double.plugin), "5"]
    done = subprocess.run(program, input=SCRIPT, env=env, capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout.splitlines()) == (0, OFF), done.stderr
    return done.stderr


def test_a_missing_directory_is_said_once_and_nowhere_else(double: Double, tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    told = f"tocsin: not watched: not there (in a container: not mounted): {absent}\n"
    off = "log: tocsin is off: its frame could not be made\n"
    assert run_off(double, absent) == told + off
    assert run_off(double, absent, RANK="1") == run_off(double, absent, SLURM_PROCID="1") == off


def test_a_job_that_wants_no_probe_has_none(double: Double, tmp_path: Path) -> None:
    assert "off" in run_off(double, tmp_path, TOCSIN_DISABLE="1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="a file system of a chosen size needs root")
@pytest.mark.parametrize("options", ["size=8k", "ro"])
def test_a_full_or_read_only_dev_shm_leaves_the_job_alive_and_no_file(
    double: Double, tmp_path: Path, options: str
) -> None:
    script = f"mount -t tmpfs -o {options} tmpfs {tmp_path} && {double.driver} {double.plugin} 5; ls -A {tmp_path}"
    assert "could not be made" in run_off_in(script, tmp_path)


def run_off_in(script: str, frames: Path) -> str:
    """`run_off` in a mount namespace of its own, the program started by the script."""
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        input=SCRIPT,
        env={"PATH": os.environ["PATH"], "TOCSIN_FRAME_DIR": str(frames)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.stdout.splitlines() == OFF, done.stderr
    return done.stderr


def test_a_limit_on_file_sizes_does_not_kill_the_job(double: Double, tmp_path: Path) -> None:
    run_off(double, tmp_path, "bash", "-c", 'ulimit -f 4; exec "$@"', "bash")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="a file system of a chosen size needs root")
@pytest.mark.parametrize(("size", "stands"), [("64m", False), ("1g", True)])
def test_kernel_events_are_not_asked_for_where_nccl_would_crash_on_a_small_dev_shm(
    double: Double, tmp_path: Path, size: str, stands: bool
) -> None:
    script = f"mount -t tmpfs -o size={size} tmpfs /dev/shm && exec {double.driver} {double.plugin} 6"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        input=f"comm a {COMM_ID} 4 1\n",
        env={"PATH": os.environ["PATH"], "TOCSIN_FRAME_DIR": str(tmp_path), "FAKE_NCCL_VERSION": "22907"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    _, _, _, mask = done.stdout.split()
    assert bool(int(mask) & Event.KERNEL_CH) == stands


def test_the_plugin_shows_its_interfaces_only_and_stays_mapped() -> None:
    library = plugin_library()
    assert library.name == NAME
    shown = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout
    assert sorted(line.split()[-1] for line in shown.splitlines()) == [f"ncclProfiler_v{one}" for one in INTERFACES]
    flags = subprocess.run(["readelf", "-d", library], check=True, capture_output=True, text=True).stdout
    assert "NODELETE" in flags
