"""Plays NCCL for the plugin in a container that has no compiler: `drive_plugin.py PLUGIN`, Python 3.6 or newer.

One communicator and one collective through interface 5. Ends with 0 where the plugin told success all along, and prints
whether it follows the communicator.
"""

import ctypes
import sys

COLL_API = 1 << 9
POINTER = ctypes.c_void_p
FUNCTIONS = (
    ctypes.CFUNCTYPE(ctypes.c_int, POINTER, ctypes.c_uint64, POINTER, ctypes.c_char_p, *[ctypes.c_int] * 3, POINTER),
    ctypes.CFUNCTYPE(ctypes.c_int, POINTER, POINTER, POINTER),
    ctypes.CFUNCTYPE(ctypes.c_int, POINTER),
    ctypes.CFUNCTYPE(ctypes.c_int, POINTER, ctypes.c_int, POINTER),
    ctypes.CFUNCTYPE(ctypes.c_int, POINTER),
)


class CollApi(ctypes.Structure):
    """The event of a collective's call, as profiler_abi.h has it."""

    _fields_ = [
        ("type", ctypes.c_uint64),
        ("parent", POINTER),
        ("rank", ctypes.c_int32),
        ("function", ctypes.c_char_p),
        ("count", ctypes.c_uint64),
        ("datatype", ctypes.c_char_p),
        ("root", ctypes.c_int32),
        ("stream", POINTER),
        ("graph_captured", ctypes.c_bool),
    ]


def main() -> None:
    """One life of a communicator."""
    interface = (POINTER * 6).in_dll(ctypes.CDLL(sys.argv[1]), "ncclProfiler_v5")
    init, start, stop, _, finalize = (kind(interface[at + 1] or 0) for at, kind in enumerate(FUNCTIONS))
    context, handle, mask = POINTER(), POINTER(), ctypes.c_int(0)
    failed = init(ctypes.byref(context), 0xBEEF, ctypes.byref(mask), b"world", 1, 2, 0, None)
    if context.value:
        event = CollApi(COLL_API, None, 0, b"AllReduce", 8, b"ncclFloat32", 0, None, False)
        failed |= start(context, ctypes.byref(handle), ctypes.byref(event))
        failed |= stop(handle)
        failed |= finalize(context)
    sys.stdout.write("followed\n" if context.value else "not followed\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
