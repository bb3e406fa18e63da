"""Stalls to test with: what each rank says in its newest sample, one healthy sample before, and what nodes say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from diagnosis.contracts.verdict import Verdict
from diagnosis.drill.steps import settled
from tests.judged import verdict_on

Row = dict[str, Any]
Said = Mapping[int, Mapping[str, Row]]

ROUND = 10
LOOPS = 40
HEALTHY_T_MS, LAST_T_MS, WINDOW_MS, QUIET_MS = 1_000.0, 400_000.0, 1_000.0, 300_000.0
GPUS = 8
NOBODY_STOPS = np.iinfo(np.int64).max // 4


def comm(ranks: Iterable[int], algo: str = "RING", transport: str = "NET", kind: str = "collective") -> Row:
    """A communicator."""
    return {"ranks": list(ranks), "algo": algo, "transport": transport, "kind": kind}


def running(send: int | None = 1, recv: int | None = 0, **more: Any) -> Row:
    """Inside round `ROUND`."""
    return {"seq": ROUND, "state": "running", "send": send, "recv": recv} | more


def done(**more: Any) -> Row:
    """Has left round `ROUND` - 1 and is in none."""
    return {"seq": ROUND - 1, "state": "done", "send": 0, "recv": 0} | more


def enqueued(**more: Any) -> Row:
    """Round `ROUND` is handed to the GPU; no steps are told."""
    return {"seq": ROUND, "done_seq": ROUND - 1, "state": "enqueued", "send": None, "recv": None} | more


def stopped(size: int, at: int, after: int, algo: str = "RING") -> list[tuple[int, int]]:
    """(sent, received) of all members of a round in which one stopped after that many parts."""
    most = np.full((2, 1, size), NOBODY_STOPS)
    links = 1 + (2 * at + 1 < size) + (2 * at + 2 < size) if algo == "TREE" else 1
    most[:, 0, at] = after * (links - (at == 0) if algo == "TREE" else 1)
    send, recv = settled("AllReduce", algo, LOOPS, None, np.ones((1, size), bool), most[0], most[1])
    return list(zip(send[0].tolist(), recv[0].tolist(), strict=True))


def absent(size: int, at: int, algo: str = "RING") -> list[tuple[int, int]]:
    """(sent, received) of all members of a round that one never entered."""
    most = np.full((1, size), NOBODY_STOPS)
    entered = np.ones((1, size), bool)
    entered[0, at] = False
    send, recv = settled("AllReduce", algo, LOOPS, None, entered, most, most)
    return list(zip(send[0].tolist(), recv[0].tolist(), strict=True))


def judged(
    comms: Mapping[str, Row],
    said: Said,
    *,
    fell_silent: Iterable[int] = (),
    healthy: Mapping[int, Mapping[str, Row]] | None = None,
    health: Iterable[Row] = (),
    fabric: Row | None = None,
    world: int | None = None,
) -> Verdict:
    """The verdict. `said`: newest words by rank and communicator; who is not in it is silent, from the beginning or
    (`fell_silent`) after a healthy sample. `healthy`: fields of that sample that differ from the usual."""
    size = world or 1 + max(rank for one in comms.values() for rank in one["ranks"])
    heard = {*said, *fell_silent}
    frames = []
    for rank in range(size):
        mine = [name for name, one in comms.items() if rank in one["ranks"]]
        changed = (healthy or {}).get(rank, {})
        if rank in heard and mine:
            rows = [_usual(comms[name], rank) | {"comm": name} | dict(changed.get(name, {})) for name in mine]
            frames.append(_frame(rank, HEALTHY_T_MS, rows))
        if rank in said:
            words = {"op": "AllReduce", "dtype": "bf16", "count": 1024, "rounds": 0, "age_ms": QUIET_MS}
            frames.append(_frame(rank, LAST_T_MS, [words | {"comm": name} | row for name, row in said[rank].items()]))
    job = {
        "world_size": size,
        "nodes": [f"n{rank // GPUS}" for rank in range(size)],
        "gpus": [rank % GPUS for rank in range(size)],
    }
    files: dict[str, list[Row]] = {
        "job.json": [{"schema": "tocsin.bundle/1", "job_id": 1} | job],
        "communicators.jsonl": [{"comm": name} | one for name, one in comms.items()],
        "frames.jsonl": frames,
        "health.jsonl": list(health),
    }
    if fabric is not None:
        files["fabric.json"] = [fabric]
    return verdict_on(
        {name: b"".join(msgspec.json.encode(row) + b"\n" for row in rows) for name, rows in files.items()}
    )


def guilty(verdict: Verdict) -> list[tuple[str, int | None, str]]:
    """Kind, rank and cause of the culprits."""
    return [(culprit.kind, culprit.rank, culprit.cause) for culprit in verdict.culprits]


def _usual(one: Row, rank: int) -> Row:
    """A healthy window of four rounds."""
    place, size = one["ranks"].index(rank), len(one["ranks"])
    children = (2 * place + 1 < size) + (2 * place + 2 < size)
    steps = children + (place > 0) if one["algo"] == "TREE" else 2 * (size - 1)
    words = {"op": "AllReduce", "dtype": "bf16", "count": 1024, "state": "done", "seq": ROUND - 4}
    return words | {"rounds": 4, "dur_ms": 40.0, "gap_ms": 40.0, "send": 4 * LOOPS * steps, "recv": 4 * LOOPS * steps}


def _frame(rank: int, t_ms: float, comms: list[Row]) -> Row:
    return {"rank": rank, "t_ms": t_ms, "window_ms": WINDOW_MS, "comms": comms}
