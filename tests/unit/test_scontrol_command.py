"""Running one command: deadlines, bounds, surroundings, faults, and what happens when the controller dies."""

from __future__ import annotations

import asyncio
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from diagnosis.contracts.errors import SlurmFault
from remediation.backends import command
from tests.eventually import eventually

Script = Callable[[str], str]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Writes a shell script and returns its path."""

    def write(body: str) -> str:
        path = tmp_path / "scontrol"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return write


async def run(*argv: str, deadline_s: float = 10.0, output_bytes_max: int = 1 << 20) -> str:
    return await command.run(argv, deadline_s=deadline_s, output_bytes_max=output_bytes_max)


async def gone(pid: int) -> bool:
    """Returns once the process has ended (a zombie has). Raises AssertionError when it lives on."""

    def ended() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    await eventually(ended, 5)
    return True


async def test_the_output_of_a_command_comes_back_whole(script: Script) -> None:
    assert await run(script('echo "$1"; echo said'), "a b") == "a b\nsaid\n"


async def test_a_hanging_command_is_killed_with_all_its_children(script: Script, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    body = f"sleep 60 & echo $$ $! > {pids}.part; mv {pids}.part {pids}; trap '' TERM; wait"
    with pytest.raises(SlurmFault) as caught:
        await run(script(body), deadline_s=1.0)
    assert caught.value.reason == "timeout"
    for pid in pids.read_text().split():
        assert await gone(int(pid))


async def test_a_cancelled_call_leaves_no_process(script: Script, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    call = asyncio.create_task(run(script(f"echo $$ > {pid_file}.part; mv {pid_file}.part {pid_file}; sleep 60")))
    await eventually(pid_file.exists)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await gone(int(pid_file.read_text()))


async def test_endless_output_is_cut_and_told(script: Script) -> None:
    with pytest.raises(SlurmFault) as caught:
        await run(script("yes"), output_bytes_max=1 << 16)
    assert caught.value.reason == "oversized"


async def test_endless_complaints_do_not_block_a_command(script: Script) -> None:
    with pytest.raises(SlurmFault) as caught:
        await run(script("head -c 1000000 /dev/zero | tr '\\0' x >&2; exit 1"))
    assert caught.value.reason == "refused"
    assert len(str(caught.value)) < 500


async def test_a_command_that_does_not_exist_says_where_to_set_it(tmp_path: Path) -> None:
    with pytest.raises(SlurmFault, match=r"\[slurm\] path") as caught:
        await run(str(tmp_path / "scontrol"))
    assert caught.value.reason == "missing"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("slurm_update error: Unable to contact slurm controller (connect failure)", "unreachable"),
        ("slurm_load_jobs error: Zero Bytes were transmitted or received", "unreachable"),
        ("scontrol: fatal: Could not establish a configuration source", "unreachable"),
        ("slurm_update error: Socket timed out on send/recv operation", "timeout"),
        ("slurm_update error: Access/permission denied", "permission"),
        ("error: Protocol authentication error", "permission"),
        ("Invalid job id specified for job 999", "unknown_job"),
        ("slurm_update error: Invalid node name specified", "unknown_node"),
        ("Node nope not found", "unknown_node"),
        ("Job is no longer pending execution for job 1", "refused"),
        ("", "refused"),
    ],
)
async def test_a_failure_has_a_stable_word_and_slurms_own_text(script: Script, said: str, reason: str) -> None:
    with pytest.raises(SlurmFault) as caught:
        await run(script(f"echo '{said}' >&2; exit 1"))
    assert caught.value.reason == reason
    assert said in str(caught.value)


async def test_a_command_sees_nothing_that_changes_its_words(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SQUEUE_FORMAT", "SLURM_CLUSTERS", "SLURM_JOB_ID", "SQUEUE_STATES"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("SLURM_CONF", "/some/slurm.conf")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    seen = dict(line.split("=", 1) for line in (await run(script("env"))).splitlines())
    assert {"LC_ALL": "C", "SLURM_CONF": "/some/slurm.conf", "SLURM_TIME_FORMAT": "standard"}.items() <= seen.items()
    assert not any(name.startswith(("SQUEUE_", "SLURM_CLUSTERS", "SLURM_JOB")) for name in seen)


async def test_a_command_dies_with_a_controller_that_is_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    parent = (
        "import asyncio, sys\n"
        "from remediation.backends import command\n"
        "asyncio.run(command.run(sys.argv[1:], deadline_s=60, output_bytes_max=1000))\n"
    )
    body = f"echo $$ > {pid_file}.part; mv {pid_file}.part {pid_file}; exec sleep 60"
    controller = await asyncio.create_subprocess_exec(
        sys.executable, "-c", parent, "/bin/sh", "-c", body, cwd=Path(__file__).parents[2]
    )
    try:
        await eventually(lambda: pid_file.exists() or controller.returncode is not None, 20)
    finally:
        controller.kill()
        await controller.wait()
    assert await gone(int(pid_file.read_text()))
