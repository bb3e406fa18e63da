"""Faults of the lab's network: a token bucket (tbf) slows a node's wire, nftables loses or swallows, a relay delays.

The kernel may have no netem; none of this needs it. Management traffic stays: losing and swallowing are for the
connections of a job's ranks alone, as on a cluster with a network of its own for the data. Both happen in the switch:
a sender whose own host drops its packets knows of it and does not double its timer. Only a wire that is delayed goes
through the relay, and only while it is.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from node_daemon.collectors.sockets import SocketOwners, TcpSocket, read_sockets
from tests.lab import processes
from tests.lab.cluster import Lab
from tests.lab.system import LabError, in_namespace

BURST_KB = 64
QUEUE_MS = 100
PERMILLE_MAX = 999
RELAY = Path(__file__).with_name("delay.py")


class Wires:
    """The wires of a lab's nodes; `mend` takes every fault away."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._slowed: set[str] = set()
        self._filtered: set[str] = set()
        self._delayed: dict[str, subprocess.Popen[bytes]] = {}

    def slow(self, node: str, mbit: int) -> None:
        """Both ways through the node's wire carry at most so much."""
        shape = f"root tbf rate {mbit}mbit burst {BURST_KB}kb latency {QUEUE_MS}ms".split()
        self._run(node, ["tc", "qdisc", "replace", "dev", "eth0", *shape])
        self._run(None, ["tc", "qdisc", "replace", "dev", f"v-{node}", *shape])
        self._slowed.add(node)

    def lose(self, node: str, permille: int, pids: Iterable[int]) -> None:
        """Of the packets of these processes' connections that come in or go out, so many are lost."""
        if not 0 < permille <= PERMILLE_MAX:
            raise LabError(f"{permille} permille: 1 to {PERMILLE_MAX} can be lost")
        self._filter(node, pids, f"numgen random mod 1000 < {permille} drop")

    def swallow(self, node: str, pids: Iterable[int]) -> None:
        """Nothing of these processes' connections passes any more, and nobody is told: a black hole."""
        self._filter(node, pids, "drop")

    def delay(self, node: str, ms: float) -> None:
        """Whatever passes the node's wire takes so much longer, each way; connections stay."""
        if node in self._delayed:
            raise LabError(f"the wire of {node} is delayed already")
        port, tap = f"v-{node}", f"t-{node}"
        argv = [sys.executable, str(RELAY), port, tap, str(ms)]
        relay = self._lab.popen_controller(argv, name=f"delay-{node}", pipes=True)
        self._delayed[node] = relay
        assert relay.stdout is not None
        if relay.stdout.readline() != b"ready\n":
            raise LabError(f"the relay does not work: {self._lab.log(f'delay-{node}.out')[-400:]}")
        # Off the bridge the port would answer the node's ARP requests itself.
        self._ip(f"link set {port} nomaster arp off", f"link set {tap} up master br0")

    def mend(self) -> None:
        """All wires as they were."""
        for node in self._slowed:
            self._run(node, ["tc", "qdisc", "del", "dev", "eth0", "root"])
            self._run(None, ["tc", "qdisc", "del", "dev", f"v-{node}", "root"])
        for node in self._filtered:
            self._run(None, ["nft", "delete", "table", "bridge", node])
        for node, relay in self._delayed.items():
            processes.kill([relay])  # its TAP goes with it
            self._ip(f"link set v-{node} arp on master br0")
        self._slowed.clear()
        self._filtered.clear()
        self._delayed.clear()

    def connections(self, node: str, pids: Iterable[int]) -> list[TcpSocket]:
        """The connections that these processes have to other nodes."""
        own = self._lab.node(node).address

        def look() -> list[TcpSocket]:
            sockets = read_sockets()
            holder = SocketOwners().find(sockets, {pid: Path(f"/proc/{pid}").stat().st_uid for pid in pids})
            return [one for one in sockets if one.inode in holder and one.local[0] == own and one.remote[0] != own]

        return in_namespace(self._lab.network.namespace(node), look)

    def _filter(self, node: str, pids: Iterable[int], then: str) -> None:
        pairs = {(one.local[1], one.remote[1]) for one in self.connections(node, pids)}
        if not pairs:
            raise LabError(f"the processes on {node} have no connection to another node")
        out = ", ".join(f"{local} . {remote}" for local, remote in sorted(pairs))
        back = ", ".join(f"{remote} . {local}" for local, remote in sorted(pairs))
        rules = f"""
table bridge {node} {{
  chain forward {{
    type filter hook forward priority 0
    iifname "v-{node}" tcp sport . tcp dport {{ {out} }} {then}
    oifname "v-{node}" tcp sport . tcp dport {{ {back} }} {then}
  }}
}}
"""
        self._run(None, ["nft", "-f", "-"], rules)
        self._filtered.add(node)

    def _ip(self, *commands: str) -> None:
        self._run(None, ["ip", "-batch", "-"], "\n".join(commands) + "\n")

    def _run(self, node: str | None, command: list[str], stdin: str = "") -> None:
        enter = self._lab.network.enter(node)
        if not enter:
            raise LabError("faults of the network need network namespaces, and those need root")
        done = subprocess.run([*enter, *command], input=stdin, text=True, capture_output=True, timeout=20)
        if done.returncode != 0:
            raise LabError(f"{' '.join(command[:3])}: {done.stderr.strip() or done.stdout.strip()}")
