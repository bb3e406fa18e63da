"""Profiling windows of a job: who asks for one, whether it may be, who took part, and when it is over.

One window at a time. Whoever asks while one is under way joins it (`Asked.joined`): it is being looked at already. A
window that would cost more than the job's budget is refused, unless a person asks.

A window waits for nobody for long. Ranks are armed by their nodes beforehand, each by the rounds of its own anchor
(`engine.window_plan`), so all profile the same steps although nobody tells them to begin. A rank that was armed late
takes part from the next step on; that its steps are not all of the window's, its summary says. A rank whose process
has ended, whose node is silent or has not confirmed, that has not come so far, or that has come and says nothing, is
reported as just that; the others' summaries count.

`look` once a cycle. Times are the controller's clock in seconds. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from diagnosis.engine.pace import Bools
from diagnosis.engine.profiling_rules import WindowRules
from diagnosis.engine.window_budget import Budget
from diagnosis.engine.window_plan import Anchor, Plan, Scene, plan_of, sound

CAUSES_MAX: Final = 16
WHY_CHARS_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class Ask:
    """`cause`: a sentence. `person`: somebody wants it, whatever it costs. `steps`: None: as the rules say.
    `stacks`: with the stacks of Python functions, which cost a job several times as much."""

    cause: str
    person: bool = False
    steps: int | None = None
    stacks: bool = False


class Asked(StrEnum):
    """What became of an ask."""

    PLANNED = "planned"
    JOINED = "joined"
    BUSY = "busy"  # the window under way is without stacks
    OVER_BUDGET = "over budget"
    NO_STEP = "no step"  # no rank's steps are known (now)


class Absence(StrEnum):
    """Why a rank has no summary."""

    REFUSED = "refused"  # its node says why
    GONE = "gone"  # its process has ended
    UNREACHED = "unreached"  # it is on no communicator that tells steps
    UNSEEN = "unseen"  # its node has not reported lately, or never
    NOT_ARMED = "not armed"  # its node has not confirmed that it was told
    LATE = "late"  # it has not come to the end of the window
    SILENT = "silent"  # it has, and sent nothing


class Ending(StrEnum):
    """Why a window is over."""

    COMPLETE = "complete"
    QUORUM = "quorum"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"


class Receipt(StrEnum):
    """What became of a summary."""

    TAKEN = "taken"
    TWICE = "twice"
    STRANGER = "stranger"  # of no window that is open, or of a rank that is not in it


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """A window that is over. `told`: ranks with a summary of all its steps, `partly`: of some of them, or of others.
    `begun`: whether any rank came to it."""

    window: int
    plan: Plan
    causes: tuple[str, ...]
    stacks: bool
    ending: Ending
    begun: bool
    told: tuple[int, ...]
    partly: tuple[int, ...]
    missing: Mapping[Absence, tuple[int, ...]]
    refusals: Mapping[int, str]

    @property
    def text(self) -> str:
        """A sentence for people."""
        world = len(self.told) + len(self.partly) + sum(map(len, self.missing.values()))
        parts = [f"{len(self.told)} of {world} ranks told of {self.plan.steps} steps"]
        parts += [f"{len(self.partly)} of a part of them"] * bool(self.partly)
        parts += [f"{len(ranks)} {why.value}" for why, ranks in self.missing.items()]
        return ", ".join(parts)


@dataclass(slots=True, eq=False)
class Window:
    """A window that is planned or under way."""

    number: int
    plan: Plan
    planned_at: float
    stacks: bool
    person: bool
    causes: list[str]
    anchor: NDArray[np.int32]  # (world,) index of each rank's, -1: none
    armed: Bools  # (world,) like the next two
    told: Bools
    whole: Bools
    refusals: dict[int, str] = field(default_factory=dict)
    quorum_at: float | None = None
    begun: bool = False

    @property
    def not_armed(self) -> NDArray[np.int64]:
        """Ranks whose nodes have not confirmed; tell them (again)."""
        return np.flatnonzero((self.anchor >= 0) & ~self.armed & ~self.told)

    def anchor_of(self, rank: int) -> Anchor | None:
        """By what a rank knows the window."""
        place = int(self.anchor[rank]) if 0 <= rank < len(self.anchor) else -1
        return self.plan.anchors[place] if place >= 0 else None


class Windows:
    """Of one attempt of a job; `budget` is the job's. `rules` may be replaced at any time. `number`: of the last window
    of this attempt, where there were some before (numbers are not used twice)."""

    def __init__(self, rules: WindowRules | None = None, budget: Budget | None = None, number: int = 0) -> None:
        self.rules = rules or WindowRules()
        self.budget = budget or Budget()
        self.number = number
        self.current: Window | None = None

    def ask(self, ask: Ask, scene: Scene, now: float) -> Asked:
        """Ask for a window. Where it is planned or joined it is `current`."""
        window = self.current
        if window is not None:
            if ask.stacks and not window.stacks:
                return Asked.BUSY
            if ask.cause not in window.causes and len(window.causes) < CAUSES_MAX:
                window.causes.append(ask.cause)
            return Asked.JOINED
        scene = sound(scene)
        plan = plan_of(scene, ask.steps, now, self.rules)
        if plan is None:
            return Asked.NO_STEP
        if not ask.person:
            if plan.steps > self.budget.left(now, self.rules):
                return Asked.OVER_BUDGET
            self.budget.take(plan.steps, now, self.rules)
        self.number += 1
        anchor = np.full(scene.world_size, -1, np.int32)
        for place, one in enumerate(plan.anchors):
            anchor[one.ranks] = place
        armed, told, whole = np.zeros((3, scene.world_size), np.bool_)
        self.current = Window(
            self.number, plan, now, ask.stacks, ask.person, [ask.cause], anchor, armed=armed, told=told, whole=whole
        )
        return Asked.PLANNED

    def arm(self, window: int, ranks: Iterable[int]) -> None:
        """A node confirms that it has told these ranks of a window."""
        current = self.current
        if current is not None and current.number == window:
            for rank in ranks:
                if current.anchor_of(rank) is not None:
                    current.armed[rank] = True

    def refuse(self, window: int, rank: int, why: str) -> None:
        """A node says that a rank has no summary of a window, and why (its own profiler runs, say)."""
        current = self.current
        if current is not None and current.number == window and current.anchor_of(rank) is not None:
            current.refusals.setdefault(rank, why[:WHY_CHARS_MAX])

    def tell(self, window: int, rank: int, first_step: int | None, last_step: int | None) -> Receipt:
        """A summary of a rank has come: of the steps that begin with these rounds of its anchor."""
        current = self.current
        anchor = current.anchor_of(rank) if current is not None and current.number == window else None
        if current is None or anchor is None:
            return Receipt.STRANGER
        if current.told[rank]:
            return Receipt.TWICE
        current.told[rank] = current.begun = True
        current.refusals.pop(rank, None)
        current.whole[rank] = (first_step, last_step) == (anchor.begin_of(0), anchor.begin_of(current.plan.steps - 1))
        return Receipt.TAKEN

    def look(self, scene: Scene, now: float) -> Outcome | None:
        """What has become of the window, once it is over."""
        window = self.current
        if window is None:
            return None
        state = _State(window, sound(scene), now, self.rules)
        window.begun = window.begun or state.begun
        if not state.awaited.any():
            return self._over(window, state, Ending.COMPLETE)
        if window.quorum_at is None and window.told.any() and state.share_told >= self.rules.quorum:
            window.quorum_at = now
        if window.quorum_at is not None and now - window.quorum_at >= self.rules.grace_s:
            return self._over(window, state, Ending.QUORUM)
        if now >= window.plan.deadline_at:
            return self._over(window, state, Ending.DEADLINE)
        return None

    def cancel(self, scene: Scene, now: float) -> Outcome | None:
        """End the window that is under way: a person says so, or the job is over. Nodes must be told."""
        window = self.current
        if window is None:
            return None
        state = _State(window, sound(scene), now, self.rules)
        window.begun = window.begun or state.begun
        return self._over(window, state, Ending.CANCELLED)

    def _over(self, window: Window, state: _State, ending: Ending) -> Outcome:
        if not window.begun and not window.person:
            self.budget.give_back(window.plan.steps, window.planned_at)
        self.current = None
        return Outcome(
            window=window.number,
            plan=window.plan,
            causes=tuple(window.causes),
            stacks=window.stacks,
            ending=ending,
            begun=window.begun,
            told=_ranks(window.whole),
            partly=_ranks(window.told & ~window.whole),
            missing=state.missing(),
            refusals=dict(window.refusals),
        )


class _State:
    """Where the ranks of a window are now. All arrays (world,)."""

    def __init__(self, window: Window, scene: Scene, now: float, rules: WindowRules) -> None:
        world = len(window.anchor)
        pulses = scene.pulses[scene.pulses["rank"] < world]
        rank = pulses["rank"]
        self._window = window
        self._gone, self._fresh = np.zeros(world, np.bool_), np.zeros(world, np.bool_)
        self._gone[rank] = pulses["gone"]
        self._fresh[rank] = pulses["told_at"] >= now - rules.stale_s
        self._refused = np.zeros(world, np.bool_)
        self._refused[list(window.refusals)] = True
        self._past_end = np.zeros(world, np.bool_)
        self.begun = False
        for place, anchor in enumerate(window.plan.anchors):
            of = (window.anchor[rank] == place) & (pulses["comm"] == np.uint64(anchor.comm_id))
            past_end = pulses["round"][of] >= anchor.begin_of(window.plan.steps)
            self._past_end[window.anchor == place] = past_end.any()  # of those who tell another communicator's steps
            self._past_end[rank[of]] = past_end
            self.begun |= bool((pulses["round"][of] >= anchor.first_round).any())
        self._anchored = window.anchor >= 0
        can_tell = self._anchored & ~self._refused & ~self._gone
        self.awaited: Bools = can_tell & ~window.told
        self.share_told = float(window.told.sum() / max(1, ((can_tell & self._fresh) | window.told).sum()))

    def missing(self) -> dict[Absence, tuple[int, ...]]:
        """Every rank without a summary, under one reason."""
        left = ~self._window.told
        found: dict[Absence, tuple[int, ...]] = {}
        for why, so in (
            (Absence.REFUSED, self._refused),
            (Absence.GONE, self._gone),
            (Absence.UNSEEN, ~self._fresh),
            (Absence.UNREACHED, ~self._anchored),
            (Absence.NOT_ARMED, ~self._window.armed),
            (Absence.LATE, ~self._past_end),
            (Absence.SILENT, np.ones(len(left), np.bool_)),
        ):
            ranks = _ranks(left & so)
            if ranks:
                found[why] = ranks
            left = left & ~so
        return found


def _ranks(chosen: Bools) -> tuple[int, ...]:
    return tuple(np.flatnonzero(chosen).tolist())
