"""The job that is trained: how ranks form groups, on which nodes they stand, which operations a step has.

Ranks are placed as training frameworks do it: tensor parallel ranks (TP) side by side inside a node, then data
parallel (DP) and pipeline (PP), in one of two orders. A `Family` is all communicators of one purpose; every group in
it has the same size, so that one numpy operation serves all of them. The words of an operation (name, type, count,
protocol) and its cost (bytes over each hop, transfer steps) are an `Operation`.

Units: milliseconds, bytes, Gbit/s. All randomness comes from the generator that is handed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from diagnosis.contracts.errors import OperatorFault
from diagnosis.drill import steps

Ranks = NDArray[np.int64]
Floats = NDArray[np.float64]

WORLD_MIN: Final = 16
WORLD_MAX: Final = 1024
# (TP, PP, DP): what is drawn from, filtered by the number of ranks that is wanted.
SHAPES: Final = (
    *((4, 1, 4), (2, 2, 4), (8, 1, 2), (1, 1, 16), (2, 1, 8)),
    *((8, 1, 4), (8, 2, 2), (4, 2, 4), (4, 4, 2), (1, 1, 32)),
    *((8, 2, 4), (8, 1, 8), (4, 4, 4), (4, 2, 8), (8, 4, 2), (2, 2, 16), (1, 1, 64)),
    *((8, 2, 8), (8, 4, 4), (4, 4, 8), (8, 1, 16), (4, 8, 4)),
    *((8, 4, 8), (8, 2, 16), (8, 8, 4), (4, 4, 16)),
    *((8, 8, 8), (8, 8, 16)),
)
NVLINK_GB_S: Final = 300.0
STEP_BYTES: Final = 1 << 19
P2P_STEPS: Final = 4
LOOPS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class Operation:
    """One kind of round. `hop_bytes`: over the busiest hop; `loops`: chunks that follow each other; `root`: position
    in the group, None where the operation has none."""

    op: str
    dtype: str
    count: int
    proto: str
    hop_bytes: float
    loops: int
    root: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """All communicators of one purpose. `groups`: (G, n) ranks in communicator order; `ids`: (G,) names.
    `edges`: (G, m, 2) sender and receiver of each hop that carries data."""

    name: str
    groups: Ranks
    ids: tuple[str, ...]
    kind: str
    algo: str
    transport: str
    edges: Ranks


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The job. Per rank (W,): `tp`, `pp`, `dp` coordinates, `node` (index) and `gpu`.

    `families`: "tp", "ep", "dp", "emb", "norm" where they exist and "p2p" (groups (B, 2): lower and upper stage).
    `stage_ranks`: (PP, W / PP). `ops`: operations by name. `work_ms`: healthy own time by kind of work.
    """

    shape: tuple[int, int, int]
    ep: int
    gpus_per_node: int
    micro_batches: int
    tp_style: str
    dp_style: str
    broadcast: bool
    node_names: tuple[str, ...]
    tp: Ranks
    pp: Ranks
    dp: Ranks
    node: Ranks
    gpu: Ranks
    stage_ranks: Ranks
    families: dict[str, Family]
    ops: dict[str, Operation]
    work_ms: dict[str, float]
    nic_gbps: int
    group_words: dict[str, list[list[int]]]

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.tp)


