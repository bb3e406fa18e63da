"""The report: what one node says about all its ranks and GPUs at one moment. One POST, one acknowledgement.

On the wire: msgpack `[version, report]`, compressed with zstd. Additions keep the version (columns and trailing
struct fields may be added); a change of meaning raises it, and an older side refuses it with a reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec
import numpy as np
import zstandard

from diagnosis.contracts.columns import Columns, rows_of
from diagnosis.contracts.errors import AgentFault

VERSION: Final = 1
WIRE_BYTES_MAX: Final = 4 << 20
PLAIN_BYTES_MAX: Final = 32 << 20
JOBS_MAX: Final = 64
RANKS_MAX: Final = 256
COMM_ROWS_MAX: Final = RANKS_MAX * 16
ROUND_ROWS_MAX: Final = 16_384
"""Of all jobs of one report together, like the two above: what a user's job writes costs the controller no more."""
GPUS_MAX: Final = 64
FLOW_ROWS_MAX: Final = 8192
NICS_MAX: Final = 64
ADDRESSES_MAX: Final = 4096
REASONS_MAX: Final = 64
TEXT_CHARS_MAX: Final = 1024

RANK_DTYPE: Final = np.dtype(
    [
        ("rank", "<i4"),
        ("world_size", "<i4"),
        ("local_rank", "<i4"),
        ("gpu", "<i4"),  # index on the node, as the job claims
        ("pid", "<i4"),
        ("step_id", "<i4"),
        ("process_state", "u1"),  # letter of /proc/PID/stat as the daemon sees it (R S D T Z), X: gone, null: unknown
        # Steps of training as inferred from the order of operations; null: not known (yet).
        ("step_us", "<u4"),
        ("step_jitter_us", "<u4"),  # deviation of a single step
        ("step_rounds", "<u2"),  # rounds of a step on the communicator that tells it
        ("step_round", "<u2"),  # which of them was entered last, from 1
        ("armed", "u1"),  # 1: in the window NCCL was asked for costlier events, or they were on still; null: no NCCL
        # How the process ended, as the kernel says. Null: it lives, or nobody saw its end.
        ("ended_us", "<u8"),  # since then
        ("exit_code", "<u2"),  # null also where a signal ended it, and where the kernel does not tell
        ("exit_signal", "u1"),  # null where it ended by itself, or the kernel does not tell
        ("oom_kills", "u1"),  # processes of its cgroup ended for want of memory since the daemon first saw it
    ]
)
COMM_DTYPE: Final = np.dtype(
    [
        ("rank_row", "<u2"),  # row in the job's rank table
        ("comm_id", "<u8"),
        ("comm_size", "<u4"),
        ("comm_rank", "<u4"),
        ("op", "u1"),
        ("dtype", "u1"),
        ("algo", "u1"),
        ("proto", "u1"),
        ("state", "u1"),  # CommState
        ("count", "<u8"),
        ("root", "<i4"),
        ("seq", "<u8"),  # newest round entered
        ("done_seq", "<u8"),  # rounds complete on this rank
        ("age_us", "<u8"),  # running: since the oldest open round was entered; done: since the process left any round
        ("send", "<u4"),  # transfer steps; running: of the oldest open round, done: in the window
        ("recv", "<u4"),
        ("rounds", "<u4"),  # rounds completed in the window
        ("dur_us", "<u8"),  # their durations, summed
        ("gap_us", "<u8"),  # the rank's own time before each, summed
        ("signature", "<u4"),  # of the newest round
        ("errors", "<u4"),
        # No kernel of NCCL runs in the process, and this is the newest round here that one ran for: it stands in no
        # round, whatever is enqueued. Null: not told, or one runs.
        ("idle_seq", "<u8"),
    ]
)
ROUND_DTYPE: Final = np.dtype(
    [
        ("comm_row", "<u2"),
        ("seq", "<u8"),
        ("gap_us", "<u4"),
        ("dur_us", "<u4"),
        ("signature", "<u4"),
    ]
)

