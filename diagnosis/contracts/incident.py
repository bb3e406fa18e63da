"""One incident of one job as columns: what the engine reads, whoever gathered it (live reports, a bundle, a drill).

Everything is arrays, so that a million ranks fit and each rule is a few passes over them. Conventions:

* ranks are global ranks 0..world_size-1; communicators, nodes, links and words are indices into tuples of names.
* a measured number is float64 and NaN means "not told", which is never zero; an index is int32 and -1 means unknown.
* rows of `Frames` are sorted by rank, then by sample (oldest first), whatever order they arrived in. Times of different
  nodes are not comparable; within one rank `t_ms` is monotonic.

The readable form of the same is the bundle (`docs/bundle.md`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import nan
from typing import Final

import numpy as np
from numpy.typing import NDArray

from diagnosis.contracts.exits import ExitFacts
from diagnosis.contracts.gathered import FlightFacts, ProcessFacts, RasFacts

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]
Bytes = NDArray[np.uint8]

UNKNOWN: Final = -1
WORLD_MAX: Final = 1 << 21


class State:
    """State of a rank in the newest round that it knows of a communicator."""

    UNKNOWN: Final = 0
    NONE: Final = 1
    RUNNING: Final = 2
    ENQUEUED: Final = 3
    DONE: Final = 4


class Kind:
    """Kind of a communicator."""

    UNKNOWN: Final = 0
    COLLECTIVE: Final = 1
    P2P: Final = 2


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """The job and where its ranks run.

    `node`: index into `node_names` per rank; `gpu`: local GPU index per rank. `nic_of_gpu`: name of the NIC that serves
    a GPU, empty: `mlx5_K` serves GPU K. `groups`: parallel groups by kind ("tp", "dp", "pp", "ep"), empty: not told.
    `fidelity`: "full" or "nccl" (what a stock NCCL can tell). `step_ms`: how long a training step took while all was
    well, NaN where nobody knows.
    """

    job_id: int | None
    world_size: int
    node_names: tuple[str, ...]
    node: Ints
    gpu: Ints
    fidelity: str = "full"
    groups: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    nic_of_gpu: Mapping[int, str] = field(default_factory=dict)
    step_ms: float = nan


@dataclass(frozen=True, slots=True, eq=False)
class Communicators:
    """Members of communicator `c`, in its own order, are `member[start[c]:start[c + 1]]` (ranks).

    Shapes: `start` (C + 1,), `member` (M,), the others (C,). A ring sends from position i to i + 1.
    """

    ids: tuple[str, ...]
    start: NDArray[np.int64]
    member: Ints
    kind: Bytes
    algo: tuple[str, ...]
    transport: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Frames:
    """The probe's words. One frame is one rank at one moment; a row is one communicator in one frame.

    Per frame (F,): `rank`, `t_ms`, `window_ms`. Per row (R,): `frame`, `comm`, `peer` (p2p: the rank this one receives
    from), `state`, `signature` (index into `signatures`: op, dtype, count, root as text; equal text means equal
    operations), and measured columns as in the bundle.
    """

    rank: Ints
    t_ms: Floats
    window_ms: Floats
    frame: Ints
    comm: Ints
    peer: Ints
    state: Bytes
    signature: Ints
    signatures: tuple[str, ...]
    seq: Floats
    done_seq: Floats
    age_ms: Floats
    send: Floats
    recv: Floats
    send_rate: Floats
    recv_rate: Floats
    rounds: Floats
    dur_ms: Floats
    dur_min_ms: Floats
    dur_max_ms: Floats
    gap_ms: Floats
    idle_seq: Floats
    errors: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Summaries:
    """Profiling windows, condensed. Per worker (W,): `rank`, `step_ms`, `steps`, and `phases` by name in ms per step.

    Per row (O,), one operator of one worker: `worker` (index), `operator` (index into `operator_names`), `kind`
    ("compute" | "comm" | "memcpy" | "host", per name), `stats` by column name of the bundle (`invocation_count`,
    `total_time_ms`, `mean_us`, `p50_us`, ..., `beta`, `mu`, `sigma`).
    """

    rank: Ints
    step_ms: Floats
    steps: Floats
    phases: Mapping[str, Floats]
    worker: Ints
    operator: Ints
    operator_names: tuple[str, ...]
    kind: tuple[str, ...]
    stats: Mapping[str, Floats]


@dataclass(frozen=True, slots=True, eq=False)
class HealthTable:
    """Observations of one source. Per row (N,): `node`, `entity` (GPU index or NIC name; "" where the node itself is
    meant) and `values` by field name of the bundle; a yes or no is 1.0 or 0.0, `link` is 1.0 for up."""

    node: Ints
    entity: tuple[int | str, ...]
    values: Mapping[str, Floats]


@dataclass(frozen=True, slots=True)
class KernelLine:
    """One line of a node's kernel log."""

    node: str
    line: str


