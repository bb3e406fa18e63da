"""What nodes say about themselves: GPU, NIC, host and kernel log, judged one by one. Evidence, not guilt.

Each rule is a comparison with what is normal: with the value's own limit (clock and its maximum, link width and its
maximum) or with the rest of the job (an error counter that is high here and near nothing elsewhere). A counter that
covers a node's whole life ("since") says nothing about the incident. Whether a finding convicts is decided where the
time lost is known.

Clock event reasons (nvml.h, `nvmlClocksEventReason*`): a software power cap (0x4), application clocks (0x2) and idle
(0x1) occur on healthy nodes; hardware slowdown (0x8), software thermal slowdown (0x20), hardware thermal slowdown
(0x40) and power brake (0x80) do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from diagnosis.contracts.incident import Floats, HealthTable, Incident
from diagnosis.engine.lanes import Bools
from diagnosis.engine.thresholds import Thresholds
from diagnosis.evidence import kernel_log

SLOWDOWN_REASONS: Final[dict[int, str]] = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
GPU_IDLE: Final = 0x1
"""The reason that says that nothing runs on the GPU (nvml.h, `nvmlClocksEventReasonGpuIdle`)."""
TIMES_THE_FLEET: Final = 10.0
FINDINGS_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class Finding:
    """One judged observation. `entity`: GPU index, NIC name or "" for the node itself. `scale`: by how much the thing
    is slower than it should be (1.0: not told). `decisive`: it is broken for certain, no second word is needed."""

    node: str
    entity: int | str
    cause: str
    source: str
    text: str
    scale: float = 1.0
    decisive: bool = False


@dataclass(frozen=True, slots=True)
class Witnesses:
    """All findings, by node."""

    of_node: dict[str, tuple[Finding, ...]]

    def about(self, node: str, gpu: int | None, nic: str | None) -> list[Finding]:
        """Findings about a rank's GPU, its NIC and its node; without a GPU index, all of the node."""
        found = self.of_node.get(node, ())
        if gpu is None:
            return list(found)
        return [f for f in found if f.entity == "" or f.entity == gpu or (nic is not None and f.entity == nic)]


def gather(incident: Incident, limits: Thresholds) -> Witnesses:
    """All findings of an incident, at most FINDINGS_MAX."""
    found: list[Finding] = []
    names = incident.job.node_names
    if incident.nvml is not None:
        found += _of_gpus(incident.nvml, names, limits.clock_ratio_max)
    if incident.ib is not None:
        found += _of_nics(incident.ib, names)
    if incident.host is not None:
        found += _of_hosts(incident.host, names)
    found += _of_kernel(incident)
    by_node: dict[str, list[Finding]] = {}
    for finding in found[:FINDINGS_MAX]:
        by_node.setdefault(finding.node, []).append(finding)
    return Witnesses({node: tuple(list_) for node, list_ in by_node.items()})


class _Table:
    """Columns of one source; a column that nobody told is all NaN."""

    def __init__(self, table: HealthTable, names: tuple[str, ...], source: str) -> None:
        self._table = table
        self._names = names
        self._source = source
        self._lifetime = np.nan_to_num(table.values.get("since", np.zeros(len(table.node)))) > 0

    def column(self, name: str) -> Floats:
        """The column, NaN where not told."""
        return self._table.values.get(name, np.full(len(self._table.node), np.nan))

    def part(self, name: str, of: str) -> Floats:
        """One column as a part of another."""
        most = self.column(of)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(most > 0, self.column(name) / most, np.nan)

    def counted(self, name: str, least: float) -> Bools:
        """Rows whose counter is at least `least` and far above the rest, and covers the incident only."""
        values = self.column(name)
        told = values[~np.isnan(values)]
        usual = float(np.median(told)) if len(told) else 0.0
        with np.errstate(invalid="ignore"):
            return (values >= max(least, TIMES_THE_FLEET * usual)) & ~self._lifetime

    def findings(
        self, rows: Bools, cause: str, words: Callable[[int], str], scale: Floats | None = None, decisive: bool = False
    ) -> list[Finding]:
        """A finding for each of the rows."""
        result = []
        for row in np.flatnonzero(rows)[:FINDINGS_MAX]:
            node = int(self._table.node[row])
            if 0 <= node < len(self._names):
                by = float(scale[row]) if scale is not None and np.isfinite(scale[row]) else 1.0
                entity = self._table.entity[row]
                text = f"{_name(entity)}{self._names[node]}: {words(int(row))}"
                result.append(Finding(self._names[node], entity, cause, self._source, text, by, decisive))
        return result


