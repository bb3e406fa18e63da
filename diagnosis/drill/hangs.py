"""Faults that stop a job: ranks that never come (H1), programs that disagree (H2), hardware that stops (H3)."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from diagnosis.contracts.errors import OperatorFault
from diagnosis.drill.case import ONCE, Case, Pieces, Scene, truth
from diagnosis.drill.health import Health, Witness, no_witness
from diagnosis.drill.layout import Operation
from diagnosis.drill.network import hops, link_index, link_name
from diagnosis.drill.program import Instruction
from diagnosis.drill.slow_network import alike, on_network, paths, whole
from diagnosis.drill.timeline import Bools, Break
from diagnosis.drill.weather import Stall

# Xids after which a GPU does no more work, with the driver's words.
XIDS: Final = (
    (79, "pid='<unknown>', name=<unknown>, GPU has fallen off the bus."),
    (48, "pid=77120, name=python3, An uncorrectable double bit error (DBE) has been detected on GPU"),
    (95, "pid=77120, name=python3, Uncontained ECC error. Physical Address 0x00000000"),
    (119, "pid=77120, name=python3, Timeout after 45s of waiting for RPC response from GPU0 GSP! Expected function 76"),
)


def process_stuck(scene: Scene) -> list[Case]:
    """One process lives and never comes to its next operation."""
    rank = scene.rank()
    return [_never(scene, [rank], ["process_stuck", "process_exit"])]


def several_stuck(scene: Scene) -> list[Case]:
    """Two or three processes of different replicas stop in the same step."""
    dp = scene.layout.dp
    count = int(scene.rng.integers(2, min(3, int(dp.max()) + 1) + 1))
    replicas = scene.rng.permutation(int(dp.max()) + 1)[:count]
    ranks = [scene.rank(np.flatnonzero(dp == replica)) for replica in replicas]
    return [_never(scene, ranks, ["process_stuck", "process_exit"])]


def process_exit(scene: Scene) -> list[Case]:
    """One process is gone: no report of it, or only those from before. The kernel may have killed it for memory."""
    rank = scene.rank()
    killed = scene.chance(0.4)
    pid = int(scene.rng.integers(20_000, 400_000))

    def witness(health: Health, x: float) -> None:
        del x
        if killed:
            node = int(scene.layout.node[rank])
            health.say(
                node, f"Out of memory: Killed process {pid} (python3) total-vm:912345678kB, anon-rss:801234567kB"
            )
            health.host[node]["mem_free_gb"] = 3
        health.nvml[rank] |= {"utilization_pct": 0, "power_w": 92}

    causes = ["process_exit"] if killed else ["process_exit", "process_stuck"]
    return [replace(_never(scene, [rank], causes, witness), exited=(rank,))]


def rank_unseen(scene: Scene) -> list[Case]:
    """One process never came, and nothing was ever heard of it: only the others' waiting shows where it is missing."""
    rank = scene.rank()
    case = _never(scene, [rank], ["process_stuck", "process_exit", "unknown"])
    return [replace(case, unseen=(rank,))]


def wrong_op(scene: Scene) -> list[Case]:
    """One rank runs another operation than its group."""
    return [_diverged(scene, "op")]


def wrong_count(scene: Scene) -> list[Case]:
    """One rank brings another number of elements."""
    return [_diverged(scene, "count")]


def wrong_dtype(scene: Scene) -> list[Case]:
    """One rank brings another type of elements."""
    return [_diverged(scene, "dtype")]


def wrong_root(scene: Scene) -> list[Case]:
    """One rank takes another member for the root of a broadcast."""
    return [_diverged(scene, "root")]


def wrong_order(scene: Scene) -> list[Case]:
    """One rank takes the norm too early, before a round with ranks that the norm needs as well: they wait for it
    there, it waits for them here. Two rounds that share one rank only would merely be late."""
    rank = scene.rank()
    rounds = [
        (number, item)
        for number, item in enumerate(scene.program.instructions)
        if item.kind == "round" and rank in item.ranks
    ]
    norm, last = next((n, _group(item, rank)) for n, item in rounds if item.track == "norm")
    earlier = [n for n, item in rounds if n < norm and len(last & _group(item, rank)) >= 3]
    if not earlier:
        raise OperatorFault("no two communicators of this layout share enough ranks")
    breakage = Break("swap", int(scene.rng.integers(0, 2)), earlier[-1], norm, ranks=(rank,))
    return [_hang(scene, "H2", [rank], ["program_divergence"], "notify", breakage)]


