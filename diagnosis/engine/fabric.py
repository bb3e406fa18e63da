"""Tomography of the network: the fewest links, switches or NICs that explain which flows are slow and which are not.

A flow is *bad* when its rate is far below, or its round trip far above, the better half of all flows. Each thing
that flows pass through (a link, a switch, the NIC at either end) is a candidate when nearly all its flows are bad.
Candidates are taken greedily by how many bad flows they alone still explain, the narrower first where two explain the
same.

What is wrong with it, by load: a *full* link (our flows fill its capacity) is congested by our own traffic. When it
has to carry several times as many flows as its siblings (the other links or switches that could have been chosen at
the same place), ECMP has put too many flows on one path: polarisation. A slow link that is not full is broken.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diagnosis.contracts.incident import Fabric, Floats
from diagnosis.engine.lanes import Bools

BAD_RATE = 0.6
BAD_RTT = 3.0
ALL_BAD = 0.75
FULL = 0.9
CROWDED = 2.0
NAMED_MAX = 4


@dataclass(frozen=True, slots=True)
class Place:
    """One guilty thing. `kind`: "link" | "switch" | "rank" (the NIC at its end). `flows` bad flows it explains."""

    kind: str
    name: str
    rank: int | None
    cause: str
    flows: int
    text: str


def locate(fabric: Fabric) -> list[Place]:
    """The guilty things, those that explain most first; empty where no flow is bad or nothing explains the bad ones."""
    bad = _bad_flows(fabric)
    if not bad.any() or bad.all():
        return []
    candidates = _candidates(fabric)
    left = bad.copy()
    found: list[Place] = []
    while left.any() and len(found) < NAMED_MAX:
        best, best_key = None, (0, 0)
        for key, flows in candidates.items():
            if bad[flows].mean() < ALL_BAD:
                continue
            gain = int(left[flows].sum())
            if (gain, -_breadth(key[0])) > best_key:
                best, best_key = key, (gain, -_breadth(key[0]))
        if best is None or best_key[0] < max(1, int(0.1 * bad.sum())):
            break
        found.append(_place(fabric, best, candidates[best], bad))
        left[candidates[best]] = False
    return found


def _breadth(kind: str) -> int:
    return {"rank": 0, "link": 1, "switch": 2}[kind]


def dead_flows(fabric: Fabric) -> Bools:
    """Flows over which nothing moves (P,)."""
    with np.errstate(invalid="ignore"):
        return np.asarray(fabric.gbps <= 0, np.bool_)


def _bad_flows(fabric: Fabric) -> Bools:
    """Dead flows if there are any; else those far below the better ones of as many hops (P,)."""
    gbps, rtt = fabric.gbps, fabric.rtt_us
    bad = dead_flows(fabric)
    if bad.any():
        return bad
    hops = np.diff(fabric.path_start)
    with np.errstate(invalid="ignore"):
        for count in np.unique(hops):
            alike = hops == count
            if np.isfinite(gbps[alike]).any():
                bad |= alike & (gbps < BAD_RATE * float(np.nanpercentile(gbps[alike], 75)))
            if np.isfinite(rtt[alike]).any():
                bad |= alike & (rtt > BAD_RTT * float(np.nanpercentile(rtt[alike], 25)))
    return bad


def _candidates(fabric: Fabric) -> dict[tuple[str, str], np.ndarray]:
    """Flows through each link, switch and end; at least two flows make a candidate."""
    flows: dict[tuple[str, str], list[int]] = {}
    ends = {name for pair in zip(fabric.a, fabric.b, strict=True) for name in pair}
    for flow in range(len(fabric.gbps)):
        path = fabric.path[fabric.path_start[flow] : fabric.path_start[flow + 1]]
        passed = {name for link in path for name in (fabric.a[link], fabric.b[link]) if name in ends}
        for link in path:
            flows.setdefault(("link", fabric.links[link]), []).append(flow)
        for name in passed:
            flows.setdefault(("switch", name), []).append(flow)
        for rank in (int(fabric.src[flow]), int(fabric.dst[flow])):
            flows.setdefault(("rank", str(rank)), []).append(flow)
    return {key: np.array(sorted(set(list_)), np.int64) for key, list_ in flows.items() if len(set(list_)) >= 2}


def _place(fabric: Fabric, key: tuple[str, str], flows: np.ndarray, bad: Bools) -> Place:
    kind, name = key
    explained = int(bad[flows].sum())
    if kind == "rank":
        text = f"{explained} of {len(flows)} flows at rank {name} are slow, and nothing else is common to them"
        return Place("rank", name, int(name), "nic_degraded", explained, text)
    load = _load(fabric)
    mine = [i for i, link in enumerate(fabric.links) if link == name or name in (fabric.a[i], fabric.b[i])]
    used = [i for i in mine if load[i] > 0]
    full = [i for i in used if load[i] >= FULL]
    crowd = _crowd(fabric, kind, name, len(flows))
    words = f"{len(full)} of its {len(used)} links in use are full and it carries {crowd:.1f} times its share of flows"
    if used and len(full) >= 0.5 * len(used):
        cause = "ecmp_polarization" if crowd >= CROWDED else "link_congestion"
    else:
        cause = "link_fault"
        words = "it is slow although it is not full"
    text = f"{explained} of {len(flows)} flows through {name} are slow; {words}"
    return Place(kind, name, None, cause, explained, text)


def _crowd(fabric: Fabric, kind: str, name: str, flows: int) -> float:
    """Flows through a place over the mean of it and its siblings; 1.0 where it has none."""
    counts = np.bincount(fabric.path, minlength=len(fabric.links))
    if kind == "link":
        at = fabric.links.index(name)
        fans = [[i for i in range(len(fabric.links)) if ends[i] == ends[at]] for ends in (fabric.a, fabric.b)]
        fan = max(fans, key=len)
        mean = float(np.mean(counts[fan]))
        return float(counts[at]) / mean if mean > 0 else 1.0
    neighbours = {b for a, b in zip(fabric.a, fabric.b, strict=True) if a == name}
    neighbours |= {a for a, b in zip(fabric.a, fabric.b, strict=True) if b == name}
    siblings = {a for a, b in zip(fabric.a, fabric.b, strict=True) if b in neighbours}
    siblings |= {b for a, b in zip(fabric.a, fabric.b, strict=True) if a in neighbours}
    through: dict[str, set[int]] = {sibling: set() for sibling in siblings}
    flow_of = np.repeat(np.arange(len(fabric.gbps)), np.diff(fabric.path_start))
    for flow, link in zip(flow_of.tolist(), fabric.path.tolist(), strict=True):
        for end in (fabric.a[link], fabric.b[link]):
            if end in through:
                through[end].add(flow)
    mean = sum(len(set_) for set_ in through.values()) / max(1, len(through))
    return flows / mean if mean > 0 else 1.0


def _load(fabric: Fabric) -> Floats:
    """Part of each link's capacity that the known flows use (L,)."""
    carried = np.zeros(len(fabric.links))
    per_flow = np.diff(fabric.path_start)
    np.add.at(carried, fabric.path, np.repeat(np.nan_to_num(fabric.gbps), per_flow))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.nan_to_num(carried / fabric.capacity_gbps)
