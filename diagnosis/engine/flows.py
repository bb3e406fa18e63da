"""What kernels tell of one job's network, joined: connections with both their ends, ports, and the paths between.

Each node tells the TCP connections of its own ranks by local and remote address. A connection is known by its two ends,
so what both nodes tell of it is one *flow*, and the rank at the far end is whoever has the same pair the other way
round; that is remembered when the far node falls silent. Flows inside a node, and those to whoever is no rank of the
job, say nothing of the network between its nodes and are left out.

An end is *busy* while it sends data: only then does its round trip speak of now. A flow is *dead* when data is under
way, the sender has doubled its timer more than once and nothing was acknowledged for seconds; or when the receiver had
closed its window and the sender asks in vain whether it is open again. A receiver that is merely stopped does not look
so, for its kernel goes on acknowledging, and answers.

Whether a flow is slow is measured by the time that its data was under way, beyond what as many bytes took in the flow's
own healthy past: what part of the time is that (`dragged`). In a ring all rates drop together, but only the path that
holds up the others is at work all the time; it holds for a narrow path, a long one and one that loses alike. Round
trips are the second best: where none grew clearly they say nothing, and none is told. Only the end that sends the data
is asked: a lone small message is acknowledged late on purpose.

Paths come from the topology (`diagnosis.evidence.topology.paths`). Without one each node has a link of its own to an
unknown fabric. Pings that were sent on suspicion are no flows: they are told beside them, with the same paths.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from diagnosis.contracts import report as wire
from diagnosis.contracts.columns import null_of, unpack
from diagnosis.contracts.gathered import PingFacts
from diagnosis.contracts.incident import UNKNOWN, Fabric, HealthTable, Probe
from diagnosis.contracts.report import NIC_COUNTERS, NetworkFacts, NicFacts
from diagnosis.contracts.topology import Topology
from diagnosis.evidence.topology.paths import Links, links_of, unseen_ways

ENDS_MAX: Final = 65_536
"""Ends of connections that are remembered of a job."""
FORGET_S: Final = 60.0
BUSY_BYTES_PER_S: Final = 32_768
PAST_SKIPPED: Final = 2
PAST_KEPT: Final = 8
RECENT: Final = 3
GROWN_TIMES: Final = 2.0
GROWN_US: Final = 500.0
DEAD_BACKOFF: Final = 2
DEAD_PROBES: Final = 2
DEAD_MS: Final = 1500
NIC_PAST_S: Final = 120.0
NIC_LOOKS_MAX: Final = 128

Endpoint = tuple[str, int]


@dataclass(slots=True)
class FlowEnd:
    """One end of a connection as its own kernel tells it. None: not told."""

    rank: int
    node: str
    measured_at: float = 0.0
    looks: int = 0
    acked: int = 0
    busy: bool = False
    ever_busy: bool = False
    dead: bool = False
    resent: float | None = None
    past_work: list[tuple[int, int]] = field(default_factory=list)
    recent_drag: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    past_us: list[float] = field(default_factory=list)
    recent_us: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    @property
    def rtt_us(self) -> float | None:
        """The round trip of the newest busy looks."""
        return float(np.median(self.recent_us)) if self.recent_us else None

    @property
    def dragged(self) -> float | None:
        """Part of the time that data was under way for longer than before."""
        return float(np.median(self.recent_drag)) if self.recent_drag else None

    @property
    def grown(self) -> bool:
        """Whether the round trip is clearly longer than it was."""
        if len(self.past_us) < PAST_KEPT or self.rtt_us is None:
            return False
        usual = float(np.median(self.past_us))
        return self.rtt_us >= max(GROWN_TIMES * usual, usual + GROWN_US)


@dataclass(slots=True)
class NetworkHistory:
    """The network of one job attempt; bounded by ENDS_MAX, and by the nodes that Slurm gave to the job."""

    ends: dict[tuple[Endpoint, Endpoint], FlowEnd] = field(default_factory=dict)
    node_of: dict[str, str] = field(default_factory=dict)
    port_of: dict[str, str] = field(default_factory=dict)
    nic_of_rank: dict[int, str] = field(default_factory=dict)
    nics: dict[str, deque[tuple[float, list[NicFacts]]]] = field(default_factory=dict)
    looked_at: dict[str, float] = field(default_factory=dict)
    uplinks: dict[str, list[tuple[str, str]]] = field(default_factory=dict)

    def observe(
        self, node: str, ranks: Sequence[int | None], sample: wire.JobSample, network: NetworkFacts | None, at: float
    ) -> None:
        """Take in one node's words; `ranks`: whom each row of its rank table speaks for. Raises AgentFault where the
        table is unsound."""
        table = unpack(sample.flows, wire.FLOW_DTYPE, wire.FLOW_ROWS_MAX)
        if network is None or network.state != "ok":
            return
        looked_at = at - network.age_ms / 1000
        if looked_at <= self.looked_at.get(node, -np.inf) + 0.001:
            return  # the same look again: the daemon reports more often than it looks
        self.looked_at[node] = looked_at
        if network.uplinks:
            self.uplinks[node] = network.uplinks
        looks = self.nics.setdefault(node, deque(maxlen=NIC_LOOKS_MAX))
        looks.append((looked_at, network.nics))
        while looked_at - looks[0][0] > NIC_PAST_S:
            looks.popleft()
        for row in table:
            self._observe_flow(node, ranks, network, row, looked_at)
        for key, end in list(self.ends.items()):
            if end.node == node and end.measured_at < looked_at - FORGET_S:
                del self.ends[key]

    def _observe_flow(
        self, node: str, ranks: Sequence[int | None], network: NetworkFacts, row: np.void, at: float
    ) -> None:
        places = [int(row[name]) for name in ("rank_row", "local", "remote")]
        if places[0] >= len(ranks) or max(places[1:]) >= len(network.addresses):
            return
        rank, nic = ranks[places[0]], network.nic_of[places[1]]
        if rank is None or not nic or nic == "lo":
            return
        local, remote = network.addresses[places[1]], network.addresses[places[2]]
        self.node_of[local] = node if self.node_of.get(local, node) == node else ""
        self.port_of[local] = nic
        self.nic_of_rank[rank] = nic
        key = ((local, int(row["local_port"])), (remote, int(row["remote_port"])))
        end = self.ends.get(key)
        if end is None:
            if len(self.ends) >= ENDS_MAX:
                return
            end = self.ends[key] = FlowEnd(rank, node)
        _update(end, row, network.window_ms / 1000, at)

    # -- for the engine --------------------------------------------------------------------------------------------

    def fabric(self, topology: Topology, now: float, stale_s: float, pings: Iterable[PingFacts] = ()) -> Fabric | None:
        """Flows between nodes and the links they take, and pings. None where there are no pings, and no flow is known
        that was ever busy, or is dead."""
        flows, pings = self._flows(now, stale_s), list(pings)
        if not flows and not pings:
            return None
        told = any(end.grown or end.dragged is not None for flow in flows for end in flow.fresh)
        links = links_of(topology, [flow.places for flow in flows])
        nothing = np.full(len(flows), np.nan)
        return Fabric(
            links=tuple(links.names),
            a=tuple(links.a),
            b=tuple(links.b),
            capacity_gbps=np.full(len(links.names), np.nan),
            comm=np.full(len(flows), -1, np.int32),
            src=np.array([flow.ranks[0] for flow in flows], np.int32),
            dst=np.array([flow.ranks[1] for flow in flows], np.int32),
            gbps=np.where([flow.dead for flow in flows], 0.0, nothing),
            rtt_us=np.array([flow.rtt_us for flow in flows], np.float64) if told else nothing,
            path_start=np.concatenate([[0], np.cumsum([len(path) for path in links.paths])]).astype(np.int64),
            path=np.array([link for path in links.paths for link in path], np.int32),
            resent=np.array([flow.resent for flow in flows], np.float64),
            dragged=np.array([flow.dragged for flow in flows], np.float64),
            probes=tuple(self._probes(pings, flows, links)),
        )

    def _probes(self, pings: list[PingFacts], flows: list[_Flow], links: Links) -> Iterator[Probe]:
        """Pings with the path of the flows between the same ports, whichever way; none where there is no such flow."""
        path_of = {frozenset(flow.places): path for flow, path in zip(flows, links.paths, strict=True)}
        rank_at = {local[0]: end.rank for (local, _), end in sorted(self.ends.items(), reverse=True)}
        for ping in pings:
            places = [(self.node_of.get(end, ""), self.port_of.get(end, "")) for end in (ping.local, ping.remote)]
            yield Probe(
                src=rank_at.get(ping.local, UNKNOWN),
                dst=rank_at.get(ping.remote, UNKNOWN),
                sent=ping.sent,
                loss=1 - ping.heard / ping.sent if ping.sent else np.nan,
                rtt_us=np.nan if ping.rtt_us is None else ping.rtt_us,
                path=tuple(path_of.get(frozenset(places), ())),
            )

    def unseen_ways(self, topology: Topology) -> list[str]:
        """What the topology leaves open for this job's ports, for people."""
        if not topology.above and not topology.of_port:
            return []
        return unseen_ways(topology, {(node, self.port_of.get(end, "")) for end, node in self.node_of.items() if node})

    def _flows(self, now: float, stale_s: float) -> list[_Flow]:
        found: dict[frozenset[Endpoint], _Flow] = {}
        for (local, remote), end in self.ends.items():
            far = self.ends.get((remote, local))
            node = far.node if far is not None else self.node_of.get(remote[0])
            if not node or node == end.node:
                continue
            places = ((end.node, self.port_of.get(local[0], "")), (node, self.port_of.get(remote[0], "")))
            flow = found.setdefault(
                frozenset((local, remote)), _Flow((end.rank, far.rank if far is not None else UNKNOWN), places, [])
            )
            if now - end.measured_at <= stale_s:
                flow.fresh.append(end)
        return [flow for flow in found.values() if flow.dead or any(end.ever_busy for end in flow.fresh)]

    def ports(self, names: Sequence[str], now: float, stale_s: float) -> HealthTable | None:
        """The ports of these nodes as a table of NICs; counters tell what was added lately. None where none is told.

        A port that was never seen up is left without a state: it may not be in use at all.
        """
        rows: list[tuple[int, NicFacts, dict[str, float]]] = []
        for place, name in enumerate(names):
            looks = self.nics.get(name)
            if not looks or now - looks[-1][0] > stale_s:
                continue
            before = {nic.name: nic for nic in looks[0][1]}
            seen_up = {nic.name for _, nics in looks for nic in nics if nic.up}
            for nic in looks[-1][1]:
                rows.append((place, nic, _port_values(nic, before.get(nic.name, nic), nic.name in seen_up)))
        if not rows:
            return None
        columns = ("link", "speed_gbps", "speed_max_gbps", *NIC_COUNTERS)
        return HealthTable(
            node=np.array([place for place, _, _ in rows], np.int32),
            entity=tuple(nic.name for _, nic, _ in rows),
            values={name: np.array([values[name] for _, _, values in rows], np.float64) for name in columns},
        )

    def nic_of_gpu(self, gpu_of_rank: Mapping[int, int | None]) -> dict[int, str]:
        """The port that the connections of a GPU's ranks lie on, where all its ranks agree."""
        found: dict[int, set[str]] = {}
        for rank, nic in self.nic_of_rank.items():
            gpu = gpu_of_rank.get(rank)
            if gpu is not None:
                found.setdefault(gpu, set()).add(nic)
        return {gpu: min(nics) for gpu, nics in sorted(found.items()) if len(nics) == 1}