def _group(item: Instruction, rank: int) -> set[int]:
    """The members of the group of a round that `rank` is in."""
    return set(item.groups[(item.groups == rank).any(1)][0].tolist())


def gpu_xid(scene: Scene) -> list[Case]:
    """A GPU stops inside a collective and the driver says why."""
    rank = scene.rank()
    number, text = XIDS[int(scene.rng.integers(len(XIDS)))]

    def witness(health: Health, x: float) -> None:
        del x
        health.xid(rank, number, text)
        row = health.nvml[rank]
        if number == 79:
            row |= dict.fromkeys(key for key in row if key not in ("node", "gpu", "source"))
        elif number in (48, 95):
            row |= {"ecc_dbe": 1, "row_remap_pending": True}

    causes = ["gpu_fault", "hbm_degraded"] if number in (48, 95) else ["gpu_fault"]
    return [_hang(scene, "H3", [rank], causes, "drain", _stops(scene, rank, ("tp", "dp", "dp", "norm")), witness)]


def gpu_silent(scene: Scene) -> list[Case]:
    """A GPU stops inside a collective and nobody says anything: only the steps point at it."""
    rank = scene.rank()
    breakage = _stops(scene, rank, ("dp",))
    return [_hang(scene, "H3", [rank], ["unknown", "gpu_fault", "process_stuck"], "collect", breakage)]


def nvlink_down(scene: Scene) -> list[Case]:
    """NVLink of a GPU dies: what goes through it inside the node stops."""
    rank = scene.rank()

    def witness(health: Health, x: float) -> None:
        del x
        text = "pid='<unknown>', name=<unknown>, NVLink: fatal error detected on link 4(0x10000, 0x0, 0x0)"
        health.xid(rank, 74, text)
        health.nvml[rank] |= {"nvlink_down": int(scene.rng.integers(1, 19)), "nvlink_crc_errors": 4113}

    dead = _dead(scene, rank, inside=True)
    return [_hang(scene, "H3", [rank], ["nvlink_fault", "gpu_fault"], "drain", _cut(scene, dead), witness)]


def nic_down(scene: Scene) -> list[Case]:
    """The link of a NIC goes down."""
    rank = scene.rank(on_network(scene))
    nic = int(scene.layout.gpu[rank])

    def witness(health: Health, x: float) -> None:
        del x
        health.ib[rank] |= {"link": "down", "link_downed": 1, "speed_gbps": 0, "retransmits": 812}
        health.say(int(scene.layout.node[rank]), f"mlx5_core 0000:{0x18 + nic:02x}:00.0 ib{nic}: Link down")

    dead = _dead(scene, rank, inside=False)
    case = _hang(scene, "H3", [rank], ["nic_fault"], "drain", _cut(scene, dead), witness)
    return [replace(case, fabric=scene.chance(0.3))]


def link_cut(scene: Scene) -> list[Case]:
    """A link between switches dies and its flows are not moved: only they stop, all nodes are healthy."""
    table = paths(scene)
    used = np.unique(table.up[table.up >= 0])
    up = link_name(scene.fabric, int(used[int(scene.rng.integers(len(used)))]))
    down = "-".join(reversed(up.split("-")))
    index = [link_index(scene.fabric, name) for name in (up, down)]
    dead = {}
    for name, family in scene.layout.families.items():
        path = hops(scene.layout, scene.fabric, whole(scene), family)
        dead[name] = np.isin(path.up, index) | np.isin(path.down, index)
    right = truth(
        "hang", "H3", links=alike(scene, [up, down]), causes=["link_fault"], action="notify", kind="link",
        keep=scene.layout.node_names,
    )  # fmt: skip
    sources = {int(rank) for name, family in scene.layout.families.items() for rank in family.edges[dead[name]][:, 0]}

    def witness(health: Health, x: float) -> None:
        del x
        for rank in sources:
            health.ib[rank]["retransmits"] += int(scene.rng.integers(7, 900))

    return [Case(right, breakage=_cut(scene, dead), witness=witness, fabric=True)]


