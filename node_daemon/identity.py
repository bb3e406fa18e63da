"""What the daemon is: its node's key, this boot, and the number of its life (`epoch`)."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Final

from diagnosis.contracts.errors import OperatorFault
from node_daemon.log import EventLog

KEY_BYTES: Final = 32
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_EPOCH_FILE: Final = "epoch"
_EPOCH_MAX: Final = 1 << 62
_log = EventLog("node_daemon.identity")


def read_key(path: Path) -> bytes:
    """The key (32 bytes). Raises OperatorFault where the file is absent, open to others, or no key."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise OperatorFault(
            f"{path}: {error.strerror}: make it on the controller with `tocsin node-key NODE`", reason="key"
        ) from error
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in (0, os.geteuid()):
            raise OperatorFault(f"{path}: must be a file that belongs to root or the daemon's user", reason="key")
        if status.st_mode & 0o077:
            raise OperatorFault(f"{path}: others may read the key: chmod 600 {path}", reason="key")
        text = file.read(256).strip()
    if not re.fullmatch(rb"[0-9a-fA-F]{64}", text):
        raise OperatorFault(f"{path}: must hold 64 hex digits, as `tocsin node-key NODE` prints them", reason="key")
    return bytes.fromhex(text.decode())


def boot_id() -> str:
    """The kernel's name of this boot, "" where it does not tell."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def next_epoch(state_dir: Path, wall_s: int) -> int:
    """The number of this life: greater than any before, also when the clock was set back or the file was lost.

    It is written down before it is used. Where that fails the clock alone must do, and a warning says so.
    """
    path = state_dir / _EPOCH_FILE
    try:
        stored = int(path.read_text()[:20])
    except (OSError, ValueError):
        stored = 0
    epoch = max(stored + 1, wall_s) if 0 <= stored < _EPOCH_MAX else wall_s
    fresh = path.with_suffix(".new")
    try:
        fresh.write_text(f"{epoch}\n")
        fresh.replace(path)
    except OSError as error:
        _log.warning("epoch not written down", path=path, error=error.strerror)
    return epoch
