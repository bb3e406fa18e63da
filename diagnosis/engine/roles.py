"""Roles: which ranks are peers. Only peers may be compared.

The last pipeline stage is slower by design in 39 % of real straggling jobs (ByteDance/NYU, OSDI'25), so a rank is
never compared with "all others". A role is the pipeline stage where the job tells its groups. Otherwise it is
inferred: ranks in communicators of the same sizes, kinds and transports, at the same place of the point-to-point
chain, do the same work.
"""

from __future__ import annotations

import numpy as np

from diagnosis.contracts.incident import Kind
from diagnosis.engine.lanes import Lanes, Longs


def roles_of(lanes: Lanes) -> Longs:
    """A role number per rank (W,)."""
    groups = lanes.incident.job.groups.get("pp", ())
    if groups:
        stage = np.zeros(lanes.world, np.int64)
        for group in groups:
            for place, rank in enumerate(group):
                if 0 <= rank < lanes.world:
                    stage[rank] = place
        return stage
    return _inferred(lanes)


def _inferred(lanes: Lanes) -> Longs:
    comms = lanes.incident.communicators
    p2p = comms.kind == Kind.P2P
    place = lanes.start[lanes.comm]
    position = np.arange(lanes.count) - place
    mark = lanes.kind[lanes.comm]
    mark = np.where(p2p[lanes.comm], mark * 64 + np.minimum(position, 63) + 1, mark * 64)
    # An order-free sum of mixed marks: equal multisets give equal sums.
    mixed = (mark.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    signature = np.zeros(lanes.world, np.uint64)
    np.add.at(signature, lanes.rank, mixed)
    _, role = np.unique(signature, return_inverse=True)
    return np.asarray(role, np.int64)
