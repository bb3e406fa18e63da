"""Faults of the lab's wires: a delayed one is longer both ways and whole in what it carries; a black hole is one."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from node_daemon.collectors.sockets import TcpSocket, read_sockets
from tests.lab.cluster import Lab
from tests.lab.system import LabError, eventually, in_namespace
from tests.lab.wires import Wires

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
NODE, OTHER = "gpu001", "gpu002"
DELAY_MS = 20.0
BULK = os.urandom(4 << 20)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(nodes=2) as running:
        yield running


@pytest.fixture
def wires(lab: Lab) -> Iterator[Wires]:
    one = Wires(lab)
    yield one
    one.mend()


@pytest.fixture
def ends(lab: Lab) -> Iterator[tuple[socket.socket, socket.socket]]:
    """The two ends of a connection from the node to the other one."""
    server = in_namespace(lab.network.namespace(OTHER), lambda: socket.create_server((lab.node(OTHER).address, 0)))
    where = server.getsockname()
    near = in_namespace(lab.network.namespace(NODE), lambda: socket.create_connection(where, 10))
    far, _ = server.accept()
    with server, near, far:
        for one in (near, far):
            one.settimeout(30)
        yield near, far


def _received(one: socket.socket, size: int) -> bytes:
    parts = []
    while size and (part := one.recv(min(size, 1 << 20))):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _round_trip_ms(near: socket.socket, far: socket.socket) -> float:
    began = time.monotonic()
    near.sendall(b"?")
    far.sendall(_received(far, 1))
    _received(near, 1)
    return (time.monotonic() - began) * 1000


def test_a_delayed_wire_takes_longer_each_way_and_connections_stay(
    wires: Wires, ends: tuple[socket.socket, socket.socket]
) -> None:
    assert min(_round_trip_ms(*ends) for _ in range(5)) < 2 * DELAY_MS
    wires.delay(NODE, DELAY_MS)
    assert min(_round_trip_ms(*ends) for _ in range(5)) >= 2 * DELAY_MS
    wires.mend()
    assert min(_round_trip_ms(*ends) for _ in range(5)) < 2 * DELAY_MS


def test_what_passes_a_delayed_wire_arrives_whole_both_ways(
    wires: Wires, ends: tuple[socket.socket, socket.socket]
) -> None:
    wires.delay(NODE, 1.0)
    for sender, receiver in (ends, ends[::-1]):
        thread = threading.Thread(target=sender.sendall, args=(BULK,))
        thread.start()
        assert _received(receiver, len(BULK)) == BULK
        thread.join()


def test_the_controllers_machine_and_slurm_still_reach_a_node_behind_a_delay(lab: Lab, wires: Wires) -> None:
    wires.delay(NODE, DELAY_MS)
    listener = lab.listen()
    where = (lab.switch_address, listener.getsockname()[1])
    with in_namespace(lab.network.namespace(NODE), lambda: socket.create_connection(where, 10)):
        listener.accept()[0].close()
    assert lab.run("srun", f"--nodelist={NODE}", "--nodes=1", "hostname").stdout.strip() == socket.gethostname()


def test_a_wire_is_delayed_once_and_its_relay_ends_with_it(lab: Lab, wires: Wires) -> None:
    wires.delay(NODE, DELAY_MS)
    with pytest.raises(LabError, match="delayed already"):
        wires.delay(NODE, DELAY_MS)
    wires.mend()
    names = [name for _, name in in_namespace(lab.network.namespace(None), socket.if_nameindex)]
    assert f"t-{NODE}" not in names and f"v-{NODE}" in names


def test_a_black_hole_behind_a_closed_window_shows_by_questions_that_nobody_answers(
    lab: Lab, wires: Wires, ends: tuple[socket.socket, socket.socket]
) -> None:
    near, _ = ends
    near.setblocking(False)

    def sender() -> TcpSocket:
        with contextlib.suppress(BlockingIOError):
            while True:
                near.send(BULK[:65_536])
        found = in_namespace(lab.network.namespace(NODE), read_sockets)
        return next(one for one in found if one.local == near.getsockname())

    eventually(lambda: sender().unacked == 0, 10, "all that was sent acknowledged, and the window closed")
    assert sender().queued_bytes > 0
    wires.swallow(NODE, [os.getpid()])
    dead = eventually(lambda: one if (one := sender()).probes >= 2 else None, 10, "two questions in vain")
    assert dead.unacked == 0, "nothing is under way, and still the connection is dead"
