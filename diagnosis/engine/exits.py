"""What the kernel says of a rank's end, whoever gathered it: with the frames, or on suspicion of a hang."""

from __future__ import annotations

from collections.abc import Mapping
from signal import Signals
from typing import Final

import numpy as np

from diagnosis.contracts.exits import ExitFacts
from diagnosis.contracts.incident import Incident, Ints
from diagnosis.contracts.verdict import EvidenceItem
from diagnosis.engine.lanes import Bools, Lanes, Now

SAME_NODE_MS: Final = 2.0
BETWEEN_NODES_MS: Final = 250.0
_GONE: Final = frozenset("XZ")


def ends_of(incident: Incident) -> dict[int, ExitFacts]:
    """By rank, of those that have ended."""
    ends = {
        one.world_rank: ExitFacts(
            world_rank=one.world_rank,
            pid=one.pid,
            exit_code=one.exit_code if one.exit_code is None or 0 <= one.exit_code <= 255 else None,
            signal=one.signal,
            oom_kills=one.oom_kills,
        )
        for one in incident.processes
        if one.state is not None and one.state in _GONE
    }
    return ends | {one.world_rank: one for one in incident.exits}


def oom_kills_of(incident: Incident, rank: int) -> int:
    """Processes of a rank's cgroup that were ended for want of memory, as far as anybody tells."""
    told = [one.oom_kills for one in incident.exits if one.world_rank == rank]
    told += [one.oom_kills for one in incident.processes if one.world_rank == rank]
    return max((kills for kills in told if kills is not None), default=0)


def erred_of(lanes: Lanes, now: Now) -> Bools:
    """Ranks of which some round ended with an error (W,): their peers told them that something is wrong."""
    return lanes.ranks_in(now.heard & (np.nan_to_num(now.errors) > 0))


def firsts_of(ends: Mapping[int, ExitFacts], erred: Bools, node: Ints) -> list[int]:
    """Ranks that may have ended first, sorted; none where no time is told. Of those that ended together, the ones that
    no error had reached, if there are any. Whoever was not the first of its own node, by that node's one clock, was not
    the first of all: a launcher ends the ranks beside one that failed, whether an error reached them or not."""
    times = {rank: end.ended_ms for rank, end in ends.items() if end.ended_ms is not None}
    if not times:
        return []
    first = min(times, key=lambda rank: (times[rank], rank))
    of_node: dict[int, float] = {}
    for rank, at in times.items():
        of_node[int(node[rank])] = min(at, of_node.get(int(node[rank]), at))

    def apart_ms(rank: int) -> float:
        return SAME_NODE_MS if node[first] >= 0 and node[first] == node[rank] else BETWEEN_NODES_MS

    def follows(rank: int) -> bool:
        return node[rank] >= 0 and times[rank] - of_node[int(node[rank])] > SAME_NODE_MS

    together = [rank for rank in times if times[rank] - times[first] <= apart_ms(rank) and not follows(rank)]
    return sorted([rank for rank in together if not erred[rank]] or together)


def how(end: ExitFacts) -> str:
    """ "was ended by SIGKILL", "exited with 1", "has ended, nobody saw how"."""
    if end.signal is not None:
        return f"was ended by {signal_name(end.signal)}"
    return "has ended, nobody saw how" if end.exit_code is None else f"exited with {end.exit_code}"


def signal_name(number: int) -> str:
    """SIGKILL for 9; a number that is none has only that."""
    return next((one.name for one in Signals if one.value == number), f"signal {number}")


def cite(incident: Incident, rank: int, end: ExitFacts | None) -> list[EvidenceItem]:
    """The kernel's words about a rank's end and its cgroup."""
    items = []
    if end is not None:
        items.append(EvidenceItem(kind="exit", text=f"the process of rank {rank} {how(end)}", witness="kernel"))
    kills = oom_kills_of(incident, rank)
    if kills:
        text = f"the kernel ended {kills} processes of the cgroup of rank {rank} for want of memory"
        items.append(EvidenceItem(kind="oom", text=text, value=float(kills), witness="kernel"))
    return items
