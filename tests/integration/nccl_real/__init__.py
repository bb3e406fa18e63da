"""The host code of a real libnccl.so.2, on a machine without a GPU.

No communicator can be made here, for that needs the CUDA driver. But the wheels' library keeps its symbol table and
its debug information, so its own functions can be called on structs that are laid out as it lays them out: it then
loads the plugin, calls it through its own wrappers, and runs its own RAS threads. `host` is the process that does so.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.integration.gloo_double import DEADLINE_S

ROOT = Path(__file__).resolve().parents[3]
INSTALLED = ROOT / ".venv" / "nccl"
HOST = Path(__file__).with_name("host.py")
SYMBOLS = re.compile(r"ncclProfiler|ncclRas|nccl(?:Func|Datatype|Algo|Proto)ToString|^ncclGetVersion$|^netTransport$")
FIELDS = {
    "ncclComm": (
        *("commHash", "nNodes", "nRanks", "rank", "profilerContext"),
        *("peerInfo", "peerInfoValid", "abortFlag", "seqNumber", "cudaDev", "nvmlDev"),
    ),
    "ncclInfo": ("coll", "comm", "count", "datatype"),
    "ncclKernelPlan": ("comm", "collTaskQueue", "groupEventHandle"),
    "ncclTaskColl": ("func", "count", "datatype", "eActivationMask", "collApiEventHandle", "eventHandle", "nChannels"),
    "ncclProxyArgs": ("subs", "sliceSteps", "nsubs", "chunkSize", "progress"),
    "ncclProxySubArgs": (
        *("eActivationMask", "rank", "pid", "profilerContext", "taskEventHandle"),
        *("channelId", "nsteps", "peer", "transSize"),
    ),
    "ncclProfilerWorkOp": ("channelId", "eActivationMask", "taskEventHandle", "profilerContext"),
    "ncclPeerInfo": ("rank", "hostHash", "pidHash"),
    "ncclProfilerApiState": ("collApiEventHandle",),
    "ncclTransport": ("send.proxyProgress",),
}
SIZES = ("ncclComm", "ncclProxyArgs", "ncclPeerInfo")


def library() -> Path:
    """The installed libnccl.so.2 (2.30 or newer). Raises AssertionError where `tools/install.sh test` has not run."""
    path = INSTALLED / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    assert path.is_file(), f"{path} is missing: tools/install.sh test brings it"
    return path


def ask_gdb(path: Path, *commands: str) -> str:
    """What gdb says of the library's types; a type or field that it lacks gives no line."""
    words = [word for command in commands for word in ("-ex", command)]
    return subprocess.run(
        ["gdb", "-nx", "-batch", *words, str(path)], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    ).stdout


@dataclass(frozen=True)
class Layout:
    """Where things lie in one libnccl: symbols by mangled name, `struct.field` offsets, sizes of structs."""

    path: Path
    symbols: dict[str, int]
    offsets: dict[str, int]
    sizes: dict[str, int]

    def as_json(self) -> str:
        known = {"symbols": self.symbols, "offsets": self.offsets, "sizes": self.sizes}
        return json.dumps({"path": str(self.path), **known})


def layout(path: Path) -> Layout:
    """Reads it from the library's symbol table and debug information."""
    table = subprocess.run(["nm", path], capture_output=True, text=True, check=True, timeout=DEADLINE_S).stdout
    symbols: dict[str, int] = {}
    for line in table.splitlines():
        words = line.split()
        if len(words) == 3 and SYMBOLS.search(words[2]) and ".cold" not in words[2]:
            symbols.setdefault(words[2], int(words[0], 16))
    wanted = [(struct, field) for struct, fields in FIELDS.items() for field in fields]
    asked = [
        *(rf'printf "{struct}.{field} %ld\n", (long)&((struct {struct}*)0)->{field}' for struct, field in wanted),
        *(rf'printf "{struct} %ld\n", sizeof(struct {struct})' for struct in SIZES),
    ]
    told = {name: int(value) for name, value in re.findall(r"^(\S+) (\d+)$", ask_gdb(path, *asked), re.MULTILINE)}
    task = ask_gdb(path, "ptype /o struct ncclTaskColl")  # has bit-fields, which have no address
    for field in ("algorithm", "protocol", "nWarps"):
        found = re.search(rf"/\*\s+(\d+)[^*]*\*/[^;]*\b{field} : 8;", task)
        if found:
            told[f"ncclTaskColl.{field}"] = int(found[1])
    offsets = {name: value for name, value in told.items() if "." in name}
    return Layout(path, symbols, offsets, {name: told[name] for name in SIZES})


class Host:
    """The process around the library. `ask` sends a command and returns the answer as JSON."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.pid = process, process.pid

    def ask(self, *command: object) -> object:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("answer "):  # NCCL writes to stdout too
                return json.loads(line.removeprefix("answer "))
        raise AssertionError(f"{command}: the host ended")


@contextmanager
def host(of: Layout, frames: Path, plugin: Path | str, ras_port: int, **environment: str) -> Iterator[Host]:
    """The process, with the plugin for NCCL to load; killed in the end."""
    env = {
        "PATH": os.environ["PATH"],
        "TOCSIN_FRAME_DIR": str(frames),
        "NCCL_PROFILER_PLUGIN": str(plugin),
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_RAS_ADDR": f"127.0.0.1:{ras_port}",
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "ALL",
        **environment,
    }
    process = subprocess.Popen(
        [sys.executable, HOST],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
    )
    try:
        assert process.stdin
        process.stdin.write(of.as_json() + "\n")
        yield Host(process)
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)
