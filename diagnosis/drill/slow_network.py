"""Faults that make communication slow (S2): a rank's NIC, the path, NVLink; and both kinds at once (S3)."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from diagnosis.contracts.errors import OperatorFault
from diagnosis.drill import slow_compute
from diagnosis.drill.case import Case, MakePieces, Pieces, Scene, Truth, truth
from diagnosis.drill.health import Health, Witness
from diagnosis.drill.layout import Ranks
from diagnosis.drill.network import SPINES, Hops, Network, hops, link_name

NVLINKS: Final = 18
SPEEDS: Final = (2.0, 4.0, 8.0, 16.0, 40.0)
STRONGEST: Final = 60.0


def whole(scene: Scene) -> Network:
    """A network on which nothing is wrong."""
    world = scene.layout.world
    return Network(np.ones(world), np.ones(world))


def on_network(scene: Scene) -> Ranks:
    """Ranks whose NIC carries gradients, or activations where gradients stay inside nodes."""
    for name in ("dp", "p2p", "ep"):
        family = scene.layout.families.get(name)
        if family is not None:
            used = family.edges[hops(scene.layout, scene.fabric, whole(scene), family).net]
            if len(used):
                return np.unique(used)
    raise OperatorFault("no communicator of this layout leaves a node")


def paths(scene: Scene) -> Hops:
    """Hops of the data-parallel family. Raises OperatorFault where none crosses leaf switches."""
    family = scene.layout.families["dp"]
    table = hops(scene.layout, scene.fabric, whole(scene), family)
    if not (table.up >= 0).any():
        raise OperatorFault("no gradient of this layout crosses leaf switches")
    return table


def alike(scene: Scene, links: list[str]) -> list[str]:
    """These links and those that no flow can tell from them: over each of the others go the same flows."""
    routes: list[set[str]] = []
    for family in scene.layout.families.values():
        table = hops(scene.layout, scene.fabric, whole(scene), family)
        crossing = table.up >= 0
        ends = zip(table.up[crossing].tolist(), table.down[crossing].tolist(), strict=True)
        routes += [{link_name(scene.fabric, up), link_name(scene.fabric, down)} for up, down in ends]

    def carried(cable: set[str]) -> list[bool]:
        return [bool(route & cable) for route in routes]

    hit = carried(set(links))
    found = list(links)
    for link in sorted(set().union(*routes) - set(links)):
        cable = {link} if len(links) == 1 else {link, "-".join(reversed(link.split("-")))}
        if carried(cable) == hit:
            found.append(link)
    return found


def nic_degraded(scene: Scene) -> list[Case]:
    """A NIC's link came up at a lower speed."""
    rank = scene.rank(on_network(scene))

    def witness(health: Health, x: float) -> None:
        health.ib[rank]["speed_gbps"] = int(scene.layout.nic_gbps / x)

    return [_nic(scene, rank, ["nic_degraded"], witness, SPEEDS)]


def transceiver_errors(scene: Scene) -> list[Case]:
    """A bad transceiver: symbols are lost, packets sent again."""
    rank = scene.rank(on_network(scene))
    symbols, again = int(scene.rng.integers(8_000, 200_000)), int(scene.rng.integers(4_000, 60_000))

    def witness(health: Health, x: float) -> None:
        health.ib[rank] |= {"symbol_errors": symbols, "retransmits": again, "out_of_sequence": int(again / x)}

    return [_nic(scene, rank, ["transceiver_errors", "nic_fault"], witness)]


