"""Tomography of the network: the fewest links, switches or NICs that explain which flows are slow and which are not.

A flow is *bad* when it is dead, or when its rate lies below the widest gap between the rates of flows of its length.
Each thing that flows pass through (a link, a switch, the NIC at either end) is a candidate when nearly all its flows
are bad. Candidates are taken greedily by how many bad flows they alone still explain, the narrower first where two
explain the same. Where it is known how much each flow holds up, that is what they explain, and what is left counts only
if it is about as bad as what is explained, and its round trips are as long or it loses as well: in a ring that stutters
innocent flows wait too, for acknowledgements that come late on purpose.

What is wrong with it, by load: where it has to carry several times as many flows as its siblings (the other links or
switches that could have been chosen at the same place), ECMP has put too many flows on one path: polarisation. A *full*
link (our flows fill its capacity) is congested by our own traffic. A slow link that is neither is broken, or full of
what is not ours.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diagnosis.contracts.incident import Fabric, Floats, Job
from diagnosis.engine.lanes import Bools

GAP_MIN = 1.6
ALL_BAD = 0.75
FULL = 0.9
CROWDED = 2.0
NAMED_MAX = 4
DRAGGED_MIN = 0.15
DRAGGED_PART = 0.5
LOSSY_MIN = 0.003
TIMES_THE_REST = 10.0
ALIKE_PART = 0.75
RTT_PART = 0.5


@dataclass(frozen=True, slots=True)
class Place:
    """One guilty thing. `kind`: "link" | "switch" | "rank" (the NIC at its end). `flows` bad flows it explains. `node`:
    of a link that is one node's own."""

    kind: str
    name: str
    rank: int | None
    cause: str
    flows: int
    text: str
    node: str | None = None


def behind_own_link(job: Job, fabric: Fabric) -> set[int]:
    """Ranks whose node's own link is among the links: what slows all their flows is that link, as far as flows tell."""
    ends = {*fabric.a, *fabric.b}
    linked = np.array([name in ends for name in job.node_names], np.bool_)
    return set(np.flatnonzero((job.node >= 0) & linked[job.node]).tolist()) if len(linked) else set()


def locate(
    fabric: Fabric, clean: Collection[int] = (), nodes: Collection[str] = (), untold: Bools | None = None
) -> list[Place]:
    """The guilty things, those that explain most first; empty where no flow is bad or nothing explains the bad ones.

    `clean`: ranks whose NIC has told its counters and is well; they are not suspected for their flows. `nodes`: names
    of nodes, to know a node's own link by. `untold` (P,): flows that are no sign of health.
    """
    spared = {("rank", str(rank)) for rank in clean}
    bad = _bad_flows(fabric)
    told = np.ones(len(bad), np.bool_) if untold is None else bad | ~untold
    if not bad.any() or bad[told].all():
        return []
    known = {key: flows[told[flows]] for key, flows in _candidates(fabric).items() if key not in spared}
    candidates = {key: flows for key, flows in known.items() if len(flows)}
    left, badness = bad.copy(), _badness(fabric)
    found: list[Place] = []
    while left.any() and len(found) < NAMED_MAX:
        best, best_key = None, (0.0, 0)
        for key, flows in candidates.items():
            if bad[flows].mean() < ALL_BAD:
                continue
            gain = float(badness[flows[left[flows]]].sum())
            if (gain, -_breadth(key[0])) > best_key:
                best, best_key = key, (gain, -_breadth(key[0]))
        if best is None or left[candidates[best]].sum() < max(1, int(0.1 * bad.sum())):
            break
        found.append(_place(fabric, best, candidates[best], bad, nodes))
        left[candidates[best]] = False
        left &= _alike(fabric, badness, bad & ~left)
    return found


def _breadth(kind: str) -> int:
    return {"rank": 0, "link": 1, "switch": 2}[kind]


def dead_flows(fabric: Fabric) -> Bools:
    """Flows over which nothing moves (P,)."""
    with np.errstate(invalid="ignore"):
        return np.asarray(fabric.gbps <= 0, np.bool_)


