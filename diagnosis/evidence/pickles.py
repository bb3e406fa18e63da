"""A pickle of plain data, read without ever making anything but plain data.

A pickle is a program. Most of its instructions build None, numbers, strings, lists, tuples and dicts; a few look up a
name in some module and call it, which is how loading one can run any command. So the program is walked first, without
running it: an instruction that is not among the plain ones refuses the whole pickle, and so does a memo slot beyond the
number of instructions (the loader would reserve memory for all slots below it) or a length beyond the end. Only then it
is loaded, by a loader that knows no name. What comes out may share parts with itself or contain itself: whoever walks
it must bound the walk.

The walk is a loop over bytes: a dump with call stacks has a million instructions, and there is one per rank.
"""

from __future__ import annotations

import io
import pickle
from pickle import (
    APPEND,
    APPENDS,
    BINBYTES,
    BINBYTES8,
    BINFLOAT,
    BINGET,
    BININT,
    BININT1,
    BININT2,
    BINPUT,
    BINSTRING,
    BINUNICODE,
    BINUNICODE8,
    DICT,
    EMPTY_DICT,
    EMPTY_LIST,
    EMPTY_TUPLE,
    FLOAT,
    FRAME,
    GET,
    INT,
    LIST,
    LONG,
    LONG1,
    LONG4,
    LONG_BINGET,
    LONG_BINPUT,
    MARK,
    MEMOIZE,
    NEWFALSE,
    NEWTRUE,
    NONE,
    POP,
    POP_MARK,
    PROTO,
    PUT,
    SETITEM,
    SETITEMS,
    SHORT_BINBYTES,
    SHORT_BINSTRING,
    SHORT_BINUNICODE,
    STOP,
    STRING,
    TUPLE,
    TUPLE1,
    TUPLE2,
    TUPLE3,
    UNICODE,
)
from typing import Final

from diagnosis.contracts.errors import AgentFault

OPERATIONS_MAX: Final = 20_000_000
_BARE: Final = (NONE, NEWTRUE, NEWFALSE, MARK, POP, POP_MARK, MEMOIZE, EMPTY_LIST, APPEND, APPENDS, LIST, EMPTY_TUPLE)
_BARE_TOO: Final = (TUPLE, TUPLE1, TUPLE2, TUPLE3, EMPTY_DICT, DICT, SETITEM, SETITEMS)
_FIXED: Final = {
    **{code[0]: 1 for code in (*_BARE, *_BARE_TOO)},
    **{code[0]: 2 for code in (PROTO, BININT1, BINGET)},
    **{code[0]: 3 for code in (BININT2,)},
    **{code[0]: 5 for code in (BININT, LONG_BINGET)},
    **{code[0]: 9 for code in (BINFLOAT, FRAME)},
}
"""Bytes of an instruction, its code included, where they are always as many."""
_COUNTED: Final = {
    **{code[0]: 1 for code in (LONG1, SHORT_BINUNICODE, SHORT_BINBYTES, SHORT_BINSTRING)},
    **{code[0]: 4 for code in (LONG4, BINUNICODE, BINBYTES, BINSTRING)},
    **{code[0]: 8 for code in (BINUNICODE8, BINBYTES8)},
}
"""Bytes of the length that stands behind the code."""
_LINES: Final = {code[0] for code in (INT, LONG, FLOAT, STRING, UNICODE, GET)}
_PUTS: Final = {BINPUT[0]: 1, LONG_BINPUT[0]: 4}


class _Loader(pickle.Unpickler):
    """Knows no name; the walk before makes sure that it is asked for none."""

    def find_class(self, module: str, name: str, /) -> object:
        raise AgentFault(f"it names {module}.{name}"[:200], reason="pickle_names_code")


def load_plain(content: bytes) -> object:
    """The data in a pickle.

    Raises: AgentFault with `reason` "pickle_names_code" (it would make or call something that is no plain data),
    "pickle_too_large" or "pickle_broken".
    """
    try:
        _walk(content)
        return _Loader(io.BytesIO(content), encoding="utf-8", errors="replace").load()
    except (
        pickle.UnpicklingError,
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        EOFError,
        AttributeError,
        OverflowError,
        MemoryError,
        RecursionError,
    ) as error:
        raise AgentFault(f"it is broken: {error}"[:200], reason="pickle_broken") from None


def _walk(content: bytes) -> None:
    """Refuses everything but plain instructions up to the first STOP.

    Raises: AgentFault, IndexError or ValueError (it ends too soon).
    """
    at = operations = 0
    while (code := content[at]) != STOP[0]:
        operations += 1
        if operations > OPERATIONS_MAX:
            raise AgentFault("it has too many instructions", reason="pickle_too_large")
        size = _FIXED.get(code)
        if size is not None:
            at += size
        elif code in _COUNTED:
            data_at = at + 1 + _COUNTED[code]
            at = data_at + int.from_bytes(content[at + 1 : data_at], "little")
        elif code in _PUTS:
            end = at + 1 + _PUTS[code]
            _check_slot(int.from_bytes(content[at + 1 : end], "little"), operations)
            at = end
        elif code in _LINES:
            at = content.index(b"\n", at) + 1
        elif code == PUT[0]:
            end = content.index(b"\n", at)
            _check_slot(int(content[at + 1 : min(end, at + 20)]), operations)
            at = end + 1
        else:
            raise AgentFault(f"its instruction {bytes([code])!r} is none of plain data", reason="pickle_names_code")


def _check_slot(slot: int, operations: int) -> None:
    if not 0 <= slot <= operations:
        raise AgentFault("it numbers its parts beyond their count", reason="pickle_broken")
