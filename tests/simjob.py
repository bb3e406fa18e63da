"""A small synchronous job in numbers, for tests of the engine and the control loop: no processes, no clock.

Each step every rank works for its own time (`gap`), then all meet in one collective that ends a fixed transfer time
after the last has come. Reports are built with the product's own wire structs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from diagnosis.contracts import report as wire
from diagnosis.contracts.columns import empty, null_of, pack

COMM_ID = 0xC0FFEE
SIGNATURE = 0x1234


@dataclass
class SimRank:
    """State of one rank as its frame would tell it. Times in ms on the job's own clock. `ended`: when, and its
    signal or its exit code."""

    rank: int
    node: str
    gpu: int
    pid: int
    seq: int = 0
    done: int = 0
    since_ms: float = 0.0
    running: bool = False
    state: str = "S"
    signature: int = SIGNATURE
    errors: int = 0
    ended: tuple[float, int | None, int | None] | None = None
    rounds: list[tuple[int, float, float]] = field(default_factory=list)


class SimJob:
    """`ranks` ranks, `per_node` on each node of `nodes`. Advance with `steps`, freeze with `hang`."""

    def __init__(self, ranks: int = 8, per_node: int = 2, job_id: int = 7, restart: int = 0, uid: int = 1000) -> None:
        self.job_id, self.restart, self.uid, self.now_ms = job_id, restart, uid, 0.0
        self.ranks = [SimRank(r, f"gpu{r // per_node + 1:03d}", r % per_node, 1000 + r) for r in range(ranks)]

    @property
    def nodes(self) -> list[str]:
        """Node names in order."""
        return list(dict.fromkeys(rank.node for rank in self.ranks))

    def steps(self, count: int, gap_ms: Callable[[int, int], float], transfer_ms: float = 10.0) -> None:
        """`gap_ms(rank, step)` is each rank's own time before the step's collective."""
        for step in range(count):
            gaps = [gap_ms(rank.rank, step) for rank in self.ranks]
            end = self.now_ms + max(gaps) + transfer_ms
            for rank, gap in zip(self.ranks, gaps, strict=True):
                rank.seq += 1
                rank.done += 1
                rank.rounds.append((rank.seq, gap, end - self.now_ms - gap))
                rank.since_ms, rank.running = end, False
            self.now_ms = end

    def hang(self, absent: Iterable[int] = (), inside: Iterable[int] = (), ahead: Iterable[int] = ()) -> None:
        """The next collective begins and never ends: `absent` ranks do not enter, `inside` ones are stopped in it,
        `ahead` ones could leave it and stand in the one after."""
        for rank in self.ranks:
            if rank.rank in absent:
                continue
            rank.seq += 1
            rank.running, rank.since_ms = True, self.now_ms
            if rank.rank in ahead:
                rank.done, rank.seq = rank.seq, rank.seq + 1
        for number in inside:
            self.ranks[number].state = "T"

    def kill(self, number: int, signal: int = 9, others_code: int = 1) -> None:
        """A signal ends one rank in the middle of the next collective; half a second later all others have exited."""
        for rank in self.ranks:
            rank.seq += 1
            rank.since_ms, rank.state = self.now_ms, "X"
            if rank.rank == number:
                rank.running, rank.ended = True, (self.now_ms, signal, None)
            else:
                rank.done, rank.errors = rank.seq, 1
                rank.ended = (self.now_ms + 500 + rank.rank, None, others_code)

    def sample(self, node: str) -> wire.JobSample:
        """What the daemon of `node` says now; rounds are told once."""
        here = [rank for rank in self.ranks if rank.node == node]
        ranks = empty(wire.RANK_DTYPE, len(here))
        comms = np.zeros(len(here), wire.COMM_DTYPE)
        told: list[tuple[int, int, int, int, int]] = []
        for row, rank in enumerate(here):
            known = (rank.rank, len(self.ranks), rank.gpu, rank.gpu, rank.pid, 0, ord(rank.state))
            for name, value in zip(wire.RANK_DTYPE.names or (), known, strict=False):
                ranks[name][row] = value
            comms["send"] = comms["recv"] = null_of(np.dtype("u4"))
            comms["idle_seq"] = null_of(np.dtype("u8"))
            comms[row]["rank_row"], comms[row]["comm_id"] = row, COMM_ID
            comms[row]["comm_size"], comms[row]["comm_rank"] = len(self.ranks), rank.rank
            comms[row]["state"] = wire.CommState.RUNNING if rank.running else wire.CommState.DONE
            comms[row]["seq"], comms[row]["done_seq"] = rank.seq, rank.done
            comms[row]["age_us"] = int((self.now_ms - rank.since_ms) * 1000)
            comms[row]["signature"] = rank.signature
            comms[row]["errors"] = rank.errors
            if rank.ended is not None:
                at_ms, signal, code = rank.ended
                ranks["ended_us"][row] = max(0, int((self.now_ms - at_ms) * 1000))
                if signal is not None:
                    ranks["exit_signal"][row] = signal
                if code is not None:
                    ranks["exit_code"][row] = code
            told += [(row, seq, int(gap * 1000), int(dur * 1000), SIGNATURE) for seq, gap, dur in rank.rounds]
            rank.rounds = []
        rounds = np.array(told, wire.ROUND_DTYPE) if told else np.zeros(0, wire.ROUND_DTYPE)
        return wire.JobSample(self.job_id, self.restart, self.uid, pack(ranks), pack(comms), pack(rounds))
