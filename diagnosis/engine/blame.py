"""Slow-downs attributed: which ranks' own time and which communicators' transfer explain the loss.

A rank is named when its excess explains a real part of the loss, stands clear of the noise between ranks, and now it
needs more time of its own than its peers (one that was the fastest and is now like all others holds up nobody). A
communicator is named when its transfer grew for a real part of the loss and stands clear of what communicators of its
kind do by themselves. When many are to name, it is not they but the job (or the network) that changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from diagnosis.contracts.incident import Floats
from diagnosis.engine.lanes import Bools, Lanes, Longs, by_kind
from diagnosis.engine.slowness import MAD_TO_SIGMA, Slowness
from diagnosis.engine.thresholds import Thresholds

NAMED_MAX = 256
WHOLE_ROLE = 0.9
DOUBLED = 0.5
STANDS_OUT = 0.3


@dataclass(slots=True)
class Blame:
    """`ranks` by excess, `comms` by part of the loss explained, most guilty first; `part_of_rank`: that of each rank.

    `roles`: roles that are named as a whole; `everybody`: the part of the loss by which all own times grew alike;
    `imbalance`: whole roles grew and no witness says why.
    """

    ranks: list[int] = field(default_factory=list)
    comms: list[int] = field(default_factory=list)
    part_of_rank: dict[int, float] = field(default_factory=dict)
    roles: set[int] = field(default_factory=set)
    everybody: float = 0.0
    imbalance: bool = False


def attribute(lanes: Lanes, slow: Slowness, limits: Thresholds) -> Blame:
    """Who explains the loss of a job that is slower than it was."""
    blame = Blame()
    with np.errstate(invalid="ignore", divide="ignore"):
        part = np.where(slow.lost_ms > 0, slow.excess_ms / slow.lost_ms, 0.0)
        shared = slow.common_ms / slow.lost_ms
    told = shared[np.isfinite(shared)]
    blame.everybody = float(np.median(told)) if len(told) else 0.0
    _name_ranks(lanes, slow, np.nan_to_num(part), limits, blame)
    _name_comms(lanes, slow, limits, blame)
    return blame


def _name_ranks(lanes: Lanes, slow: Slowness, part: Floats, limits: Thresholds, blame: Blame) -> None:
    with np.errstate(invalid="ignore"):
        clear = slow.excess_ms > limits.rank_noise_factor * slow.noise_ms
        clear &= _apart_ms(slow, clear) > STANDS_OUT * slow.excess_ms
        large = slow.excess_ms > limits.own_time_part_min * slow.unit_ms
        explains = part >= limits.blame_share_min
    named = np.flatnonzero(clear & large & explains)
    nodes = lanes.incident.job.node
    many = len(named) > limits.named_share_max * lanes.world
    blame.roles = _whole_roles(slow.role, named)
    if many and len(np.unique(nodes[named])) > max(1, limits.named_share_max * len(np.unique(nodes))):
        return
    order = named[np.argsort(-slow.excess_ms[named], kind="stable")]
    blame.ranks = [int(rank) for rank in order][:NAMED_MAX]
    blame.part_of_rank = {rank: float(min(part[rank], 1.0)) for rank in blame.ranks}


def _apart_ms(slow: Slowness, clear: Bools) -> Floats:
    """Each rank's own time above the middle of those of its role that did not grow (W,); infinite without such."""
    usual = np.full(len(slow.role), -np.inf)
    steady = ~clear & np.isfinite(slow.own_ms)
    for members in by_kind(np.arange(len(slow.role)), slow.role):
        if steady[members].any():
            usual[members] = np.median(slow.own_ms[members][steady[members]])
    return np.asarray(slow.own_ms - usual, np.float64)


def _whole_roles(role: Longs, named: Longs) -> set[int]:
    """Roles nearly all of whose ranks are named, where there are several roles."""
    sizes, counts = np.bincount(role), np.bincount(role[named], minlength=int(role.max(initial=0)) + 1)
    whole = np.flatnonzero((sizes > 1) & (counts >= WHOLE_ROLE * sizes))
    return {int(number) for number in whole} if (sizes > 0).sum() > 1 else set()


def _name_comms(lanes: Lanes, slow: Slowness, limits: Thresholds, blame: Blame) -> None:
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = slow.transfer_excess_ms / slow.transfer_ms
        share = np.where(relative >= DOUBLED, 0.5, 1.0) * limits.transfer_share_min
        grown = (slow.transfer_part >= share) & (relative >= limits.transfer_growth_min)
    told = np.flatnonzero(np.isfinite(slow.transfer_excess_ms))
    named: list[int] = []
    for here in by_kind(told, lanes.kind[told]):
        excess = slow.transfer_excess_ms[here]
        quiet = excess[~grown[here]]
        spread = MAD_TO_SIGMA * float(np.median(np.abs(quiet - np.median(quiet)))) if len(quiet) >= 3 else 0.0
        middle = float(np.median(quiet)) if len(quiet) >= 3 else 0.0
        chosen = here[grown[here] & (excess > middle + limits.rank_noise_factor * spread)]
        named += [int(comm) for comm in chosen]
    blame.comms = sorted(named, key=lambda comm: (-slow.transfer_part[comm], comm))[:NAMED_MAX]
