"""`controller.toml`: every key, its default and its limits. Unknown keys are refused; all faults are told at once.

Durations are seconds, sizes bytes. Addresses are `host:port` with a numeric host (`[::1]:8621` for IPv6).
"""

from __future__ import annotations

import os
import re
import stat
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, SecretStr, model_validator

from controller.config_faults import load_model
from diagnosis.contracts.credential import SECRET_BYTES_MIN
from diagnosis.contracts.errors import OperatorFault
from diagnosis.engine.thresholds import Thresholds
from remediation.policy.rules import Policy

DEFAULT_PATH: Final = Path("/etc/tocsin/controller.toml")
DEFAULT_SOCKET: Final = Path("/run/tocsin/controller.sock")
_SECRET_FILE_BYTES_MAX: Final = 4096


class Address(NamedTuple):
    """A numeric host and a port; port 0 asks the kernel for a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _address(value: object) -> Address:
    if isinstance(value, Address):
        return value
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([0-9.]+)):(\d{1,5})", str(value), re.ASCII)
    if found is None or int(found[3]) > 65535:
        raise ValueError("should be host:port with a numeric host, such as 127.0.0.1:8621 or [::1]:8621")
    host = ip_address(found[1] or found[2])
    if (found[1] is not None) != isinstance(host, IPv6Address):
        raise ValueError("only an IPv6 host stands in square brackets")
    return Address(str(host), int(found[3]))


def _loopback(value: Address) -> Address:
    if not ip_address(value.host).is_loopback:
        raise ValueError("should be a loopback address: the page has no sign-in")
    return value


def _absolute(value: Path) -> Path:
    if not value.is_absolute():
        raise ValueError("should be an absolute path")
    return value


SocketAddress = Annotated[Address, PlainValidator(_address)]
LoopbackAddress = Annotated[Address, PlainValidator(_address), AfterValidator(_loopback)]
AbsolutePath = Annotated[Path, Field(strict=False), AfterValidator(_absolute)]
HostName = Annotated[str, Field(pattern=r"^[A-Za-z0-9.-]{1,253}$")]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Server(_Section):
    """`[server]`: where node daemons report, and the read-only page."""

    listen: SocketAddress = Address("0.0.0.0", 8620)
    page: LoopbackAddress = Address("127.0.0.1", 8621)
    page_hosts: list[HostName] = []
    """Further Host names the page answers to, such as that of a signing-in reverse proxy before it."""
    report_period_ms: int = Field(1000, ge=100, le=600_000)
    """How often each daemon is told to report."""
    bytes_in_flight_max: int = Field(128 << 20, ge=16 << 20)
    """Reports being received or read at one time; beyond it a daemon is told to come back later."""
    body_deadline_s: float = Field(10.0, gt=0, le=300)
    """A request body must have arrived after this time."""
    connections_max: int = Field(40_000, ge=16)
    connections_per_peer_max: int = Field(64, ge=4)
    """From one address. A node has two; raise it where a proxy stands before the controller."""


class Control(_Section):
    """`[control]`: who, besides root and the controller's own user, may change things over the Unix socket."""

    admin_uids: list[Annotated[int, Field(ge=0)]] = []
    admin_gids: list[Annotated[int, Field(ge=0)]] = []
    """Compared with the peer's primary group as the kernel tells it."""


class Slurm(_Section):
    """`[slurm]`: how Slurm is asked and told."""

    backend: Literal["scontrol"] = "scontrol"
    path: AbsolutePath | None = None
    """Directory with scontrol and squeue; not set: found on PATH."""
    call_deadline_s: float = Field(10.0, gt=0, le=120)
    snapshot_period_s: float = Field(2.0, gt=0, le=60)


class TopologySettings(_Section):
    """`[topology]`: who tells which switches lie between nodes. Without it verdicts name a node's own link at most."""

    source: Literal["none", "slurm", "ibnetdiscover", "lldp"] = "none"
    """"slurm": topology.conf; "ibnetdiscover": a file with its output; "lldp": the nodes' daemons ask lldpd."""
    file: AbsolutePath | None = None

    @model_validator(mode="after")
    def _a_file_where_one_is_read(self) -> TopologySettings:
        if (self.source in ("slurm", "ibnetdiscover")) != (self.file is not None):
            raise ValueError('the sources "slurm" and "ibnetdiscover" need a file, the others have none')
        return self


