"""The bundle's files as typed lines: what each may hold. The meaning of every field stands in `docs/bundle.md`."""

from __future__ import annotations

from typing import Final

import msgspec

from diagnosis.contracts.incident import Kind, State
from diagnosis.contracts.report import NIC_COUNTERS
from diagnosis.evidence.values import integer, mend, number, text

SCHEMA: Final = "tocsin.bundle/1"
JOB: Final = "job.json"
COMMUNICATORS: Final = "communicators.jsonl"
FRAMES: Final = "frames.jsonl"
SUMMARIES: Final = "summaries.jsonl"
HEALTH: Final = "health.jsonl"
FABRIC: Final = "fabric.json"
RAS: Final = "ras.json"
FLIGHTS: Final = "flights.jsonl"
PROCESSES: Final = "processes.jsonl"
EXITS: Final = "exits.jsonl"
PROBE: Final = "probe"
NAMES: Final = (JOB, COMMUNICATORS, FRAMES, SUMMARIES, HEALTH, FABRIC, RAS, FLIGHTS, PROCESSES, EXITS)

STATES: Final = {"running": State.RUNNING, "enqueued": State.ENQUEUED, "done": State.DONE, "none": State.NONE}
KINDS: Final = {"collective": Kind.COLLECTIVE, "p2p": Kind.P2P}

ROW_NUMBERS: Final = (
    "seq",
    "done_seq",
    "age_ms",
    "send",
    "recv",
    "send_rate",
    "recv_rate",
    "rounds",
    "dur_ms",
    "dur_min_ms",
    "dur_max_ms",
    "gap_ms",
    "idle_seq",
    "errors",
)
"""Measured columns of a row of a frame; none of them can be negative."""

STATS: Final = (
    "invocation_count",
    "total_time_ms",
    "mean_us",
    "p50_us",
    "p90_us",
    "p95_us",
    "p99_us",
    "max_us",
    "variance_us2",
    "beta",
    "mu",
    "sigma",
)

NVML_COUNTERS: Final = ("ecc_sbe", "ecc_dbe", "pcie_replays", "nvlink_crc_errors", "nvlink_replays")
NVML: Final = (
    "sm_clock_mhz",
    "sm_clock_max_mhz",
    "mem_clock_mhz",
    "mem_clock_max_mhz",
    "clocks_event_reasons",
    "temperature_c",
    "power_w",
    "power_limit_w",
    "row_remap_pending",
    "row_remap_failure",
    "pcie_gen",
    "pcie_gen_max",
    "pcie_width",
    "pcie_width_max",
    "nvlink_down",
    "utilization_pct",
    *NVML_COUNTERS,
)
IB_COUNTERS: Final = NIC_COUNTERS
IB: Final = ("link", "speed_gbps", "speed_max_gbps", *IB_COUNTERS)
HOST: Final = ("cpu_util_pct", "iowait_pct", "steal_pct", "load1", "cpus", "mem_free_gb", "fs_read_p99_ms")
BELOW_ZERO: Final = frozenset({"temperature_c"})
YES_OR_NO: Final = frozenset({"row_remap_pending", "row_remap_failure"})


class CommunicatorLine(msgspec.Struct):
    """One line of `communicators.jsonl`."""

    comm: str | None = None
    ranks: list[int] | None = None
    kind: str | None = None
    algo: str | None = None
    transport: str | None = None


class RowLine(msgspec.Struct, gc=False):
    """One communicator in one line of `frames.jsonl`."""

    comm: str | None = None
    peer: int | None = None
    op: str | None = None
    dtype: str | None = None
    count: int | None = None
    root: int | None = None
    state: str | None = None
    seq: float | None = None
    done_seq: float | None = None
    age_ms: float | None = None
    send: float | None = None
    recv: float | None = None
    send_rate: float | None = None
    recv_rate: float | None = None
    rounds: float | None = None
    dur_ms: float | None = None
    dur_min_ms: float | None = None
    dur_max_ms: float | None = None
    gap_ms: float | None = None
    idle_seq: float | None = None
    errors: float | None = None


class FrameLine(msgspec.Struct):
    """One line of `frames.jsonl`."""

    rank: int | None = None
    t_ms: float | None = None
    window_ms: float | None = None
    comms: list[RowLine | None] | None = None


