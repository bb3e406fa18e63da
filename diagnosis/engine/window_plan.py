"""Which steps of a job all its ranks profile: named by what every one of them counts alike.

Nothing numbers a job's steps: clocks of nodes differ, and a rank that joins late or loses a look counts less. But the
rounds of a communicator are numbered alike on all its members, from 1, by the program itself (docs/probe-frame.md). So
a step is named by the round with which it begins, on a communicator that the rank is a member of: its *anchor*. A
window is `steps` steps from round `first_round` on. A rank that was stopped comes to that round when it comes to it;
operations that come in between (an evaluation) shift where in the program it lies, for all members alike.

Where one communicator has all ranks, all profile the same steps, whatever happens. Else a few communicators, the
largest first, are taken until each rank has an anchor. Which step of one is which step of another follows from when
they began; ranks of one job are never a step apart, so that is right (`exact` False) where a step takes longer than the
nodes' words are late.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Final

import numpy as np
from numpy.typing import NDArray

from diagnosis.engine.pace import Bools
from diagnosis.engine.profiling_rules import WindowRules

RANKS_MAX: Final = 1 << 20
ROUNDS_MAX: Final = 1 << 62
STEP_ROUNDS_MAX: Final = 1 << 20
STEP_MS_MIN: Final = 1e-3
STEP_MS_MAX: Final = 86_400_000.0
Table = NDArray[np.void]

PULSE_DTYPE: Final = np.dtype(
    [
        ("rank", "<i4"),
        ("told_at", "<f8"),  # when this was so, by the controller's clock in seconds
        ("gone", "?"),  # its process has ended
        ("comm", "<u8"),  # the communicator that tells its steps, 0: none
        ("step_rounds", "<i4"),  # of a step on it
        ("round", "<i8"),  # entered last on it, from 1
        ("place", "<i4"),  # which of the step's rounds that is, from 1; 0: not known
        ("entered_at", "<f8"),  # when; NaN: not known
        ("step_ms", "<f8"),
    ]
)


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    """What is known of a job now. `pulses`: PULSE_DTYPE, one row a rank; `members`: ranks by communicator."""

    world_size: int
    pulses: Table
    members: Mapping[int, NDArray[np.int64]]


@dataclass(frozen=True, slots=True, eq=False)
class Anchor:
    """The rounds by which some ranks know the window. `ranks` (N,): ascending."""

    comm_id: int
    first_round: int
    step_rounds: int
    ranks: NDArray[np.int64]

    def begin_of(self, step: int) -> int:
        """The round with which step 0, 1, ... of the window begins; of the step after the last: where it ends."""
        return self.first_round + step * self.step_rounds


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A window that is to be. Times are expectations; `unreached` (N,): ranks without an anchor."""

    anchors: tuple[Anchor, ...]
    steps: int
    step_ms: float
    begins_at: float
    ends_at: float
    deadline_at: float
    exact: bool
    unreached: NDArray[np.int64]


def sound(scene: Scene) -> Scene:
    """The scene without rows that make no sense, and one row a rank."""
    pulses, world = scene.pulses, min(max(scene.world_size, 0), RANKS_MAX)
    pulses = pulses[(pulses["rank"] >= 0) & (pulses["rank"] < world) & np.isfinite(pulses["told_at"])]
    pulses = pulses[np.argsort(pulses["told_at"], kind="stable")[::-1]]
    pulses = pulses[np.unique(pulses["rank"], return_index=True)[1]]
    return Scene(world, pulses, scene.members)