class Detect(_Section):
    """`[detect]`: when silence is a hang and slowness is a fault. The keys of `diagnosis.engine.thresholds`."""

    hang_floor_s: float = Field(120.0, ge=1)
    """No round has ended for at least this long before a hang is suspected."""
    hang_factor: float = Field(3.0, ge=1)
    """And for this many times the longest healthy round of the job."""
    startup_floor_s: float = Field(900.0, ge=1)
    """The floor until the job has done `warmup_rounds`: imports, compilation, scans of the data."""
    warmup_rounds: int = Field(10, ge=1)
    stale_after_s: float = Field(5.0, ge=0.5)
    """A node whose newest report is older than this is unseen, not idle."""
    baseline_windows: int = Field(8, ge=2)
    """Windows from which a job's own normal speed is learnt."""
    window_rounds: int = Field(10, ge=2)
    window_s: float = Field(1.0, gt=0)
    """A window has at least so many rounds and lasts at least so long."""
    windows: int = Field(3, ge=1)
    """So many windows in a row must be slow."""
    slow_ratio: float = Field(1.25, gt=1)
    """A round this many times as long as the baseline is slow."""
    noise_factor: float = Field(4.0, ge=0)
    """And it must exceed the baseline by this many times the baseline's own spread."""
    blame_share_min: float = Field(0.25, gt=0, le=1)
    """A rank is blamed only for at least this share of the lost time."""
    clock_ratio_max: float = Field(0.9, gt=0, le=1)
    """A GPU clock below this share of its peers' or its maximum is low."""
    clock_explains_min: float = Field(0.3, ge=0, le=1)
    """A low clock convicts only when it explains at least this share of the lost time."""
    slow_job_min: float = Field(0.06, ge=0)
    """`tocsin diagnose` takes a job as slow from this much above its own past; a live job needs `slow_ratio`."""
    rank_noise_factor: float = Field(6.0, gt=0)
    """A rank or communicator is named only if it stands out by so many times the spread among its peers."""
    own_time_part_min: float = Field(0.02, gt=0, le=1)
    """And a rank only if its own time grew by this share of a round."""
    transfer_share_min: float = Field(0.2, gt=0, le=1)
    """A communicator is blamed only for at least this share of the lost time."""
    transfer_growth_min: float = Field(0.15, gt=0)
    """And only if this share of its transfer time is new."""
    named_share_max: float = Field(0.34, gt=0, le=1)
    """When more than this share of all ranks were to be named, it is the job that changed and no rank is."""

    def thresholds(self) -> Thresholds:
        """The same as the engine takes it."""
        return Thresholds(**self.model_dump())


class Target(_Section):
    """One `[[notify.targets]]`: an apprise `url`, or a `webhook` that is posted to."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$")
    url: SecretStr | None = None
    webhook: SecretStr | None = None
    format: Literal["slack", "json"] = "slack"
    """Body of a webhook: Slack's `{"text": ...}`, or the whole message as JSON."""

    @model_validator(mode="after")
    def _one_way(self) -> Target:
        if (self.url is None) == (self.webhook is None):
            raise ValueError("needs either url or webhook")
        if self.url is not None and "format" in self.model_fields_set:
            raise ValueError("format belongs to webhook, an apprise url has its own")
        if self.webhook is not None and not re.match(r"https?://[^/\s]", self.webhook.get_secret_value()):
            raise ValueError("webhook should begin with http:// or https://")
        return self


class Notify(_Section):
    """`[notify]`: whom to tell. No target: nobody is told, incidents are on the page and in the command line."""

    targets: list[Target] = []
    deadline_s: float = Field(10.0, gt=0, le=120)
    attempts_max: int = Field(12, ge=1, le=100)
    """A message that failed so often is given up and shown in the status."""
    messages_per_minute_max: int = Field(10, ge=1)
    """Per target; what comes on top waits and is sent as one digest."""

    @model_validator(mode="after")
    def _names_differ(self) -> Notify:
        names = [target.name for target in self.targets]
        if len(set(names)) < len(names):
            raise ValueError("two targets have the same name")
        return self


class Retention(_Section):
    """`[retention]`: how long closed incidents are kept."""

    evidence_days: float = Field(30.0, gt=0)
    incident_days: float = Field(400.0, ge=2)


class Settings(_Section):
    """The whole file."""

    state_dir: AbsolutePath = Path("/var/lib/tocsin")
    socket: AbsolutePath = DEFAULT_SOCKET
    secret_file: AbsolutePath = Path("/etc/tocsin/secret")
    policy_file: AbsolutePath = Path("/etc/tocsin/policy.toml")
    cycle_period_s: float = Field(1.0, ge=0.1, le=60)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    server: Server = Server()
    control: Control = Control()
    slurm: Slurm = Slurm()
    topology: TopologySettings = TopologySettings()
    detect: Detect = Detect()
    notify: Notify = Notify()
    retention: Retention = Retention()

    @model_validator(mode="after")
    def _reports_are_not_stale_when_they_come(self) -> Settings:
        if self.detect.stale_after_s * 1000 < 2 * self.server.report_period_ms:
            raise ValueError("detect.stale_after_s should be at least twice server.report_period_ms")
        return self


def load_settings(path: Path) -> Settings:
    """The settings of a file. Raises ConfigFault naming all its faults."""
    return load_model(path, Settings)


def load_policy(path: Path) -> Policy:
    """The policy of a file. Raises ConfigFault naming all its faults."""
    return load_model(path, Policy)


def read_secret(path: Path) -> bytes:
    """The controller's secret: at least 32 bytes as hexadecimal text in a file that only its owner may read.

    Raises OperatorFault.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            text = file.read(_SECRET_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise OperatorFault(f"{path}: the secret cannot be read: {error.strerror}", reason="secret") from error
    if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077:
        raise OperatorFault(f"{path}: others may read the secret; chmod 600 {path}", reason="secret")
    try:
        secret = bytes.fromhex(text.decode("ascii").strip())
    except ValueError as error:
        raise OperatorFault(f"{path}: the secret is not hexadecimal text", reason="secret") from error
    if not SECRET_BYTES_MIN <= len(secret) <= _SECRET_FILE_BYTES_MAX // 2:
        raise OperatorFault(f"{path}: {len(secret)} bytes, at least {SECRET_BYTES_MIN} are needed", reason="secret")
    return secret
