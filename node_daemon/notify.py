"""systemd's notification protocol (sd_notify(3)): a datagram of `KEY=value` lines to the socket that systemd names."""

from __future__ import annotations

import os
import socket


def notify(*words: str) -> None:
    """Tell systemd, such as `READY=1`, `WATCHDOG=1`, `STOPPING=1`. Without systemd nothing happens.

    A failure is passed over: the watchdog itself notices a daemon that cannot speak.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as datagram:
        try:
            datagram.sendto("\n".join(words).encode(), address.replace("@", "\0", 1) if address[0] == "@" else address)
        except OSError:
            return
