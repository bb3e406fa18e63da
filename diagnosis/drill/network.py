"""The network: NVLink inside a node, one NIC per GPU, a leaf-spine fabric with equal-cost paths (ECMP) between nodes.

Bandwidth of a hop is the least of what its two NICs and the links of its path give it; flows of one family run at the
same time and share a link equally. A ring is as fast as its slowest hop. The fabric is built without oversubscription
and a healthy hash spreads flows by rail, so that links do not limit a healthy job.

Units: GB/s inside, Gbit/s in what is written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from diagnosis.drill.layout import NVLINK_GB_S, Family, Floats, Layout, Ranks

Bools = NDArray[np.bool_]

SPINES: Final = 8
RTT_US: Final = 9.0


@dataclass(frozen=True, slots=True, eq=False)
class Fabric:
    """`leaf` (W,): leaf switch of each rank's node; `rail` (W,): number of its NIC on that leaf. `hash_word`: a fixed
    random number per hop of each family, (G, m); ECMP sends hops below the polarised share to one spine."""

    leaf: Ranks
    rail: Ranks
    trunk_gbps: float
    hash_word: dict[str, Floats]

    @property
    def leaves(self) -> int:
        """Number of leaf switches."""
        return int(self.leaf.max()) + 1


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """State of the network at one time. `nic`, `nvlink` (W,): share of the healthy bandwidth that is left.
    `links`: the same by link name. `polarised`: (spine, share of flows that all hash there)."""

    nic: Floats
    nvlink: Floats
    links: dict[str, float] = field(default_factory=dict)
    polarised: tuple[int, float] = (0, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Hops:
    """Hops of one family, (G, m) each: `gb_s`, `net` (leaves the node), `up` and `down` link (index, -1 none)."""

    gb_s: Floats
    net: Bools
    up: Ranks
    down: Ranks


def build_fabric(rng: np.random.Generator, layout: Layout) -> Fabric:
    """A fabric just wide enough for the job's nodes. Leaves take two or four nodes."""
    per_leaf = 4 if len(layout.node_names) >= 16 else 2
    trunk = layout.nic_gbps * layout.gpus_per_node * per_leaf / SPINES
    words = {name: rng.random(family.edges.shape[:2]) for name, family in layout.families.items()}
    rail = layout.node % per_leaf * layout.gpus_per_node + layout.gpu
    return Fabric(leaf=layout.node // per_leaf, rail=rail, trunk_gbps=trunk, hash_word=words)


def link_name(fabric: Fabric, index: int) -> str:
    """Name of a link: the first half of the indices leads up from leaves, the second down from spines."""
    half = fabric.leaves * SPINES
    leaf, spine = divmod(index % half, SPINES)
    return f"leaf{leaf}-spine{spine}" if index < half else f"spine{spine}-leaf{leaf}"


def link_index(fabric: Fabric, name: str) -> int:
    """The inverse of `link_name`."""
    a, b = name.split("-")
    leaf, spine = (a, b) if a.startswith("leaf") else (b, a)
    index = int(leaf[4:]) * SPINES + int(spine[5:])
    return index if a.startswith("leaf") else index + fabric.leaves * SPINES


def hops(layout: Layout, fabric: Fabric, network: Network, family: Family) -> Hops:
    """Bandwidth and path of every hop of a family while all its groups are at work."""
    source, target = family.edges[..., 0], family.edges[..., 1]
    net = layout.node[source] != layout.node[target]
    inside = NVLINK_GB_S * np.minimum(network.nvlink[source], network.nvlink[target])
    outside = layout.nic_gbps / 8 * np.minimum(network.nic[source], network.nic[target])
    crossing = net & (fabric.leaf[source] != fabric.leaf[target])
    spine = (fabric.rail[source] + fabric.leaf[source] + fabric.leaf[target]) % SPINES
    to, share = network.polarised
    spine = np.where(fabric.hash_word[family.name] < share, to, spine)
    half = fabric.leaves * SPINES
    up = np.where(crossing, fabric.leaf[source] * SPINES + spine, -1)
    down = np.where(crossing, half + fabric.leaf[target] * SPINES + spine, -1)
    if crossing.any():
        load = np.zeros(2 * half)
        for link, end in ((up, source), (down, target)):
            # A NIC with several flows sends or receives them in turn: together they load a link as one does.
            flows = np.bincount(end[net], minlength=layout.world)
            np.add.at(load, link[crossing], 1.0 / flows[end[crossing]])
        room = np.full(2 * half, fabric.trunk_gbps / 8)
        for name, factor in network.links.items():
            room[link_index(fabric, name)] *= factor
        each = room / np.maximum(load, 1.0)
        limited = np.minimum(each[up], each[down])
        outside = np.where(crossing, np.minimum(outside, limited), outside)
    return Hops(np.where(net, outside, inside), net, up, down)


def track_bandwidth(layout: Layout, table: dict[str, Hops]) -> dict[str, Floats]:
    """GB/s per group (G,) of each collective family (its slowest hop), and per receiving rank (W,) of "act", "grad"."""
    result = {name: item.gb_s.min(1) for name, item in table.items() if name != "p2p"}
    if "p2p" in table:
        pairs = layout.families["p2p"].groups
        for column, track in ((0, "act"), (1, "grad")):
            result[track] = np.ones(layout.world)
            result[track][pairs[:, 1 - column]] = table["p2p"].gb_s[:, column]
    return result


def fabric_record(
    rng: np.random.Generator, layout: Layout, fabric: Fabric, network: Network, dead: dict[str, Bools]
) -> dict[str, Any]:
    """`fabric.json`: all links, and the flows between nodes of all communicators.

    A flow's rate is taken while it sends: a ring's fast hops wait between bursts. Hops that are `dead`, (G, m) by
    family, carry nothing.
    """
    half = fabric.leaves * SPINES
    names = [link_name(fabric, index) for index in range(2 * half)]
    links = []
    for name in names:
        a, b = name.split("-")
        links.append({"id": name, "a": a, "b": b, "gbps": fabric.trunk_gbps})
    flows: list[dict[str, Any]] = []
    for family in layout.families.values():
        table = hops(layout, fabric, network, family)
        noise = np.exp(0.03 * rng.standard_normal(table.gb_s.shape))
        for group, hop in zip(*np.nonzero(table.net), strict=True):
            path = [names[i] for i in (int(table.up[group, hop]), int(table.down[group, hop])) if i >= 0]
            line = layout.nic_gbps / 8
            rate = min(line, float(table.gb_s[group, hop] * noise[group, hop]))
            cut = family.name in dead and bool(dead[family.name][group, hop])
            queue = line / max(rate, 1e-3)
            source, target = family.edges[group, hop].tolist()
            flows.append(
                {
                    "comm": family.ids[group],
                    "src_rank": source,
                    "dst_rank": target,
                    "path": path,
                    "gbps": 0.0 if cut else round(8 * rate, 2),
                    "rtt_us": None if cut else round(RTT_US * (1 + len(path)) * queue * float(noise[group, hop]), 1),
                }
            )
    return {"links": links, "flows": flows}
