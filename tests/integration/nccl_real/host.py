"""A process that calls the host code of a real libnccl: JSON commands in, JSON answers out. See the package."""

from __future__ import annotations

import ctypes
import json
import os
import struct
import sys
from typing import Any

STEP_BYTES = 1 << 19
SEND_STATES, RECV_STATES = (8, 20, 9), (10, 11, 12)
IN_PROGRESS = 19
ALL_REDUCE, FLOAT32, RING, SIMPLE = 4, 7, 1, 2
"""As NCCL numbers them."""
RAS_RANK_BYTES = 56
AF_INET = 2
RTLD_DI_TLS_MODID = 9


class Nccl:
    """The library, its internal functions by name, and buffers laid out as its structs."""

    def __init__(self, known: dict[str, Any]) -> None:
        self.symbols, self.offsets, self.sizes = known["symbols"], known["offsets"], known["sizes"]
        self.loaded = ctypes.CDLL(known["path"])
        address = ctypes.cast(self.loaded.ncclGetVersion, ctypes.c_void_p).value or 0
        self.base = address - self.symbols["ncclGetVersion"]

    def find(self, name: str) -> str | None:
        """The mangled name of a C++ function."""
        return next((one for one in self.symbols if one.startswith(f"_Z{len(name)}{name}")), None)

    def call(self, name: str, *arguments: Any, answer: Any = ctypes.c_int) -> Any:
        mangled = self.find(name)
        assert mangled, name
        kinds = [type(one) if isinstance(one, ctypes._SimpleCData) else ctypes.c_int for one in arguments]
        return ctypes.CFUNCTYPE(answer, *kinds)(self.base + self.symbols[mangled])(*arguments)

    def put(self, buffer: Any, field: str, value: int, form: str, at: int = 0) -> None:
        struct.pack_into(f"<{form}", buffer, at + self.offsets[field], value)

    def take(self, buffer: Any, field: str, form: str = "Q") -> int:
        value: int = struct.unpack_from(f"<{form}", buffer, self.offsets[field])[0]
        return value

    def api_handle(self) -> int:
        """The handle of this thread's current call, which NCCL keeps in thread-local memory."""
        libc, module = ctypes.CDLL(None), ctypes.c_size_t()
        libc.dlinfo(ctypes.c_void_p(self.loaded._handle), RTLD_DI_TLS_MODID, ctypes.byref(module))
        index = (ctypes.c_size_t * 2)(module.value, self.symbols["ncclProfilerApiState"])
        address_of = libc["__tls_get_addr"]
        address_of.restype = ctypes.c_void_p
        state = address_of(index)
        return ctypes.c_uint64.from_address(state + self.offsets["ncclProfilerApiState.collApiEventHandle"]).value


