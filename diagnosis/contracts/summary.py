"""Summaries on the wire: what the ranks of one node did in one profiling window, function by function.

On the wire: msgpack `[version, NodeSummaries]`, compressed with zstd, as the report is. Additions keep the version; a
change of meaning raises it. All of it is the job's own word, and hostile input.

**Names** travel apart from the numbers. A row names its function by a hash of kind and name, 8 bytes; the text is sent
once per job and node. The receiver hashes each text itself, so that nobody can give a function another's name. Rows
whose text it lacks (it was restarted, say) it keeps under the hash and asks for all texts in its answer.

**Nothing is dropped silently.** A rank's summary takes at most `RANK_BYTES_MAX`; the functions that took least are
added up to one row a kind, "(other compute)", which says in `functions` how many it stands for. What could not be
seen or read stands in `unseen`.

**A function's time is its own**, without the functions that it called: the rows of a thread add up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from math import isfinite
from typing import Final

import msgspec
import numpy as np
import zstandard

from diagnosis.contracts import histogram
from diagnosis.contracts.columns import Columns, Table, null_of, rows_of
from diagnosis.contracts.errors import AgentFault
from diagnosis.contracts.histogram import Histograms
from diagnosis.contracts.report import RANKS_MAX, decompress

VERSION: Final = 1
RANK_BYTES_MAX: Final = 10 << 10
"""One rank's summary, compressed by itself, without names. The sender merges rows until it fits."""
FUNCTIONS_MAX: Final = 512
HISTOGRAM_BYTES_MAX: Final = 64 << 10
NAMES_MAX: Final = 16_384
NAME_CHARS_MAX: Final = 256
PHASES_MAX: Final = 16
RESOURCES_MAX: Final = 32
NOTES_MAX: Final = 16
TEXT_CHARS_MAX: Final = 256

KINDS: Final = ("compute", "memcpy", "comm", "host")
"""By number, and by the right to a moment on the critical path, highest first."""
COMPUTE, MEMCPY, COMM, HOST = range(len(KINDS))
OTHERS: Final = tuple(f"(other {kind})" for kind in KINDS)

PARTS: Final = 1_000_000
"""A share of 1 in `beta`, `mu` and `sigma`."""

FUNCTION_DTYPE: Final = np.dtype(
    [
        ("name", "<u8"),  # `name_hash`
        ("kind", "u1"),
        ("functions", "<u4"),  # how many the row stands for: 1, or those of the long tail
        ("count", "<u8"),  # executions that ran in the window
        ("total_ns", "<u8"),
        ("deviation_ns", "<u8"),  # standard deviation of an execution
        ("max_ns", "<u8"),
        ("beta", "<u4"),  # share of the window's critical path
        ("mu", "<u4"),  # use of the kind's resource over the critical durations: mean and standard deviation
        ("sigma", "<u4"),
        ("bytes", "<u8"),  # copied or given to the collective, all executions together
        ("members", "<u4"),  # ranks in the collective's group
    ]
)


class Overlap(msgspec.Struct, array_like=True, frozen=True):
    """Ms per step in which computation ran, communication ran, and both did."""

    compute_ms: float
    comm_ms: float
    both_ms: float


class Range(msgspec.Struct, array_like=True, frozen=True):
    """A resource or a clock over the window."""

    mean: float
    least: float
    most: float


class RankSummary(msgspec.Struct, array_like=True, frozen=True):
    """One rank's window. None: not known. `functions`: FUNCTION_DTYPE as columns, `histograms`: as many, of single
    executions. `sources`: who saw it ("kineto", "cupti", "hooks", "nvml"); `phases`: ms per step, adding up to it."""

    rank: int
    first_step: int | None
    last_step: int | None
    steps: int | None
    window_ms: float
    step_ms: float | None
    sources: list[str] = []
    unseen: list[str] = []
    phases: dict[str, float] = {}
    overlap: Overlap | None = None
    functions: Columns = {}
    histograms: bytes = b""
    hardware: dict[str, Range] = {}


class Missing(msgspec.Struct, array_like=True, frozen=True):
    """A rank of the node without a summary, and why."""

    rank: int
    why: str


class NodeSummaries(msgspec.Struct, array_like=True, frozen=True):
    """All ranks of one job attempt on one node, one window. `window` is the controller's number of it; with `job_id`,
    `restart` and the rank it is unique. `names`: (kind, text), those that were not sent before."""

    node: str
    job_id: int
    restart: int
    uid: int
    window: int
    ranks: list[RankSummary] = []
    missing: list[Missing] = []
    names: list[tuple[int, str]] = []


class Answer(msgspec.Struct, frozen=True):
    """Body of the 200 answer (JSON). `names_wanted`: send all texts again."""

    duplicate: bool = False
    names_wanted: bool = False


_ENCODER: Final = msgspec.msgpack.Encoder()
_ENVELOPE: Final = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])
_DECODER: Final = msgspec.msgpack.Decoder(NodeSummaries)


def name_hash(kind: int, name: str) -> int:
    """What stands for a function on the wire."""
    text = name.encode(errors="replace")
    return int.from_bytes(blake2b(bytes([kind]) + text, digest_size=8).digest(), "little")


