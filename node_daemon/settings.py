"""`node.toml`: every key, its default and its limits. All faults of a file are told at once, with line and key.

The tables below are the one definition: `SETTINGS` says type, default, bounds and meaning of each key, and the
operator's page lists the same keys (a test compares them). Durations are seconds unless the name says `_ms`.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from diagnosis.contracts.credential import NODE_NAME
from diagnosis.contracts.errors import OperatorFault

DEFAULT_PATH: Final = Path("/etc/tocsin/node.toml")
FILE_BYTES_MAX: Final = 64 << 10
PERIOD_MS_LEAST: Final = 100
PERIOD_MS_MOST: Final = 60_000
"""Half a minute less than the unit's WatchdogSec, which finished ticks feed."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the file: its kind, the value when it is absent (None: required), and its bounds."""

    kind: type
    default: Any
    meaning: str
    least: float = 0
    most: float = 0


_TABLES: Final[dict[str, dict[str, Key]]] = {
    "": {
        "node": Key(str, None, "this node's name as Slurm knows it (NodeName)"),
        "controller_url": Key(str, None, "where the controller listens for node daemons, such as http://head:8620"),
        "key_file": Key(str, "/etc/tocsin/node.key", "this node's key, 64 hex digits, readable by nobody else"),
        "state_dir": Key(str, "/var/lib/tocsin-node", "where the spool and the daemon's life counter are kept"),
        "frame_root": Key(str, "/dev/shm/tocsin", "where TaskProlog makes a directory for each job's probe frames"),
        "report_period_ms": Key(
            int, 1000, "time between reports until the controller says otherwise", PERIOD_MS_LEAST, PERIOD_MS_MOST
        ),
        "request_timeout_s": Key(float, 10.0, "how long one request to the controller may take", 0.1, 300),
    },
    "frames": {
        "gone_keep_s": Key(float, 900.0, "how long the frame of an ended process is still reported", 0, 604_800),
        "idle_keep_s": Key(
            float,
            86_400.0,
            "how long an empty job directory, or a frame that stands still and whose process the daemon cannot see, "
            "is kept",
            0,
            2_592_000,
        ),
    },
    "nvml": {
        "enabled": Key(bool, True, "ask the NVIDIA driver about clocks, event reasons, temperature, power, load"),
        "period_s": Key(float, 10.0, "time between two readings of all GPUs", 0.1, 3600),
        "deadline_s": Key(float, 5.0, "a reading that takes longer is reported as a hung driver", 0.1, 300),
    },
    "arming": {
        "enabled": Key(bool, True, "turn on more of NCCL's events for seconds where a job looks ill"),
    },
    "network": {
        "enabled": Key(bool, True, "tell round trips and losses of the ranks' TCP connections, and the network ports"),
        "period_s": Key(float, 2.0, "time between two looks at the kernel's socket table", 0.2, 3600),
        "deadline_s": Key(float, 5.0, "a look that takes longer is given up", 0.1, 300),
        "lldp_period_s": Key(
            float, 3600.0, "time between two questions to lldpd (`lldpctl`), where it is there; 0: never", 0, 86_400
        ),
        "ping": Key(bool, True, "ping other nodes of a job where the controller suspects the path to them"),
    },
    "spool": {
        "reports_max": Key(int, 10_000, "reports kept on disk while the controller is away", 1, 1_000_000),
        "bytes_max": Key(int, 64 << 20, "their total size in bytes", 4096, 1 << 40),
        "drain_per_s": Key(float, 2.0, "spooled reports sent per second once the controller is back", 0.01, 1000),
    },
    "evidence": {
        "enabled": Key(bool, True, "answer the controller's requests for process states and stacks"),
        "py_spy": Key(str, "", "path of py-spy; empty: beside the daemon's Python, then on PATH"),
        "per_minute_max": Key(int, 6, "collections per minute, whatever the controller asks for", 1, 60),
        "suspect_after_s": Key(
            float,
            60.0,
            "how long all ranks here must stand still before evidence is gathered unasked; 0: only when asked",
            0,
            86_400,
        ),
    },
}
SETTINGS: Final[dict[str, Key]] = {
    (f"{table}.{name}" if table else name): key for table, keys in _TABLES.items() for name, key in keys.items()
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The daemon's settings; meaning and bounds of each stand in `SETTINGS` under the same words."""

    node: str
    controller_url: str
    key_file: Path
    state_dir: Path
    frame_root: Path
    report_period_ms: int
    request_timeout_s: float
    frames_gone_keep_s: float
    frames_idle_keep_s: float
    nvml_enabled: bool
    nvml_period_s: float
    nvml_deadline_s: float
    arming_enabled: bool
    network_enabled: bool
    network_period_s: float
    network_deadline_s: float
    network_lldp_period_s: float
    network_ping: bool
    spool_reports_max: int
    spool_bytes_max: int
    spool_drain_per_s: float
    evidence_enabled: bool
    evidence_py_spy: str
    evidence_per_minute_max: int
    evidence_suspect_after_s: float


def load(path: Path) -> Settings:
    """Read a file. Raises OperatorFault that lists every fault, one a line: `file:line: key: what is wrong`."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise OperatorFault(f"{path}: {error.strerror}: give --config the daemon's file", reason="config") from error
    if len(data) > FILE_BYTES_MAX:
        raise OperatorFault(f"{path}: more than {FILE_BYTES_MAX} bytes are no configuration", reason="config")
    try:
        text = data.decode()
        return parse(text, str(path))
    except UnicodeDecodeError as error:
        raise OperatorFault(f"{path}: not UTF-8 at byte {error.start}", reason="config") from error


def parse(text: str, name: str = "node.toml") -> Settings:
    """Settings from TOML text. Raises OperatorFault as `load` does."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise OperatorFault(f"{name}: {error}", reason="config") from error
    given, unknown = _flatten(document)
    faults = dict.fromkeys(unknown, "there is no such key")
    values: dict[str, Any] = {}
    for key, spec in SETTINGS.items():
        value = given.get(key, spec.default)
        fault = _fault_of(key, spec, value)
        if fault is not None:
            faults[key] = fault
        values[key.replace(".", "_")] = spec.kind(value) if fault is None else value
    if faults:
        lines = _lines_of(text)
        told = sorted((lines.get(key, 0), key, fault) for key, fault in faults.items())
        raise OperatorFault(
            "\n".join(
                f"{name}:{line}: {key}: {fault}" if line else f"{name}: {key}: {fault}" for line, key, fault in told
            ),
            reason="config",
        )
    for key in ("key_file", "state_dir", "frame_root"):
        values[key] = Path(values[key])
    values["controller_url"] = values["controller_url"].rstrip("/")
    return Settings(**values)


def _flatten(document: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Known keys with their values by full name, and the names of keys that do not exist."""
    given: dict[str, Any] = {}
    unknown: list[str] = []
    for name, value in document.items():
        if name in _TABLES and name:
            if not isinstance(value, dict):
                unknown.append(name)
                continue
            for inner, inner_value in value.items():
                full = f"{name}.{inner}"
                if full in SETTINGS:
                    given[full] = inner_value
                else:
                    unknown.append(full)
        elif name in SETTINGS:
            given[name] = value
        else:
            unknown.append(name)
    return given, unknown


def _fault_of(key: str, spec: Key, value: object) -> str | None:
    """What is wrong with a value, None when nothing is."""
    if value is None:
        return f"is missing: {spec.meaning}"
    if spec.kind is float and type(value) is int:
        value = float(value)
    if type(value) is not spec.kind:
        words = {str: "text in quotes", int: "a whole number", float: "a number", bool: "true or false"}
        return f"must be {words[spec.kind]}: {spec.meaning}"
    if isinstance(value, int | float) and spec.kind is not bool and not spec.least <= value <= spec.most:
        return f"must be from {spec.least:g} to {spec.most:g}: {spec.meaning}"
    return _fault_of_text(key, value) if isinstance(value, str) else None


def _fault_of_text(key: str, value: str) -> str | None:
    if key == "node" and not NODE_NAME.fullmatch(value):
        return "is no node name"
    if key in ("key_file", "state_dir", "frame_root") and not value.startswith("/"):
        return "must be an absolute path"
    if key == "evidence.py_spy" and value and not value.startswith("/"):
        return "must be an absolute path or empty"
    if key == "controller_url":
        return _fault_of_url(value)
    return None


def _fault_of_url(value: str) -> str | None:
    try:
        url = urlsplit(value)
        sound = url.scheme in ("http", "https") and bool(url.hostname) and (url.port or 1) > 0
    except ValueError:
        sound = False
    if not sound:
        return "must look like http://host:8620 or https://host"
    if url.path.strip("/") or url.query or url.fragment or url.username is not None:
        return "must be scheme, host and port alone"
    return None


_HEADER: Final = re.compile(r"\s*\[\s*([A-Za-z0-9_.-]+)\s*\]")
_ASSIGNMENT: Final = re.compile(r"\s*([A-Za-z0-9_.\"'-]+)\s*=")


def _lines_of(text: str) -> dict[str, int]:
    """Where each key and table stands. tomllib tells no positions; for tables of plain values a scan is enough."""
    lines: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            table = header[1]
            lines.setdefault(table, number)
        elif assignment := _ASSIGNMENT.match(line):
            key = assignment[1].replace('"', "").replace("'", "")
            lines.setdefault(f"{table}.{key}" if table else key, number)
    return lines
