"""The command line as a person runs it: a process, its output and its exit code."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import pytest_asyncio
from typer.testing import CliRunner

from controller.cli.main import ExitCode, app
from controller.control.status import IncidentDetail, LoopStatus, Status
from controller.store.base import Incident
from diagnosis.contracts.credential import node_key
from tests.integration.controller_view import ControlSite
from tests.unit.test_store import make_incident

PROGRAM = "from controller.cli.main import main; main()"


class Result(NamedTuple):
    """What a person gets."""

    code: int
    out: str
    err: str


async def tocsin(*arguments: str, **environment: str) -> Result:
    env = {name: value for name, value in os.environ.items() if not name.startswith("TOCSIN_")} | environment
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PROGRAM,
        *arguments,
        env=env,
        cwd=Path(__file__).parents[2],
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return Result(process.returncode, out.decode(), err.decode())


@pytest_asyncio.fixture
async def site() -> AsyncIterator[ControlSite]:
    started = await ControlSite().start()
    yield started
    await started.stop()


async def ask(site: ControlSite, *arguments: str) -> Result:
    return await tocsin(*arguments, "--socket", str(site.socket))


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (("status", "--json"), Status),
        (("incidents", "--json"), list[Incident]),
        (("incidents", "--open", "--limit", "3", "--json"), list[Incident]),
        (("show", "a1b2c3", "--json"), IncidentDetail),
        (("pause", "--why", "test", "--json"), dict[str, Any]),
        (("resume", "--json"), dict[str, bool]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
async def test_every_answer_comes_as_json_on_request(site: ControlSite, arguments: tuple[str, ...], kind: Any) -> None:
    await site.reading.add_hostile_incident()
    result = await ask(site, *arguments)
    assert (result.code, result.err) == (ExitCode.OK, "")
    msgspec.json.decode(result.out, type=kind)


async def test_status_is_told_in_words(site: ControlSite) -> None:
    site.reading.pause.pause("ada", "fabric\x1b[2J maintenance", 1_799_999_000.0)
    site.reading.loop.told = LoopStatus(mode="act", fault="Slurm does not answer\nfor 20 s")
    result = await ask(site, "status")
    lines = result.out.splitlines()
    assert lines[0] == "PAUSED by ada, 17 min ago: fabric?[2J maintenance"
    assert "FAULT Slurm does not answer" in lines and "FAULT for 20 s" in lines
    assert any(line.split()[:4] == ["42.1", "ada", "RUNNING", "8"] for line in lines)


async def test_a_node_whose_daemon_has_fallen_silent_does_not_count_as_reporting(site: ControlSite) -> None:
    site.reading.loop.told = LoopStatus(mode="act", nodes_known=3, nodes_held=1)
    site.reading.registry.nodes += [
        msgspec.structs.replace(site.reading.registry.nodes[0], node="gpu003", silent=True),
    ]
    assert "1 of 3 nodes report, silent: gpu003; 1 held by us" in (await ask(site, "status")).out.splitlines()


async def test_incidents_and_one_of_them_are_told_in_words_that_drive_no_terminal(site: ControlSite) -> None:
    listed = await ask(site, "incidents")
    assert listed.out == "no incidents\n"
    await site.reading.add_hostile_incident()
    listed = await ask(site, "incidents")
    assert listed.out.splitlines()[1].split()[0] == "a1b2c3"
    shown = await ask(site, "show", "a1b2c3")
    assert "drain" in shown.out and "rank 3, pid 7, state T" in shown.out and "python  " in shown.out
    assert "\x1b" not in listed.out + shown.out


async def test_what_is_not_there_is_a_problem_and_what_is_misused_is_usage(site: ControlSite) -> None:
    absent = await ask(site, "show", "ffffff")
    assert (absent.code, absent.err) == (ExitCode.PROBLEM, "no such incident\n")
    for arguments in (
        ("show", "../status"),
        ("show", "é"),
        ("incidents", "--limit", "0"),
        ("nonsense",),
        ("status", "--nonsense"),
    ):
        assert (await tocsin(*arguments)).code == ExitCode.USAGE


async def test_without_a_controller_the_answer_says_so(tmp_path: Path) -> None:
    result = await tocsin("status", "--socket", str(tmp_path / "absent.sock"))
    assert result.code == ExitCode.UNREACHABLE
    assert "absent.sock" in result.err and "Traceback" not in result.err


def config_of(directory: Path) -> Path:
    path = directory / "controller.toml"
    path.write_text(
        f'state_dir = "{directory}"\nsocket = "{directory}/controller.sock"\n'
        f'secret_file = "{directory}/secret"\npolicy_file = "{directory}/policy.toml"\n'
    )
    (directory / "secret").write_text("ab" * 32)
    (directory / "secret").chmod(0o600)
    (directory / "policy.toml").write_text('mode = "observe"\n')
    return path


async def test_pause_works_through_the_socket_that_the_configuration_names(site: ControlSite) -> None:
    config = config_of(site.directory)
    paused = await tocsin("pause", "--why", "maintenance", TOCSIN_CONFIG=str(config))
    assert paused.code == ExitCode.OK and paused.out.startswith("paused by ")
    state = site.reading.pause.state()
    assert state is not None and state.why == "maintenance"
    resumed = await tocsin("resume", "--config", str(config))
    assert (resumed.code, resumed.out) == (ExitCode.OK, "resumed\n")
    assert site.reading.pause.state() is None


async def test_pause_works_without_a_controller_and_says_how(tmp_path: Path) -> None:
    config = str(config_of(tmp_path))
    paused = await tocsin("pause", "--why", "maintenance", "--config", config)
    assert paused.code == ExitCode.OK
    assert "no controller answers" in paused.out and str(tmp_path / "paused.json") in paused.out
    assert json.loads((tmp_path / "paused.json").read_text())["why"] == "maintenance"
    again = await tocsin("pause", "--config", config, "--json")
    assert json.loads(again.out)["who"]
    resumed = await tocsin("resume", "--config", config)
    assert resumed.code == ExitCode.OK and resumed.out.startswith("resumed (no controller answers")
    assert not (tmp_path / "paused.json").exists()


@pytest.mark.parametrize("fault", ["cycle_period_s = 0\n", "nonsense = 1\n", "[notify]\ntargets = 5\n"])
async def test_a_fault_in_the_configuration_does_not_prevent_a_pause(tmp_path: Path, fault: str) -> None:
    config = config_of(tmp_path)
    config.write_text(config.read_text() + fault)
    paused = await tocsin("pause", "--config", str(config))
    assert paused.code == ExitCode.OK and "controller.toml:" in paused.err and (tmp_path / "paused.json").exists()
    assert (await tocsin("resume", "--config", str(config))).code == ExitCode.OK
    assert not (tmp_path / "paused.json").exists()


@pytest.mark.parametrize("fault", ["state_dir = 5\n", "socket = [\n", 'state_dir = "relative"\n'])
async def test_a_pause_of_nobody_knows_which_controller_is_refused(tmp_path: Path, fault: str) -> None:
    config = tmp_path / "controller.toml"
    config.write_text(fault)
    paused = await tocsin("pause", "--config", str(config))
    assert paused.code == ExitCode.PROBLEM and "nothing was changed" in paused.err


async def test_the_usual_file_counts_with_its_faults_where_it_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path)
    config.write_text(config.read_text() + "nonsense = 1\n")
    monkeypatch.setattr("controller.cli.main.DEFAULT_PATH", config)
    result = CliRunner().invoke(app, ["pause"])
    assert result.exit_code == ExitCode.OK and (tmp_path / "paused.json").exists()
    result = CliRunner().invoke(app, ["status"])
    assert result.exit_code == ExitCode.PROBLEM and "nonsense" in result.output


@pytest.mark.parametrize("why", ["caf\udce9", "\udcff", "x" * 100_000, "\x1b[2J"])
async def test_any_word_pauses(tmp_path: Path, why: str) -> None:
    assert (await tocsin("pause", "--why", why, "--config", str(config_of(tmp_path)))).code == ExitCode.OK
    assert (tmp_path / "paused.json").exists()


async def test_a_pause_that_reaches_nobody_and_nothing_fails(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    config.write_text(config.read_text().replace(f'state_dir = "{tmp_path}"', f'state_dir = "{tmp_path}/absent"'))
    result = await tocsin("pause", "--config", str(config))
    assert result.code == ExitCode.UNREACHABLE and "not paused" in result.err


async def test_a_node_gets_its_key(tmp_path: Path) -> None:
    config = str(config_of(tmp_path))
    result = await tocsin("node-key", "gpu001", "--config", config)
    assert result == Result(ExitCode.OK, node_key(b"\xab" * 32, "gpu001").hex() + "\n", "")
    assert (await tocsin("node-key", "not a node", "--config", config)).code == ExitCode.PROBLEM
    (tmp_path / "secret").chmod(0o644)
    refused = await tocsin("node-key", "gpu001", "--config", config)
    assert refused.code == ExitCode.PROBLEM and "chmod 600" in refused.err and refused.out == ""


async def test_config_check_finds_all_faults_of_all_files(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    good = await tocsin("config", "check", str(config))
    assert good == Result(ExitCode.OK, "no faults found\n", "")
    bad = tmp_path / "bad.toml"
    bad.write_text('state_dir = "relative"\n[slurm]\ncall_deadline_s = -1\n[detect]\nhang_flor_s = 6\n')
    policy = tmp_path / "policy.toml"
    policy.write_text('mode = "maybe"\n[budget]\nnodes_held_max = -1\n')
    node = tmp_path / "node.toml"
    node.write_text('node = "gpu001"\ncontroller_url = "http://head:8620"\n[frames]\nbad = 1\n')
    result = await tocsin("config", "check", str(bad), str(policy), str(node), "--json")
    assert result.code == ExitCode.PROBLEM
    found = [(Path(fault["path"]).name, fault["line"], fault["key"]) for fault in json.loads(result.out)]
    assert found == [
        ("bad.toml", 1, "state_dir"),
        ("bad.toml", 3, "slurm.call_deadline_s"),
        ("bad.toml", 5, "detect.hang_flor_s"),
        ("policy.toml", 1, "mode"),
        ("policy.toml", 3, "budget.nodes_held_max"),
        ("node.toml", 4, "frames.bad"),
    ]
    told = (await tocsin("config", "check", str(bad))).out
    assert f"{bad}:5: detect.hang_flor_s: unknown key, did you mean hang_floor_s?" in told


async def test_config_check_of_the_controllers_file_covers_what_it_names(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    (tmp_path / "secret").unlink()
    (tmp_path / "policy.toml").write_text("nonsense = 1\n")
    with config.open("a") as file:
        file.write('[[notify.targets]]\nname = "chat"\nurl = "nosuchservice://TOPSECRET"\n')
    result = await tocsin("config", "check", str(config))
    assert result.code == ExitCode.PROBLEM
    for words in ("policy.toml:1: nonsense: unknown key", "secret cannot be read", "target chat"):
        assert words in result.out
    assert "TOPSECRET" not in result.out


async def test_faults_of_a_named_configuration_are_not_passed_over(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    config.write_text("nonsense = 1\n")
    result = await tocsin("status", "--config", str(config))
    assert result.code == ExitCode.PROBLEM and ":1: nonsense: unknown key" in result.err


async def test_a_controller_that_speaks_otherwise_is_told(site: ControlSite) -> None:
    await site.reading.store.add_incident(make_incident())
    site.reading.loop.told = msgspec.structs.replace(site.reading.loop.told, mode=5)
    result = await ask(site, "status")
    assert result.code == ExitCode.PROBLEM and "same version" in result.err