@dataclass(slots=True)
class _Flow:
    """A connection. `places`: node and port of both ends; `fresh`: its ends that were told lately."""

    ranks: tuple[int, int]
    places: tuple[tuple[str, str], tuple[str, str]]
    fresh: list[FlowEnd]

    @property
    def dead(self) -> bool:
        return any(end.dead for end in self.fresh)

    @property
    def rtt_us(self) -> float:
        told = [(end.acked, end.rtt_us) for end in self.fresh if end.busy and end.rtt_us is not None]
        return max(told)[1] if told else np.nan

    @property
    def dragged(self) -> float:
        return max((end.dragged for end in self.fresh if end.busy and end.dragged is not None), default=np.nan)

    @property
    def resent(self) -> float:
        return max((end.resent for end in self.fresh if end.resent is not None), default=np.nan)


def _update(end: FlowEnd, row: np.void, window_s: float, at: float) -> None:
    end.measured_at = at
    end.acked = _known(row, "acked_bytes") or 0
    end.busy = window_s > 0 and end.acked >= BUSY_BYTES_PER_S * window_s
    unacked, backoff, age_ms = (_known(row, name) for name in ("unacked", "backoff", "ack_age_ms"))
    lost = bool(unacked) and (backoff or 0) >= DEAD_BACKOFF
    asked_in_vain = bool(_known(row, "queued_bytes")) and (_known(row, "probes") or 0) >= DEAD_PROBES
    end.dead = (lost or asked_in_vain) and (age_ms or 0) >= DEAD_MS
    segments, resent = _known(row, "segments"), _known(row, "resent")
    end.resent = resent / segments if segments and resent is not None and end.busy else None
    rtt = _known(row, "rtt_us")
    if not end.busy or rtt is None:
        return
    end.ever_busy = True
    end.looks += 1
    _weigh(end, _known(row, "busy_us"), window_s)
    end.recent_us.append(float(rtt))
    if end.looks > PAST_SKIPPED and len(end.past_us) < PAST_KEPT:
        end.past_us.append(float(rtt))


def _weigh(end: FlowEnd, busy_us: int | None, window_s: float) -> None:
    """Compare the time that the newest look's bytes took with the past."""
    if busy_us is None:
        return
    if len(end.past_work) >= PAST_KEPT:
        usual = sum(time for time, _ in end.past_work) / sum(acked for _, acked in end.past_work)
        end.recent_drag.append((busy_us - end.acked * usual) / 1e6 / window_s)
    elif end.looks > PAST_SKIPPED:
        end.past_work.append((busy_us, end.acked))


def _known(row: np.void, name: str) -> int | None:
    value = int(row[name])
    return None if value == null_of(wire.FLOW_DTYPE[name]) else value


def _port_values(nic: NicFacts, before: NicFacts, seen_up: bool) -> dict[str, float]:
    values = {
        "link": np.nan if nic.up is None or not seen_up else float(nic.up),
        "speed_gbps": np.nan if nic.speed_gbps is None else nic.speed_gbps,
        "speed_max_gbps": np.nan if nic.speed_max_gbps is None else nic.speed_max_gbps,
    }
    for name in NIC_COUNTERS:
        new, old = getattr(nic, name), getattr(before, name)
        values[name] = np.nan if new is None or old is None or new < old else float(new - old)
    return values
