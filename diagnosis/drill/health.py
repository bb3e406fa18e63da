"""What the machines say of themselves: NVML per GPU, counters per NIC, the host, the kernel log (`health.jsonl`).

A healthy cluster is not silent: a few retransmits, pauses and corrected memory errors are everywhere, some GPUs are at
their power cap. Faults and red herrings change single fields of single rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from diagnosis.drill.layout import Layout

Row = dict[str, Any]

SM_MHZ: Final = 1980
MEM_MHZ: Final = 2619
POWER_W: Final = 700
# Bits of NVML's clock event reasons.
POWER_CAP: Final = 0x4
HW_SLOWDOWN: Final = 0x8
SW_THERMAL: Final = 0x20
HW_THERMAL: Final = 0x40
POWER_BRAKE: Final = 0x80
QUIET_LINES: Final = (
    'audit: type=1400 apparmor="STATUS" operation="profile_load"',
    "EXT4-fs (nvme0n1p2): re-mounted. Quota mode: none.",
    "perf: interrupt took too long (2512 > 2500), lowering kernel.perf_event_max_sample_rate to 79500",
    "mlx5_core 0000:9a:00.0: mlx5e_update_carrier: Link up",
    "systemd-journald[812]: Time jumped backwards, rotating.",
)


@dataclass(slots=True)
class Health:
    """Rows that can be changed before they are written. `nvml` by rank, `ib` by rank, `host` by node index."""

    layout: Layout
    nvml: dict[int, Row]
    ib: dict[int, Row]
    host: dict[int, Row]
    kmsg: list[Row] = field(default_factory=list)

    def say(self, node: int, line: str) -> None:
        """One line of a node's kernel log."""
        self.kmsg.append({"node": self.layout.node_names[node], "source": "kmsg", "line": line})

    def pci(self, rank: int) -> str:
        """PCI address of a rank's GPU as the driver writes it."""
        return f"0000:{(0x1B, 0x43, 0x52, 0x61, 0x9D, 0xC3, 0xD1, 0xDF)[int(self.layout.gpu[rank])]:02x}:00"

    def xid(self, rank: int, number: int, text: str, when: str = "") -> None:
        """An Xid line of the NVIDIA driver."""
        self.say(int(self.layout.node[rank]), f"{when}NVRM: Xid (PCI:{self.pci(rank)}): {number}, {text}")

    def records(self) -> list[Row]:
        """All rows in the order in which a collector would write them."""
        order: Iterable[int] = range(self.layout.world)
        rows = [self.nvml[rank] for rank in order] + [self.ib[rank] for rank in order]
        return rows + [self.host[node] for node in sorted(self.host)] + self.kmsg


Witness = Callable[[Health, float], None]


def no_witness(health: Health, strength: float) -> None:
    """Nothing is to be seen."""
    del health, strength


def healthy(rng: np.random.Generator, layout: Layout, busy: bool) -> Health:
    """Rows of a cluster on which nothing is wrong. `busy`: the GPUs are at work."""
    world, nodes = layout.world, len(layout.node_names)
    capped = rng.random(world) < 0.25
    # At the cap the clock gives way by a few percent, at most; that is how such GPUs always run.
    clock = SM_MHZ - 15 * np.where(capped, rng.integers(0, 5, world), 0)
    temperature, power = rng.integers(54, 70, world), rng.integers(560, 695, world)
    if not busy:
        temperature, power = temperature - 20, power // 5
    few = rng.random((4, world)) < 0.03
    small = rng.integers(0, 40, (6, world))
    nvml = {
        rank: {
            "node": layout.node_names[layout.node[rank]], "gpu": int(layout.gpu[rank]), "source": "nvml",
            "sm_clock_mhz": int(clock[rank]), "sm_clock_max_mhz": SM_MHZ,
            "mem_clock_mhz": MEM_MHZ, "mem_clock_max_mhz": MEM_MHZ,
            "clocks_event_reasons": POWER_CAP if capped[rank] and busy else 0 if busy else 1,
            "temperature_c": int(temperature[rank]), "power_w": int(power[rank]), "power_limit_w": POWER_W,
            "ecc_sbe": int(small[0, rank] // 10) if few[0, rank] else 0, "ecc_dbe": 0,
            "row_remap_pending": False, "row_remap_failure": False,
            "pcie_gen": 5, "pcie_gen_max": 5, "pcie_width": 16, "pcie_width_max": 16,
            "pcie_replays": int(few[1, rank]), "nvlink_crc_errors": int(few[2, rank]), "nvlink_replays": 0,
            "nvlink_down": 0, "utilization_pct": 100 if busy else 0,
        }
        for rank in range(world)
    }  # fmt: skip
    ib = {
        rank: {
            "node": layout.node_names[layout.node[rank]], "nic": f"mlx5_{layout.gpu[rank]}", "source": "ib",
            "link": "up", "speed_gbps": layout.nic_gbps, "speed_max_gbps": layout.nic_gbps,
            "symbol_errors": int(few[3, rank]), "link_downed": 0, "rx_discards": 0,
            "rx_pause": int(small[1, rank]), "tx_pause": int(small[2, rank]),
            "out_of_sequence": int(small[3, rank] // 14), "retransmits": int(small[4, rank] // 10),
            "cnp_handled": int(small[5, rank] * 12),
        }
        for rank in range(world)
    }  # fmt: skip
    host = {
        node: {
            "node": layout.node_names[node], "source": "host",
            "cpu_util_pct": round(float(rng.uniform(18, 45)), 1), "iowait_pct": round(float(rng.uniform(0, 1.2)), 1),
            "steal_pct": 0.0, "load1": round(float(rng.uniform(10, 40)), 1), "cpus": 192,
            "mem_free_gb": int(rng.integers(400, 1500)), "fs_read_p99_ms": round(float(rng.uniform(1.5, 6.0)), 1),
        }
        for node in range(nodes)
    }  # fmt: skip
    health = Health(layout, nvml, ib, host)
    for node in np.flatnonzero(rng.random(nodes) < 0.1).tolist():
        health.say(node, QUIET_LINES[int(rng.integers(len(QUIET_LINES)))])
    return health


def red_herring(rng: np.random.Generator, health: Health, rank: int) -> None:
    """A finding that looks bad and explains nothing: old, small, or of another program."""
    layout = health.layout
    choice = int(rng.integers(6))
    if choice == 0:
        health.nvml[rank]["ecc_sbe"] = int(rng.integers(20, 400))
    elif choice == 1:
        health.xid(rank, 13, "pid=4182, name=python3, Graphics SM Warp Exception on (GPC 2, TPC 1, SM 0)", "[812.41] ")
    elif choice == 2:
        row = health.ib[rank]
        row |= {"symbol_errors": int(rng.integers(2_000, 90_000)), "since": "boot"}
    elif choice == 3:
        health.nvml[rank] |= {"pcie_replays": int(rng.integers(3, 40)), "temperature_c": int(rng.integers(74, 80))}
    elif choice == 4:
        health.ib[rank] |= {"link_downed": 1, "since": "boot"}
    else:
        row = health.host[int(layout.node[rank])]
        row |= {"load1": round(float(rng.uniform(90, 150)), 1), "cpu_util_pct": round(float(rng.uniform(60, 75)), 1)}