OTHER_HASHES: Final = tuple(name_hash(kind, name) for kind, name in enumerate(OTHERS))


def rank_bytes(summary: RankSummary) -> int:
    """What one rank's summary takes on the wire, by itself."""
    return len(_compressed(_ENCODER.encode(summary)))


def encode(summaries: NodeSummaries) -> bytes:
    """The summaries as they travel."""
    return _compressed(_ENCODER.encode((VERSION, summaries)))


def _compressed(plain: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=3).compress(plain)


def decode(body: bytes) -> NodeSummaries:
    """The summaries of a request body; tables stay packed, `table` opens them.

    Raises AgentFault with reason `oversized`, `garbage`, `version` or `limits`.
    """
    plain = decompress(body)
    try:
        version, raw = _ENVELOPE.decode(plain)
        if version > VERSION:
            text = f"summaries of version {version}, this controller understands up to {VERSION}: upgrade it first"
            raise AgentFault(text, reason="version")
        summaries = _DECODER.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise AgentFault(f"body is not summaries: {error}", reason="garbage") from error
    _check_limits(summaries)
    return summaries


def table(summary: RankSummary) -> tuple[Table, Histograms]:
    """The functions (N,) of FUNCTION_DTYPE with their N histograms; kinds are known ones.

    Raises AgentFault (reason `columns`, `histogram` or `limits`).
    """
    functions, histograms, _ = tables([summary])
    return functions, histograms


def tables(summaries: Sequence[RankSummary]) -> tuple[Table, Histograms, list[int]]:
    """The functions of many summaries, one after the other, and how many each has.

    Raises AgentFault (reason `columns`, `histogram` or `limits`) where one of them is not sound.
    """
    names = FUNCTION_DTYPE.names or ()
    rows = [rows_of(one.functions, FUNCTION_DTYPE) for one in summaries]
    if rows and max(rows) > FUNCTIONS_MAX:
        raise AgentFault(f"{max(rows)} functions, at most {FUNCTIONS_MAX} are taken", reason="columns")
    if any(len(one.histograms) > HISTOGRAM_BYTES_MAX for one in summaries):
        raise AgentFault(f"more than {HISTOGRAM_BYTES_MAX} bytes of histograms", reason="limits")
    functions = np.empty(sum(rows), FUNCTION_DTYPE)
    for name in names:
        dtype = FUNCTION_DTYPE[name]
        null = null_of(dtype).to_bytes(dtype.itemsize, "little")
        parts = [one.functions.get(name, null * count) for one, count in zip(summaries, rows, strict=True)]
        if any(len(part) != count * dtype.itemsize for part, count in zip(parts, rows, strict=True)):
            raise AgentFault(f"column {name} is not as long as the others", reason="columns")
        functions[name] = np.frombuffer(b"".join(parts), dtype)
    if len(functions) and functions["kind"].max() >= len(KINDS):
        raise AgentFault("a function of an unknown kind", reason="limits")
    return functions, histogram.decode_all([one.histograms for one in summaries], rows), rows


def _check_limits(summaries: NodeSummaries) -> None:
    if len(summaries.ranks) > RANKS_MAX or len(summaries.missing) > RANKS_MAX or len(summaries.names) > NAMES_MAX:
        raise AgentFault(f"more than {RANKS_MAX} ranks or {NAMES_MAX} names", reason="limits")
    if any(not 0 <= kind < len(KINDS) or len(name) > NAME_CHARS_MAX for kind, name in summaries.names):
        raise AgentFault(f"a name of an unknown kind or of more than {NAME_CHARS_MAX} characters", reason="limits")
    if any(len(text) > TEXT_CHARS_MAX for text in _texts(summaries)):
        raise AgentFault(f"more than {TEXT_CHARS_MAX} characters of text", reason="limits")
    for rank in summaries.ranks:
        if len(rank.phases) > PHASES_MAX or len(rank.hardware) > RESOURCES_MAX:
            raise AgentFault(f"more than {PHASES_MAX} phases or {RESOURCES_MAX} resources", reason="limits")
        if max(len(rank.sources), len(rank.unseen)) > NOTES_MAX:
            raise AgentFault(f"more than {NOTES_MAX} notes", reason="limits")
        if not all(isfinite(value) for value in _numbers(rank)):
            raise AgentFault(f"rank {rank.rank}: a number that is none", reason="limits")


def _texts(summaries: NodeSummaries) -> Iterator[str]:
    yield summaries.node
    yield from (missing.why for missing in summaries.missing)
    for rank in summaries.ranks:
        yield from (*rank.sources, *rank.unseen, *rank.phases, *rank.hardware, *rank.functions)


def _numbers(rank: RankSummary) -> Iterator[float]:
    yield from (rank.window_ms, rank.step_ms or 0.0, *rank.phases.values())
    if rank.overlap is not None:
        yield from (rank.overlap.compute_ms, rank.overlap.comm_ms, rank.overlap.both_ms)
    for told in rank.hardware.values():
        yield from (told.mean, told.least, told.most)
