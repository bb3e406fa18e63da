"""The directories that the daemon makes for frames: `<frame_root>`, and `<frame_root>/<node>` with mode 1777.

TaskProlog makes the job's directory below them as the user. /dev/shm is open to everybody, so what stands there under
our name may be a trap: both are opened without following a link and used only when they belong to the daemon's user.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from diagnosis.contracts.errors import OperatorFault

NODE_MODE: Final = 0o1777
_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_node_directory(root: Path, node: str) -> int:
    """A descriptor of `<root>/<node>`, made when it is missing; the caller closes it.

    Raises OperatorFault where either path is something else than a directory of the daemon's user (or of root).
    """
    root_fd = _open(root, None, 0o755)
    try:
        about = os.fstat(root_fd)
        others_may_write = about.st_mode & 0o022 and not about.st_mode & stat.S_ISVTX
        if about.st_uid not in (0, os.geteuid()) or others_may_write:
            raise _fault(root, f"belongs to user {about.st_uid}, mode {stat.S_IMODE(about.st_mode):o}")
        node_fd = _open(Path(node), root_fd, 0o700)
    finally:
        os.close(root_fd)
    try:
        about = os.fstat(node_fd)
        if about.st_uid not in (0, os.geteuid()):
            raise _fault(root / node, f"belongs to user {about.st_uid}")
        if stat.S_IMODE(about.st_mode) != NODE_MODE:
            os.fchmod(node_fd, NODE_MODE)
    except OSError as error:
        os.close(node_fd)
        raise _fault(root / node, str(error.strerror)) from error
    except OperatorFault:
        os.close(node_fd)
        raise
    return node_fd


def _open(path: Path, dir_fd: int | None, mode: int) -> int:
    try:
        try:
            return os.open(path, _FLAGS, dir_fd=dir_fd)
        except FileNotFoundError:
            os.mkdir(path, mode, dir_fd=dir_fd)
            return os.open(path, _FLAGS, dir_fd=dir_fd)
    except OSError as error:
        raise _fault(path, str(error.strerror)) from error


def _fault(path: Path, what: str) -> OperatorFault:
    return OperatorFault(
        f"{path}: {what}: the daemon needs a directory of its own there; look who made it, remove it or set frame_root",
        reason="frame_root",
    )
