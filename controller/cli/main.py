"""`tocsin`: the command line. It talks to the controller's Unix socket; heavy parts are imported by who needs them.

Exit codes: 0 done; 1 refused, not found or faults found; 2 wrong usage; 3 no controller answers. `tocsin diagnose`
needs no controller: 0 a verdict was reached, 1 an internal error, 2 wrong usage, 3 nothing readable among the inputs.
"""

from __future__ import annotations

import os
import pwd
import secrets
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
    _check_id(incident)
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
    graph: Annotated[
        Path | None, typer.Option(help="Write who waits for whom and why, as .svg, .json or .dot.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Name who slows or hangs a job, from files alone: a bundle or whatever evidence there is. Needs no controller."""
    from controller.cli.diagnose import NothingReadable, diagnose_paths, verdict_lines  # numpy, the engine
    from controller.cli.graph_file import graph_writer

    try:
        verdict = diagnose_paths(paths, graph_writer(graph) if graph is not None else None)
    except NothingReadable as nothing:
        _fail(str(nothing), ExitCode.NOTHING_READABLE)
    except OperatorFault as fault:
        _fail(str(fault), ExitCode.USAGE)
    _print(msgspec.json.encode(verdict), as_json, lambda: verdict_lines(verdict))


@app.command()
def drill(
    kind: Annotated[str | None, typer.Argument(help="See --list. Default: drawn, as often as they occur.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="The same seed gives the same drill. Default: drawn.")] = None,
    effect: Annotated[float | None, typer.Option(min=2, max=90, help="Part of a step that is lost, in %.")] = None,
    noise: Annotated[float | None, typer.Option(min=0, max=30, help="Spread of the ranks' own times, in %.")] = None,
    missing: Annotated[float | None, typer.Option(min=0, max=50, help="Ranks that send no report, in %.")] = None,
    fidelity: Annotated[str | None, typer.Option(help="full, or nccl: what a stock NCCL can tell.")] = None,
    out: Annotated[Path | None, typer.Option(help="New directory. Default: drill-KIND-SEED.")] = None,
    only_list: Annotated[bool, typer.Option("--list", help="Name all kinds.")] = False,
    judged: Annotated[bool, typer.Option("--judge/--no-judge", help="Say what tocsin makes of it.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Make an incident whose truth is known, and see whether the verdict is right. Needs no controller."""
    from controller.cli.drill import exam_lines, examine  # numpy, the simulator, the engine
    from diagnosis.drill import Limits, kinds

    if only_list:
        _print(msgspec.json.encode(kinds()), as_json, kinds)
        return
    lost, spread, silent = (None if pct is None else pct / 100 for pct in (effect, noise, missing))
    try:
        limits = Limits(effect=lost, noise=spread, missing=silent, fidelity=fidelity)
        exam = examine(kind, secrets.randbelow(1 << 31) if seed is None else seed, limits, out, judged)
    except OperatorFault as fault:
        _fail(str(fault), ExitCode.USAGE)
    _print(msgspec.json.encode(exam), as_json, lambda: exam_lines(exam))
    if not exam.passed:
        raise typer.Exit(ExitCode.PROBLEM)


@app.command()
def capture(
    incident: Annotated[str | None, typer.Argument(help="An incident's id: what its verdict was given on.")] = None,
    job: Annotated[int | None, typer.Option(min=1, help="Instead: a watched job as it is now.")] = None,
    out: Annotated[Path | None, typer.Option(help="Default: incident-ID.tar.zst or job-ID.tar.zst.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    config: ConfigOption = None,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write what a verdict was given on to a file, for `tocsin diagnose` on any machine."""
    from controller.cli.capture import Captured, write_file

    if (incident is None) == (job is None):
        raise typer.BadParameter("name either an incident or a --job")
    if incident is not None:
        _check_id(incident)
    place, name = (f"/incidents/{incident}", f"incident-{incident}") if incident else (f"/jobs/{job}", f"job-{job}")
    path = out or Path(f"{name}.tar.zst")
    content = _ask(_settings(config), socket, "GET", f"{place}/bundle")
    try:
        write_file(path, content, force)
    except OperatorFault as fault:
        _fail(str(fault))
    told = Captured(file=words.printable(path), size_bytes=len(content), incident=incident, job_id=job)
    _print(msgspec.json.encode(told), as_json, lambda: [f"{words.clean(told.file)}, {len(content)} bytes"])


@app.command()
def replay(
    incidents: Annotated[list[str] | None, typer.Argument(help="Ids of incidents.")] = None,
    every: Annotated[bool, typer.Option("--all", help="The newest 1000 incidents.")] = False,
    since: Annotated[float | None, typer.Option(min=0, help="Those of so many DAYS.", metavar="DAYS")] = None,
    db: Annotated[Path | None, typer.Option(help="A state.db, or a copy, instead of the controller.")] = None,
    config: ConfigOption = None,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> None:
    """Judge incidents of the past by the rules of today: 0 same verdicts, 1 something changed."""
    from controller.cli import replay as replaying  # the engine

    if bool(incidents) == (every or since is not None):
        raise typer.BadParameter("name either incidents, or --all or --since")
    for number in incidents or ():
        _check_id(number)
    settings = _settings(config)
    # A user who may not read the configuration has its defaults, which are not the thresholds in force.
    told = config is not None or os.access(DEFAULT_PATH, os.R_OK)
    present = settings.detect.thresholds() if told else None
    oldest = None if since is None else time.time() - since * 86400
    done = []
    try:
        with replaying.opened(db, socket or settings.socket) as source:
            for one in replaying.replayed(source, replaying.chosen(source, incidents or (), oldest), present):
                done.append(one)
                if not as_json:
                    _print(b"", False, lambda: replaying.replay_lines(done[-1]))
    except Unreachable as error:
        _fail(str(error), ExitCode.UNREACHABLE)
    except (Refused, OperatorFault) as fault:
        _fail(str(fault))
    total = replaying.summed(done)
    _print(msgspec.json.encode(total), as_json, lambda: [replaying.sum_line(total)])
    if not total.all_same:
        raise typer.Exit(ExitCode.PROBLEM)


@app.command()
def node(
    once: Annotated[
        bool, typer.Option("--once", help="Look once and print; the daemon is tocsin-node-daemon.")
    ] = False,
    seconds: Annotated[float, typer.Option(min=0, max=600, help="Watch for so long, to tell the time of a step.")] = 5,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="The daemon's node.toml.")] = None,
    frame_root: Annotated[Path | None, typer.Option(help="Where the frames lie. Default: as node.toml says.")] = None,
    name: Annotated[str | None, typer.Option("--node", help="The node's name. Default: as node.toml says.")] = None,
    as_json: JsonOption = False,
) -> None:
    """The ranks of this node, the odd ones first. Needs no controller; root sees all users' jobs."""
    from controller.cli.node_once import lines_of, node_now  # numpy, NVML

    if not once:
        raise typer.BadParameter("give --once; what runs for ever is tocsin-node-daemon")
    try:
        now = node_now(config, frame_root, name, seconds)
    except (OperatorFault, OSError) as fault:
        _fail(str(fault))
    _print(msgspec.json.encode(now), as_json, lambda: lines_of(now))


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


def _check_id(incident: str) -> None:
    if not (incident.isascii() and incident.isalnum() and len(incident) <= 64):
        raise typer.BadParameter("an incident's id has letters and digits only")


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
