"""The probe and its process: the frame's file, who the process says it is, forks, and programs without torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from diagnosis.contracts import probeframe
from tests.integration.gloo_double import ALLREDUCE, DEADLINE_S, FLOAT, Double, Driver, build, probe_library, running

DEBUG = {"TOCSIN_PROBE_DEBUG": "1"}


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> Double:
    return build(tmp_path_factory.getbasetemp())


@pytest.fixture
def driver(double: Double, tmp_path: Path) -> Iterator[Driver]:
    with running(double, tmp_path) as program:
        yield program


def one_round(driver: Driver, prefix: str = "") -> None:
    driver.ask(f"{prefix}group world 1 4 0,1,2,3")
    driver.ask(f"{prefix}enqueue world w {ALLREDUCE} {FLOAT} 8")
    driver.ask(f"{prefix}start w")
    driver.ask(f"{prefix}finish w")


def start_ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])


def test_the_header_names_the_process(driver: Driver) -> None:
    one_round(driver)
    header = driver.frame().header
    assert (header["pid"], header["pid_start_ticks"]) == (driver.pid, start_ticks(driver.pid))
    assert (header["transport"], header["library"]) == (probeframe.Transport.GLOO, b"torch gloo")
    assert (header["rank"], header["world_size"], header["symbols_missing"]) == (1, 4, 0)


UNKNOWN = -1


@pytest.mark.parametrize(
    ("environment", "local_rank", "gpu", "step_id"),
    [
        ({}, UNKNOWN, UNKNOWN, UNKNOWN),
        ({"LOCAL_RANK": "1"}, 1, 1, UNKNOWN),
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "4,6"}, 1, 6, UNKNOWN),
        ({"LOCAL_RANK": "2", "CUDA_VISIBLE_DEVICES": "4,6"}, 2, UNKNOWN, UNKNOWN),
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "GPU-a1,GPU-b2"}, 1, UNKNOWN, UNKNOWN),
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": ""}, 1, 1, UNKNOWN),
        ({"CUDA_VISIBLE_DEVICES": "5"}, UNKNOWN, 5, UNKNOWN),  # the only one it sees
        ({"LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "5"}, 3, 5, UNKNOWN),
        # Slurm's device cgroup renumbers from 0 ...
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "0,1", "SLURM_STEP_GPUS": "2,3"}, 1, 3, UNKNOWN),
        ({"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "0,1", "SLURM_JOB_GPUS": "1,2"}, 0, 1, UNKNOWN),
        # ... without it the numbers are the node's ...
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "2,3", "SLURM_STEP_GPUS": "2,3"}, 1, 3, UNKNOWN),
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "0,1", "SLURM_STEP_GPUS": "0,1"}, 1, 1, UNKNOWN),
        # ... and where it could be either, nobody knows.
        ({"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "1", "SLURM_STEP_GPUS": "1,2"}, 0, UNKNOWN, UNKNOWN),
        ({"SLURM_LOCALID": "3", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "7"}, 3, 3, 7),
        ({"SLURM_LOCALID": "0", "SLURM_NTASKS": "2"}, UNKNOWN, UNKNOWN, UNKNOWN),  # a task is not a rank here
        ({"LOCAL_RANK": "99999999999999999999", "SLURM_STEP_ID": "batch"}, UNKNOWN, UNKNOWN, UNKNOWN),
        ({"LOCAL_RANK": "-4", "SLURM_STEP_ID": "4294967294"}, UNKNOWN, UNKNOWN, UNKNOWN),
    ],
)
def test_the_header_says_where_the_process_runs_and_what_it_does_not_know(
    double: Double, tmp_path: Path, environment: dict[str, str], local_rank: int, gpu: int, step_id: int
) -> None:
    with running(double, tmp_path, environment) as program:
        one_round(program)
        header = program.frame().header
    assert (header["local_rank"], header["gpu"], header["step_id"]) == (local_rank, gpu, step_id)


@pytest.mark.parametrize("environment", [{"TOCSIN_FRAME_DIR": ""}, {"TOCSIN_DISABLE": "1"}], ids=["no dir", "disabled"])
def test_without_a_directory_or_when_disabled_the_probe_stays_off(
    double: Double, tmp_path: Path, environment: dict[str, str]
) -> None:
    with running(double, tmp_path, environment | DEBUG) as program:
        one_round(program)
        one_round(program)
        errors = program.finish()
    assert errors.count("tocsin probe") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_missing_directory_is_said_once_in_the_job_by_its_first_rank(
    double: Double, tmp_path: Path, rank: str
) -> None:
    absent = tmp_path / "absent"
    with running(double, absent, {"RANK": rank}) as program:
        one_round(program)
        one_round(program)
        told = f"tocsin: not watched: not there (in a container: not mounted): {absent}\n"
        assert program.finish() == (told if rank == "0" else "")


def test_a_directory_that_is_a_link_is_refused(double: Double, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with running(double, tmp_path / "link") as program:
        one_round(program)
        assert program.finish() == ""
    assert list((tmp_path / "real").iterdir()) == []


def test_a_link_in_the_file_s_place_is_never_followed(driver: Driver, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("untouched")
    driver.frame_path().symlink_to(precious)
    one_round(driver)
    driver.finish()
    assert precious.read_text() == "untouched"
    assert driver.frame_path().is_symlink()


def test_what_a_dead_namesake_left_is_replaced(driver: Driver) -> None:
    driver.frame_path().write_bytes(b"\1" * probeframe.FILE_BYTES)
    one_round(driver)
    assert driver.frame().header["pid_start_ticks"] == start_ticks(driver.pid)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_the_file_of_another_user_is_left_alone(driver: Driver) -> None:
    driver.frame_path().write_bytes(b"theirs")
    os.chown(driver.frame_path(), 65534, 65534)
    one_round(driver)
    driver.finish()
    assert driver.frame_path().read_bytes() == b"theirs"


@pytest.mark.skipif(os.geteuid() != 0, reason="a file system of a chosen size needs root")
def test_a_full_file_system_leaves_the_job_alive_and_no_file(double: Double, tmp_path: Path) -> None:
    script = f"""
        mount -t tmpfs -o size=8k tmpfs {tmp_path} || exit 3
        printf 'group world 1 4 0,1,2,3\\nenqueue world w 1 6 8\\nstart w\\nfinish w\\n' | {double.driver} || exit 4
        ls -A {tmp_path} | grep . && exit 5
        exit 0
    """
    env = {"LD_PRELOAD": str(probe_library()), "TOCSIN_FRAME_DIR": str(tmp_path), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script], env=env, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["ok"] * 3 + ["ok", "nothing"]


def test_a_limit_on_file_sizes_does_not_kill_the_job(double: Double, tmp_path: Path) -> None:
    commands = "group world 1 4 0,1,2,3\nenqueue world w 1 6 8\nstart w\nfinish w\n"
    env = {"LD_PRELOAD": str(probe_library()), "TOCSIN_FRAME_DIR": str(tmp_path), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        ["bash", "-c", f"ulimit -f 4; exec {double.driver}"],
        input=commands,
        env=env,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_never_writes_to_its_parent_s_frame_and_makes_its_own(driver: Driver) -> None:
    one_round(driver)
    child = int(driver.ask("fork"))
    before = driver.frame_path().read_bytes()
    assert not driver.frame_path(child).exists()
    # Even a round on the group that it inherited goes to a frame of its own, and starts at one.
    driver.ask(f"child enqueue world x {ALLREDUCE} {FLOAT} 8")
    one_round(driver, "child ")
    assert driver.frame_path().read_bytes() == before
    header = driver.frame(child).header
    assert (header["pid"], header["pid_start_ticks"]) == (child, start_ticks(child))
    assert {int(slot["enqueued"]) for slot in driver.frame(child).slots} <= {1, 2}
    driver.ask(f"enqueue world y {ALLREDUCE} {FLOAT} 8")
    assert driver.frame().slots[0]["enqueued"] == 2
    driver.finish()


def test_a_child_forked_before_any_collective_makes_its_own_frame(driver: Driver) -> None:
    child = int(driver.ask("fork"))
    one_round(driver, "child ")
    assert not driver.frame_path().exists()
    assert driver.frame(child).header["pid"] == child
    driver.finish()


def test_the_frame_can_be_read_while_the_process_is_stopped(driver: Driver) -> None:
    driver.ask("group world 1 4 0,1,2,3")
    driver.ask(f"enqueue world w {ALLREDUCE} {FLOAT} 8")
    driver.ask("start w")
    driver.ask("step w recv 0 8 held")
    os.kill(driver.pid, signal.SIGSTOP)
    try:
        slot = driver.frame().slots[0]
        assert (slot["enqueued"], slot["done"], slot["open"]["seq"].tolist()) == (1, 0, [1, 0])
    finally:
        os.kill(driver.pid, signal.SIGCONT)
    driver.ask("gate done")
    driver.ask("finish w")


@pytest.mark.parametrize(
    "command",
    [
        ["bash", "-c", "for i in 1 2 3; do echo $((i * 2)) | cat; done; exit 3"],
        [sys.executable, "-c", "import subprocess, sys; print(subprocess.run(['true']).returncode); sys.exit(3)"],
    ],
    ids=["bash", "python"],
)
def test_programs_without_torch_notice_nothing(tmp_path: Path, command: list[str]) -> None:
    plain = subprocess.run(command, capture_output=True, timeout=DEADLINE_S)
    env = {**os.environ, "LD_PRELOAD": str(probe_library()), "TOCSIN_FRAME_DIR": str(tmp_path), **DEBUG}
    probed = subprocess.run(command, env=env, capture_output=True, timeout=DEADLINE_S)
    assert (probed.returncode, probed.stdout, probed.stderr) == (3, plain.stdout, plain.stderr)
    assert list(tmp_path.iterdir()) == []
