"""What the names in a Kineto trace say: which kind a function is, which phase it marks, what it is compared by.

A name must be the same on all ranks for the same function, and no two ranks may differ by an address in it. A
collective is its operation, type, size and group; a Python function is itself and who called it, innermost first,
without the frames that every program has.
"""

from __future__ import annotations

import re
from typing import Final

from diagnosis.contracts.summary import COMM, COMPUTE, NAME_CHARS_MAX
from diagnosis.evidence.condense import Phase

STEP: Final = re.compile(r"ProfilerStep#(\d{1,9})$")
OPTIMIZER_STEP: Final = re.compile(r"Optimizer\.step#")
HOST_COLLECTIVES: Final = re.compile(r"(gloo|mpi|ucc|xccl):")
"""Ranges of libraries that move data with the processor. `nccl:` is the launch of a kernel."""
LAUNCHES: Final = re.compile(r"c10d::|nccl:|record_param_comms|gloo:")
BACKWARD: Final = "autograd::engine::evaluate_function"

_COLLECTIVE_KERNEL: Final = re.compile(
    r"(?:nccl|rccl|msccl)\w*kernel\w*?_(?P<op>AllReduce|AllGather|ReduceScatter|Broadcast|Reduce|SendRecv|AllToAll\w*?)"
    r"(?=_|\(|$)",
    re.IGNORECASE,
)
_COLLECTIVE_WORDS: Final = re.compile(r"nccl\w*kernel|rccl|msccl|nvshmem|cross_device_reduce|ncclsymk", re.IGNORECASE)
_TYPE: Final = re.compile(
    r"_(?:Sum|Prod|Max|Min|PreMulSum|SumPostDiv|MinMax)_(?P<dtype>\w+?)(?=_RING|_TREE|_NVLS|_COLL|\(|$)"
)
_ADDRESS: Final = re.compile(r" at 0x[0-9a-fA-F]+|0x[0-9a-fA-F]{6,}")
_PLUMBING: Final = re.compile(
    r"<built-in |<string>|runpy\.py|threading\.py|multiprocessing/|torch/multiprocessing/|torch/_ops\.py"
    r"|torch/utils/_contextlib|torch/nn/modules/module\.py|torch/distributed/(run|launcher|elastic)|nn\.Module: "
)
_MARKS: Final = (
    (re.compile(r"Optimizer\.(step|zero_grad)#"), Phase.OPTIMIZER),
    (re.compile(r"enumerate\(DataLoader\)#|.*torch/utils/data/dataloader\.py\(\d+\): __next__"), Phase.DATA),
    (re.compile(re.escape(BACKWARD)), Phase.BACKWARD),
    (re.compile(r"DistributedDataParallel\.forward|FullyShardedDataParallel\.forward"), Phase.FORWARD),
    (re.compile(r"torch/serialization\.py\(\d+\): (save|_save)|torch/distributed/checkpoint/"), Phase.CHECKPOINT),
)
_BYTES_OF: Final = {
    **dict.fromkeys(("double", "long", "int64", "float64", "complexfloat", "f64", "u64", "i64"), 8),
    **dict.fromkeys(("float", "int", "int32", "float32", "f32", "u32", "i32"), 4),
    **dict.fromkeys(("half", "bfloat16", "short", "float16", "f16", "bf16"), 2),
    **dict.fromkeys(("byte", "char", "bool", "uint8", "int8", "u8", "i8", "float8_e4m3fn", "float8_e5m2"), 1),
}


def plain(name: str) -> str:
    """The name without what differs from process to process."""
    return _ADDRESS.sub("", name)


def kernel_kind(name: str) -> int:
    """COMM for a kernel of a communication library, in any of the forms that their releases use."""
    return COMM if _COLLECTIVE_WORDS.search(name) else COMPUTE


def collective_name(kernel: str, operation: str | None, dtype: str | None, size: int | None, group: int | None) -> str:
    """The name of a collective on a GPU, from what the trace tells of it, else from its kernel's name."""
    by_kernel = _COLLECTIVE_KERNEL.search(kernel)
    what = operation or (by_kernel["op"] if by_kernel else kernel.split("(", 1)[0])
    if dtype is None and (typed := _TYPE.search(kernel)):
        dtype = typed["dtype"]
    of = f" of {size}" if size is not None else ""
    among = f", {group} ranks" if group is not None else ""
    return f"nccl:{what}{' ' + dtype if dtype else ''}{of}{among}"


def item_bytes(dtype: str | None) -> int | None:
    """Bytes of one element; None where the type is not known."""
    return _BYTES_OF.get(dtype.lower().removeprefix("c10::")) if dtype else None


def phase_of(name: str) -> Phase | None:
    """The phase that a function of a thread opens for all that it calls; None: it opens none."""
    return next((phase for pattern, phase in _MARKS if pattern.match(name)), None)


class Stacks:
    """Names of Python functions with their callers. A function's caller must be told before it."""

    def __init__(self) -> None:
        self._frames: dict[int, tuple[str, ...]] = {}
        self._texts: dict[tuple[str, ...], str] = {}

    def name(self, function: str, own_id: int | None, caller: int | None) -> str:
        """The function and who called it, as long as a name may be; plumbing is left out."""
        callers = self._frames.get(caller, ()) if caller is not None else ()
        frames = (plain(function), *callers)
        if own_id is not None:
            self._frames[own_id] = callers if _PLUMBING.match(function) else frames[:FRAMES_MAX]
        text = self._texts.get(frames)
        if text is None:
            text = self._texts[frames] = _joined(frames)
        return text


FRAMES_MAX: Final = 12


def _joined(frames: tuple[str, ...]) -> str:
    text = frames[0]
    for frame in frames[1:]:
        if len(text) + 3 + len(frame) > NAME_CHARS_MAX:
            break
        text = f"{text} < {frame}"
    return text
