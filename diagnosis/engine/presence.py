"""What the transfer steps of a round tell of a member that tells nothing itself: has it begun the round?

*Ring* (all-reduce, all-gather, reduce-scatter): a member sends its own chunk as soon as it is inside, whatever the
others do. So one whose successor has received anything has begun; one whose successor is inside and has received
nothing has not. A dead connection to the successor looks the same from there, but then the member itself took what
its predecessor sent, and that one could send more than the slots of one connection hold. In a chain (broadcast, reduce)
a member sends what it received: its successor's steps prove that it has begun, their absence nothing.

*Tree*: a member passes up what has come from all below it, and nothing comes down before the root has it. So one that
sent anything proves that all below it have begun, and a leaf that received anything that all have.

*No steps needed*: NCCL tells when a kernel begins. A round that is enqueued, runs on others and never began here, while
nothing else of NCCL runs here, lacks this rank as if it had not called it.

A rank stands in one round at a time. So one that has begun a round which still stands is a victim like all others
in it, and a round of another communicator that lacks it waits for a victim.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from diagnosis.contracts.incident import Kind, State
from diagnosis.engine.lanes import Bools, Lanes, Now
from diagnosis.engine.shapes import (
    CHAIN_OPS,
    RING_OPS,
    SLOTS,
    algorithm_is,
    heap_above,
    is_heap,
    neighbours,
    usual_steps,
)
from diagnosis.evidence.signatures import signature_parts

TREES_MAX: Final = 256

Signs = NDArray[np.int8]


def filled(lanes: Lanes, now: Now) -> Now:
    """The same with what the other fields of a lane imply where its state or its newest round is not told.

    Who has a round that is not finished has entered or enqueued it. Who says that he is inside, and not in which round,
    is in the one after his last, or in the newest that the others of his communicator are in.
    """
    state = np.where(now.heard & (now.state == State.UNKNOWN) & (now.seq > now.done), State.ENQUEUED, now.state)
    inside = now.heard & ((state == State.RUNNING) | (state == State.ENQUEUED))
    lost = inside & np.isnan(now.seq)
    seq, done = now.seq, now.done
    if lost.any():
        newest = np.fmax(lanes.over_members(np.where(inside, seq, np.nan), np.fmax), 0.0)[lanes.comm]
        seq = np.where(lost, np.where(np.isnan(done), newest, done + 1), seq)
        done = np.where(lost & np.isnan(done), seq - 1, done)
    return _kept_out(lanes, replace(now, state=state.astype(np.uint8), seq=seq, done=done))


def _kept_out(lanes: Lanes, now: Now) -> Now:
    """The same with the lanes marked whose round runs on other members and has not begun on this one.

    The program has called it, and the GPU is not there: its stream is behind other work, or stuck. It runs no other
    operation of its library either, so the rank waits for no rank that is known, and the others wait for it. Where more
    are outside than inside, whatever it is is not the doing of those outside.
    """
    collective = lanes.incident.communicators.kind[lanes.comm] != Kind.P2P
    runs = now.pending & (now.state == State.RUNNING) & collective
    newest = lanes.over_members(np.where(runs, now.done + 1, -1.0), np.maximum)[lanes.comm]
    out = now.heard & ~runs & collective & (newest > 0) & (now.idle_seq < newest) & (now.seq >= newest)
    out &= (lanes.members_in(out) < lanes.members_in(runs))[lanes.comm]
    if not out.any():
        return now
    state = np.where(out, State.ENQUEUED, now.state).astype(np.uint8)
    return replace(now, state=state, done=np.where(out, newest - 1, now.done), kept_out=out)


def begun(lanes: Lanes, now: Now, stalled: Bools) -> Signs:
    """For each lane (M,) 1: has begun the round that is waited for in its communicator, -1: has not, 0: nobody knows.

    `stalled` (C,): communicators in which somebody has long waited. Told are only lanes of communicators whose
    algorithm is known.
    """
    waits = now.pending & stalled[lanes.comm]
    wanted = lanes.over_members(np.where(waits, now.done + 1, -1.0), np.maximum)[lanes.comm]
    inside = waits & (now.done + 1 == wanted)
    result = np.zeros(lanes.count, np.int8)
    _in_rings(lanes, now, inside, result)
    result[waits & ((now.send > 0) | (now.recv > 0))] = 1
    _in_trees(lanes, now, stalled, inside, result)
    return result


def _in_trees(lanes: Lanes, now: Now, stalled: Bools, inside: Bools, result: Signs) -> None:
    trees = np.flatnonzero(stalled & algorithm_is(lanes, "TREE") & (lanes.members_in(now.heard) < lanes.sizes))
    usual = usual_steps(lanes) if len(trees) else np.empty(0)
    for comm in trees[:TREES_MAX]:
        members = lanes.of_comm(int(comm))
        if not is_heap(usual[members]):
            continue
        here, leaf = inside[members], 2 * np.arange(lanes.sizes[comm]) + 1 >= lanes.sizes[comm]
        all_begun = bool((here & leaf & (now.recv[members] > 0)).any())
        sent = here & (now.send[members] > 0)
        for place in np.flatnonzero(~now.heard[members]).tolist():
            if all_begun or any(sent[above] for above in heap_above(place)):
                result[members.start + place] = 1


def _in_rings(lanes: Lanes, now: Now, inside: Bools, result: Signs) -> None:
    ring = algorithm_is(lanes, "RING") & (lanes.incident.communicators.kind != Kind.P2P) & (lanes.sizes > 1)
    of_ring = ring[lanes.comm]
    words = lanes.incident.frames.signatures
    ops = [signature_parts(text).op for text in words]
    circular = np.array([op in RING_OPS for op in ops] + [False])[now.signature]
    linear = np.array([op in CHAIN_OPS for op in ops] + [False])[now.signature]
    before, after = neighbours(lanes)
    followed = of_ring & inside[after]
    received = now.recv[after]
    # A predecessor that sent more than the slots hold was taken from.
    taken = inside[before] & (now.send[before] > SLOTS)
    result[followed & circular[after] & (received == 0) & ~taken] = -1
    result[followed & (circular | linear)[after] & (received > 0)] = 1
