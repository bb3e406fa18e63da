"""HTTP to the controller's Unix socket, for the command line."""

from __future__ import annotations

import http.client
import socket
from pathlib import Path
from typing import Final

import msgspec

from diagnosis.contracts.report import Refusal

DEADLINE_S: Final = 10.0
ANSWER_BYTES_MAX: Final = 256 << 20


class Unreachable(Exception):
    """Nobody answers on the socket, or not in time. The text says which and what to do."""


class Refused(Exception):
    """The controller answered with a refusal, of HTTP status `status`."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=DEADLINE_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(DEADLINE_S)
        self.sock.connect(str(self._path))


def ask(path: Path, method: str, url: str, body: bytes | None = None) -> bytes:
    """The JSON body of the answer. Raises Unreachable or Refused."""
    connection = _UnixConnection(path)
    try:
        connection.request(method, url, body)
        answer = connection.getresponse()
        content = answer.read(ANSWER_BYTES_MAX)
    except (OSError, http.client.HTTPException) as error:
        words = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise Unreachable(f"no controller answers on {path}: {words}") from error
    finally:
        connection.close()
    if answer.status == 200:
        return content
    try:
        refusal = msgspec.json.decode(content, type=Refusal)
    except msgspec.DecodeError:
        raise Refused(f"the controller answered {answer.status}", answer.status) from None
    raise Refused(refusal.detail, answer.status)