FLOW_DTYPE: Final = np.dtype(
    [
        ("rank_row", "<u2"),  # row in the job's rank table: the process that holds the socket
        ("local", "<u2"),  # index into NetworkFacts.addresses
        ("local_port", "<u2"),
        ("remote", "<u2"),
        ("remote_port", "<u2"),
        ("rtt_us", "<u4"),  # smoothed by the kernel; of a silent connection it is old
        ("acked_bytes", "<u8"),  # in the network window
        ("received_bytes", "<u8"),  # in the network window
        ("segments", "<u4"),  # data segments sent in the network window, those sent again among them
        ("resent", "<u4"),  # sent again in the network window
        ("busy_us", "<u8"),  # with data under way or waiting to be, in the network window
        ("unacked", "<u4"),  # segments under way
        ("queued_bytes", "<u4"),  # written by the process and not acknowledged
        ("backoff", "u1"),  # doublings of the retransmission timer since an acknowledgement came
        ("ack_age_ms", "<u4"),  # since the newest acknowledgement
        ("probes", "u1"),  # questions to a receiver whose window is closed, unanswered
    ]
)
"""TCP connections of a job's ranks, as the kernel's socket table has them."""


class CommState:
    """State of the newest known round of a communicator on one rank."""

    NONE: Final = 0
    RUNNING: Final = 1
    ENQUEUED: Final = 2
    DONE: Final = 3


class GpuFacts(msgspec.Struct, array_like=True, frozen=True):
    """NVML's words about one GPU. None: not told. `clocks_event_reasons` is NVML's bit mask."""

    index: int
    uuid: str | None = None
    bus_id: str | None = None
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    mem_clock_mhz: int | None = None
    mem_clock_max_mhz: int | None = None
    clocks_event_reasons: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    utilization_pct: int | None = None


class HardwareFacts(msgspec.Struct, array_like=True, frozen=True):
    """GPU facts of a node. `state` is "ok", "absent" (no driver library), "hung" or "error"; only "ok" judges."""

    state: str
    detail: str = ""
    age_ms: int = 0
    gpus: list[GpuFacts] = []


class NicFacts(msgspec.Struct, array_like=True, frozen=True):
    """The kernel's words about one network port. None: not told. Counters run since the driver was loaded."""

    name: str
    up: bool | None = None
    speed_gbps: float | None = None
    speed_max_gbps: float | None = None
    symbol_errors: int | None = None
    link_downed: int | None = None
    rx_discards: int | None = None
    rx_pause: int | None = None
    tx_pause: int | None = None
    out_of_sequence: int | None = None
    retransmits: int | None = None
    cnp_handled: int | None = None


NIC_COUNTERS: Final = (
    "symbol_errors",
    "link_downed",
    "rx_discards",
    "rx_pause",
    "tx_pause",
    "out_of_sequence",
    "retransmits",
    "cnp_handled",
)
"""Those of `NicFacts` that count, by the names that they also have in a bundle."""


class NetworkFacts(msgspec.Struct, array_like=True, frozen=True):
    """What the kernel of a node says of its network. `addresses`: texts that `JobSample.flows` point to; `nic_of`: for
    each the local port that has it, "" where none has; `uplinks`: ports and the switches that they lead to, by LLDP.
    `state` is "ok" or "error"; only "ok" judges."""

    state: str
    detail: str = ""
    age_ms: int = 0
    window_ms: int = 0
    addresses: list[str] = []
    nic_of: list[str] = []
    nics: list[NicFacts] = []
    flows_left_out: int = 0
    uplinks: list[tuple[str, str]] = []


class JobSample(msgspec.Struct, array_like=True, frozen=True):
    """All ranks of one job attempt on one node. Tables as columns: RANK_DTYPE, COMM_DTYPE, ROUND_DTYPE, FLOW_DTYPE.

    `uid` is the owner of the frame directory as the kernel says; the controller compares it with Slurm's.
    """

    job_id: int
    restart: int
    uid: int
    ranks: Columns
    comms: Columns
    rounds: Columns
    flows: Columns = {}


class Report(msgspec.Struct, array_like=True, frozen=True):
    """One node at one moment. `epoch` names the daemon's life, `sample` counts within it; together unique per node."""

    node: str
    boot_id: str
    epoch: int
    sample: int
    mono_ms: int
    wall_ms: int
    window_ms: int
    jobs: list[JobSample] = []
    hardware: HardwareFacts | None = None
    refused: dict[str, int] = {}  # frames refused since the daemon started, by reason
    spool_dropped: int = 0  # reports lost since the daemon started because the spool was full
    gathered: list[bytes] = []  # on suspicion of a hang: parts of `contracts.gathered`, each with a version of its own
    network: NetworkFacts | None = None


class Refusal(msgspec.Struct, frozen=True):
    """Body of every 4xx answer (JSON): a stable word and a sentence."""

    reason: str
    detail: str