def _name(entity: int | str) -> str:
    if isinstance(entity, int):
        return f"GPU{entity} of "
    return f"{entity} of " if entity else ""


def slowdown_reasons(mask: float) -> list[str]:
    """Names of the abnormal reasons in a mask of clock event reasons; none where the mask is NaN."""
    bits = 0 if np.isnan(mask) else int(mask)
    return [name for bit, name in SLOWDOWN_REASONS.items() if bits & bit]


def _of_gpus(nvml: HealthTable, names: tuple[str, ...], clock_part_max: float) -> list[Finding]:
    table = _Table(nvml, names, "nvml")
    sm, sm_max = table.column("sm_clock_mhz"), table.column("sm_clock_max_mhz")
    clock, memory = table.part("sm_clock_mhz", "sm_clock_max_mhz"), table.part("mem_clock_mhz", "mem_clock_max_mhz")
    reasons = table.column("clocks_event_reasons")
    mask = np.nan_to_num(reasons).astype(np.int64)
    abnormal = (mask & sum(SLOWDOWN_REASONS)) != 0
    # Many GPUs clock their memory down while nothing runs on them: a rank that starves its GPU breaks no memory.
    awake = ~np.isnan(reasons) & ((mask & GPU_IDLE) == 0)
    usual = float(np.nanmedian(clock)) if not np.isnan(clock).all() else 1.0
    with np.errstate(invalid="ignore", divide="ignore"):
        low = clock <= clock_part_max * min(1.0, max(usual, 0.1))
        slow_by, memory_by = 1 / clock, 1 / memory

    def clock_words(row: int) -> str:
        why = ", ".join(slowdown_reasons(reasons[row])) or "without an abnormal reason"
        return f"runs at {sm[row]:.0f} of {sm_max[row]:.0f} MHz ({why})"

    found = table.findings(low & abnormal, "gpu_clock_throttle", clock_words, slow_by)
    sbe, dbe = table.column("ecc_sbe"), table.column("ecc_dbe")
    mem = table.column("mem_clock_mhz")
    with np.errstate(invalid="ignore"):
        found += table.findings(
            awake & (memory <= clock_part_max), "hbm_degraded", lambda r: f"memory runs at {mem[r]:.0f} MHz", memory_by
        )
        remap = (table.column("row_remap_pending") > 0) | (table.column("row_remap_failure") > 0)
        found += table.findings(remap, "hbm_degraded", lambda r: "a memory row waits to be remapped or could not be")
        found += table.findings(
            table.counted("ecc_sbe", 1000), "hbm_degraded", lambda r: f"{sbe[r]:.0f} corrected memory errors"
        )
        found += table.findings(
            table.counted("ecc_dbe", 1), "gpu_fault", lambda r: f"{dbe[r]:.0f} uncorrected memory errors"
        )
    return found + _of_gpu_links(table)


def _of_gpu_links(table: _Table) -> list[Finding]:
    gen, gen_max = table.column("pcie_gen"), table.column("pcie_gen_max")
    width, width_max = table.column("pcie_width"), table.column("pcie_width_max")
    replays, crc = table.column("pcie_replays"), table.column("nvlink_crc_errors")
    down, link_replays = table.column("nvlink_down"), table.column("nvlink_replays")
    with np.errstate(invalid="ignore", divide="ignore"):
        speed = (gen_max - gen) * np.log(2) + np.log(width_max / width)
        slow_by = np.exp(np.nan_to_num(speed))
        found = table.findings(
            (gen < gen_max) | (width < width_max),
            "pcie_degraded",
            lambda r: f"PCIe runs at gen {gen[r]:.0f} x{width[r]:.0f} of gen {gen_max[r]:.0f} x{width_max[r]:.0f}",
            slow_by,
        )
        found += table.findings(
            table.counted("pcie_replays", 1000), "pcie_degraded", lambda r: f"{replays[r]:.0f} PCIe replays"
        )
        found += table.findings(down > 0, "nvlink_fault", lambda r: f"{down[r]:.0f} NVLinks are down", decisive=True)
        found += table.findings(
            table.counted("nvlink_replays", 100) | table.counted("nvlink_crc_errors", 100),
            "nvlink_fault",
            lambda r: f"NVLink errors: {np.nan_to_num(crc[r]):.0f} CRC, {np.nan_to_num(link_replays[r]):.0f} replays",
        )
    return found


