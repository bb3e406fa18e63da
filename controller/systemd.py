"""What the service manager wants to hear: sd_notify(3), a datagram on the socket named by NOTIFY_SOCKET."""

from __future__ import annotations

import os
import socket
import time
from typing import Final

_WAIT_S: Final = 1.0


def notify(*lines: str, wait_s: float = _WAIT_S) -> None:
    """Send lines such as `READY=1`. Nothing happens without a service manager.

    The line is lost where the manager has gone away or does not read within `wait_s`: it must not end or stop us.
    """
    name = os.environ.get("NOTIFY_SOCKET", "")
    if not name.startswith(("/", "@")):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.settimeout(wait_s)
        try:
            sender.sendto("\n".join(lines).encode(), "\0" + name[1:] if name[0] == "@" else name)
        except OSError:
            return


def cycle_ended() -> None:
    """Feed the watchdog. Does not wait: the next cycle tells again."""
    notify("WATCHDOG=1", wait_s=0.0)


def reloading() -> None:
    """A reload has begun; `notify("READY=1")` ends it."""
    notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