def draw_layout(rng: np.random.Generator, world_min: int, world_max: int, needs: frozenset[str]) -> Layout:
    """A job of `world_min` to `world_max` ranks that has what the fault needs: "tp", "pp", "net", "leaves", "peers".

    Raises OperatorFault where no shape fits.
    """
    fitting = [s for s in SHAPES if world_min <= s[0] * s[1] * s[2] <= min(world_max, WORLD_MAX) and _offers(s, needs)]
    if not fitting:
        raise OperatorFault(f"no layout of {world_min} to {world_max} ranks has {', '.join(sorted(needs))}")
    shape = fitting[int(rng.integers(len(fitting)))]
    tp, pp, dp = shape
    world = tp * pp * dp
    gpus_per_node = 4 if world <= 32 and tp <= 4 and "leaves" in needs else 8
    order = "tp-dp-pp" if pp == 1 or rng.random() < 0.6 else "tp-pp-dp"
    ranks = np.arange(world)
    grid = ranks.reshape((pp, dp, tp)) if order == "tp-dp-pp" else ranks.reshape((dp, pp, tp)).transpose(1, 0, 2)
    coordinate = np.empty((3, world), np.int64)
    coordinate[:, grid.ravel()] = np.indices(grid.shape).reshape(3, -1)
    ep = int(rng.choice([2, 4])) if dp % 4 == 0 and rng.random() < 0.25 else 1
    node = ranks // gpus_per_node
    families = _families(rng, grid, node, ep)
    nic_gbps = int(rng.choice([200, 400, 400]))
    work_ms = _work(rng)
    groups = {"tp": grid.reshape(-1, tp), "dp": grid.transpose(0, 2, 1).reshape(-1, dp)}
    groups["pp"] = grid.reshape(pp, -1).T
    ops = _operations(rng, families, work_ms, nic_gbps)
    told = rng.random() < 0.7
    return Layout(
        shape=shape,
        ep=ep,
        gpus_per_node=gpus_per_node,
        micro_batches=max(pp, int(rng.choice([2, 4, 4, 6]))),
        tp_style=str(rng.choice(["allreduce", "sequence"])),
        dp_style="zero" if families.get("dp") and families["dp"].algo == "RING" and rng.random() < 0.4 else "allreduce",
        broadcast=tp > 1 and ("broadcast" in needs or rng.random() < 0.4),
        node_names=_node_names(rng, int(node[-1]) + 1),
        pp=coordinate[0],
        dp=coordinate[1],
        tp=coordinate[2],
        node=node,
        gpu=ranks % gpus_per_node,
        stage_ranks=grid.reshape(pp, -1),
        families=families,
        ops=ops,
        work_ms=work_ms,
        nic_gbps=nic_gbps,
        group_words={name: table.tolist() for name, table in groups.items()} if told else {},
    )


def _offers(shape: tuple[int, int, int], needs: frozenset[str]) -> bool:
    tp, pp, dp = shape
    offered = {
        "tp": tp >= 2,
        "broadcast": tp >= 4,
        "pp": pp >= 2,
        "net": tp * dp > 8 or dp >= 4,
        "leaves": tp * pp * dp >= 32 and tp * dp >= 16,
        "peers": dp >= 4,
    }
    return all(offered[need] for need in needs)


def _node_names(rng: np.random.Generator, nodes: int) -> tuple[str, ...]:
    prefix = str(rng.choice(["gpu", "node", "h", "dgx-", "n"]))
    numbers = np.sort(rng.choice(900, nodes, replace=False)) + 1
    return tuple(f"{prefix}{number:03d}" for number in numbers.tolist())


def _families(rng: np.random.Generator, grid: Ranks, node: Ranks, ep: int) -> dict[str, Family]:
    pp, dp, tp = grid.shape
    by_dp = grid.transpose(0, 2, 1).reshape(-1, dp)
    tables: dict[str, Ranks] = {"tp": grid.reshape(-1, tp), "dp": by_dp}
    if ep > 1:
        tables["ep"] = by_dp.reshape(-1, ep)
    if pp > 1:
        tables["p2p"] = np.stack([grid[:-1].ravel(), grid[1:].ravel()], 1)
        if rng.random() < 0.5:
            tables["emb"] = np.stack([grid[0].ravel(), grid[-1].ravel()], 1)
    world_wide = pp * tp == 1 or (grid.size <= 128 and rng.random() < 0.4)
    tables["norm"] = np.sort(grid.reshape(1, -1) if world_wide else grid.transpose(1, 0, 2).reshape(dp, -1), 1)
    tree = dp >= 8 and rng.random() < 0.3
    families = {}
    for name, groups in tables.items():
        if groups.shape[1] < 2:
            continue
        nodes = node[groups]
        algo = {"dp": "TREE" if tree else "RING"}.get(name, "RING")
        ids = tuple(f"0x{int(word):012x}" for word in rng.integers(1 << 47, size=len(groups)))
        transport = "NET" if bool((nodes != nodes[:, :1]).any()) else "NVLINK"
        kind = "p2p" if name == "p2p" else "collective"
        families[name] = Family(name, groups, ids, kind, algo, transport, _edges(groups, algo, name))
    return families