def nic_fault(scene: Scene) -> list[Case]:
    """A NIC that drops what it receives and says so in the kernel log."""
    rank = scene.rank(on_network(scene))
    drops = int(scene.rng.integers(20_000, 900_000))

    def witness(health: Health, x: float) -> None:
        health.ib[rank] |= {"rx_discards": drops, "out_of_sequence": drops // 3, "retransmits": int(drops / x)}
        line = "mlx5_core 0000:9a:00.0: mlx5_health_report: device's health compromised - reached miss count"
        health.say(int(scene.layout.node[rank]), line)

    return [_nic(scene, rank, ["nic_fault", "nic_degraded"], witness)]


def pfc_storm(scene: Scene) -> list[Case]:
    """One NIC sends pause frames without end; its switch holds back what goes there and, with it, its neighbours."""
    rank = scene.rank(on_network(scene))
    beside = np.flatnonzero(scene.fabric.leaf == scene.fabric.leaf[rank])
    pauses = int(scene.rng.integers(200_000, 4_000_000))
    spread = scene.rng.uniform(0.002, 0.02, scene.layout.world)

    def pieces(x: float) -> Pieces:
        nic = np.ones(scene.layout.world)
        nic[beside] = 1.0 / (1.0 + 0.15 * (x - 1.0))
        nic[rank] = 1.0 / x
        return Pieces(network=Network(nic, np.ones(scene.layout.world)))

    def witness(health: Health, x: float) -> None:
        del x
        health.ib[rank]["tx_pause"] = pauses
        for other in beside.tolist():
            if other != rank:
                health.ib[other]["rx_pause"] += int(pauses * spread[other])

    node = scene.node_of(rank)
    right = truth("slow", "S2", ranks=[rank], nodes=[node], causes=["pfc_storm", "nic_fault"], action="drain")
    return [_network_case(scene, right, pieces, witness, protected=[rank])]


def ecmp_polarization(scene: Scene) -> list[Case]:
    """The hash sends a third to two thirds of the flows, and in bad cases other jobs' too, over one spine; every NIC is
    healthy."""
    paths(scene)
    spine = int(scene.rng.integers(SPINES))
    most = float(scene.rng.uniform(0.3, 0.65))
    names = [
        name for leaf in range(scene.fabric.leaves) for name in (f"leaf{leaf}-spine{spine}", f"spine{spine}-leaf{leaf}")
    ]

    def pieces(x: float) -> Pieces:
        own, others = min(x, SPINES), max(1.0, x / SPINES)
        share = most * (own - 1.0) / (SPINES - 1.0)
        links = dict.fromkeys(names, 1.0 / others)
        return Pieces(network=replace(whole(scene), polarised=(spine, share), links=links))

    def witness(health: Health, x: float) -> None:
        del x
        for row in health.ib.values():
            row["cnp_handled"] += int(scene.rng.integers(500, 6000))

    right = _fabric_truth(scene, [f"spine{spine}"], ["ecmp_polarization", "link_congestion"])
    return [_network_case(scene, right, pieces, witness, fabric=True)]


def link_fault(scene: Scene) -> list[Case]:
    """A link between switches lost most of its lanes."""
    return [_link(scene, ["link_fault", "link_congestion"], congested=False)]


def link_congestion(scene: Scene) -> list[Case]:
    """Other jobs' traffic takes most of a link."""
    return [_link(scene, ["link_congestion", "link_fault"], congested=True)]


def nvlink_slow(scene: Scene) -> list[Case]:
    """NVLinks of one GPU are down or repeat what they send: its node's collectives are slow."""
    rank = scene.rank()
    replays = int(scene.rng.integers(500, 90_000))

    def pieces(x: float) -> Pieces:
        return Pieces(network=Network(np.ones(scene.layout.world), scene.only([rank], 1.0 / x)))

    def witness(health: Health, x: float) -> None:
        down = min(NVLINKS - 1, int(np.ceil(NVLINKS * (1.0 - 1.0 / x))))
        health.nvml[rank] |= {"nvlink_down": down, "nvlink_replays": replays, "nvlink_crc_errors": replays // 7}

    node = scene.node_of(rank)
    right = truth("slow", "S2", ranks=[rank], nodes=[node], causes=["nvlink_fault"], action="drain")
    return [replace(_network_case(scene, right, pieces, witness, protected=[rank]), strengths=(1.0, float(NVLINKS)))]


def mixed(scene: Scene) -> list[Case]:
    """A slow GPU and a slow NIC on different nodes (S3)."""
    network = (transceiver_errors, nic_degraded)[int(scene.rng.integers(2))](scene)
    kinds = (slow_compute.gpu_clock_throttle, slow_compute.hbm_degraded, slow_compute.gpu_clock_throttle)
    for _ in range(20):
        compute = kinds[int(scene.rng.integers(3))](scene)
        if compute[0].truth["nodes"] != network[0].truth["nodes"]:
            break
    return [*compute, *network]


def _nic(
    scene: Scene, rank: int, causes: list[str], witness: Witness, strengths: tuple[float, ...] | None = None
) -> Case:
    def pieces(x: float) -> Pieces:
        return Pieces(network=Network(scene.only([rank], 1.0 / x), np.ones(scene.layout.world)))

    node = scene.node_of(rank)
    right = truth("slow", "S2", ranks=[rank], nodes=[node], causes=causes, action="drain")
    case = _network_case(scene, right, pieces, witness, fabric=scene.chance(0.3), protected=[rank])
    if strengths is None:
        return case
    return Case(right, pieces, strengths, True, witness, fabric=case.fabric, protected=(rank,))


def _link(scene: Scene, causes: list[str], congested: bool) -> Case:
    table = paths(scene)
    used = np.unique(table.up[table.up >= 0])
    up = link_name(scene.fabric, int(used[int(scene.rng.integers(len(used)))]))
    down = "-".join(reversed(up.split("-")))
    leaf = int(up.split("-")[0][4:])

    def pieces(x: float) -> Pieces:
        links = {up: 1.0 / x} if congested else {up: 1.0 / x, down: 1.0 / x}
        return Pieces(network=replace(whole(scene), links=links))

    def witness(health: Health, x: float) -> None:
        del x
        for rank in np.flatnonzero(scene.fabric.leaf == leaf).tolist():
            health.ib[rank]["cnp_handled"] += int(scene.rng.integers(200, 9000 if congested else 1500))

    right = _fabric_truth(scene, alike(scene, [up] if congested else [up, down]), causes)
    return _network_case(scene, right, pieces, witness, fabric=True)


def _fabric_truth(scene: Scene, links: list[str], causes: list[str]) -> Truth:
    return truth("slow", "S2", links=links, causes=causes, action="notify", kind="link", keep=scene.layout.node_names)


def _network_case(
    scene: Scene,
    right: Truth,
    pieces: MakePieces,
    witness: Witness,
    fabric: bool | None = None,
    protected: list[int] | None = None,
) -> Case:
    gathered = scene.chance(0.3) if fabric is None else fabric
    return Case(
        right,
        pieces,
        (1.0, STRONGEST),
        witness=witness,
        pattern=scene.pattern(),
        fabric=gathered,
        protected=tuple(protected or ()),
    )
