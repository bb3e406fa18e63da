"""A pickle of plain data, read without ever making anything but plain data.

A pickle is a program. Most of its instructions build None, numbers, strings, lists, tuples and dicts; a few look up a
name in some module and call it, which is how loading one can run any command. So the program is read first, without
running it: an instruction that is not among the plain ones refuses the whole pickle, and so does a memo slot beyond
the number of instructions (the loader would reserve memory for all slots below it). Only then it is loaded, by a
loader that knows no name. What comes out may share parts with itself or contain itself: whoever walks it must bound
the walk.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import Final

from diagnosis.contracts.errors import AgentFault

OPERATIONS_MAX: Final = 5_000_000
_CONSTANTS: Final = {"NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"}
_WORDS: Final = {"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "STRING", "BINSTRING", "SHORT_BINSTRING"}
_BYTES: Final = {"FLOAT", "BINFLOAT", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"}
_LISTS: Final = {"EMPTY_LIST", "APPEND", "APPENDS", "LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}
_MAPS: Final = {"EMPTY_DICT", "DICT", "SETITEM", "SETITEMS"}
_MEMO: Final = {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GET", "BINGET", "LONG_BINGET"}
_FRAMING: Final = {"PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK"}
_PLAIN: Final = frozenset(_CONSTANTS | _WORDS | _BYTES | _LISTS | _MAPS | _MEMO | _FRAMING)
_PUTS: Final = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})


class _Loader(pickle.Unpickler):
    """Knows no name; the check before makes sure that it is asked for none."""

    def find_class(self, module: str, name: str, /) -> object:
        raise AgentFault(f"it names {module}.{name}"[:200], reason="pickle_names_code")


def load_plain(content: bytes) -> object:
    """The data in a pickle.

    Raises: AgentFault with `reason` "pickle_names_code" (it would make or call something that is no plain data),
    "pickle_too_large" or "pickle_broken".
    """
    try:
        for at, (operation, argument, _) in enumerate(pickletools.genops(content)):
            if operation.name not in _PLAIN:
                raise AgentFault(f"its instruction {operation.name} is none of plain data", reason="pickle_names_code")
            if at > OPERATIONS_MAX:
                raise AgentFault("it has too many instructions", reason="pickle_too_large")
            if operation.name in _PUTS and isinstance(argument, int) and not 0 <= argument <= at:
                raise AgentFault("it numbers its parts beyond their count", reason="pickle_broken")
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
