"""Transfer steps inside a round: how many a whole round has, and how far a round comes that cannot end.

A collective is a marked graph: a rank may send its next chunk when it has received the one that it depends on and
the receiver has a free slot (NCCL has 8 per connection); a rank that is not there does neither. Such a graph has one
final state whatever the order of events: every counter stands at the greatest value that all its constraints allow.
All constraints are differences (x <= y + constant), so that state is a shortest-path problem, solved here for many
rounds at once by relaxation (Bellman-Ford). A round in which everybody takes part and nothing is broken ends with all
counters at their totals.

* ring: chunk s + 1 is sent after chunk s came in. With one member missing its successor has sent 1 and received 0,
  the next 2 and 1, and so on.
* broadcast: the same without the way back to the root, which sends without receiving.
* tree: a node passes a chunk up when all its children's have come, and down when its parent's has.
* all-to-all: every pair by itself.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

SLOTS: Final = 8


def totals(op: str, algo: str, n: int, loops: int, root: int | None) -> tuple[Ints, Ints]:
    """Steps (sent, received) of a whole round per position. Shapes (n,), (n,)."""
    position = np.arange(n)
    if op == "Broadcast":
        distance = (position - (root or 0)) % n
        return np.where(distance < n - 1, loops, 0), np.where(distance > 0, loops, 0)
    if algo == "TREE":
        children = (2 * position + 1 < n).astype(np.int64) + (2 * position + 2 < n)
        parent = (position > 0).astype(np.int64)
        return loops * (children + parent), loops * (children + parent)
    each = loops * (n - 1) * (2 if op == "AllReduce" else 1)
    return np.full(n, each), np.full(n, each)


def settled(
    op: str, algo: str, loops: int, root: int | None, entered: Bools, send_cap: Ints, recv_cap: Ints
) -> tuple[Ints, Ints]:
    """Steps (sent, received) at which rounds come to rest.

    `entered` (B, n): who takes part. `send_cap`, `recv_cap` (B, n): steps after which a position can send or receive
    no more (a stopped GPU, a dead link); a large number where nothing is broken. Returns (B, n), (B, n).
    """
    n = entered.shape[1]
    send_total, recv_total = totals(op, algo, n, loops, root)
    send_limit = np.where(entered, np.minimum(send_cap, send_total), 0)
    recv_limit = np.where(entered, np.minimum(recv_cap, recv_total), 0)
    if op == "AllToAll":
        return _pairwise(loops, entered, send_limit, recv_limit)
    if algo == "TREE":
        return _tree(loops, entered, send_limit, recv_limit)
    sends, recvs = np.arange(n), n + np.arange(n)
    before, after = np.roll(np.arange(n), 1), np.roll(np.arange(n), -1)
    if op == "Broadcast":
        start = root or 0
        tail = (start - 1) % n
        chain = np.arange(n) != start
        edges = [
            (recvs[chain], sends[before][chain], 0),
            (sends[chain & (sends != tail)], recvs[chain & (sends != tail)], 0),
            (sends[sends != tail], n + after[sends != tail], SLOTS),
        ]
    else:
        edges = [
            (sends, recvs, 1),
            (recvs, before, 0),
            (recvs, sends, 0),
            (sends, n + after, SLOTS),
        ]
    state = _relax(np.concatenate([send_limit, recv_limit], 1), edges)
    return state[:, :n], state[:, n:]


def _relax(state: Ints, edges: list[tuple[Ints, Ints, int]]) -> Ints:
    """The greatest state below `state` with state[:, to] <= state[:, source] + weight for every edge."""
    for _ in range(2 * state.shape[1]):
        before = state.copy()
        for to, source, weight in edges:
            state[:, to] = np.minimum(state[:, to], state[:, source] + weight)
        if np.array_equal(before, state):
            break
    return state


def _pairwise(loops: int, entered: Bools, send_limit: Ints, recv_limit: Ints) -> tuple[Ints, Ints]:
    """All pairs exchange at once: full exchange with those who are there, a full buffer for those who are not."""
    others = entered.sum(1, keepdims=True) - entered
    absent = entered.shape[1] - 1 - others
    send = loops * others + min(loops, SLOTS) * absent
    return np.minimum(send_limit, send), np.minimum(recv_limit, loops * others)


def _tree(loops: int, entered: Bools, send_limit: Ints, recv_limit: Ints) -> tuple[Ints, Ints]:
    """Chunks up (`up[i]` passed by i to its parent, `root` counts as passing to itself) and down, then the sums."""
    n = entered.shape[1]
    position = np.arange(n)
    children = (2 * position + 1 < n).astype(np.int64) + (2 * position + 2 < n)
    links = np.maximum(children + (position > 0), 1)
    can = np.where(entered, np.minimum(loops, np.minimum(send_limit, recv_limit) // links), 0)
    state = np.concatenate([can, can], 1)
    child, parent = position[1:], (position[1:] - 1) // 2
    left = child % 2 == 1
    edges = [
        # A parent passes on what all its children have passed; a child runs ahead of its parent by the slots.
        *((parent[side], child[side], 0) for side in (left, ~left)),
        (child, parent, SLOTS),
        # What came up at the root goes down; a node passes down what came from above.
        (np.array([n]), np.array([0]), 0),
        (n + child, n + parent, 0),
        *((n + parent[side], n + child[side], SLOTS) for side in (left, ~left)),
    ]
    state = _relax(state, edges)
    up, down = state[:, :n], state[:, n:]
    send = np.where(position > 0, up, 0) + children * down
    recv = children * up + np.where(position > 0, down, 0)
    return np.minimum(send, send_limit), np.minimum(recv, recv_limit)