def _of_nics(ib: HealthTable, names: tuple[str, ...]) -> list[Finding]:
    table = _Table(ib, names, "ib")
    speed, speed_max = table.column("speed_gbps"), table.column("speed_max_gbps")
    symbol, retransmits = table.column("symbol_errors"), table.column("retransmits")
    order, downed = table.column("out_of_sequence"), table.column("link_downed")
    tx, rx, discards = table.column("tx_pause"), table.column("rx_pause"), table.column("rx_discards")
    marks = table.column("cnp_handled")
    with np.errstate(invalid="ignore", divide="ignore"):
        found = table.findings(table.column("link") <= 0, "nic_fault", lambda r: "its link is down", decisive=True)
        found += table.findings(
            speed < speed_max,
            "nic_degraded",
            lambda r: f"runs at {speed[r]:.0f} of {speed_max[r]:.0f} Gbit/s",
            speed_max / speed,
        )
    found += table.findings(
        table.counted("symbol_errors", 100),
        "transceiver_errors",
        lambda r: f"{symbol[r]:.0f} symbol errors, {np.nan_to_num(retransmits[r]):.0f} retransmits",
    )
    found += table.findings(
        table.counted("link_downed", 1), "nic_fault", lambda r: f"its link went down {downed[r]:.0f} times"
    )
    found += table.findings(table.counted("tx_pause", 1000), "pfc_storm", lambda r: f"it sent {tx[r]:.0f} pause frames")
    found += table.findings(
        table.counted("rx_pause", 1000), "pfc_victim", lambda r: f"it received {rx[r]:.0f} pause frames"
    )
    found += table.findings(
        table.counted("rx_discards", 1000), "nic_degraded", lambda r: f"it discarded {discards[r]:.0f} packets"
    )
    lossy = (table.counted("retransmits", 1000) | table.counted("out_of_sequence", 1000)) & ~table.counted(
        "symbol_errors", 100
    )
    found += table.findings(
        lossy,
        "lossy_path",
        lambda r: f"{np.nan_to_num(retransmits[r]):.0f} retransmits, {np.nan_to_num(order[r]):.0f} out of sequence",
    )
    found += table.findings(
        table.counted("cnp_handled", 5000), "congested_path", lambda r: f"{marks[r]:.0f} congestion notifications"
    )
    return found


def _of_hosts(host: HealthTable, names: tuple[str, ...]) -> list[Finding]:
    table = _Table(host, names, "host")
    cpu, steal, wait = table.column("cpu_util_pct"), table.column("steal_pct"), table.column("iowait_pct")
    read, load = table.column("fs_read_p99_ms"), table.part("load1", "cpus")
    usual = float(np.nanmedian(cpu)) if not np.isnan(cpu).all() else 0.0
    with np.errstate(invalid="ignore"):
        busy = (cpu >= max(85.0, usual + 20)) | (steal >= 5) | (load >= 1.5)
        found = table.findings(
            table.counted("fs_read_p99_ms", 100),
            "storage_stall",
            lambda r: f"file reads take {read[r]:.0f} ms (p99), {np.nan_to_num(wait[r]):.0f} % waiting for I/O",
        )
        found += table.findings(
            busy,
            "host_contention",
            lambda r: f"CPUs {cpu[r]:.0f} % busy, {np.nan_to_num(steal[r]):.0f} % stolen, load {load[r]:.1f} per CPU",
        )
    return found


def _of_kernel(incident: Incident) -> list[Finding]:
    found = []
    for line in incident.kernel_log[:FINDINGS_MAX]:
        fact = kernel_log.read_line(line.line)
        if fact is None:
            continue
        cause, decisive = _cause_of(fact)
        if cause:
            entity = fact.entity if fact.kind == "nic_down" else ""
            text = f"kernel log of {line.node}: {line.line.strip()[:160]}"
            found.append(Finding(line.node, entity, cause, "kmsg", text, decisive=decisive))
    return found


def _cause_of(fact: kernel_log.KernelFact) -> tuple[str, bool]:
    if fact.kind == "off_bus":
        return "gpu_fault", True
    if fact.kind == "oom":
        return "process_exit", True
    if fact.kind == "nic_down":
        return "nic_fault", True
    if fact.kind == "segfault":
        return "process_exit", False
    if fact.number in kernel_log.XID_OF_NVLINK:
        return "nvlink_fault", True
    if fact.number in kernel_log.XID_FATAL:
        return "gpu_fault", True
    return "", False
