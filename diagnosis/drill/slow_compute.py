"""Faults that make a rank's own time longer (S1): GPU, memory, copies, host, data, program."""

from __future__ import annotations

from typing import Final

import numpy as np

from diagnosis.drill import health as machine
from diagnosis.drill.case import Case, Pieces, Scene, Truth, truth
from diagnosis.drill.health import Health
from diagnosis.drill.weather import Effect, Stall

# Link speed and width as NVML tells them, with how many times longer a copy takes than on generation 5 x16.
PCIE: Final = ((2.0, 4, 16), (4.0, 3, 16), (8.0, 3, 8), (12.8, 1, 16), (16.0, 3, 4), (25.6, 1, 8))


def gpu_clock_throttle(scene: Scene) -> list[Case]:
    """The clock of one GPU is held down by heat, by the board's power brake or by hardware."""
    rank = scene.rank()
    reasons, heat = (
        (machine.SW_THERMAL | machine.HW_THERMAL, True),
        (machine.HW_THERMAL | machine.HW_SLOWDOWN, True),
        (machine.POWER_BRAKE | machine.HW_SLOWDOWN, False),
        (machine.HW_SLOWDOWN, False),
    )[int(scene.rng.integers(4))]
    hot = int(scene.rng.integers(86, 95))

    def witness(health: Health, x: float) -> None:
        row = health.nvml[rank]
        row |= {"sm_clock_mhz": int(machine.SM_MHZ / x) // 15 * 15, "clocks_event_reasons": reasons}
        row["power_w"] = int(machine.POWER_W * (0.3 + 0.6 / x))
        if heat:
            row["temperature_c"] = hot

    right = truth(
        "slow", "S1", ranks=[rank], nodes=[scene.node_of(rank)], causes=["gpu_clock_throttle"], action="drain"
    )
    return [_slower(scene, "sm", [rank], 5.0, right, witness)]


def hbm_degraded(scene: Scene) -> list[Case]:
    """Memory of one GPU is slow: a low memory clock, or rows that fail and wait to be remapped."""
    rank = scene.rank()
    clock = scene.chance(0.4)
    errors = int(scene.rng.integers(3_000, 60_000))

    def witness(health: Health, x: float) -> None:
        row = health.nvml[rank]
        if clock:
            row["mem_clock_mhz"] = int(machine.MEM_MHZ / x)
        else:
            row |= {"ecc_sbe": errors, "row_remap_pending": True}
            health.xid(
                rank, 63, "pid='<unknown>', name=<unknown>, Row Remapper: New row marked for remapping, reset gpu"
            )

    right = truth("slow", "S1", ranks=[rank], nodes=[scene.node_of(rank)], causes=["hbm_degraded"], action="drain")
    return [_slower(scene, "hbm", [rank], 6.0, right, witness)]


def pcie_degraded(scene: Scene) -> list[Case]:
    """The PCIe link of one GPU trained down: copies from the host take long."""
    rank = scene.rank()

    def witness(health: Health, x: float) -> None:
        _, generation, width = min(PCIE, key=lambda row: abs(row[0] - x))
        health.nvml[rank] |= {"pcie_gen": generation, "pcie_width": width, "pcie_replays": int(40 * x)}

    right = truth("slow", "S1", ranks=[rank], nodes=[scene.node_of(rank)], causes=["pcie_degraded"], action="drain")
    case = _slower(scene, "pcie", [rank], 1.0, right, witness)
    return [_with_strengths(case, tuple(row[0] for row in PCIE))]


def unknown_slow(scene: Scene) -> list[Case]:
    """One GPU computes slowly and nothing says why."""
    rank = scene.rank()

    def pieces(x: float) -> Pieces:
        return Pieces(effects=tuple(Effect(r, scene.only([rank], x)) for r in ("sm", "hbm")))

    node = scene.node_of(rank)
    right = truth(
        "slow", "S1", ranks=[rank], nodes=[node], causes=["unknown", "gpu_fault"], action="collect", keep=[node]
    )
    return [Case(right, pieces, (1.0, 5.0), pattern=scene.pattern(), protected=(rank,))]


def allocator_stall(scene: Scene) -> list[Case]:
    """The memory allocator of one rank gives memory back and asks for it again, several times a step."""
    word = ("cudaMalloc", "cudaFree")[int(scene.rng.integers(2))]
    return [_still(scene, [scene.rank()], "fwd", word, int(scene.rng.integers(2, 5)), "allocator_stall")]


def gc_stall(scene: Scene) -> list[Case]:
    """Python's garbage collector of one rank runs within the step."""
    kind = "fwd" if scene.chance(0.5) else "bwd"
    return [_still(scene, [scene.rank()], kind, "gc.collect", 1, "gc_stall")]


def dataloader_starvation(scene: Scene) -> list[Case]:
    """One rank, or all of a node, waits for data that its workers have not ready."""
    rank = scene.rank()
    ranks = scene.on_node(rank) if scene.chance(0.6) else [rank]
    return [_still(scene, ranks, "start", scene.words["start"], 1, "dataloader_starvation")]


def storage_stall(scene: Scene) -> list[Case]:
    """The file system of a node answers late: data comes late, processors wait for input."""
    rank = scene.rank()
    node = int(scene.layout.node[rank])
    slow, wait = float(scene.rng.uniform(200, 2500)), float(scene.rng.uniform(18, 55))

    def witness(health: Health, x: float) -> None:
        del x
        health.host[node] |= {"fs_read_p99_ms": round(slow, 1), "iowait_pct": round(wait, 1)}

    case = _still(scene, scene.on_node(rank), "start", scene.words["start"], 1, "storage_stall", witness)
    case.truth["causes"].append("dataloader_starvation")
    return [case]


def host_contention(scene: Scene) -> list[Case]:
    """Something else eats the processors of a node: everything that the host does takes long."""
    rank = scene.rank()
    ranks, node = scene.on_node(rank), int(scene.layout.node[rank])
    steal = round(float(scene.rng.uniform(8, 40)), 1) if scene.chance(0.25) else 0.0
    load = round(float(scene.rng.uniform(230, 600)), 1)
    util = round(float(scene.rng.uniform(93, 100)), 1)

    def witness(health: Health, x: float) -> None:
        del x
        health.host[node] |= {"cpu_util_pct": util, "load1": load, "steal_pct": steal}

    name = scene.node_of(rank)
    right = truth(
        "slow", "S1", ranks=ranks, nodes=[name], causes=["host_contention"], action="notify", kind="node", keep=[name]
    )
    return [_slower(scene, "host", ranks, 60.0, right, witness)]


def two_slow(scene: Scene) -> list[Case]:
    """Two GPUs of different nodes are slow at the same time."""
    first = gpu_clock_throttle(scene)
    for _ in range(20):
        second = (gpu_clock_throttle, hbm_degraded)[int(scene.rng.integers(2))](scene)
        if second[0].truth["nodes"] != first[0].truth["nodes"]:
            break
    return [*first, *second]


def _with_strengths(case: Case, strengths: tuple[float, ...]) -> Case:
    return Case(case.truth, case.pieces, strengths, True, case.witness, protected=case.protected)


def _slower(
    scene: Scene,
    resource: str,
    ranks: list[int],
    most: float,
    right: Truth,
    witness: machine.Witness,
) -> Case:
    """One resource of some ranks takes x times as long."""

    def pieces(x: float) -> Pieces:
        return Pieces(effects=(Effect(resource, scene.only(ranks, x)),))

    return Case(right, pieces, (1.0, most), witness=witness, pattern=scene.pattern(), protected=tuple(ranks))


def _still(
    scene: Scene,
    ranks: list[int],
    kind: str,
    operator: str,
    count: int,
    cause: str,
    witness: machine.Witness = machine.no_witness,
) -> Case:
    """Some ranks stand still for x - 1 healthy steps in every step."""

    def pieces(x: float) -> Pieces:
        ms = np.zeros(scene.layout.world)
        ms[ranks] = (x - 1.0) * scene.step_ms
        return Pieces(stalls=(Stall(kind, ms, operator, pieces=count),))

    node = scene.node_of(ranks[0])
    right = truth(
        "slow",
        "S1",
        ranks=ranks,
        nodes=[node],
        causes=[cause],
        action="notify",
        kind="rank" if len(ranks) == 1 else "node",
        keep=[node],
    )
    return Case(right, pieces, (1.0, 3.0), witness=witness, pattern=scene.pattern(), protected=tuple(ranks))