def _edges(groups: Ranks, algo: str, name: str) -> Ranks:
    n = groups.shape[1]
    if name == "p2p":
        pairs = [(0, 1), (1, 0)]
    elif name == "ep":
        pairs = [(i, j) for i in range(n) for j in range(n) if i != j]
    elif algo == "TREE":
        pairs = [(i, (i - 1) // 2) for i in range(1, n)] + [((i - 1) // 2, i) for i in range(1, n)]
    else:
        pairs = [(i, (i + 1) % n) for i in range(n)]
    return groups[:, np.array(pairs)]


def _work(rng: np.random.Generator) -> dict[str, float]:
    forward = float(rng.uniform(9.0, 26.0))
    return {
        "start": float(rng.uniform(1.0, 4.0)),
        "copy": float(rng.uniform(1.0, 2.5)),
        "fwd": forward,
        "bwd": 2.0 * forward,
        "grad": float(rng.uniform(0.02, 0.2)),
        "opt": float(rng.uniform(2.0, 6.0)),
    }


def _operations(
    rng: np.random.Generator, families: dict[str, Family], work_ms: dict[str, float], nic_gbps: int
) -> dict[str, Operation]:
    """Sizes in proportion: communication takes the share of a step that it has in well tuned jobs (5 to 25 %)."""
    ops: dict[str, Operation] = {}
    n = {name: family.groups.shape[1] for name, family in families.items()}
    if "tp" in n:
        share_ms = float(rng.uniform(0.02, 0.08)) * work_ms["fwd"]
        count = int(share_ms * NVLINK_GB_S * 1e6 / 4) // 4096 * 4096
        for op in ("AllReduce", "ReduceScatter", "AllGather"):
            ops[f"tp.{op}"] = collective(op, "bf16", count, n["tp"])
        ops["tp.Broadcast"] = collective("Broadcast", "int64", 1 << 14, n["tp"], root=0)
    if "ep" in n:
        ops["ep.AllToAll"] = collective("AllToAll", "bf16", int(2 ** rng.integers(20, 22)), n["ep"])
    if "dp" in n:
        share_ms = float(rng.uniform(0.25, 0.7)) * work_ms["fwd"]
        count = int(share_ms * nic_gbps * 1e6 / 8 / 4) // 4096 * 4096
        for op in ("AllReduce", "ReduceScatter", "AllGather"):
            ops[f"dp.{op}"] = collective(op, "bf16", count, n["dp"])
    if "emb" in n:
        ops["emb.AllReduce"] = collective("AllReduce", "bf16", 1 << 24, 2)
    if "p2p" in n:
        count = int(2 ** rng.integers(22, 24))
        ops["p2p.Recv"] = Operation("Recv", "bf16", count, "SIMPLE", 2.0 * count, 1)
    ops["norm.AllReduce"] = collective("AllReduce", "f32", 2, n["norm"])
    return ops


BYTES_OF: Final = {"bf16": 2, "f32": 4, "f16": 2, "int64": 8}


def collective(op: str, dtype: str, count: int, n: int, root: int | None = None) -> Operation:
    """The operation with what it costs among `n` members (bandwidth-optimal algorithms, as in NCCL's tests)."""
    size = float(BYTES_OF[dtype] * count)
    share = {"AllReduce": 2.0 * (n - 1) / n, "Broadcast": 1.0}.get(op, (n - 1) / n)
    loops = int(min(LOOPS_MAX, max(1.0, np.ceil(size / n / STEP_BYTES))))
    proto = "LL" if size < 1 << 16 else "LL128" if size < 1 << 22 else "SIMPLE"
    return Operation(op, dtype, count, proto, size * share, loops, root)


def step_totals(family: Family, op: Operation) -> tuple[Ranks, Ranks]:
    """Transfer steps that each position of a group sends and receives in one whole round. Shapes: (n,), (n,)."""
    n = family.groups.shape[1]
    if op.op == "Recv":
        return np.full(n, P2P_STEPS), np.full(n, P2P_STEPS)
    return steps.totals(op.op, family.algo, n, op.loops, op.root)
