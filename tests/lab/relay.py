"""A small TCP relay: a port on this machine's loopback that leads to wherever `connect` goes.

For a person's browser; a handful of connections, each with two threads that end with it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

CONNECTIONS_MAX = 32
_CHUNK_BYTES = 65536


class Relay:
    """Listens at 127.0.0.1:`port` until closed."""

    def __init__(self, connect: Callable[[], socket.socket]) -> None:
        self._connect = connect
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=CONNECTIONS_MAX)
        self.port = int(self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._ends: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._accept, name=f"relay-{self.port}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and cut all connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)
        with self._lock:
            ends = list(self._ends)
        for end in ends:
            _hang_up(end)

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                full = len(self._ends) >= 2 * CONNECTIONS_MAX
            try:
                other = None if full else self._connect()
            except OSError:
                other = None
            if other is None:
                caller.close()
                continue
            other.settimeout(None)
            with self._lock:
                self._ends |= {caller, other}
            for source, sink in ((caller, other), (other, caller)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        """Carry bytes one way; when that way ends, both do, and the second pump to end closes nothing twice."""
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK_BYTES):
                sink.sendall(data)
        _hang_up(sink)
        with self._lock:
            self._ends.discard(source)
        source.close()


def _hang_up(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
