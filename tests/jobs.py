"""A small synchronous job as a bundle, told by the time that each rank needs of its own: for tests of single rules.

All ranks do the same: work, then enter a round of `dp`, which ends `transfer` after the last has come. Every window is
as long as its rounds take.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any, Final

ROUNDS: Final = 20
GPUS_PER_NODE: Final = 4

Own = Callable[[int, int], float]


def bundle(
    world: int,
    samples: int,
    own: Own,
    transfer: Callable[[int], float] = lambda sample: 2.0,
    silent: Collection[int] = (),
    edit: Callable[[int, int, dict[str, Any]], None] = lambda rank, sample, entry: None,
    **more: list[dict[str, Any]],
) -> dict[str, bytes]:
    """Files of a bundle. `own(rank, sample)`, `transfer(sample)`: ms per round; `silent`: ranks without frames;
    `edit` changes the entry of a rank's sample; `more`: further files (`health`, `summaries`) as lists of lines."""
    job = {
        "schema": "tocsin.bundle/1",
        "job_id": 7,
        "world_size": world,
        "nodes": [f"n{rank // GPUS_PER_NODE}" for rank in range(world)],
        "gpus": [rank % GPUS_PER_NODE for rank in range(world)],
    }
    comms = [{"comm": "dp", "ranks": list(range(world)), "kind": "collective", "algo": "RING", "transport": "NET"}]
    frames = []
    for rank in range(world):
        clock = 1000.0 * rank
        for sample in range(samples):
            slowest = max(own(other, sample) for other in range(world))
            unit, waits = slowest + transfer(sample), slowest + transfer(sample) - own(rank, sample)
            clock += ROUNDS * unit
            entry = {
                "comm": "dp",
                "seq": ROUNDS * (sample + 1),
                "op": "AllReduce",
                "state": "done",
                "rounds": ROUNDS,
                "dur_ms": ROUNDS * waits,
                "dur_min_ms": waits,
                "dur_max_ms": waits,
                "gap_ms": ROUNDS * own(rank, sample),
            }
            edit(rank, sample, entry)
            frame = {"rank": rank, "t_ms": clock, "window_ms": ROUNDS * unit, "comms": [entry]}
            if rank not in silent:
                frames.append(frame)
    files: dict[str, list[dict[str, Any]]] = {"communicators": comms, "frames": frames, **more}
    lines = {f"{name}.jsonl": "".join(json.dumps(line) + "\n" for line in rows) for name, rows in files.items()}
    return {"job.json": json.dumps(job).encode(), **{name: text.encode() for name, text in lines.items()}}
