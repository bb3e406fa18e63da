"""All kinds of drills with what they need of a job, how often they are drawn, and where the weight comes from.

Weights follow published frequencies where there are any: GPU faults lead among hardware causes (Llama 3 58.7 %, Aegis
45.6 %, Minder ECC 25.7 %, PCIe 8.6 %), software and hardware are about equal (EROICA 44.4 and 48.2 %), hangs are a
tenth of all incidents (ByteRobust 9.9 %) but most of what a probe is asked about, slow communication is far more
frequent than slow computation (Greyhound 40 % of jobs against 2 %), and most uneven jobs have no bad worker (uneven
last stage 39.3 %, sequence lengths 21.4 %, bad workers 1.7 %). A quarter of a mixed draw is no fault at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from diagnosis.drill import hangs, slow_compute, slow_network, traps
from diagnosis.drill.case import Case, Scene


@dataclass(frozen=True, slots=True)
class Kind:
    """`needs`: what the layout must have ("tp", "broadcast", "pp", "net", "leaves", "peers")."""

    build: Callable[[Scene], list[Case]]
    weight: float
    needs: tuple[str, ...] = ()


KINDS: Final[dict[str, Kind]] = {
    "process_stuck": Kind(hangs.process_stuck, 5.0),
    "process_exit": Kind(hangs.process_exit, 4.0),
    "several_stuck": Kind(hangs.several_stuck, 1.0),
    "rank_unseen": Kind(hangs.rank_unseen, 0.7),
    "wrong_op": Kind(hangs.wrong_op, 1.5, ("peers",)),
    "wrong_count": Kind(hangs.wrong_count, 1.5, ("peers",)),
    "wrong_dtype": Kind(hangs.wrong_dtype, 0.7, ("peers",)),
    "wrong_root": Kind(hangs.wrong_root, 0.7, ("broadcast",)),
    "wrong_order": Kind(hangs.wrong_order, 1.2, ("peers",)),
    "gpu_xid": Kind(hangs.gpu_xid, 6.0),
    "gpu_silent": Kind(hangs.gpu_silent, 1.0, ("peers",)),
    "nvlink_down": Kind(hangs.nvlink_down, 2.0, ("tp",)),
    "nic_down": Kind(hangs.nic_down, 2.5, ("net",)),
    "link_cut": Kind(hangs.link_cut, 2.0, ("leaves",)),
    "gpu_clock_throttle": Kind(slow_compute.gpu_clock_throttle, 7.0),
    "hbm_degraded": Kind(slow_compute.hbm_degraded, 3.5),
    "pcie_degraded": Kind(slow_compute.pcie_degraded, 2.0),
    "unknown_slow": Kind(slow_compute.unknown_slow, 2.0),
    "allocator_stall": Kind(slow_compute.allocator_stall, 2.0),
    "gc_stall": Kind(slow_compute.gc_stall, 2.0),
    "dataloader_starvation": Kind(slow_compute.dataloader_starvation, 3.0),
    "storage_stall": Kind(slow_compute.storage_stall, 2.0),
    "host_contention": Kind(slow_compute.host_contention, 2.0),
    "two_slow": Kind(slow_compute.two_slow, 1.5),
    "nic_degraded": Kind(slow_network.nic_degraded, 3.0, ("net",)),
    "transceiver_errors": Kind(slow_network.transceiver_errors, 3.0, ("net",)),
    "nic_fault": Kind(slow_network.nic_fault, 2.0, ("net",)),
    "pfc_storm": Kind(slow_network.pfc_storm, 1.5, ("net",)),
    "ecmp_polarization": Kind(slow_network.ecmp_polarization, 2.0, ("leaves",)),
    "link_fault": Kind(slow_network.link_fault, 2.0, ("leaves",)),
    "link_congestion": Kind(slow_network.link_congestion, 3.0, ("leaves",)),
    "nvlink_slow": Kind(slow_network.nvlink_slow, 2.0, ("tp",)),
    "mixed": Kind(slow_network.mixed, 3.0, ("net",)),
    "healthy": Kind(traps.healthy, 6.0),
    "checkpoint": Kind(traps.checkpoint, 2.0),
    "recompilation": Kind(traps.recompilation, 1.0),
    "startup": Kind(traps.startup, 1.0),
    "idle_end": Kind(traps.idle_end, 1.0),
    "evaluation": Kind(traps.evaluation, 1.5),
    "spike": Kind(traps.spike, 2.0),
    "stage_imbalance": Kind(traps.stage_imbalance, 4.0, ("pp",)),
    "sequence_imbalance": Kind(traps.sequence_imbalance, 3.0),
    "workload_imbalance": Kind(traps.workload_imbalance, 1.0),
    "workload_change": Kind(traps.workload_change, 2.0),
    "power_cap": Kind(traps.power_cap, 2.0),
    "innocent_finding": Kind(traps.innocent_finding, 2.0),
    "jobwide_throttle": Kind(traps.jobwide_throttle, 0.5),
}