def plan_of(scene: Scene, steps: int | None, now: float, rules: WindowRules) -> Plan | None:
    """The next window of a job that can be reached; None where no rank knows its steps. `scene` is `sound`."""
    pulses = scene.pulses
    telling = pulses[_tells(pulses) & ~pulses["gone"] & (pulses["told_at"] >= now - rules.stale_s)]
    if not len(telling):
        return None
    step_ms = float(np.median(telling["step_ms"]))
    step_s = step_ms / 1e3
    count = _steps(steps, step_s, rules)
    wanted = np.ones(scene.world_size, np.bool_)
    wanted[pulses["rank"][pulses["gone"]]] = False
    chosen = _cover(telling, scene, wanted)
    if not chosen:
        return None
    earliest_at = now + max(rules.lead_s, rules.lead_steps * step_s)
    begins_at, anchors = np.nan, []
    for comm_id, ranks in chosen:
        head, rounds, head_at = _head(telling[telling["comm"] == comm_id], step_s)
        if np.isnan(begins_at):  # the largest: the others follow it
            ahead = ceil((earliest_at - head_at) / step_s)
            begins_at = head_at + max(1, ahead) * step_s
        ahead = max(1, round((begins_at - head_at) / step_s))
        anchors.append(Anchor(comm_id, head + ahead * rounds, rounds, ranks))
    ends_at = begins_at + count * step_s
    deadline_at = now + rules.slack * (ends_at - now) + rules.answer_s
    unreached = np.flatnonzero(wanted)
    return Plan(tuple(anchors), count, step_ms, begins_at, ends_at, deadline_at, len(anchors) == 1, unreached)


def _tells(pulses: Table) -> Bools:
    tells: Bools = (pulses["comm"] != 0) & (pulses["step_ms"] >= STEP_MS_MIN) & (pulses["step_ms"] <= STEP_MS_MAX)
    tells &= (pulses["step_rounds"] > 0) & (pulses["step_rounds"] <= STEP_ROUNDS_MAX)
    tells &= (pulses["round"] > 0) & (pulses["round"] < ROUNDS_MAX) & np.isfinite(pulses["entered_at"])
    return tells & (pulses["place"] >= 0) & (pulses["place"] <= pulses["step_rounds"])


def _steps(asked: int | None, step_s: float, rules: WindowRules) -> int:
    if asked is not None:
        return min(max(1, asked), rules.steps_asked_max)
    count = min(max(ceil(rules.window_s / step_s), rules.steps_min), rules.steps_max)
    return min(count, max(1, int(rules.window_max_s / step_s)))


def _cover(telling: Table, scene: Scene, wanted: Bools) -> list[tuple[int, NDArray[np.int64]]]:
    """Communicators that tell steps, largest first, each with the ranks that the ones before it lack. What they reach
    is struck off `wanted`."""
    of: list[tuple[int, NDArray[np.int64]]] = []
    for comm_id in np.unique(telling["comm"]).tolist():
        told = telling["rank"][telling["comm"] == comm_id].astype(np.int64)
        ranks = np.union1d(told, np.asarray(scene.members.get(comm_id, told), np.int64))
        of.append((comm_id, ranks[(ranks >= 0) & (ranks < scene.world_size)]))
    chosen = []
    for comm_id, ranks in sorted(of, key=lambda one: (-len(one[1]), one[0])):
        new = ranks[wanted[ranks]]
        if len(new):
            wanted[new] = False
            chosen.append((comm_id, new))
    return chosen


def _head(told: Table, step_s: float) -> tuple[int, int, float]:
    """Of a communicator: the round with which a step began, the rounds of a step, and when it began.

    By the rank in the middle of those who tell it, so that one that is wrong does not matter. When it told, it was in
    that step: one that stands in it has not come further since.
    """
    kinds, counts = np.unique(told["step_rounds"], return_counts=True)
    rounds = int(kinds[counts.argmax()])
    told = told[told["step_rounds"] == rounds]
    when = told["entered_at"] - told["round"] / rounds * step_s  # when round 0 would have been
    middle = told[np.argsort(when, kind="stable")[len(told) // 2]]
    passed = max(0, int(middle["place"]) - 1)
    told_at, began_at = float(middle["told_at"]), float(middle["entered_at"]) - passed / rounds * step_s
    return int(middle["round"]) - passed, rounds, min(max(began_at, told_at - step_s), told_at)