def _bad_flows(fabric: Fabric) -> Bools:
    """Dead flows if there are any; else those whose own time explains most, where that is told; else those below the
    widest gap in the rates of flows of as many hops (P,).

    Round trips stand in where no rate is told. A gap and no fixed part of the best: on a busy fabric healthy flows that
    share a link differ from each other by small whole factors.
    """
    bad = dead_flows(fabric)
    if bad.any():
        return bad
    if len(fabric.dragged) and np.isfinite(fabric.dragged).any():
        floor = max(DRAGGED_MIN, DRAGGED_PART * float(np.nanmax(fabric.dragged)))
        return np.asarray(np.nan_to_num(fabric.dragged) >= floor, np.bool_)
    hops = np.diff(fabric.path_start)
    for count in np.unique(hops):
        alike = np.flatnonzero(hops == count)
        rate = fabric.gbps[alike]
        if not np.isfinite(rate).any():
            rate = 1 / fabric.rtt_us[alike]
        bad[alike[_below_gap(rate)]] = True
    return bad if bad.any() else _lossy(fabric)


def _badness(fabric: Fabric) -> Floats:
    """How much each flow holds up (P,); 1 for all where that is not what makes them bad."""
    if dead_flows(fabric).any() or not np.isfinite(fabric.dragged).any():
        return np.ones(len(fabric.gbps))
    return np.nan_to_num(fabric.dragged)


def _alike(fabric: Fabric, badness: Floats, explained: Bools) -> Bools:
    """Flows that are about as bad as those explained in all that is told of them (P,)."""
    if dead_flows(fabric).any() or not np.isfinite(fabric.dragged).any():
        return np.ones(len(badness), np.bool_)
    rtt_us, usual_us = fabric.rtt_us, np.nanmedian(fabric.rtt_us[explained])
    with np.errstate(invalid="ignore"):
        as_long = np.isnan(rtt_us) | np.isnan(usual_us) | (rtt_us >= RTT_PART * usual_us)
    return np.asarray((badness >= ALIKE_PART * np.median(badness[explained])) & (as_long | _lossy(fabric)), np.bool_)


def _lossy(fabric: Fabric) -> Bools:
    """Flows that send clearly more again than the best quarter does (P,)."""
    if len(fabric.resent) != len(fabric.gbps) or np.isnan(fabric.resent).all():
        return np.zeros(len(fabric.gbps), np.bool_)
    usual = float(np.nanquantile(fabric.resent, 0.25))
    with np.errstate(invalid="ignore"):
        return np.asarray(fabric.resent >= max(LOSSY_MIN, TIMES_THE_REST * usual), np.bool_)


def _below_gap(rate: Floats) -> NDArray[np.int64]:
    """Places of the rates below the widest gap between neighbours, if that is wide; none otherwise."""
    told = np.flatnonzero(np.isfinite(rate) & (rate > 0))
    order = told[np.argsort(rate[told], kind="stable")]
    if len(order) < 2:
        return np.empty(0, np.int64)
    steps = rate[order[1:]] / rate[order[:-1]]
    widest = int(steps.argmax())
    return order[: widest + 1] if steps[widest] >= GAP_MIN else np.empty(0, np.int64)


def _candidates(fabric: Fabric) -> dict[tuple[str, str], np.ndarray]:
    """Flows through each link, switch and end; a switch or end needs two flows to be a candidate."""
    flows: dict[tuple[str, str], list[int]] = {}
    ends = {name for pair in zip(fabric.a, fabric.b, strict=True) for name in pair if name}
    for flow in range(len(fabric.gbps)):
        path = fabric.path[fabric.path_start[flow] : fabric.path_start[flow + 1]]
        passed = {name for link in path for name in (fabric.a[link], fabric.b[link]) if name in ends}
        for link in path:
            flows.setdefault(("link", fabric.links[link]), []).append(flow)
        for name in passed:
            flows.setdefault(("switch", name), []).append(flow)
        for rank in (int(fabric.src[flow]), int(fabric.dst[flow])):
            flows.setdefault(("rank", str(rank)), []).append(flow)
    distinct = {key: sorted(set(list_)) for key, list_ in flows.items()}
    return {key: np.array(list_, np.int64) for key, list_ in distinct.items() if key[0] == "link" or len(list_) >= 2}


