"""The daemon's RAS client and the RAS threads of a real libnccl in four processes, without a GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from diagnosis.contracts.gathered import RasFacts
from node_daemon.collectors import ras
from node_daemon.collectors.doors import Process
from node_daemon.collectors.process import Processes
from tests.integration.nccl_real import Host, Layout, host, layout, library
from tests.integration.test_nccl_real import COMM_ID, OLDER, free_port
from tests.nodeframes import start_ticks

RANKS, LATE = 4, 2
FIRST_WORLD_RANK = 8
"""The four are the second node of a job: their ranks in the communicator are not those in the job."""
COMM_RANKS = {f"{COMM_ID:#x}": {rank: FIRST_WORLD_RANK + rank for rank in range(RANKS)}}


@contextmanager
def job(of: Layout, frames: Path, launched: dict[int, int]) -> Iterator[tuple[list[Host], list[Process]]]:
    """Four processes that RAS knows as one communicator; `launched`: all-reduces by rank, 6650 of the others."""
    with ExitStack() as stack:
        hosts = [stack.enter_context(host(of, frames, "none", free_port())) for _ in range(RANKS)]
        told = []
        for rank, process in enumerate(hosts):
            process.ask("comm", COMM_ID, RANKS, rank)
            assert process.ask("ras") == 0
            told.append(process.ask("ras_rank"))
        for rank, process in enumerate(hosts):
            assert process.ask("join", told, launched.get(rank, 6650)) == 0
        owner = (os.getuid(), os.getgid())
        yield hosts, [Process(FIRST_WORLD_RANK + r, p.pid, start_ticks(p.pid), *owner) for r, p in enumerate(hosts)]


async def ask(members: list[Process]) -> RasFacts:
    found, notes = ras.find_doors(members, Processes())
    assert len(found) == ras.DOORS_MAX, notes
    return ras.placed(await ras.ask_twice(found, pause_s=0.1), members, COMM_RANKS)


async def heard(members: list[Process]) -> int | None:
    comms = (await ras.ask_once(ras.find_doors(members, Processes())[0][0])).facts.comms
    return comms[0].heard if comms else None


async def joined(members: list[Process]) -> None:
    for _ in range(200):
        if await heard(members) == RANKS:
            return
    raise AssertionError("RAS did not gather all four")


async def check(of: Layout, frames: Path) -> None:
    with job(of, frames, {LATE: 6649}) as (hosts, members):
        door = ras.find_doors(members, Processes())[0][0]
        await _mismatch(members, door.pid == hosts[0].pid)
        os.kill(hosts[LATE].pid, signal.SIGSTOP)
        facts = await ask(members)
        silent = {process.world_rank for process in facts.processes}
        silent |= {rank.world_rank for comm in facts.comms for rank in comm.missing}
        assert (facts.state, silent) == ("ok", {FIRST_WORLD_RANK + LATE})


async def _mismatch(members: list[Process], first_is_asked: bool) -> None:
    assert first_is_asked
    for _ in range(200):  # until RAS's own network stands
        facts = await ask(members)
        assert facts.state == "ok"
        if facts.comms and facts.comms[0].differs:
            break
    (comm,) = facts.comms
    (difference,) = comm.differs
    most, least = difference.values
    assert (difference.what, most.value, most.ranks, least.value) == ("AllReduce", 6650, 3, 6649)
    (late,) = least.listed
    assert (late.rank, late.world_rank, late.pid, late.gpu) == (LATE, FIRST_WORLD_RANK + LATE, members[LATE].pid, LATE)


@pytest.fixture(scope="module")
def newest() -> Layout:
    return layout(library())


async def test_who_is_behind_and_who_is_stopped_are_told_with_rank_process_and_gpu(
    newest: Layout, tmp_path: Path
) -> None:
    await check(newest, tmp_path)


async def test_where_the_one_that_listens_is_stopped_another_is_asked(newest: Layout, tmp_path: Path) -> None:
    with job(newest, tmp_path, {}) as (hosts, members):
        await joined(members)
        os.kill(hosts[0].pid, signal.SIGSTOP)
        found, _ = ras.find_doors(members, Processes())
        facts = await ras.ask_twice(found, pause_s=0.1, deadline_s=7)
        facts = ras.placed(facts, members, COMM_RANKS)
    (comm,) = facts.comms
    assert (facts.state, facts.answers, comm.heard, comm.moved) == ("ok", 2, 3, False)
    assert [rank.world_rank for rank in comm.missing] == [FIRST_WORLD_RANK]


@pytest.fixture
def older(request: pytest.FixtureRequest, tmp_path: Path) -> Layout:
    where = tmp_path / "nccl"
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--target", where, f"nvidia-nccl-cu12=={request.param}"], check=True, timeout=600)
    return layout(where / "nvidia" / "nccl" / "lib" / "libnccl.so.2")


@pytest.mark.acceptance
@pytest.mark.timeout(900)
@pytest.mark.parametrize("older", OLDER, indirect=True)
async def test_older_releases_tell_the_same(tmp_path: Path, older: Layout) -> None:
    await check(older, tmp_path)
