"""The network as this node's kernel sees it: the TCP connections of the job's ranks, and the state of the ports.

Counters of a connection run since it was made; told is what was added since the look before (the network window). A
connection that was not there then tells no differences. Where a job has more connections than a report holds, those
with something under way go before the busy ones, and those before the idle ones; what is left out is counted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from diagnosis.contracts import report as wire
from diagnosis.contracts.columns import Table, empty, null_of, pack
from diagnosis.contracts.report import JobSample, NetworkFacts
from node_daemon.collectors.ethtool import PortStatistics
from node_daemon.collectors.frames import JobFrames
from node_daemon.collectors.nics import local_addresses, read_nics
from node_daemon.collectors.process import STATE_GONE, STATE_UNKNOWN
from node_daemon.collectors.sockets import SocketOwners, TcpSocket, read_sockets
from node_daemon.log import EventLog
from node_daemon.threads import OwnThread

_log = EventLog("node_daemon.network")
_COUNTERS: Final = ("acked_bytes", "received_bytes", "segments", "resent", "busy_us")
_Key = tuple[int, tuple[str, int], tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Flow:
    """A rank's connection and what was added to its counters since the look before; None: not known."""

    socket: TcpSocket
    added: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Look:
    """One look: the connections of each process, the ports, and the port of each local address."""

    flows: Mapping[int, list[Flow]]
    nics: list[wire.NicFacts]
    nic_of: Mapping[str, str]
    window_ms: int
    fault: str = ""


@dataclass(slots=True)
class NetworkSource:
    """Reads everything at once. `pids`: process to owner, of the ranks that live."""

    owners: SocketOwners = field(default_factory=SocketOwners)
    sockets: Callable[[], list[TcpSocket]] = read_sockets
    addresses: Callable[[], dict[str, str]] = local_addresses
    clock: Callable[[], float] = time.monotonic
    statistics: PortStatistics = field(default_factory=PortStatistics)
    _before: dict[_Key, tuple[int | None, ...]] = field(default_factory=dict)
    _looked_at: float | None = None

    def read(self, pids: Mapping[int, int]) -> Look:
        """One look; a source that fails is a fault of the look and no fact about the network."""
        try:
            sockets, nic_of = self.sockets() if pids else [], self.addresses()
        except OSError as error:
            return Look({}, [], {}, 0, f"{error.strerror or error}")
        now = self.clock()
        window_s = now - self._looked_at if self._looked_at is not None else 0.0
        self._looked_at = now
        holder = self.owners.find(sockets, pids)
        flows: dict[int, list[Flow]] = {}
        counters: dict[_Key, tuple[int | None, ...]] = {}
        for one in sockets:
            pid = holder.get(one.inode)
            if pid is None:
                continue
            key = (one.inode, one.local, one.remote)
            counters[key] = tuple(getattr(one, name) for name in _COUNTERS)
            flows.setdefault(pid, []).append(Flow(one, _added(counters[key], self._before.get(key))))
        self._before = counters
        used = {nic_of[flow.socket.local[0]] for of in flows.values() for flow in of if flow.socket.local[0] in nic_of}
        return Look(flows, read_nics(used - {"lo"}, self.statistics), nic_of, int(window_s * 1000))


def _added(now: tuple[int | None, ...], before: tuple[int | None, ...] | None) -> tuple[int | None, ...]:
    if before is None:
        return (None,) * len(now)
    pairs = zip(now, before, strict=True)
    return tuple(None if new is None or old is None or new < old else new - old for new, old in pairs)


