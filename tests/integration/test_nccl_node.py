"""The node daemon and the NCCL plugin meet in the frame: what it reads there, and what it asks for."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from diagnosis.contracts import probeframe
from diagnosis.contracts.columns import unpack
from diagnosis.contracts.errors import AgentFault
from diagnosis.contracts.probeframe import WIDEN_S_MAX
from diagnosis.contracts.report import (
    COMM_DTYPE,
    COMM_ROWS_MAX,
    RANK_DTYPE,
    RANKS_MAX,
    ROUND_DTYPE,
    ROUND_ROWS_MAX,
    CommState,
)
from node_daemon.arming import ARMED_S, Arming
from node_daemon.collectors.event_mask import ask_for_events
from node_daemon.collectors.frames import FrameReader
from node_daemon.collectors.process import Processes
from node_daemon.native.nccl.masks import Event
from node_daemon.summarise import Memory, summarise
from tests.eventually import eventually
from tests.integration.nccl_double import COMM_ID, Double, Driver, build, running
from tests.nodeframes import NODE, FrameImage

JOB = "42.0"
STANDING = Event.COLL | Event.COLL_API | Event.PROXY_OP
"""Of NCCL 2.31."""


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> Double:
    return build(tmp_path_factory.getbasetemp())


@pytest.fixture
def frames(tmp_path: Path) -> Path:
    directory = tmp_path / NODE / JOB
    directory.mkdir(parents=True)
    tmp_path.chmod(0o755)
    (tmp_path / NODE).chmod(0o1777)
    return directory


@pytest.fixture
def driver(double: Double, frames: Path) -> Iterator[Driver]:
    with running(
        double, frames, 7, TOCSIN_NCCL_EVENTS="-", FAKE_NCCL_VERSION="23102", RANK="3", WORLD_SIZE="16"
    ) as one:
        one.ask(f"comm a {COMM_ID} 16 3")
        yield one


def reader(root: Path) -> FrameReader:
    return FrameReader(root, NODE, Processes(), gone_keep_s=60, idle_keep_s=60)


def test_the_daemon_reports_what_nccl_does(driver: Driver, tmp_path: Path) -> None:
    look, memory = reader(tmp_path), Memory()
    ask_for_events(tmp_path, NODE, JOB, driver.pid, Event.KERNEL_CH | Event.PROXY_STEP, 60)
    driver.ask("allreduce a 1 2 2")
    for collectives in (2, 3):
        driver.ask(f"allreduce a {collectives} 4 14")
        (job,) = look.collect().jobs
        sample, memory = summarise(job, memory)
    (row,) = unpack(sample.comms, COMM_DTYPE, COMM_ROWS_MAX)
    rounds = unpack(sample.rounds, ROUND_DTYPE, ROUND_ROWS_MAX)
    assert (row["comm_id"], row["state"], row["seq"], row["done_seq"]) == (COMM_ID, CommState.DONE, 6, 6)
    assert (row["rounds"], row["send"], row["recv"]) == (3, 3 * 4 * 14, 3 * 4 * 14)
    assert (row["dur_us"], row["gap_us"]) == (6, 12)
    assert rounds[["seq", "gap_us", "dur_us"]].tolist() == [(4, 4, 2), (5, 4, 2), (6, 4, 2)]


def test_a_rank_whose_kernel_has_not_begun_is_told_from_those_in_theirs(driver: Driver, tmp_path: Path) -> None:
    ask_for_events(tmp_path, NODE, JOB, driver.pid, Event.KERNEL_CH, 60)
    driver.ask("allreduce a 2 1 1")
    driver.coll("x")
    states = []
    for step in ("launched", "begun"):
        if step == "begun":
            driver.kernel("x", 0, 9_000_000, None)
        (job,) = reader(tmp_path).collect().jobs
        (row,) = unpack(summarise(job, {})[0].comms, COMM_DTYPE, COMM_ROWS_MAX)
        states.append((int(row["seq"]), int(row["done_seq"]), int(row["state"])))
    assert states == [(3, 2, CommState.ENQUEUED), (3, 2, CommState.RUNNING)]


def test_gloo_s_and_nccl_s_frame_of_a_process_are_one_rank(driver: Driver, frames: Path, tmp_path: Path) -> None:
    driver.ask("allreduce a 1 1 1")
    gloo = FrameImage(driver.pid, rank=3, transport=probeframe.Transport.GLOO)
    gloo.join(comm_id=77)
    gloo.step()
    gloo.save(frames)
    (job,) = reader(tmp_path).collect().jobs
    (sample,) = job.frames
    assert sorted(sample.slots["comm_id"].tolist()) == [77, COMM_ID]
    assert int(sample.header["rank"]) == 3


def test_a_frame_under_the_other_transport_s_name_is_refused(driver: Driver, frames: Path, tmp_path: Path) -> None:
    driver.frame_path().rename(frames / f"{driver.pid}.frame")
    sweep = reader(tmp_path).collect()
    assert sweep.refused == {"name": 1}


def test_no_more_is_asked_for_than_the_release_allows_nor_for_longer_than_probes_follow(
    driver: Driver, tmp_path: Path
) -> None:
    asked = ask_for_events(tmp_path, NODE, JOB, driver.pid, Event.KERNEL_CH | Event.NET_PLUGIN, 30)
    assert asked == Event.KERNEL_CH
    driver.ask("allreduce a 1 1 1")
    assert driver.ask("mask") == str(int(STANDING | Event.KERNEL_CH))
    for seconds in (0, -1, WIDEN_S_MAX + 1):
        with pytest.raises(ValueError):
            ask_for_events(tmp_path, NODE, JOB, driver.pid, Event.KERNEL_CH, seconds)


def test_a_request_whose_time_is_over_ends_by_itself(driver: Driver, tmp_path: Path) -> None:
    long_ago = time.monotonic() - 100
    ask_for_events(tmp_path, NODE, JOB, driver.pid, Event.KERNEL_CH, 30, clock_s=lambda: long_ago)
    driver.ask("allreduce a 1 1 1")
    assert driver.ask("mask") == str(int(STANDING))


async def test_a_suspected_job_tells_more_for_a_while_and_the_report_says_so(driver: Driver, tmp_path: Path) -> None:
    look = reader(tmp_path)
    arming = Arming(tmp_path, NODE, clock_s=lambda: time.monotonic() - ARMED_S + 2)  # its time is over in two seconds
    wide = STANDING | Event.KERNEL_CH | Event.PROXY_STEP
    memory: Memory = {}

    def next_report() -> tuple[int, int, Event]:
        """Armed or not, the steps told, and what NCCL delivers."""
        nonlocal memory
        driver.ask("allreduce a 1 2 3")
        sample, memory = summarise(look.collect().jobs[0], memory)
        (rank,) = unpack(sample.ranks, RANK_DTYPE, RANKS_MAX)
        (row,) = unpack(sample.comms, COMM_DTYPE, COMM_ROWS_MAX)
        return int(rank["armed"]), int(row["send"]), Event(int(driver.ask("mask")))

    unknown = 0xFFFF_FFFF
    assert next_report() == (0, unknown, STANDING)
    arming.due(look.collect().jobs, {})
    arming.ask(42, 0)
    assert arming.arm(arming.due(look.collect().jobs, {})) == 1
    assert next_report() == (1, unknown, wide)  # NCCL had read the mask for this call before
    assert next_report() == (1, unknown, wide)  # a part of the window is from before
    assert next_report() == (1, 2 * 3, wide)
    await eventually(lambda: next_report() == (0, unknown, STANDING))
    arming.ask(42, 0)
    assert arming.due(look.collect().jobs, {}) == []


def test_only_the_frame_of_the_directory_s_owner_is_written_to(driver: Driver, frames: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(bytes(probeframe.FILE_BYTES))
    (frames / "5.nccl.frame").symlink_to(precious)
    (frames / "6.nccl.frame").write_bytes(bytes(probeframe.FILE_BYTES))
    os.mkfifo(frames / "7.nccl.frame")
    FrameImage(8, 5, version=1, transport=probeframe.Transport.NCCL).save(frames).rename(frames / "8.nccl.frame")
    with pytest.raises(OSError):
        ask_for_events(tmp_path, NODE, JOB, 5, Event.KERNEL_CH, 30)
    for pid in (6, 7, 8):
        with pytest.raises(AgentFault):
            ask_for_events(tmp_path, NODE, JOB, pid, Event.KERNEL_CH, 30)
    with pytest.raises(FileNotFoundError):
        ask_for_events(tmp_path, NODE, JOB, 4, Event.KERNEL_CH, 30)
    assert not any(precious.read_bytes())
