"""What the service manager wants to hear: sd_notify(3), a datagram on the socket named by NOTIFY_SOCKET."""

from __future__ import annotations

import os
import socket
import time


def notify(*lines: str) -> None:
    """Send lines such as `READY=1`. Nothing happens without a service manager, or when it does not listen."""
    name = os.environ.get("NOTIFY_SOCKET", "")
    if not name.startswith(("/", "@")):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        try:
            sender.sendto("\n".join(lines).encode(), "\0" + name[1:] if name[0] == "@" else name)
        except OSError:  # a service manager that went away must not end the service
            return


def reloading() -> None:
    """A reload has begun; `notify("READY=1")` ends it."""
    notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
