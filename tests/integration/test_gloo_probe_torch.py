"""The probe under the real torch: jobs on loopback, unchanged, seen through their frames."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from diagnosis.contracts import probeframe
from diagnosis.contracts.probeframe import Dtype, Frame, Op
from tests.integration.gloo_double import probe_library

JOB = Path(__file__).with_name("gloo_job.py")
DEADLINE_S = 120.0
NO_ROOT = probeframe.ROOT_NONE
OPERATIONS = [
    (Op.ALL_REDUCE, Dtype.FLOAT32, 1000, NO_ROOT),
    (Op.ALL_REDUCE, Dtype.FLOAT64, 7, NO_ROOT),
    (Op.BROADCAST, Dtype.INT64, 5, 2),
    (Op.REDUCE, Dtype.BFLOAT16, 6, NO_ROOT),
    (Op.ALL_GATHER, Dtype.UINT8, 3, NO_ROOT),
    (Op.GATHER, Dtype.FLOAT32, 4, 3),
    (Op.SCATTER, Dtype.FLOAT32, 2, 0),
    (Op.ALL_TO_ALL, Dtype.FLOAT32, 8, NO_ROOT),
    (Op.BARRIER, Dtype.UNKNOWN, 0, NO_ROOT),
    (Op.ALL_REDUCE, Dtype.FLOAT32, 5, NO_ROOT),
]


@dataclass(frozen=True)
class Job:
    frames: Path
    out: Path
    process: subprocess.Popen[str]

    def live(self) -> dict[int, Frame]:
        """Frames of the running ranks, by rank; those that are being made are left out."""
        found = {}
        for path in self.frames.iterdir():
            data = path.read_bytes()
            if len(data) == probeframe.FILE_BYTES and any(data[:8]):
                frame = probeframe.parse(data)
                found[int(frame.header["rank"])] = frame
        return found

    def after(self, phase: str) -> list[Frame]:
        """Every rank's frame as it was after a phase, in order of rank."""
        paths = sorted(self.out.glob(f"{phase}.*"), key=lambda path: int(path.suffix[1:]))
        return [probeframe.parse(path.read_bytes()) for path in paths]


