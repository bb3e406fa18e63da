"""`tocsin`: the command line. It talks to the controller's Unix socket; heavy parts are imported by who needs them.

Exit codes: 0 done; 1 refused, not found or faults found; 2 wrong usage; 3 no controller answers. `tocsin diagnose`
needs no controller: 0 a verdict was reached, 1 an internal error, 2 wrong usage, 3 nothing readable among the inputs.
"""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Callable, Collection, Iterable
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Final, NoReturn, TypeVar

import msgspec
import typer

from controller.cli import words
from controller.cli.client import Refused, Unreachable, ask
from controller.config_faults import ConfigFault, load_model
from controller.control.pause import Pause, PauseState
from controller.control.status import IncidentDetail, Status
from controller.settings import DEFAULT_PATH, Settings, load_settings, read_secret
from controller.store.base import Incident
from diagnosis.contracts.credential import node_key as derive_node_key
from diagnosis.contracts.errors import OperatorFault

T = TypeVar("T")
PLACES: Final = ("state_dir", "socket")
"""All that pausing needs to know."""


class ExitCode(IntEnum):
    """See the module."""

    OK = 0
    PROBLEM = 1
    USAGE = 2
    UNREACHABLE = 3
    NOTHING_READABLE = 3


app = typer.Typer(
    name="tocsin",
    help="The alarm bell of Slurm GPU clusters. Exit codes: 0 done, 1 problem, 2 usage, 3 no controller answers.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Configuration files.", no_args_is_help=True)