class Acknowledgement(msgspec.Struct, frozen=True):
    """Body of the 200 answer to a report (JSON)."""

    duplicate: bool = False


_ENCODER: Final = msgspec.msgpack.Encoder()
_ENVELOPE: Final = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])
_REPORT: Final = msgspec.msgpack.Decoder(Report)


def encode(report: Report) -> bytes:
    """The report as it travels."""
    plain = _ENCODER.encode((VERSION, report))
    return zstandard.ZstdCompressor(level=3).compress(plain)


def decompress(body: bytes) -> bytes:
    """Plain bytes of a compressed body, within PLAIN_BYTES_MAX whatever the body claims.

    Raises AgentFault (reason `oversized` or `garbage`).
    """
    if len(body) > WIRE_BYTES_MAX:
        raise AgentFault(f"body of {len(body)} bytes, at most {WIRE_BYTES_MAX} are taken", reason="oversized")
    try:
        claimed = zstandard.frame_content_size(body)
        if claimed > PLAIN_BYTES_MAX:
            raise AgentFault(f"body unpacks to {claimed} bytes, at most {PLAIN_BYTES_MAX}", reason="oversized")
        unpacker = zstandard.ZstdDecompressor(max_window_size=PLAIN_BYTES_MAX)
        return unpacker.decompress(body, max_output_size=PLAIN_BYTES_MAX)
    except zstandard.ZstdError as error:
        raise AgentFault(f"body is not readable zstd: {error}", reason="garbage") from error


def decode(body: bytes) -> Report:
    """The report of a request body.

    Raises AgentFault with reason `oversized`, `garbage`, `version` or `limits`. Tables stay packed; all jobs' rows
    together are within the limits above.
    """
    plain = decompress(body)
    try:
        version, raw = _ENVELOPE.decode(plain)
        if version > VERSION:
            raise AgentFault(
                f"report version {version}, this controller understands up to {VERSION}: upgrade the controller first",
                reason="version",
            )
        report = _REPORT.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise AgentFault(f"body is not a report: {error}", reason="garbage") from error
    _check_limits(report)
    return report


def _check_limits(report: Report) -> None:
    """The size of a body bounds its bytes; this bounds what is made of them, and what is kept and shown."""
    if len(report.jobs) > JOBS_MAX or (report.hardware and len(report.hardware.gpus) > GPUS_MAX):
        raise AgentFault(f"more than {JOBS_MAX} jobs or {GPUS_MAX} GPUs in one report", reason="limits")
    tables: tuple[tuple[str, np.dtype[np.void], int], ...] = (
        ("ranks", RANK_DTYPE, RANKS_MAX),
        ("comms", COMM_DTYPE, COMM_ROWS_MAX),
        ("rounds", ROUND_DTYPE, ROUND_ROWS_MAX),
        ("flows", FLOW_DTYPE, FLOW_ROWS_MAX),
    )
    network = report.network
    if network and (len(network.addresses) > ADDRESSES_MAX or len(network.nics) > NICS_MAX):
        raise AgentFault(f"more than {ADDRESSES_MAX} addresses or {NICS_MAX} ports in one report", reason="limits")
    if network and len(network.uplinks) > NICS_MAX:
        raise AgentFault(f"more than {NICS_MAX} uplinks in one report", reason="limits")
    if network and len(network.nic_of) != len(network.addresses):
        raise AgentFault("addresses and their ports differ in number", reason="limits")
    for name, dtype, rows_max in tables:
        if sum(rows_of(getattr(job, name), dtype) for job in report.jobs) > rows_max:
            raise AgentFault(f"more than {rows_max} rows of {name} in one report", reason="limits")
    if len(report.refused) > REASONS_MAX or any(len(text) > TEXT_CHARS_MAX for text in _texts(report)):
        raise AgentFault(f"more than {REASONS_MAX} reasons or {TEXT_CHARS_MAX} characters of text", reason="limits")


def _texts(report: Report) -> Iterator[str]:
    yield report.boot_id
    yield from report.refused
    if report.hardware is not None:
        yield from (report.hardware.state, report.hardware.detail)
        for gpu in report.hardware.gpus:
            yield from (gpu.uuid or "", gpu.bus_id or "")
    if report.network is not None:
        yield from (report.network.state, report.network.detail, *report.network.addresses, *report.network.nic_of)
        yield from (nic.name for nic in report.network.nics)
        yield from (text for uplink in report.network.uplinks for text in uplink)
