"""The local ranks as a person sees them: who is odd, who waits for whom, and what could not be read."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from controller.cli.main import app
from controller.cli.node_once import lines_of
from diagnosis.contracts import probeframe
from diagnosis.contracts.errors import OperatorFault
from diagnosis.contracts.probeframe import StepState, Transport, Untold, WaitState
from diagnosis.contracts.report import GpuFacts, HardwareFacts
from node_daemon.once import NodeNow, RankNow, look, node_of
from tests.eventually import eventually
from tests.nodeframes import NODE, FrameImage, idle_process

GPUS = HardwareFacts("ok", gpus=[GpuFacts(0, sm_clock_mhz=1080, utilization_pct=97, temperature_c=61)])
ABSENT = HardwareFacts("absent", "no library")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "frames"
    (path / NODE).mkdir(parents=True)
    (path / NODE).chmod(0o1777)
    return path


@pytest.fixture
def job(root: Path) -> Path:
    path = root / NODE / "4242.0"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def pids() -> Iterator[list[int]]:
    """Four processes that sleep."""
    with idle_process() as a, idle_process() as b, idle_process() as c, idle_process() as d:
        yield [a.pid, b.pid, c.pid, d.pid]


def seen(root: Path, gpus: HardwareFacts = ABSENT, node: str = NODE) -> NodeNow:
    return look(root, node, 0, hardware=lambda: gpus)


def by_rank(now: NodeNow) -> dict[int | None, RankNow]:
    return {rank.rank: rank for rank in now.ranks}


def images(pids: list[int], rounds: int = 20) -> list[FrameImage]:
    """A job of four ranks that have ended some rounds together, the last some seconds ago."""
    made = [FrameImage(pid, rank=rank, world_size=4, transport=Transport.GLOO) for rank, pid in enumerate(pids)]
    for rank, image in enumerate(made):
        image.join(size=4, rank=rank)
        for _ in range(rounds):
            image.step()
        age(image, 5)
    return made


def age(image: FrameImage, seconds: int) -> None:
    image.header["last_leave_ns"] -= seconds * 10**9
    image.slots[0]["t_enqueued_ns"] -= seconds * 10**9


def save(job: Path, made: list[FrameImage]) -> None:
    for image in made:
        image.save(job)


def test_a_healthy_job_has_nobody_odd(root: Path, job: Path, pids: list[int]) -> None:
    save(job, images(pids))
    now = seen(root, GPUS)
    assert [rank.rank for rank in now.ranks] == [0, 1, 2, 3]
    assert [rank.odd for rank in now.ranks] == [[]] * 4
    (comm,) = now.ranks[0].comms
    assert (comm.entered, comm.done, comm.inside_s, comm.size, comm.position) == (20, 20, None, 4, 0)
    assert comm.idle_s is not None and comm.idle_s >= 5
    assert now.unread == ([] if os.geteuid() == 0 else now.unread)


def test_the_rank_that_has_not_entered_stands_first_and_the_others_wait_for_it(
    root: Path, job: Path, pids: list[int]
) -> None:
    made = images(pids)
    for rank in (0, 1, 3):
        made[rank].enter()
        made[rank].slots[0]["t_enqueued_ns"] -= 5 * 10**9
    save(job, made)
    now = seen(root)
    assert now.ranks[0].rank == 2
    assert now.ranks[0].odd == ["has not entered round 21, others here are 1 ahead"]
    for rank in (0, 1, 3):
        told = by_rank(now)[rank]
        assert told.odd == []
        assert told.comms[0].waits_for == ["rank 2 (not there)"]
        assert told.comms[0].inside_s is not None and told.comms[0].inside_s >= 5


def test_who_waits_elsewhere_is_not_odd_for_being_behind(root: Path, job: Path, pids: list[int]) -> None:
    made = images(pids[:3])
    made[0].enter()
    made[1].join(1, 0xB0B, size=2, rank=0)  # rank 1 is kept by rank 2 in another communicator
    made[2].join(1, 0xB0B, size=2, rank=1)
    made[1].enter(1)
    age(made[0], 5)
    save(job, made)
    now = seen(root)
    assert by_rank(now)[1].odd == []
    assert by_rank(now)[1].comms[0].waits_for == ["rank 2 (not there)"]
    assert now.ranks[0].rank == 2


def test_a_moment_behind_is_not_odd(root: Path, job: Path, pids: list[int]) -> None:
    made = images(pids)
    made[2].header["last_leave_ns"] += 5 * 10**9
    for rank in (0, 1, 3):
        made[rank].enter()
    save(job, made)
    assert [rank.odd for rank in seen(root).ranks] == [[]] * 4


async def test_what_the_kernel_says_counts_most(root: Path, job: Path, pids: list[int]) -> None:
    made = images(pids)
    for rank in (0, 1, 3):
        made[rank].enter()
    save(job, made)
    os.kill(pids[3], signal.SIGSTOP)
    await eventually(lambda: by_rank(seen(root))[3].process == "T")
    now = seen(root)
    assert now.ranks[0].rank == 3
    assert now.ranks[0].odd == ["the process is stopped (T)"]
    os.kill(pids[3], signal.SIGKILL)
    await eventually(lambda: by_rank(seen(root))[3].process == "Z")
    now = seen(root)
    assert now.ranks[0].rank == 3
    assert now.ranks[0].odd == ["the process is ended (Z)"]
    await asyncio.to_thread(os.waitpid, pids[3], 0)
    now = seen(root)
    assert now.ranks[0].odd == ["the process is gone (X)"]
    assert now.ranks[0].comms[0].inside_s is None


def test_another_operation_in_the_same_round_is_odd(root: Path, job: Path, pids: list[int]) -> None:
    made = images(pids)
    for rank, image in enumerate(made):
        image.enter(signature=9 if rank == 1 else 7)
    save(job, made)
    now = seen(root)
    assert now.ranks[0].rank == 1
    assert now.ranks[0].odd == ["runs another operation in round 21 than most here"]
    assert [rank.odd for rank in now.ranks[1:]] == [[]] * 3


def test_two_against_two_names_nobody(root: Path, job: Path, pids: list[int]) -> None:
    made = images(pids)
    for rank, image in enumerate(made):
        image.enter(signature=7 + rank % 2)
    save(job, made)
    assert [rank.odd for rank in seen(root).ranks] == [[]] * 4


def test_gloo_s_lanes_say_for_whom_it_waits_also_on_other_nodes(root: Path, job: Path, pids: list[int]) -> None:
    made = images(pids[:2])
    for image in made:
        image.slots[0]["comm_size"] = 8
        image.enter()
    lane = made[0].slots[0]["lanes"][7]
    lane["peer"], lane["used"], lane["wait_state"] = 7, 1, WaitState.RECV
    lane = made[0].slots[0]["lanes"][1]
    lane["peer"], lane["used"], lane["wait_state"] = 1, 1, WaitState.SEND
    save(job, made)
    waits = by_rank(seen(root))[0].comms[0].waits_for
    assert waits == ["rank 1 (takes nothing)", "member 7 of 8 (sends nothing)"]


def nccl(pid: int, unknown: Untold) -> FrameImage:
    image = FrameImage(pid, rank=0, world_size=2, transport=Transport.NCCL)
    image.join(size=2)
    image.step()
    image.enter()
    image.slots[0]["unknown"] = unknown
    channels = image.slots[:1]["lanes"].view(probeframe.CHANNEL_DTYPE)
    channels["peer"] = probeframe.PEER_UNKNOWN
    channels[0, 3] = (5, 5, 0, 1, StepState.PEER_CREDIT, StepState.NONE)
    return image


def test_nccl_s_channels_say_it_where_their_steps_are_on(root: Path, job: Path, pids: list[int]) -> None:
    path = nccl(pids[0], Untold(0)).save(job)
    path.rename(job / f"{pids[0]}.nccl.frame")
    (rank,) = seen(root).ranks
    assert rank.comms[0].waits_for == ["member 1 of 2 (takes nothing)"]
    assert rank.comms[0].transport == "nccl"


def test_what_a_probe_cannot_tell_is_unknown(root: Path, job: Path, pids: list[int]) -> None:
    path = nccl(pids[0], Untold.DONE | Untold.TIMES | Untold.STEPS | Untold.ERRORS).save(job)
    path.rename(job / f"{pids[0]}.nccl.frame")
    now = seen(root)
    (comm,) = now.ranks[0].comms
    assert (comm.done, comm.inside_s, comm.errors, comm.waits_for) == (None, None, None, [])
    assert any("  ? (" in line for line in lines_of(now))


def test_the_table_names_ranks_gpus_and_oddities_and_drives_no_terminal(root: Path, job: Path, pids: list[int]) -> None:
    made = images(pids)
    made[1].slots[0]["errors"] = 3
    save(job, made)
    lines = list(lines_of(seen(root, GPUS)))
    assert lines[0].split()[:4] == ["JOB", "RANK", "PID", "PROCESS"]
    assert lines[1].startswith("!4242.0")
    assert "1/4" in lines[1]
    assert "0 1080 MHz 97 % 61 C" in next(line for line in lines if "0/4" in line)
    assert "odd: rank 1 of job 4242: 3 rounds failed" in lines
    assert lines[-1].startswith(f"{NODE}: 4 ranks of ")
    assert all(char.isprintable() for line in lines for char in line)


def test_what_could_not_be_read_is_told(root: Path, job: Path, pids: list[int]) -> None:
    save(job, images(pids[:1]))
    (job / "junk").write_text("x")
    (job / "77.frame").symlink_to("/etc/passwd")
    (job / "78.frame").write_bytes(b"half a frame")
    now = seen(root, HardwareFacts("hung", "no answer"))
    told = "\n".join(now.unread)
    assert "1 of the entries below" in told
    assert "are links" in told
    assert "are no frames (short)" in told
    assert "GPUs: hung (no answer)" in now.unread


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of two users")
def test_another_user_sees_their_own_jobs_alone_and_is_told_so(root: Path, job: Path, pids: list[int]) -> None:
    save(job, images(pids))
    script = (
        "import os, sys; from pathlib import Path; from node_daemon.once import look;"
        "os.setgid(65534); os.setuid(65534);"
        "now = look(Path(sys.argv[1]), sys.argv[2], 0); print(len(now.ranks), now.unread)"
    )
    for folder in (root, *root.parents):
        if folder.stat().st_uid == 0 and folder != Path("/") and "pytest" in str(folder):
            folder.chmod(folder.stat().st_mode | 0o011)
    done = subprocess.run([sys.executable, "-c", script, str(root), NODE], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("0 "), done.stderr
    assert "not root: only jobs of nobody are read" in done.stdout
    assert "belong to somebody else" in done.stdout


def test_looking_changes_nothing(root: Path, job: Path, pids: list[int]) -> None:
    made = images(pids)
    os.kill(pids[0], signal.SIGKILL)
    save(job, made)
    (root / NODE / "4243.0").mkdir(mode=0o700)
    before = sorted(str(path) for path in root.rglob("*"))
    for _ in range(3):
        seen(root)
    assert sorted(str(path) for path in root.rglob("*")) == before


def test_where_nothing_is_watched_it_says_so_and_makes_no_directory(tmp_path: Path) -> None:
    with pytest.raises(OperatorFault, match="no such directory"):
        look(tmp_path / "absent", NODE, 0)
    assert list(tmp_path.iterdir()) == []


def test_the_node_is_the_one_that_is_there_or_that_of_the_host(root: Path) -> None:
    assert node_of(root, "elsewhere") == NODE
    (root / "gpu002").mkdir()
    assert node_of(root, "gpu002.cluster") == "gpu002"
    with pytest.raises(OperatorFault, match="gpu001, gpu002"):
        node_of(root, "elsewhere")
    with pytest.raises(OperatorFault, match="no node daemon has run here"):
        node_of(root / "absent", "elsewhere")


def test_steps_are_told_where_the_frames_moved_while_it_looked(root: Path, job: Path, pids: list[int]) -> None:
    (image,) = images(pids[:1], rounds=40)
    image.save(job)

    def step(_: float) -> None:
        image.step()
        image.slots[0]["t_enqueued_ns"] = int(image.slots[0]["enqueued"]) * 40_000_000
        image.save(job)

    now = look(root, NODE, 0.6, hardware=lambda: ABSENT, sleep=step)
    assert now.ranks[0].step_ms == 40.0
    assert any("40 " in line and " ms" in line for line in lines_of(now))


def test_the_command_prints_the_table_or_json(root: Path, job: Path, pids: list[int]) -> None:
    save(job, images(pids))
    arguments = ["node", "--once", "--seconds", "0", "--frame-root", str(root)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "4242.0" in done.output
    done = CliRunner().invoke(app, [*arguments, "--json"])
    told = json.loads(done.output)
    assert told["schema"] == "tocsin.node/1"
    assert [rank["rank"] for rank in told["ranks"]] == [0, 1, 2, 3]


def test_the_command_reads_the_daemon_s_file(root: Path, job: Path, pids: list[int], tmp_path: Path) -> None:
    save(job, images(pids))
    config = tmp_path / "node.toml"
    config.write_text(f'node = "{NODE}"\ncontroller_url = "http://head:8620"\nframe_root = "{root}"\n')
    done = CliRunner().invoke(app, ["node", "--once", "--seconds", "0", "--config", str(config)])
    assert done.exit_code == 0, done.output
    assert f"{NODE}: 4 ranks" in done.output
    config.write_text("nonsense = 1\n")
    assert CliRunner().invoke(app, ["node", "--once", "--config", str(config)]).exit_code == 1


def test_without_once_it_says_what_to_run_instead() -> None:
    assert CliRunner().invoke(app, ["node"]).exit_code == 2


def test_an_empty_node_is_no_fault(root: Path) -> None:
    lines = list(lines_of(seen(root)))
    assert lines[0] == f"no rank of a watched job is on {NODE}"


def test_a_driver_that_hangs_does_not_hold_up_the_table(root: Path, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    for_ever = threading.Event()
    monkeypatch.setattr("node_daemon.once.NVML_DEADLINE_S", 0.05)

    def hang() -> HardwareFacts:
        for_ever.wait()
        return ABSENT

    now = look(root, NODE, 0, hardware=hang)
    assert now.gpus.state == "hung"
    for_ever.set()


def test_numbers_that_a_job_makes_up_are_shown_and_nothing_more(root: Path, job: Path, pids: list[int]) -> None:
    (image,) = images(pids[:1])
    dice = np.random.default_rng(3)
    image.slots = np.frombuffer(dice.bytes(probeframe.SLOT_COUNT * probeframe.SLOT_BYTES), probeframe.SLOT_DTYPE).copy()
    image.slots["comm_rank"] %= 7
    image.slots["comm_size"] = 8
    image.save(job)
    now = seen(root)
    assert len(list(lines_of(now))) >= 2
    assert len(now.ranks[0].comms) == probeframe.SLOT_COUNT
