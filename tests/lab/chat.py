"""A team's chat as the controller sees it: takes JSON posts, notes when they came, and can be sick on request."""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.lab.system import eventually

POST_BYTES_MAX = 1 << 20
POSTS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Post:
    """One message. `at` is the arrival in seconds since the epoch, `body` the JSON (the raw text if it is none)."""

    at: float
    path: str
    body: object


class ChatReceiver:
    """Serves a listening socket (`Lab.listen`) until closed. Thread-safe."""

    def __init__(self, listener: socket.socket) -> None:
        host, port = listener.getsockname()[:2]
        self.url = f"http://{host}:{port}/hook"
        self._posts: list[Post] = []
        self._refusals: list[float] = []
        self._lock = threading.Lock()
        self._status = 200
        self._free = threading.Event()
        self._free.set()
        self._server = _Server(listener, self)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="chat", daemon=True)
        self._thread.start()

    @property
    def posts(self) -> list[Post]:
        """The messages taken so far, in order of arrival."""
        with self._lock:
            return list(self._posts)

    @property
    def refusals(self) -> list[float]:
        """When messages came that were refused (`answer(500)`)."""
        with self._lock:
            return list(self._refusals)

    def answer(self, status: int) -> None:
        """Answer with this HTTP status from now on; only messages answered 200 are taken."""
        self._status = status

    def hang(self) -> None:
        """Take connections and never answer, until `resume`."""
        self._free.clear()

    def resume(self) -> None:
        """Answer again, also those that wait."""
        self._free.set()

    def wait(self, count: int, timeout_s: float = 20.0) -> list[Post]:
        """Wait until at least `count` messages have been taken and return all; LabError if not."""
        eventually(lambda: len(self.posts) >= count, timeout_s, f"{count} chat messages")
        return self.posts

    def close(self) -> None:
        """Stop serving."""
        self._free.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def take(self, path: str, data: bytes) -> int:
        """Note one message and return the status to answer with."""
        self._free.wait()
        status = self._status
        with self._lock:
            if status != 200:
                self._refusals.append(time.time())
            elif len(self._posts) < POSTS_MAX:
                self._posts.append(Post(time.time(), path, _decoded(data)))
        return status


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, listener: socket.socket, receiver: ChatReceiver) -> None:
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.receiver = receiver


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_POST(self) -> None:
        """Take one message."""
        length = int(self.headers.get("Content-Length") or 0)
        if not 0 <= length <= POST_BYTES_MAX:
            self.send_error(413)
            return
        data = self.rfile.read(length)
        assert isinstance(self.server, _Server)
        self.send_response(self.server.receiver.take(self.path, data))
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: tests read `posts`."""


def _decoded(data: bytes) -> object:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode(errors="replace")