class NetworkMonitor:
    """Keeps the newest look and puts it into reports. `told` never blocks."""

    def __init__(self, source: NetworkSource, *, period_s: float, deadline_s: float) -> None:
        self._source, self._period_s, self._deadline_s = source, period_s, deadline_s
        self._thread = OwnThread("network")
        self._pids: dict[int, int] = {}
        self._newest: Look | None = None
        self._read_at = time.monotonic()

    def watch(self, jobs: list[JobFrames]) -> None:
        """From now on these jobs' ranks are looked at, as far as their processes live and are who they say."""
        self._pids = {
            frame.pid: job.uid for job in jobs for frame in job.frames if frame.state not in (STATE_GONE, STATE_UNKNOWN)
        }

    def paths(self, pids: Collection[int]) -> set[tuple[str, str]]:
        """Where connections of these processes lead, by the newest look: (address here, address there)."""
        flows = self._newest.flows if self._newest is not None else {}
        return {(one.socket.local[0], one.socket.remote[0]) for pid in pids for one in flows.get(pid, ())}

    async def run(self) -> None:
        """Look once a period, for ever."""
        try:
            while True:
                began_at = time.monotonic()
                await self._read(began_at)
                await asyncio.sleep(max(0.0, began_at + self._period_s - time.monotonic()))
        finally:
            self._thread.close()

    async def _read(self, began_at: float) -> None:
        pids = dict(self._pids)
        try:
            look = await self._thread.run(lambda: self._source.read(pids), self._deadline_s)
        except TimeoutError:
            look = Look({}, [], {}, 0, f"the kernel gave no answer within {self._deadline_s:g} s")
        if look.fault:
            _log.sparsely("network", "network not read", error=look.fault)
        self._newest, self._read_at = look, began_at

    def told(
        self, jobs: list[JobFrames], samples: list[JobSample], uplinks: Sequence[tuple[str, str]] = ()
    ) -> tuple[list[JobSample], NetworkFacts | None]:
        """The samples with their ranks' connections, and what they refer to. None before the first look."""
        look = self._newest
        if look is None:
            return samples, None
        age_ms = int((time.monotonic() - self._read_at) * 1000)
        if look.fault:
            return samples, NetworkFacts("error", look.fault[: wire.TEXT_CHARS_MAX], age_ms)
        table, told, left = _Addresses(), [], 0
        rows_left = wire.FLOW_ROWS_MAX
        for number, (job, sample) in enumerate(zip(jobs, samples, strict=True)):
            rows = [
                (row, flow)
                for row, frame in enumerate(job.frames[: wire.RANKS_MAX])
                for flow in look.flows.get(frame.pid, ())
            ]
            share = rows_left // (len(jobs) - number)
            rows.sort(key=lambda entry: _interest(entry[1]), reverse=True)
            kept = [(row, flow) for row, flow in rows[:share] if table.takes(flow)]
            left += len(rows) - len(kept)
            rows_left -= len(kept)
            told.append(msgspec.structs.replace(sample, flows=pack(_table(kept, table))))
        names = list(table.index)
        nic_of = [look.nic_of.get(name, "") for name in names]
        return told, NetworkFacts("ok", "", age_ms, look.window_ms, names, nic_of, look.nics, left, list(uplinks))


class _Addresses:
    """Addresses by number, as many as a report holds."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {}

    def takes(self, flow: Flow) -> bool:
        """Number both ends; False where there is no room for them."""
        wanted = [end for end, _ in (flow.socket.local, flow.socket.remote) if end not in self.index]
        if len(self.index) + len(wanted) > wire.ADDRESSES_MAX:
            return False
        for end in wanted:
            self.index[end] = len(self.index)
        return True


def _interest(flow: Flow) -> tuple[bool, int]:
    stuck = bool(flow.socket.unacked or flow.socket.probes) and flow.socket.backoff > 0
    return stuck, (flow.added[0] or 0) + (flow.added[1] or 0)


def _table(kept: list[tuple[int, Flow]], addresses: _Addresses) -> Table:
    """A column at a time: value by value takes numpy ten times as long, a third of what a report costs."""
    sockets = [flow.socket for _, flow in kept]
    columns: dict[str, Iterable[int | None]] = {
        "rank_row": [row for row, _ in kept],
        "local": [addresses.index[one.local[0]] for one in sockets],
        "local_port": [one.local[1] for one in sockets],
        "remote": [addresses.index[one.remote[0]] for one in sockets],
        "remote_port": [one.remote[1] for one in sockets],
        **dict(zip(_COUNTERS, zip(*(flow.added for _, flow in kept), strict=True), strict=False)),
    }
    for name in ("rtt_us", "unacked", "queued_bytes", "backoff", "probes", "ack_age_ms"):
        columns[name] = [getattr(one, name) for one in sockets]
    table = empty(wire.FLOW_DTYPE, len(kept))
    for name, values in columns.items():
        null = null_of(wire.FLOW_DTYPE[name])
        table[name] = [null if value is None or value >= null else value for value in values]
    return table