class OperatorLine(msgspec.Struct, gc=False):
    """One operator in one line of `summaries.jsonl`."""

    operator_name: str | None = None
    kind: str | None = None
    invocation_count: float | None = None
    total_time_ms: float | None = None
    mean_us: float | None = None
    p50_us: float | None = None
    p90_us: float | None = None
    p95_us: float | None = None
    p99_us: float | None = None
    max_us: float | None = None
    variance_us2: float | None = None
    beta: float | None = None
    mu: float | None = None
    sigma: float | None = None


class SummaryLine(msgspec.Struct):
    """One line of `summaries.jsonl`."""

    worker_rank: int | None = None
    step_duration_ms: float | None = None
    profiled_steps: float | None = None
    phases: dict[str, float | None] | None = None
    operators: list[OperatorLine | None] | None = None


class LinkItem(msgspec.Struct):
    """One link of `fabric.json`."""

    id: str | None = None
    a: str | None = None
    b: str | None = None
    gbps: float | None = None


class FlowItem(msgspec.Struct):
    """One flow of `fabric.json`. `kind` "probe": pings on suspicion, and no flow of the job's."""

    comm: str | None = None
    src_rank: int | None = None
    dst_rank: int | None = None
    path: list[str] | None = None
    gbps: float | None = None
    rtt_us: float | None = None
    resent: float | None = None
    dragged: float | None = None
    kind: str | None = None
    sent: int | None = None
    loss: float | None = None


class FabricFile(msgspec.Struct):
    """`fabric.json`."""

    links: list[LinkItem | None] | None = None
    flows: list[FlowItem | None] | None = None


class JobFile(msgspec.Struct):
    """`job.json`, as far as it is used."""

    job_id: int | None = None
    world_size: int | None = None
    nodes: list[str | None] | None = None
    gpus: list[int | None] | None = None
    fidelity: str | None = None
    groups: dict[str, list[list[int]]] | None = None
    nic_of_gpu: dict[str, str] | None = None
    step_ms: float | None = None
    thresholds: dict[str, float | None] | None = None
    unseen: list[str | None] | None = None
    ended: str | None = None
    lost_nodes: list[str | None] | None = None


def whole_numbers(value: object) -> list[int] | None:
    """Those of a list that are whole numbers; None for what is no list."""
    if not isinstance(value, list):
        return None
    return [whole for one in value if (whole := integer(one)) is not None]


def words(value: object) -> list[str] | None:
    """Those of a list that are words; None for what is no list."""
    return [word for one in value if (word := text(one)) is not None] if isinstance(value, list) else None


def mended_rows(value: object) -> list[RowLine | None] | None:
    """The rows of a frame whose line had to be mended."""
    if not isinstance(value, list):
        return None
    return [mend(one, RowLine) if isinstance(one, dict) else None for one in value]


def mended_operators(value: object) -> list[OperatorLine | None] | None:
    """The operators of a summary whose line had to be mended."""
    if not isinstance(value, list):
        return None
    return [mend(one, OperatorLine) if isinstance(one, dict) else None for one in value]


def mended_numbers(value: object) -> dict[str, float | None] | None:
    """A map of words to numbers, null where it is none."""
    return {name: number(one) for name, one in value.items()} if isinstance(value, dict) else None


def mended_links(value: object) -> list[LinkItem | None] | None:
    """The links of a fabric that had to be mended."""
    if not isinstance(value, list):
        return None
    return [mend(one, LinkItem) if isinstance(one, dict) else None for one in value]


def mended_flows(value: object) -> list[FlowItem | None] | None:
    """The flows of a fabric that had to be mended."""
    if not isinstance(value, list):
        return None
    return [mend(one, FlowItem, {"path": words}) if isinstance(one, dict) else None for one in value]


def mended_groups(value: object) -> dict[str, list[list[int]]] | None:
    """The groups of a job file that had to be mended."""
    if not isinstance(value, dict):
        return None
    return {
        name: [ranks for one in groups if (ranks := whole_numbers(one))]
        for name, groups in value.items()
        if isinstance(groups, list)
    }


def mended_names(value: object) -> list[str | None] | None:
    """One word or null per rank."""
    return [text(one) for one in value] if isinstance(value, list) else None


def mended_indices(value: object) -> list[int | None] | None:
    """One whole number or null per rank."""
    return [integer(one) for one in value] if isinstance(value, list) else None


def mended_map(value: object) -> dict[str, str] | None:
    """A map of words to words."""
    if not isinstance(value, dict):
        return None
    return {name: word for name, one in value.items() if (word := text(one)) is not None}
