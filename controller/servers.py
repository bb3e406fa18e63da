"""uvicorn, made fit for hostile peers and for three servers in one loop.

uvicorn bounds neither the bytes nor the time that a peer may take for a request's head, so `GuardedProtocol` does. On
the Unix socket `PeerProtocol` asks the kernel who has connected (SO_PEERCRED) and puts the answer into the state of
every request's scope: nothing a peer writes can change it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import struct
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from controller.settings import Address
from diagnosis.contracts.errors import OperatorFault

HEAD_BYTES_MAX: Final = 16 << 10
HEAD_DEADLINE_S: Final = 10.0
KEEP_ALIVE_S: Final = 900
"""Longer than the longest report period: daemons keep their connection (a short one makes reconnect storms)."""
CLOSE_DEADLINE_S: Final = 1
BACKLOG: Final = 4096
_PEER: Final = struct.Struct("3i")


class Peer(NamedTuple):
    """Who is at the other end of a Unix socket, by the kernel's word at the time of connecting."""

    pid: int
    uid: int
    gid: int


class GuardedProtocol(HttpToolsProtocol):
    """HTTP/1.1 whose heads are bounded in bytes and time and whose connections are bounded in number."""

    connections_max: int = 40_000
    connections_per_peer_max: int = 40_000
    peers: ClassVar[Counter[str]]
    """Connections by address; each server has its own."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._peer = self.client[0] if self.client else ""
        self.peers[self._peer] += 1
        too_many = self.peers[self._peer] > self.connections_per_peer_max
        if too_many or len(self.connections) > self.connections_max:
            transport.abort()
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_ended()
        self.peers[self._peer] -= 1
        if not self.peers[self._peer]:
            del self.peers[self._peer]
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._head_timer is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_timer is not None and self._head_bytes > HEAD_BYTES_MAX:
            self.transport.abort()

    def on_message_begin(self) -> None:
        self._await_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_ended()
        super().on_headers_complete()

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_bytes = 0
            self._head_timer = self.loop.call_later(HEAD_DEADLINE_S, self.transport.abort)

    def _head_ended(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class PeerProtocol(GuardedProtocol):
    """On a Unix socket: `scope["state"]["peer"]` is the `Peer`."""

    connections_max = 256
    peers: ClassVar[Counter[str]] = Counter()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        credentials = transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        self.app_state = {**self.app_state, "peer": Peer(*_PEER.unpack(credentials))}
        super().connection_made(transport)


class Server(uvicorn.Server):
    """A uvicorn server that leaves the process's signals alone. `stop` and await the task of `serve`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    def stop(self) -> None:
        """End within about CLOSE_DEADLINE_S, whatever the connections do."""
        self.should_exit = True


def tcp_server(app: Any, connections_max: int, connections_per_peer_max: int | None = None) -> Server:
    """A server for sockets made by `bind_tcp`: `server.serve(sockets=[...])`. None: one address may have them all."""
    bounds = {
        "connections_max": connections_max,
        "connections_per_peer_max": connections_per_peer_max or connections_max,
        "peers": Counter(),
    }
    protocol = type("Protocol", (GuardedProtocol,), bounds)
    return Server(_config(app, protocol))


def unix_server(app: Any, path: Path) -> Server:
    """A server on a Unix socket that any local user may open; what a peer may do is for the app to decide.

    A socket file that nobody answers on is replaced. Raises OperatorFault where another process answers.
    """
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            pass
        except OSError as error:
            raise OperatorFault(f"socket {path}: {error.strerror or error}", reason="socket") from error
        else:
            raise OperatorFault(f"socket {path}: another process answers there; is a controller running?")
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    if not os.access(path.parent, os.W_OK):
        raise OperatorFault(f"socket {path}: its directory does not exist or cannot be written", reason="socket")
    return Server(_config(app, PeerProtocol, uds=str(path)))


def bind_tcp(address: Address, key: str) -> socket.socket:
    """A listening socket. Raises OperatorFault naming the configuration key."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    dual_stack = family == socket.AF_INET6 and address.host == "::"
    try:
        listener = socket.create_server(tuple(address), family=family, backlog=BACKLOG, dualstack_ipv6=dual_stack)
    except OSError as error:
        hint = "; is another controller running?" if error.errno == errno.EADDRINUSE else ""
        raise OperatorFault(f"{key}: cannot listen on {address}: {error.strerror}{hint}", reason="socket") from error
    # Accepted sockets inherit it. Without it a head and its body, written one after the other, cost 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _config(app: Any, protocol: type[asyncio.Protocol], uds: str | None = None) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        uds=uds,
        loop="none",
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CLOSE_DEADLINE_S,
        backlog=BACKLOG,
    )
