"""Pings between nodes, sent on suspicion of a path: whom to ask, and what the answers say for or against a verdict.

Pings never name anybody: a site may answer none at all. They confirm or qualify what connections say. So beside the
suspected paths some others are pinged, and where these are not answered either, no silence counts.

Where pings die on a path and connections are dead there too, everything is lost on it. Where pings pass and connections
are dead, both nodes are up and reach each other: what is lost is lost for the job's own packets, by a filter, on one of
several parallel paths, or for their size. Slow pings over a slow path confirm it; quick ones leave it open, for they
are few and small and may go by a queue or a path that the job's data does not take.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from diagnosis.contracts.control import PAIRS_MAX
from diagnosis.contracts.incident import Fabric, Incident, Probe
from diagnosis.contracts.verdict import Culprit, EvidenceItem, Verdict
from diagnosis.engine.flows import NetworkHistory

KIND: Final = "probe"
WITNESS: Final = "probe"
SUSPECTED_MAX: Final = 16
OTHERS_MAX: Final = 6
SENT_MIN: Final = 5
"""Fewer pings than that tell nothing of a path."""
LOST_MIN: Final = 0.1
GROWN_TIMES: Final = 2.0
GROWN_US: Final = 500.0
CONFIRMED: Final = 0.97
"""How sure a dead path is on which pings die as well, while they pass elsewhere; not drilled."""
NAMES_SHOWN: Final = 4

Pairs = dict[str, list[tuple[str, str]]]
"""Node to what it should ping: (its address, the far address)."""


def pairs_to_ping(network: NetworkHistory, suspected: Collection[str]) -> Pairs:
    """Paths with a dead connection, then those of `suspected` nodes, then some others to compare with; both ways.

    At most SUSPECTED_MAX and OTHERS_MAX pairs of nodes, and PAIRS_MAX for each node to ping.
    """
    dead: dict[tuple[str, str], bool] = {}
    for ((here, _), (there, _)), end in network.ends.items():
        far = network.node_of.get(there)
        if far and far != end.node:
            pair = (here, there) if here <= there else (there, here)
            dead[pair] = dead.get(pair, False) or end.dead
    node_of = network.node_of

    def is_near(pair: tuple[str, str]) -> bool:
        return dead[pair] or any(node_of[end] in suspected for end in pair)

    ranked = sorted(dead, key=lambda pair: (not dead[pair], pair))
    near = [pair for pair in ranked if is_near(pair)][:SUSPECTED_MAX]
    others = [pair for pair in ranked if not is_near(pair)][:OTHERS_MAX]
    asked: Pairs = {}
    for one, other in (*near, *others):
        for local, remote in ((one, other), (other, one)):
            of_node = asked.setdefault(node_of[local], [])
            if len(of_node) < PAIRS_MAX:
                of_node.append((local, remote))
    return asked


@dataclass(frozen=True, slots=True)
class _Told:
    """Some probes together."""

    probes: Sequence[Probe]

    @property
    def sent(self) -> int:
        return sum(probe.sent for probe in self.probes)

    @property
    def lost(self) -> int:
        return round(sum(probe.sent * probe.loss for probe in self.probes))

    @property
    def dead(self) -> int:
        """Paths on which no ping was answered."""
        return sum(probe.loss >= 1 for probe in self.probes)

    @property
    def rtt_us(self) -> float:
        """Of the path in the middle: one of several may be slow for reasons of its own."""
        told = [probe.rtt_us for probe in self.probes if np.isfinite(probe.rtt_us)]
        return float(np.median(told)) if told else np.nan

    def words(self) -> str:
        lost = f"{self.lost} of {self.sent} lost"
        return f"{lost}, median {self.rtt_us / 1000:.2f} ms" if np.isfinite(self.rtt_us) else lost


def bear_witness(incident: Incident, verdict: Verdict) -> Verdict:
    """The verdict with what pings say of the links and switches it names; of a hang that names nothing, what they say
    of all paths that were asked for."""
    fabric = incident.fabric
    probes = [] if fabric is None else [probe for probe in fabric.probes if probe.sent >= SENT_MIN]
    if fabric is None or not probes or verdict.anomaly not in ("hang", "slow"):
        return verdict
    items: list[EvidenceItem] = []
    culprits: list[Culprit] = []
    for culprit in verdict.culprits:
        through, beside = _split(incident, fabric, culprit, probes)
        if through.probes and verdict.anomaly == "hang":
            item, sure = _of_dead(_name(culprit), through, beside)
            items.append(item)
            culprit = msgspec.structs.replace(culprit, confidence=max(culprit.confidence, sure))
        elif through.probes:
            items.append(_of_slow(_name(culprit), through, beside))
        culprits.append(culprit)
    if verdict.anomaly == "hang" and all(culprit.cause == "unknown" for culprit in culprits):
        items.append(_of_all(incident, _Told(probes)))
    return msgspec.structs.replace(verdict, culprits=culprits, evidence=[*verdict.evidence, *items])


def _split(incident: Incident, fabric: Fabric, culprit: Culprit, probes: list[Probe]) -> tuple[_Told, _Told]:
    """Probes over a link or switch, and those that certainly pass beside it; none where it is neither.

    A path on which no flow of the job was seen is not known. That it passes a node's own link is known all the same.
    """
    over = _links_of(fabric, culprit)
    if not over:
        return _Told([]), _Told([])
    own = [probe for probe in probes if culprit.node is not None and culprit.node in _nodes_of(incident, probe)]
    through = [probe for probe in probes if over & set(probe.path) or probe in own]
    beside = [probe for probe in probes if probe not in through and (probe.path or culprit.node is not None)]
    return _Told(through), _Told(beside)


def _nodes_of(incident: Incident, probe: Probe) -> list[str]:
    """The nodes at both ends, as far as they are known."""
    job = incident.job
    return [job.node_names[job.node[rank]] for rank in (probe.src, probe.dst) if rank >= 0 and job.node[rank] >= 0]


def _name(culprit: Culprit) -> str:
    return culprit.link or culprit.switch or ""


def _links_of(fabric: Fabric, culprit: Culprit) -> set[int]:
    """The links that a culprit is, or is at an end of."""
    if culprit.kind == "link":
        return {at for at, name in enumerate(fabric.links) if name == culprit.link}
    if culprit.kind == "switch":
        return {at for at in range(len(fabric.links)) if culprit.switch in (fabric.a[at], fabric.b[at])}
    return set()


def _of_dead(name: str, through: _Told, beside: _Told) -> tuple[EvidenceItem, float]:
    """What pings say of a path whose connections are dead, and how sure that makes it (0: no surer)."""
    if through.dead == len(through.probes):
        if beside.probes and beside.dead < len(beside.probes):
            text = f"pings over {name} die as well ({through.words()}), elsewhere they pass ({beside.words()})"
            return _item(text), CONFIRMED
        why = "elsewhere they die too" if beside.probes else "no other path was pinged"
        return _item(
            f"pings over {name} die ({through.words()}), but {why}: it may be that none are answered here"
        ), 0.0
    if through.dead:
        text = f"pings over {name} die on {through.dead} of {len(through.probes)} paths ({through.words()})"
        return _item(text), 0.0
    text = (
        f"pings over {name} pass ({through.words()}) although its connections are dead: the nodes reach each other, and"
        " what is lost are the job's own packets, by a filter, on one of several parallel paths, or for their size"
    )
    return _item(text, against=True), 0.0


def _of_slow(name: str, through: _Told, beside: _Told) -> EvidenceItem:
    """What pings say of a path that is slow."""
    than = f", elsewhere {beside.words()}" if beside.probes else ""
    usual_us, usual_loss = beside.rtt_us, beside.lost / beside.sent if beside.sent else 0.0
    floor_us = GROWN_US if np.isnan(usual_us) else max(GROWN_TIMES * usual_us, usual_us + GROWN_US)
    slow, lossy = through.rtt_us >= floor_us, through.lost / through.sent >= max(LOST_MIN, GROWN_TIMES * usual_loss)
    if beside.probes and (slow or lossy):
        return _item(f"pings over {name} are {'slow' if slow else 'lost'} too ({through.words()}{than})")
    return _item(f"pings over {name} do not show it ({through.words()}{than})", against=True)


def _of_all(incident: Incident, told: _Told) -> EvidenceItem:
    """What pings say where nothing of the network is named."""
    dead = [probe for probe in told.probes if probe.loss >= 1]
    if not dead:
        return _item(f"pings pass on all {len(told.probes)} paths that were asked for ({told.words()})", against=True)
    if len(dead) == len(told.probes):
        return _item(f"pings die on all {len(dead)} paths that were asked for: it may be that none are answered here")
    names = list(dict.fromkeys(_between(incident, dead)))
    more = f" and {len(names) - NAMES_SHOWN} others" if len(names) > NAMES_SHOWN else ""
    passing = len(told.probes) - len(dead)
    return _item(f"pings die between {', '.join(names[:NAMES_SHOWN])}{more}, and pass on {passing} other paths")


def _between(incident: Incident, probes: Sequence[Probe]) -> Iterator[str]:
    for probe in probes:
        known = _nodes_of(incident, probe)
        yield " and ".join([*sorted(known), *["a node that is not known"] * (2 - len(known))])


def _item(text: str, *, against: bool = False) -> EvidenceItem:
    return EvidenceItem(kind=KIND, text=text, witness=WITNESS, against=against)