@dataclass(frozen=True, slots=True)
class Probe:
    """Pings from the node of rank `src` to that of rank `dst` (-1: not known who). `loss`: part of the `sent` that was
    not answered, NaN where none was sent; `rtt_us`: median, NaN where none was answered; `path`: as in `Fabric`."""

    src: int
    dst: int
    sent: int
    loss: float
    rtt_us: float
    path: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Fabric:
    """Links (L,): names, ends `a`, `b` by name and capacity. Flows (P,): `comm`, `src`, `dst` (ranks), achieved rate,
    round trip; the links of flow p are `path[path_start[p]:path_start[p + 1]]`. `resent` (P,): part of its segments
    that had to be sent again; `dragged` (P,): part of the time that its data was under way for longer than as much data
    was before; both empty where nobody tells. `probes`: pings on suspicion, which are no flows of the job's."""

    links: tuple[str, ...]
    a: tuple[str, ...]
    b: tuple[str, ...]
    capacity_gbps: Floats
    comm: Ints
    src: Ints
    dst: Ints
    gbps: Floats
    rtt_us: Floats
    path_start: NDArray[np.int64]
    path: Ints
    resent: Floats = field(default_factory=lambda: np.empty(0, np.float64))
    dragged: Floats = field(default_factory=lambda: np.empty(0, np.float64))
    probes: tuple[Probe, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Incident:
    """Everything that is known of one incident. None and empty: not gathered.

    `process_state`: per rank a letter of the kernel ("T" stopped, "Z" zombie, "X" gone, ...), "" unknown; gathered by a
    node daemon and therefore a witness of its own. `thresholds`: what the site that saw it takes as slow or hung, by
    names of `diagnosis.engine.thresholds`; what is not told has its default. `unseen`: what could not be seen or read,
    for people. `ras`, `flights`, `processes`: gathered on suspicion of a hang (`contracts.gathered`), the latter two
    sorted by rank.

    `ended`: how the job ended, one of `contracts.exits.ENDED_WORDS`, "" while it runs; `lost_nodes`: those that Slurm
    had lost then; `exits`: processes that have ended, sorted by rank.
    """

    job: Job
    communicators: Communicators
    frames: Frames
    process_state: Mapping[int, str] = field(default_factory=dict)
    summaries: Summaries | None = None
    nvml: HealthTable | None = None
    ib: HealthTable | None = None
    host: HealthTable | None = None
    kernel_log: tuple[KernelLine, ...] = ()
    fabric: Fabric | None = None
    thresholds: Mapping[str, float] = field(default_factory=dict)
    unseen: tuple[str, ...] = ()
    ras: RasFacts | None = None
    flights: tuple[FlightFacts, ...] = ()
    processes: tuple[ProcessFacts, ...] = ()
    ended: str = ""
    lost_nodes: tuple[str, ...] = ()
    exits: tuple[ExitFacts, ...] = ()