app.add_typer(config_app, name="config")

ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", envvar="TOCSIN_CONFIG", help=f"Default: {DEFAULT_PATH}")
]
SocketOption = Annotated[
    Path | None, typer.Option("--socket", envvar="TOCSIN_SOCKET", help="Default: as the configuration says.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]


def main() -> None:
    """Entry point of the console script."""
    app()


@app.command()
def controller(config: ConfigOption = None) -> None:
    """Run the controller in the foreground."""
    from controller.main import run  # the whole service: not for those who only ask

    try:
        run(config or DEFAULT_PATH)
    except OperatorFault as fault:
        _fail(str(fault))


@app.command()
def status(config: ConfigOption = None, socket: SocketOption = None, as_json: JsonOption = False) -> None:
    """How the controller stands: mode, health, jobs, messages."""
    answer = _ask(_settings(config), socket, "GET", "/status")
    _print(answer, as_json, lambda: words.status_lines(_read(answer, Status)))


@app.command()
def incidents(
    config: ConfigOption = None,
    socket: SocketOption = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most so many, newest first.")] = 50,
    open_only: Annotated[bool, typer.Option("--open", help="Only those that are not closed.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Incidents, newest first."""
    url = f"/incidents?limit={limit}" + ("&open=1" if open_only else "")
    answer = _ask(_settings(config), socket, "GET", url)
    _print(answer, as_json, lambda: words.incident_lines(_read(answer, list[Incident])))


@app.command()
def show(
    incident: Annotated[str, typer.Argument(help="An incident's id, such as a1b2c3.")],
    config: ConfigOption = None,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> None:
    """One incident: who, why, how sure, what was done, and what the nodes sent."""
    if not (incident.isascii() and incident.isalnum()):
        raise typer.BadParameter("an incident's id has letters and digits only")
    answer = _ask(_settings(config), socket, "GET", f"/incidents/{incident}")
    _print(answer, as_json, lambda: words.detail_lines(_read(answer, IncidentDetail)))


@app.command()
def pause(
    why: Annotated[str, typer.Option(help="Shown to everybody who looks.")] = "",
    config: ConfigOption = None,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> None:
    """Do nothing to the cluster from now on; watching goes on. Works without a running controller too."""
    settings = _settings(config, PLACES)
    why = why.encode(errors="replace").decode()  # an argument may hold any bytes, and none of them prevents a pause
    try:
        answer = _ask_or_raise(settings, socket, "POST", "/pause", msgspec.json.encode({"why": why}))
    except Unreachable as error:
        state = _by_file(error, lambda: Pause(settings.state_dir).pause(_me(), why, time.time()))
        path = Pause(settings.state_dir).path
        lines = [f"{error}", f"paused by writing {path}: a controller obeys it as soon as it runs"]
        _print(msgspec.json.encode(state), as_json, lambda: lines)
        return
    _print(answer, as_json, lambda: [f"paused by {words.clean(_read(answer, PauseState).who or 'somebody')}"])


@app.command()
def resume(config: ConfigOption = None, socket: SocketOption = None, as_json: JsonOption = False) -> None:
    """End a pause. Works without a running controller too."""
    settings = _settings(config, PLACES)
    try:
        answer = _ask_or_raise(settings, socket, "POST", "/resume", b"")
        note = ""
    except Unreachable as error:
        was_paused = _by_file(error, lambda: Pause(settings.state_dir).resume())
        answer = msgspec.json.encode({"was_paused": was_paused})
        note = f" ({error}; removed {Pause(settings.state_dir).path})" if was_paused else f" ({error})"
    was_paused = _read(answer, dict[str, bool])["was_paused"]
    _print(answer, as_json, lambda: [("resumed" if was_paused else "was not paused") + note])


@app.command()
def diagnose(
    paths: Annotated[list[Path], typer.Argument(help="Bundles, archives, dumps, tables: files or directories, mixed.")],
    as_json: JsonOption = False,
) -> None:
    """Name who slows or hangs a job, from files alone: a bundle or whatever evidence there is. Needs no controller."""
    from controller.cli.diagnose import NothingReadable, diagnose_paths, verdict_lines  # numpy, the engine

    try:
        verdict = diagnose_paths(paths)
    except NothingReadable as nothing:
        _fail(str(nothing), ExitCode.NOTHING_READABLE)
    except OperatorFault as fault:
        _fail(str(fault), ExitCode.USAGE)
    _print(msgspec.json.encode(verdict), as_json, lambda: verdict_lines(verdict))


@app.command("node-key")
def node_key(
    node: Annotated[str, typer.Argument(help="The node's name in Slurm.")], config: ConfigOption = None
) -> None:
    """Print the key of one node, for its daemon's key file. Needs to read the controller's secret."""
    try:
        typer.echo(derive_node_key(read_secret(_settings(config).secret_file), node).hex())
    except (OperatorFault, ValueError) as fault:
        _fail(str(fault))


@config_app.command()
def check(
    paths: Annotated[list[Path], typer.Argument(help="controller.toml, policy.toml or node-daemon.toml")],
    as_json: JsonOption = False,
) -> None:
    """Name all faults of configuration files, each with its line and key."""
    from controller.cli.check import check_files  # knows all parts: not for those who only ask

    faults = [fault for path in paths for fault in check_files(path)]
    lines = [str(fault) for fault in faults] or ["no faults found"]
    _print(msgspec.json.encode(faults), as_json, lambda: lines)
    if faults:
        raise typer.Exit(ExitCode.PROBLEM)


def _settings(config: Path | None, places: Collection[str] = ()) -> Settings:
    """Of the file that was named, else of the usual one; where this user may not read that, the defaults.

    A fault in the file is told and ends the command. With `places` it only is told, as long as these keys are sound:
    whoever wants to stop everything has no time to mend a file, and must not stop something else instead.
    """
    path = config or DEFAULT_PATH
    try:
        return load_settings(path)
    except ConfigFault as fault:
        if config is None and not os.access(path, os.R_OK):
            return Settings()
        faults = str(fault)
    try:
        if not places:
            _fail(faults)
        settings = load_model(path, Settings, places)
    except ConfigFault:
        _fail(f"{faults}\nwhich controller is meant is not known: nothing was changed")
    typer.echo(faults, err=True)
    return settings


def _ask(settings: Settings, socket: Path | None, method: str, url: str) -> bytes:
    try:
        return _ask_or_raise(settings, socket, method, url)
    except Unreachable as error:
        _fail(str(error), ExitCode.UNREACHABLE)


def _ask_or_raise(settings: Settings, socket: Path | None, method: str, url: str, body: bytes | None = None) -> bytes:
    try:
        return ask(socket or settings.socket, method, url, body)
    except Refused as refusal:
        _fail(str(refusal))


def _by_file(error: Unreachable, change: Callable[[], T]) -> T:
    try:
        return change()
    except OperatorFault as fault:
        _fail(f"{error}\n{fault}", ExitCode.UNREACHABLE)


def _read(answer: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(answer, type=kind)
    except msgspec.DecodeError as error:
        _fail(f"the controller's answer cannot be read: {error}; are both of the same version?")


def _print(answer: bytes, as_json: bool, lines: Callable[[], Iterable[str]]) -> None:
    if as_json:
        typer.echo(answer.decode())
        return
    for line in lines():
        typer.echo(line)


def _fail(text: str, code: ExitCode = ExitCode.PROBLEM) -> NoReturn:
    typer.echo(text, err=True)
    raise typer.Exit(code)


def _me() -> str:
    """The name of whoever runs this; through sudo, the one who called it."""
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        name = f"uid {os.getuid()}"
    caller = os.environ.get("SUDO_USER")
    return f"{caller} as {name}" if caller and caller != name else name
