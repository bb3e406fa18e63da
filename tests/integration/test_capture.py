"""From a watched job through the control socket to a file, and back to the same verdict; then all of it judged anew."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from typer.testing import CliRunner

from controller.captures import Captures
from controller.cli.main import ExitCode, app
from controller.control.app import ControlApp
from controller.control.status import View
from controller.servers import unix_server
from controller.settings import Control
from remediation.policy.rules import Policy
from tests.eventually import eventually
from tests.integration.test_controller_cli import Result, config_of, tocsin
from tests.unit.test_control_loop import CULPRIT, GUILTY, JOB, World
from tests.unit.test_store import make_incident


class Site:
    """A controller's loop over an in-memory Slurm and a simulated job, with a served control socket."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.world = World(directory, Policy())
        self.socket = directory / "controller.sock"

    async def start(self) -> Site:
        world = self.world
        await world.start()
        await world.healthy()
        captures = Captures(world.store)
        view = View(world.store, world.pause, world.loop, world.registry, requests=Counter(), listening=lambda: 0)
        control = ControlApp(view, world.pause, captures, world.registry, Control(), clock=lambda: world.slurm.now)
        self.server = unix_server(control.asgi(), self.socket)
        self._serving = asyncio.create_task(self.server.serve())
        await eventually(lambda: self.server.started)
        return self

    async def stop(self) -> None:
        self.server.stop()
        await self._serving
        await self.world.store.close()

    async def ask(self, *arguments: str) -> Result:
        return await tocsin(*arguments, "--socket", str(self.socket))

    async def ask_here(self, *arguments: str) -> Result:
        """The same without a process of its own, which takes a second."""
        made = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, "--socket", str(self.socket)])
        return Result(made.exit_code, made.stdout, made.stderr)

    async def slow(self) -> str:
        """The id of an incident: a rank that is slow, then, with its GPU throttled."""
        for _ in range(8):
            await self.world.second(slow=2.0)
        (before,) = await self.world.incidents()
        assert before.verdict.action.kind != "drain"
        self.world.throttled = {GUILTY}
        for _ in range(4):
            await self.world.second(slow=2.0)
        (incident,) = await self.world.incidents()
        assert incident.verdict.action.kind == "drain"
        return incident.id

    async def hang(self) -> str:
        """The id of an incident: a rank that does not enter."""
        self.world.sim.hang(absent=[CULPRIT])
        for _ in range(8):
            await self.world.second()
        (incident,) = await self.world.incidents()
        assert incident.verdict.anomaly == "hang"
        return incident.id


@pytest_asyncio.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    started = await Site(tmp_path).start()
    yield started
    await started.stop()


async def diagnosed(path: Path) -> dict[str, Any]:
    result = await tocsin("diagnose", str(path), "--json")
    assert result.code == ExitCode.OK, result.err
    verdict: dict[str, Any] = json.loads(result.out)
    verdict.pop("elapsed_ms")
    return verdict


@pytest.mark.parametrize("fault", ["slow", "hang"])
async def test_a_captured_incident_gives_the_verdict_that_it_was_opened_with(
    site: Site, fault: str, tmp_path: Path
) -> None:
    number = await (site.slow() if fault == "slow" else site.hang())
    out = tmp_path / "out.tar.zst"
    result = await site.ask("capture", number, "--out", str(out), "--json")
    assert result.code == ExitCode.OK, result.err
    told = json.loads(result.out)
    assert told == {
        "file": str(out), "size_bytes": out.stat().st_size, "incident": number, "job_id": None,
        "schema": "tocsin.capture/1",
    }  # fmt: skip
    shown = json.loads((await site.ask("show", number, "--json")).out)["incident"]["verdict"]
    shown.pop("elapsed_ms")
    assert await diagnosed(out) == shown
    assert [culprit["rank"] for culprit in shown["culprits"]] == [CULPRIT]


async def test_a_watched_job_is_captured_as_it_is_now(site: Site, tmp_path: Path) -> None:
    out = tmp_path / "now.tar.zst"
    assert (await site.ask("capture", "--job", str(JOB), "--out", str(out))).code == ExitCode.OK
    healthy = await diagnosed(out)
    assert (healthy["anomaly"], healthy["job_id"]) == ("none", JOB)
    await site.hang()
    kept = await site.ask("capture", "--job", str(JOB), "--out", str(out))
    assert kept.code == ExitCode.PROBLEM and "nothing is overwritten without --force" in kept.err
    assert (await site.ask("capture", "--job", str(JOB), "--out", str(out), "--force")).code == ExitCode.OK
    assert (await diagnosed(out))["anomaly"] == "hang"
    assert [path.name for path in tmp_path.iterdir() if "now" in path.name] == ["now.tar.zst"]