def environment(frames: Path, out: Path) -> dict[str, str]:
    return os.environ | {
        "TOCSIN_FRAME_DIR": str(frames),
        "LD_PRELOAD": str(probe_library()),
        "OUT": str(out),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


@contextmanager
def started(base: Path, ranks: int, *phases: str, **changes: str) -> Iterator[Job]:
    frames, out = base / "frames", base / "out"
    frames.mkdir()
    out.mkdir()
    process = subprocess.Popen(
        [sys.executable, JOB, str(ranks), *phases],
        env=environment(frames, out) | changes,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield Job(frames, out, process)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=DEADLINE_S)


@contextmanager
def finished(base: Path, ranks: int, *phases: str, **changes: str) -> Iterator[Job]:
    with started(base, ranks, *phases, **changes) as job:
        _, errors = job.process.communicate(timeout=DEADLINE_S)
        assert job.process.returncode == 0, errors
        yield job


def eventually(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with finished(tmp_path_factory.mktemp("job"), 4, "operations", "groups", "ddp", "threads", "again") as done:
        yield done


def world_of(frame: Frame) -> np.void:
    (slot,) = (slot for slot in frame.slots if slot["comm_size"] == 4)
    return slot


def signatures(slot: np.void) -> dict[int, int]:
    used = slot["rounds"][slot["rounds"]["seq"] != 0]
    return dict(zip(used["seq"].tolist(), used["signature"].tolist(), strict=True))


def test_every_kind_of_collective_is_seen_with_its_operation_type_set_on_every_rank(job: Job) -> None:
    op, dtype, count, root = (np.array(column) for column in zip(*OPERATIONS, strict=True))
    expected = dict(enumerate(probeframe.signatures(op, dtype, count.astype(np.uint64), root).tolist(), 1))
    for rank, frame in enumerate(job.after("operations")):
        assert (frame.header["rank"], frame.header["world_size"], frame.header["local_rank"]) == (rank, 4, rank)
        assert frame.header["symbols_missing"] == 0
        slot = world_of(frame)
        assert signatures(slot) == expected
        assert (slot["enqueued"], slot["done"], slot["errors"]) == (len(OPERATIONS), len(OPERATIONS), 0)
        assert slot["comm_rank"] == rank
        assert slot["send_steps"] > 0
        assert slot["recv_steps"] > 0
        assert frame.header["works_lost"] == 0


def test_members_of_a_subgroup_have_its_id_and_nobody_else_has(job: Job) -> None:
    ids = [{int(slot["comm_id"]) for slot in frame.slots} for frame in job.after("groups")]
    assert [len(each) for each in ids] == [3, 3, 3, 3]  # the world, and two groups of the same members
    assert ids[0] == ids[1]
    assert ids[2] == ids[3]
    assert len(ids[0] & ids[2]) == 1
    for frame in job.after("groups"):
        pairs = [slot for slot in frame.slots if slot["comm_size"] == 2]
        assert [int(slot["done"]) for slot in pairs] == [3, 3]
        assert {int(slot["comm_rank"]) for slot in pairs} == {int(frame.header["rank"]) % 2}


def test_buckets_of_ddp_are_seen_and_alike_on_all_ranks(job: Job) -> None:
    before, after = ([world_of(frame) for frame in job.after(phase)] for phase in ("groups", "ddp"))
    counts = {int(new["done"] - old["done"]) for old, new in zip(before, after, strict=True)}
    assert len(counts) == 1
    assert counts.pop() >= 4 * 2  # four steps of at least two buckets
    assert len({tuple(sorted(signatures(slot).items())) for slot in after}) == 1
    assert all(slot["gap_sum_ns"] > 0 for slot in after)


def test_only_ranks_have_frames_and_loader_workers_and_the_forking_parent_none(job: Job) -> None:
    pids = {int(frame.header["pid"]) for frame in job.after("ddp")}
    assert {path.name for path in job.frames.iterdir()} == {f"{pid}.frame" for pid in pids}
    assert len(pids) == 4
    assert job.process.pid not in pids


def test_operations_in_flight_from_two_threads_are_all_counted(job: Job) -> None:
    for frame in job.after("threads"):
        twins = [slot for slot in frame.slots if slot["enqueued"] == 100]
        assert len(twins) == 2
        assert all(slot["done"] == 100 and not slot["open"]["seq"].any() for slot in twins)
        assert frame.header["works_lost"] == 0


def test_a_world_made_anew_has_another_id_equal_on_all_ranks(job: Job) -> None:
    old = {int(slot["comm_id"]) for frame in job.after("threads") for slot in frame.slots}
    new = [{int(slot["comm_id"]) for slot in frame.slots} - old for frame in job.after("again")]
    assert [len(each) for each in new] == [1, 1, 1, 1]
    assert len(set.union(*new)) == 1


def waits_of(rank: int, slots: dict[int, np.void]) -> list[int]:
    """The ranks that one meets from `rank` on when everyone names the peer that it waits for."""
    met = [rank]
    while len(met) <= len(slots):
        waiting = [int(lane["peer"]) for lane in slots[met[-1]]["lanes"] if lane["wait_state"]]
        if not waiting:
            break
        met += waiting
    return met


def test_a_stopped_rank_is_read_like_any_other_and_has_received_least(tmp_path: Path) -> None:
    with started(tmp_path, 4, "endless") as job:
        eventually(
            lambda: len(job.live()) == 4 and all(world_of(f)["done"] > 20 for f in job.live().values()),
            "all four ranks are training",
        )
        stopped = 2
        os.kill(int(job.live()[stopped].header["pid"]), signal.SIGSTOP)

        def progress() -> list[int]:
            return [int(world_of(frame)["recv_steps"]) for _, frame in sorted(job.live().items())]

        last: list[list[int]] = []

        def frozen() -> bool:
            last.append(progress())
            return len(last) > 10 and all(each == last[-1] for each in last[-10:])

        eventually(frozen, "the others stand still")
        slots = {rank: world_of(frame) for rank, frame in job.live().items()}
        entered = {rank: int(slot["enqueued"]) for rank, slot in slots.items()}
        open_rounds = {rank: slot["open"][slot["open"]["seq"] != 0] for rank, slot in slots.items()}
        # Those who had all they needed have left the round that the stopped rank is in, and wait in the next one.
        assert all(entered[rank] - entered[stopped] in (0, 1) for rank in slots)
        assert all(len(open_rounds[rank]) == 1 for rank in slots if rank != stopped)
        if len(open_rounds[stopped]) == 1:  # stopped inside the round
            received = {rank: int(slot["recv_steps"]) for rank, slot in slots.items()}
            assert received[stopped] <= min(received.values()) + 1
            assert all(stopped in waits_of(rank, slots) for rank in slots)
        os.kill(int(job.live()[stopped].header["pid"]), signal.SIGCONT)
        eventually(lambda: progress()[0] > last[-1][0], "it goes on")


def test_an_operation_that_fails_is_over_and_counted(tmp_path: Path) -> None:
    with finished(tmp_path, 2, "desert") as job:
        (frame,) = job.after("desert")
        slot = frame.slots[0]
        assert [int(slot[name]) for name in ("enqueued", "started", "done", "errors")] == [2, 2, 2, 1]
        assert not slot["open"]["seq"].any()


def test_torch_s_own_debug_mode_adds_no_communicator_of_unknown_members(tmp_path: Path) -> None:
    with finished(tmp_path, 4, "groups", TORCH_DISTRIBUTED_DEBUG="DETAIL") as job:
        frames = job.after("groups")
        ids = [{int(slot["comm_id"]) for slot in frame.slots if slot["comm_size"] == 2} for frame in frames]
        assert [len(each) for each in ids] == [2, 2, 2, 2]
        assert ids[0] == ids[1]
        assert ids[2] == ids[3]
        assert not ids[0] & ids[2]


TRAIN = """
import os, shutil, torch, torch.distributed as dist
dist.init_process_group("gloo")
for _ in range(5):
    dist.all_reduce(torch.ones(10))
works = [dist.all_reduce(torch.ones(10), async_op=True) for _ in range(3)]
for work in works:
    work.wait()
shutil.copy(f"{os.environ['TOCSIN_FRAME_DIR']}/{os.getpid()}.frame", os.environ["OUT"])
"""


def test_under_torchrun_each_worker_has_a_frame_the_launcher_none_and_all_leave_in_peace(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    frames, out = tmp_path / "frames", tmp_path / "out"
    frames.mkdir()
    out.mkdir()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run(
        [*launcher, tmp_path / "train.py"],
        env=environment(frames, out),
        check=True,
        capture_output=True,
        timeout=DEADLINE_S,
    )
    seen = [probeframe.parse(path.read_bytes()) for path in out.iterdir()]
    assert sorted(int(frame.header["local_rank"]) for frame in seen) == [0, 1]
    assert [[int(slot["done"]) for slot in frame.slots] for frame in seen] == [[8], [8]]
    assert {path.name for path in frames.iterdir()} == {path.name for path in out.iterdir()}


def test_without_a_frame_directory_the_job_runs_as_ever(tmp_path: Path) -> None:
    with finished(tmp_path, 2, "desert", TOCSIN_FRAME_DIR=str(tmp_path / "absent")) as job:
        assert list(job.frames.iterdir()) == []