def _place(fabric: Fabric, key: tuple[str, str], flows: np.ndarray, bad: Bools, nodes: Collection[str]) -> Place:
    kind, name = key
    explained = int(bad[flows].sum())
    if kind == "rank":
        text = f"{explained} of {len(flows)} flows at rank {name} are slow, and nothing else is common to them"
        return Place("rank", name, int(name), "nic_degraded", explained, text)
    own = _nodes_of(fabric, name, nodes) if kind == "link" else []
    if own:
        text = f"{explained} of {len(flows)} flows through {name} are {_fault(fabric, flows)}, and few others are"
        return Place("link", name, None, "link_fault", explained, text, own[0] if len(own) == 1 else None)
    load = _load(fabric)
    mine = [i for i, link in enumerate(fabric.links) if link == name or name in (fabric.a[i], fabric.b[i])]
    used = [i for i in mine if load[i] > 0]
    full = [i for i in used if load[i] >= FULL]
    share = _share(fabric, kind, name, len(flows))
    crowd = len(flows) / share
    chance = share + 2 * math.sqrt(share) + 1  # more than that is hardly chance
    words = f"{len(full)} of its {len(used)} links in use are full and it carries {crowd:.1f} times its share of flows"
    if crowd >= CROWDED and len(flows) >= chance:
        cause = "ecmp_polarization"
    elif used and len(full) >= 0.5 * len(used):
        cause = "link_congestion"
    else:
        cause = "link_fault"
        words = "it is slow although it is not full"
    text = f"{explained} of {len(flows)} flows through {name} are slow; {words}"
    return Place(kind, name, None, cause, explained, text)


def _nodes_of(fabric: Fabric, link: str, nodes: Collection[str]) -> list[str]:
    """The nodes at the ends of a link: one, if it is that node's own, or the two between which it stands for all."""
    at = fabric.links.index(link)
    return [end for end in (fabric.a[at], fabric.b[at]) if end in nodes]


def _fault(fabric: Fabric, flows: np.ndarray) -> str:
    """What is wrong with flows, in words."""
    if dead_flows(fabric)[flows].any():
        return "dead: data is under way and nothing is acknowledged"
    about = []
    if len(fabric.dragged) and np.isfinite(fabric.dragged[flows]).any():
        about.append(f"their data is late for up to {100 * np.nanmax(fabric.dragged[flows]):.0f} % of the time")
    if np.isfinite(fabric.rtt_us[flows]).any():
        about.append(f"round trips of up to {np.nanmax(fabric.rtt_us[flows]) / 1000:.1f} ms")
    if len(fabric.resent) and np.nan_to_num(fabric.resent[flows]).max(initial=0) >= LOSSY_MIN:
        about.append(f"up to {100 * np.nanmax(fabric.resent[flows]):.1f} % sent again")
    return f"slow ({', '.join(about)})" if about else "slow"


def _share(fabric: Fabric, kind: str, name: str, flows: int) -> float:
    """The mean of flows through a place and its siblings; where it has none, its own."""
    counts = np.bincount(fabric.path, minlength=len(fabric.links))
    if kind == "link":
        at = fabric.links.index(name)
        fans = [[i for i in range(len(fabric.links)) if ends[i] == ends[at]] for ends in (fabric.a, fabric.b)]
        fan = max(fans, key=len)
        mean = float(np.mean(counts[fan]))
        return mean if mean > 0 else float(flows)
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
    return mean if mean > 0 else float(flows)


def _load(fabric: Fabric) -> Floats:
    """Part of each link's capacity that the known flows use (L,)."""
    carried = np.zeros(len(fabric.links))
    per_flow = np.diff(fabric.path_start)
    np.add.at(carried, fabric.path, np.repeat(np.nan_to_num(fabric.gbps), per_flow))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.nan_to_num(carried / fabric.capacity_gbps)