def at(buffer: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(ctypes.addressof(buffer))


class Communicator:
    """A struct ncclComm with what the profiler and RAS look at."""

    def __init__(self, nccl: Nccl, comm_id: int, ranks: int, rank: int) -> None:
        self.nccl, self.rank, self.ranks = nccl, rank, ranks
        self.memory = ctypes.create_string_buffer(nccl.sizes["ncclComm"] + 4096)
        for field, value, form in (
            ("commHash", comm_id, "Q"),
            ("nNodes", 2, "i"),
            ("nRanks", ranks, "i"),
            ("rank", rank, "i"),
        ):
            nccl.put(self.memory, f"ncclComm.{field}", value, form)
        self.error = nccl.call("ncclProfilerPluginInit", at(self.memory))
        self.context = nccl.take(self.memory, "ncclComm.profilerContext")

    def mask(self) -> int:
        return ctypes.c_int.from_address(self.nccl.base + self.nccl.symbols["ncclProfilerEventMask"]).value

    def collective(self, channels: int, steps: int) -> None:
        """One all-reduce: the program's call, its launch, its transfers and its kernels, by NCCL's own wrappers."""
        nccl, mask = self.nccl, self.mask()
        task = self._launched(channels, mask)
        handle = nccl.take(task, "ncclTaskColl.eventHandle")
        for channel in range(channels):
            for send in (False, True):
                self._transferred(handle, mask, channel, steps, send)
        for channel in range(channels):
            self._kernel(handle, mask, channel)
        nccl.call("ncclProfilerStopGroupEvent", at(self.plan))

    def _launched(self, channels: int, mask: int) -> Any:
        nccl, info, task = self.nccl, ctypes.create_string_buffer(4096), ctypes.create_string_buffer(4096)
        self.plan = ctypes.create_string_buffer(8192)
        for field, value, form in (
            ("coll", ALL_REDUCE, "i"),
            ("comm", ctypes.addressof(self.memory), "Q"),
            ("count", 1 << 20, "Q"),
            ("datatype", FLOAT32, "i"),
        ):
            nccl.put(info, f"ncclInfo.{field}", value, form)
        if nccl.find("ncclProfilerStartCollApiEvent"):
            nccl.call("ncclProfilerStartGroupApiEvent", at(info), ctypes.c_bool(False))
            nccl.call("ncclProfilerStartCollApiEvent", at(info), ctypes.c_bool(False))
            nccl.put(task, "ncclTaskColl.collApiEventHandle", nccl.api_handle(), "Q")  # as NCCL's own queueing does
            nccl.call("ncclProfilerStopCollApiEvent")
        for field, value, form in (
            ("func", ALL_REDUCE, "i"),
            ("count", 1 << 20, "Q"),
            ("datatype", FLOAT32, "i"),
            ("eActivationMask", mask, "i"),
            ("nChannels", channels, "B"),
            ("algorithm", RING, "B"),
            ("protocol", SIMPLE, "B"),
        ):
            nccl.put(task, f"ncclTaskColl.{field}", value, form)
        nccl.put(self.plan, "ncclKernelPlan.comm", ctypes.addressof(self.memory), "Q")
        nccl.put(self.plan, "ncclKernelPlan.collTaskQueue", ctypes.addressof(task), "Q")
        nccl.call("ncclProfilerStartGroupEvent", at(self.plan))
        nccl.call("ncclProfilerStartTaskEvents", at(self.plan))
        return task

    def _transferred(self, task: int, mask: int, channel: int, steps: int, send: bool) -> None:
        nccl = self.nccl
        args = ctypes.create_string_buffer(nccl.sizes["ncclProxyArgs"])
        progress = nccl.base + nccl.symbols["netTransport"] + nccl.offsets["ncclTransport.send.proxyProgress"]
        nccl.put(args, "ncclProxyArgs.sliceSteps", 1, "i")
        nccl.put(args, "ncclProxyArgs.progress", ctypes.c_uint64.from_address(progress).value if send else 0, "Q")
        for field, value, form in (
            ("eActivationMask", mask, "i"),
            ("rank", self.rank, "i"),
            ("pid", os.getpid(), "i"),
            ("profilerContext", self.context, "Q"),
            ("taskEventHandle", task, "Q"),
            ("channelId", channel, "i"),
            ("nsteps", steps, "i"),
            ("peer", (self.rank + 1) % self.ranks, "i"),
            ("transSize", STEP_BYTES, "Q"),
        ):
            nccl.put(args, f"ncclProxySubArgs.{field}", value, form, nccl.offsets["ncclProxyArgs.subs"])
        nccl.call("ncclProfilerStartProxyOpEvent", 0, at(args))
        nccl.call("ncclProfilerRecordProxyOpEventState", 0, at(args), IN_PROGRESS)
        for step in range(steps):
            nccl.call(f"ncclProfilerStart{'Send' if send else 'Recv'}ProxyStepEvent", 0, at(args), step)
            for state in SEND_STATES if send else RECV_STATES:
                nccl.call("ncclProfilerRecordProxyStepEventState", 0, at(args), step, state)
            nccl.call("ncclProfilerStopProxyStepEvent", 0, at(args), step)
        nccl.call("ncclProfilerStopProxyOpEvent", 0, at(args))

    def _kernel(self, task: int, mask: int, channel: int) -> None:
        nccl = self.nccl
        begun_ns, ended_ns = ctypes.c_uint64(1_000_000), ctypes.c_uint64(1_250_000)
        if "ncclProfilerWorkOp.channelId" in nccl.offsets:  # 2.31: a thread of its own
            work = ctypes.create_string_buffer(4096)
            for field, value, form in (
                ("channelId", channel, "i"),
                ("eActivationMask", mask, "i"),
                ("taskEventHandle", task, "Q"),
                ("profilerContext", self.context, "Q"),
            ):
                nccl.put(work, f"ncclProfilerWorkOp.{field}", value, form)
            nccl.call("ncclProfilerStartKernelChEvent", at(work), begun_ns)
            nccl.call("ncclProfilerStopKernelChEvent", at(work), ended_ns)
            return
        args = ctypes.create_string_buffer(nccl.sizes["ncclProxyArgs"])
        for field, value, form in (
            ("eActivationMask", mask, "i"),
            ("taskEventHandle", task, "Q"),
            ("profilerContext", self.context, "Q"),
            ("channelId", channel, "i"),
        ):
            nccl.put(args, f"ncclProxySubArgs.{field}", value, form, nccl.offsets["ncclProxyArgs.subs"])
        nccl.call("ncclProfilerStartKernelChEvent", at(args), 0, begun_ns)
        nccl.call("ncclProfilerStopKernelChEvent", at(args), 0, ended_ns)

    def finalize(self) -> int:
        return int(self.nccl.call("ncclProfilerPluginFinalize", at(self.memory)))


class Ras:
    """NCCL's RAS threads in this process."""

    def __init__(self, nccl: Nccl, of: Communicator) -> None:
        self.nccl, self.of = nccl, of
        own = ctypes.create_string_buffer(256)
        struct.pack_into("<HH4B", own, 0, AF_INET, 0, 127, 0, 0, 1)
        struct.pack_into("<iiiQQ", own, 28, os.getpid(), of.rank, of.rank, 0x1111, os.getpid())
        self.error = nccl.call("ncclRasCommInit", at(of.memory), at(own))
        self.mine = bytes(own)[:RAS_RANK_BYTES]

    def join(self, ranks: list[bytes], launched: int) -> int:
        """Tells NCCL of all processes, and how many all-reduces this rank has launched."""
        nccl, memory = self.nccl, self.of.memory
        size = nccl.sizes["ncclPeerInfo"]
        self.peers = ctypes.create_string_buffer(size * len(ranks))
        self.abort = ctypes.c_uint32(0)
        for number, rank in enumerate(ranks):
            nccl.put(self.peers, "ncclPeerInfo.rank", number, "i", size * number)
            nccl.put(self.peers, "ncclPeerInfo.hostHash", 0x1111, "Q", size * number)
            nccl.put(self.peers, "ncclPeerInfo.pidHash", struct.unpack_from("<i", rank, 28)[0], "Q", size * number)
        nccl.put(memory, "ncclComm.peerInfo", ctypes.addressof(self.peers), "Q")
        nccl.put(memory, "ncclComm.abortFlag", ctypes.addressof(self.abort), "Q")
        nccl.put(memory, "ncclComm.cudaDev", self.of.rank, "i")
        nccl.put(memory, "ncclComm.nvmlDev", self.of.rank, "i")
        nccl.put(memory, "ncclComm.seqNumber", launched, "Q", 8 * ALL_REDUCE)
        nccl.put(memory, "ncclComm.peerInfoValid", 1, "B")
        libc = ctypes.CDLL(None)
        libc.malloc.restype = ctypes.c_void_p
        table = libc.malloc(ctypes.c_size_t(RAS_RANK_BYTES * len(ranks)))  # NCCL frees it
        ctypes.memmove(table, b"".join(ranks), RAS_RANK_BYTES * len(ranks))
        return int(nccl.call("ncclRasAddRanks", ctypes.c_void_p(table), len(ranks)))


def names_of(nccl: Nccl) -> dict[str, list[str]]:
    """Every name that NCCL may hand to a plugin, by kind."""
    told = {}
    for kind in ("Func", "Datatype", "Algo", "Proto"):
        name = f"nccl{kind}ToString"
        texts = [nccl.call(name, number, answer=ctypes.c_char_p) for number in range(24)]
        told[kind] = [text.decode() for text in texts if text]
    return told


def main() -> None:
    nccl = Nccl(json.loads(sys.stdin.readline()))
    held: dict[str, Any] = {}
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        answer: object = None
        if command == "version":
            version = ctypes.c_int()
            nccl.loaded.ncclGetVersion(ctypes.byref(version))
            answer = version.value
        elif command == "names":
            answer = names_of(nccl)
        elif command == "comm":
            held["comm"] = Communicator(nccl, *arguments)
            answer = [held["comm"].error, held["comm"].context != 0, held["comm"].mask()]
        elif command == "collective":
            answer = held["comm"].collective(*arguments)
        elif command == "mask":
            answer = held["comm"].mask()
        elif command == "finalize":
            answer = held["comm"].finalize()
        elif command == "ras":
            held["ras"] = Ras(nccl, held["comm"])
            answer = held["ras"].error
        elif command == "ras_rank":
            answer = held["ras"].mine.hex()
        elif command == "join":
            answer = held["ras"].join([bytes.fromhex(one) for one in arguments[0]], arguments[1])
        sys.stdout.write(f"answer {json.dumps(answer)}\n")
        sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
