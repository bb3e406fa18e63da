"""Touching a user's files as that user, so that nothing is ever read or removed that they could not read or remove.

`setfsuid(2)` changes the identity of one thread for file access alone, and with it the kernel drops the capabilities
that let root pass over permissions. Signals, ptrace and the other threads are not affected, which the process-wide
`setuid` family of Python could not promise.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_libc: Final = ctypes.CDLL(None)
_libc.setfsuid.argtypes = _libc.setfsgid.argtypes = (ctypes.c_uint32,)
_libc.setfsuid.restype = _libc.setfsgid.restype = ctypes.c_uint32
_ASK: Final = 0xFFFF_FFFF
"""An id that no one has: the call changes nothing and returns the present one."""


@contextmanager
def acting_as(uid: int, gid: int) -> Iterator[None]:
    """File access of this thread happens as (uid, gid) inside. Without root it stays what it is.

    Raises PermissionError where the kernel did not make the change (it does not say so by itself).
    """
    if os.geteuid() != 0:
        yield
        return
    try:
        _libc.setfsgid(gid)
        _libc.setfsuid(uid)
        if _libc.setfsuid(_ASK) != uid or _libc.setfsgid(_ASK) != gid:
            raise PermissionError(f"cannot act as user {uid}, group {gid}: CAP_SETUID and CAP_SETGID are needed")
        yield
    finally:
        _libc.setfsuid(0)
        _libc.setfsgid(os.getegid())
