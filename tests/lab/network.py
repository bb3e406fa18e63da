"""The lab's wires: one network namespace per node, and one for the switch and the controller's machine.

The bridge lies in the switch's namespace, so the machine's own network is never touched. Without root there are no
namespaces: every node is on 127.0.0.1 with ports of its own, and nothing else changes for whoever uses the lab.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.lab.system import LabError, eventually

RUN_NETNS = Path("/run/netns")
PREFIX = "tocsin-"
SWITCH_ADDRESS = "10.98.0.254"
BRIDGE_MAC = "02:00:0a:62:00:fe"
"""One of its own: a bridge without takes that of a port, and another when ports come and go."""


@dataclass
class Network:
    """Addresses and namespaces of one lab. `tag` names the lab, `nodes` are the node names in order."""

    tag: str
    nodes: tuple[str, ...]
    namespaced: bool = field(default_factory=lambda: os.geteuid() == 0)

    @property
    def switch_address(self) -> str:
        """Where node daemons find the controller."""
        return SWITCH_ADDRESS if self.namespaced else "127.0.0.1"

    def address(self, node: str) -> str:
        """A node's address."""
        return f"10.98.0.{self.nodes.index(node) + 1}" if self.namespaced else "127.0.0.1"

    def namespace(self, node: str | None) -> Path | None:
        """The file of a node's network namespace (of the switch's when None); None without namespaces."""
        return RUN_NETNS / self._name(node) if self.namespaced else None

    def files(self) -> list[Path]:
        """The files of all namespaces of this lab, none without namespaces."""
        return [path for node in (None, *self.nodes) if (path := self.namespace(node)) is not None]

    def enter(self, node: str | None) -> list[str]:
        """The words to put before a command so that it runs there; its pid is the command's own.

        `ip netns exec` would mount a new /sys, where slurmd misses its cgroups.
        """
        namespace = self.namespace(node)
        return [] if namespace is None else ["nsenter", f"--net={namespace}"]

    def up(self) -> None:
        """Make all namespaces, the bridge and a pair of wires per node."""
        if not self.namespaced:
            return
        with _alone():
            _ip("", *(f"netns add {self._name(node)}" for node in (None, *self.nodes)))
        switch = self._name(None)
        _ip(
            switch,
            "link set lo up",
            f"link add br0 address {BRIDGE_MAC} type bridge",
            f"addr add {SWITCH_ADDRESS}/24 dev br0",
            "link set br0 up",
            *(
                f"link add {self._port(node)} master br0 type veth peer name eth0 netns {self._name(node)}"
                for node in self.nodes
            ),
            *(f"link set {self._port(node)} up" for node in self.nodes),
        )
        for node in self.nodes:
            inside = (f"addr add {self.address(node)}/24 dev eth0", "link set eth0 up", "link set lo up")
            _ip(self._name(node), *inside)

    def link(self, node: str, up: bool) -> None:
        """Pull or plug a node's cable at the switch."""
        if not self.namespaced:
            raise LabError("cables need network namespaces, and those need root")
        _ip(self._name(None), f"link set {self._port(node)} {'up' if up else 'down'}")

    def down(self) -> None:
        """Remove all namespaces; the wires and the bridge go with them."""
        if self.namespaced:
            remove_namespaces([self._name(node) for node in (None, *self.nodes)])

    def _name(self, node: str | None) -> str:
        return f"{PREFIX}{self.tag}-{'sw' if node is None else node}"

    def _port(self, node: str) -> str:
        return f"v-{node}"


def namespaces() -> dict[str, Path]:
    """All namespaces of all labs on this machine, by name."""
    if not RUN_NETNS.is_dir():
        return {}
    return {path.name: path for path in sorted(RUN_NETNS.iterdir()) if path.name.startswith(PREFIX)}


def remove_namespaces(names: list[str]) -> None:
    """Delete namespaces that exist, and the mount of /run/netns with the last of them.

    `ip` makes that mount with the first namespace and never takes it away again.
    """
    with _alone():
        present = [name for name in names if (RUN_NETNS / name).exists()]
        _ip("", *(f"netns del {name}" for name in present))
        if present and RUN_NETNS.is_dir() and not any(RUN_NETNS.iterdir()):
            while str(RUN_NETNS) in Path("/proc/self/mounts").read_text().split():
                subprocess.run(["umount", str(RUN_NETNS)], check=True, timeout=10)
            RUN_NETNS.rmdir()


def _ip(namespace: str, *commands: str) -> None:
    """Run `ip` commands in one go, inside a named namespace when one is given.

    Not by `ip -n`: that changes mounts too, and fails where `/` is no mount point (a plain chroot).
    """
    enter = ["nsenter", f"--net={RUN_NETNS / namespace}"] if namespace else []
    text = "\n".join(commands) + "\n"
    done = subprocess.run([*enter, "ip", "-batch", "-"], input=text, text=True, capture_output=True, timeout=30)
    if done.returncode != 0:
        raise LabError(f"ip: {done.stderr.strip() or done.stdout.strip()}")


@contextmanager
def _alone() -> Iterator[None]:
    """Labs of several owners take turns when they make or remove namespaces."""
    handle = os.open("/run", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        eventually(lambda: _try_lock(handle), 30, "the lock on /run, held by another lab")
        yield
    finally:
        os.close(handle)


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