async def test_what_is_not_there_is_not_captured(site: Site, tmp_path: Path) -> None:
    await site.world.store.add_incident(make_incident())
    out = ("--out", str(tmp_path / "out.tar.zst"))
    for arguments, code, words in [
        (("capture", "ffffff", *out), ExitCode.PROBLEM, "no inputs are kept"),
        (("capture", "a1b2c3", *out), ExitCode.PROBLEM, "no inputs are kept"),
        (("capture", "--job", "77", *out), ExitCode.PROBLEM, "job 77 is not watched"),
        (("capture", "--job", "9" * 30, *out), ExitCode.PROBLEM, "a job's id is a number"),
        (("capture", "--job", "0", *out), ExitCode.USAGE, "job"),
        (("capture", "../status", *out), ExitCode.USAGE, "letters and digits"),
        (("capture", "a" * 65, *out), ExitCode.USAGE, "letters and digits"),
        (("capture", *out), ExitCode.USAGE, "either"),
        (("capture", "a1b2c3", "--job", "42", *out), ExitCode.USAGE, "either"),
    ]:
        result = await site.ask_here(*arguments)
        assert (result.code, words in result.err) == (code, True), (arguments, result)
    assert not (tmp_path / "out.tar.zst").exists()


async def test_a_file_that_cannot_be_written_is_told_and_nothing_is_left(site: Site, tmp_path: Path) -> None:
    number = await site.hang()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "folder").mkdir()
    for out, more in [("absent/x", ()), ("link", ()), ("folder", ()), ("folder", ("--force",)), ("x" * 300, ())]:
        before = {path.name for path in tmp_path.iterdir()}
        result = await site.ask_here("capture", number, "--out", str(tmp_path / out), *more)
        assert result.code == ExitCode.PROBLEM and "Traceback" not in result.err, (out, result)
        assert {path.name for path in tmp_path.iterdir()} - before <= {"folder.part"}
    assert not (tmp_path / "elsewhere").exists()
    odd = await site.ask_here("capture", number, "--out", str(tmp_path / "caf\udce9\x1b[2J"))
    assert odd.code == ExitCode.OK and "\x1b" not in odd.out


async def test_what_stands_is_the_same_and_what_the_rules_change_is_shown(site: Site, tmp_path: Path) -> None:
    number = await site.slow()
    await site.world.store.add_incident(make_incident(opened_at=1.0))  # from before inputs were kept
    same = await site.ask("replay", number)
    assert same.code == ExitCode.OK, same
    lines = same.out.splitlines()
    assert lines[0].startswith(number) and "same: slow S1, rank 5" in lines[0]
    assert lines[-1] == "1 same, 0 changed, 0 not judged"
    every = json.loads((await site.ask("replay", "--all", "--json")).out)
    assert (every["schema"], every["same"], every["changed"], every["not_judged"]) == ("tocsin.replay/1", 1, 0, 1)
    assert every["incidents"][0]["old"]["summary"] == every["incidents"][0]["new"]["summary"]
    config = config_of(tmp_path)
    config.write_text(config.read_text() + "[detect]\nclock_ratio_max = 0.1\n")
    changed = await site.ask("replay", "--all", "--config", str(config))
    assert changed.code == ExitCode.PROBLEM and "CHANGED: " in changed.out
    assert any(line.split()[:3] == ["*", "action", "drain"] for line in changed.out.splitlines()), changed.out


async def test_a_copy_of_the_state_is_replayed_without_a_controller(site: Site, tmp_path: Path) -> None:
    number = await site.hang()
    await site.world.store.close()
    copy = tmp_path / "copy.db"
    shutil.copy(tmp_path / "state.db", copy)
    before = copy.read_bytes()
    result = await tocsin("replay", "--all", "--db", str(copy), "--socket", str(tmp_path / "absent.sock"))
    assert result.code == ExitCode.OK and number in result.out, result
    assert copy.read_bytes() == before
    assert (await tocsin("replay", "--since", "0", "--db", str(copy))).out == "no incidents\n"
    site.world.store = await type(site.world.store).open(tmp_path / "state.db")


async def test_a_replay_of_nothing_or_nobody_is_told(site: Site, tmp_path: Path) -> None:
    assert await site.ask_here("replay", "--all") == Result(ExitCode.OK, "no incidents\n", "")
    unknown = await site.ask_here("replay", "ffffff")
    assert unknown.code == ExitCode.PROBLEM and "ffffff  NOT JUDGED: no such incident" in unknown.out
    await site.world.store.add_incident(make_incident())
    assert (await site.ask_here("replay", "--all")).code == ExitCode.PROBLEM
    gone = await tocsin("replay", "--all", "--socket", str(tmp_path / "absent.sock"))
    assert gone.code == ExitCode.UNREACHABLE and "no controller answers" in gone.err
    for arguments in (("replay",), ("replay", "a1b2c3", "--all"), ("replay", "../x"), ("replay", "--since", "-1")):
        assert (await site.ask_here(*arguments)).code == ExitCode.USAGE
    broken = await tocsin("replay", "--all", "--db", str(tmp_path / "absent.db"))
    assert broken.code == ExitCode.PROBLEM and "no such file" in broken.err


async def test_an_incident_is_handled_even_if_its_inputs_cannot_be_kept(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.captures.UNPACKED_BYTES_MAX", 10)
    number = await site.hang()
    assert site.world.told == [(number, "opened")]
    assert await site.world.store.inputs(number) is None
