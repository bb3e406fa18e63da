"""Pings and ports over real wires: two nodes in namespaces of their own, and what is done to the wire between them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from diagnosis.contracts.gathered import PingFacts
from node_daemon.collectors import ethtool
from node_daemon.collectors.ethtool import PortStatistics
from node_daemon.collectors.ping import COUNT, ping
from tests.lab.network import Network
from tests.lab.system import in_namespace

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
ONE, OTHER = "gpu001", "gpu002"


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network(f"ping{os.getpid()}", (ONE, OTHER))
    made.up()
    yield made
    made.down()


def _pinged(network: Network) -> PingFacts:
    pair = (network.address(ONE), network.address(OTHER))
    (told,) = in_namespace(network.namespace(ONE), lambda: ping([pair]))
    return told


def _run(network: Network, node: str | None, *command: str, stdin: str = "") -> None:
    subprocess.run([*network.enter(node), *command], input=stdin, text=True, check=True, timeout=20)


def _drop(network: Network, then: str) -> None:
    """In the switch, of the pings to the other node."""
    rule = f'oifname "v-{OTHER}" ip protocol icmp {then}'
    rules = f"table bridge t {{\n chain c {{\n type filter hook forward priority 0\n {rule}\n}}\n}}\n"
    _run(network, None, "nft", "-f", "-", stdin=rules)


def test_a_sound_wire_is_quick_and_loses_nothing(network: Network) -> None:
    told = _pinged(network)
    assert (told.sent, told.heard, told.note) == (COUNT, COUNT, "")
    assert told.rtt_us is not None and 0 < told.rtt_us < 1e6


def test_a_cable_that_is_pulled_and_a_switch_that_swallows_are_told_apart_from_a_quiet_daemon(network: Network) -> None:
    _drop(network, "drop")
    told = _pinged(network)
    assert (told.sent, told.heard) == (COUNT, 0)
    _run(network, None, "nft", "delete", "table", "bridge", "t")
    assert _pinged(network).heard == COUNT, "nobody listens on the other node, and its kernel answers"
    network.link(OTHER, False)
    assert _pinged(network).heard == 0


def test_what_the_switch_loses_at_random_is_counted(network: Network) -> None:
    _drop(network, "numgen inc mod 2 < 1 drop")
    told = _pinged(network)
    assert (told.sent, told.heard) == (COUNT, COUNT // 2)


def test_the_ioctl_s_numbers_are_the_driver_s(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual wire knows no pause frames, but the index of its other end, which the switch's namespace confirms."""
    statistics = PortStatistics(every_s=0)
    assert in_namespace(network.namespace(ONE), lambda: statistics.read("eth0")) == {}
    monkeypatch.setitem(ethtool.NAMES, "veth", {"rx_pause": "peer_ifindex"})
    told = in_namespace(network.namespace(ONE), lambda: statistics.read("eth0"))
    by_ip = subprocess.run(
        [*network.enter(None), "ip", "-o", "link", "show", f"v-{ONE}"], capture_output=True, text=True, timeout=20
    )
    assert told == {"rx_pause": int(by_ip.stdout.split(":")[0])}