def _never(scene: Scene, ranks: list[int], causes: list[str], witness: Witness = no_witness) -> Case:
    """Work of some ranks never ends, in one place of one step."""
    ms = np.zeros(scene.layout.world)
    ms[ranks] = np.inf
    kind = ("fwd", "bwd", "bwd", "start", "grad")[int(scene.rng.integers(5))]
    pieces = Pieces(stalls=(Stall(kind, ms, "stuck"),))
    case = _hang(scene, "H1", ranks, causes, "requeue", None, witness)
    return replace(case, pieces=lambda x: pieces, pattern=ONCE)


def _hang(
    scene: Scene,
    class_: str,
    ranks: list[int],
    causes: list[str],
    action: str,
    breakage: Break | None,
    witness: Witness = no_witness,
) -> Case:
    nodes = [scene.node_of(rank) for rank in ranks]
    keep = [] if action == "drain" else nodes
    right = truth("hang", class_, ranks=ranks, nodes=nodes, causes=causes, action=action, keep=keep)
    return Case(right, breakage=breakage, witness=witness, protected=tuple(ranks))


def _rounds_of(scene: Scene, rank: int, tracks: tuple[str, ...], members_min: int = 2) -> list[int]:
    """Instructions of the training step that are rounds of `rank`, in the first of the tracks that has any."""
    for track in tracks:
        family = scene.layout.families.get(track)
        if family is None or family.groups.shape[1] < members_min:
            continue
        found = [
            number
            for number, item in enumerate(scene.program.instructions)
            if item.kind == "round" and item.track == track and rank in item.ranks
        ]
        if found:
            return found
    raise OperatorFault(f"no communicator of rank {rank} fits")


def _stops(scene: Scene, rank: int, tracks: tuple[str, ...]) -> Break:
    """The GPU of `rank` stops inside a round of one of these tracks, chosen at random."""
    order = tuple(str(track) for track in scene.rng.permutation(tracks))
    found = _rounds_of(scene, rank, order)
    number = found[int(scene.rng.integers(len(found)))]
    share = float(scene.rng.uniform(0.02, 0.98))
    return Break("gpu", int(scene.rng.integers(0, 2)), number, ranks=(rank,), share=share)


def _cut(scene: Scene, dead: dict[str, Bools]) -> Break:
    return Break("path", int(scene.rng.integers(0, 2)), share=float(scene.rng.uniform(0.0, 1.2)), dead=dead)


def _dead(scene: Scene, rank: int, inside: bool) -> dict[str, Bools]:
    """Hops from or to a rank that use its NVLink (`inside` the node) or its NIC."""
    dead = {}
    for name, family in scene.layout.families.items():
        net = hops(scene.layout, scene.fabric, whole(scene), family).net
        dead[name] = (family.edges == rank).any(2) & (net != inside)
    return dead


def _diverged(scene: Scene, what: str) -> Case:
    rank = scene.rank()
    tracks = ("tp",) if what == "root" else tuple(str(t) for t in scene.rng.permutation(["tp", "dp", "norm"]))
    found = _rounds_of(scene, rank, tracks, members_min=3)
    broadcast = [n for n in found if scene.layout.ops[scene.program.instructions[n].op].root is not None]
    plain = [n for n in found if n not in broadcast]
    choice = broadcast if what == "root" else plain
    number = choice[int(scene.rng.integers(len(choice)))]
    breakage = Break(
        "tag",
        since=int(scene.rng.integers(0, 2)),
        instruction=number,
        ranks=(rank,),
        op=_other(scene, scene.layout.ops[scene.program.instructions[number].op], what),
    )
    return _hang(scene, "H2", [rank], ["program_divergence"], "notify", breakage)


def _other(scene: Scene, op: Operation, what: str) -> Operation:
    """The operation that the wrong rank runs instead."""
    if what == "op":
        others = [name for name in ("AllReduce", "AllGather", "ReduceScatter") if name != op.op]
        return replace(op, op=others[int(scene.rng.integers(len(others)))])
    if what == "count":
        return replace(
            op, count=int(op.count * float(scene.rng.choice([0.5, 2.0, 1.0]))) + int(scene.rng.integers(1, 64))
        )
    if what == "dtype":
        return replace(op, dtype="f32" if op.dtype != "f32" else "bf16")
    return replace(op, root=1 + int(scene.rng.integers(3)))
