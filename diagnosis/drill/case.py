"""What a fault is to the simulator: what it changes, what witnesses say, what is true."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from diagnosis.drill.health import Witness, no_witness
from diagnosis.drill.layout import Layout, Ranks
from diagnosis.drill.network import Fabric, Network
from diagnosis.drill.program import Program
from diagnosis.drill.timeline import Break
from diagnosis.drill.weather import STEPS_MAX, Effect, Stall, Weather

Truth = dict[str, Any]

ONCE: Final = (True,) + (False,) * (STEPS_MAX - 1)


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    """The job in which a fault is placed. `step_ms`: its healthy step without noise. `words`: framework's names."""

    rng: np.random.Generator
    layout: Layout
    fabric: Fabric
    program: Program
    step_ms: float
    words: dict[str, str]

    def rank(self, among: Ranks | None = None) -> int:
        """A random rank."""
        choice = np.arange(self.layout.world) if among is None else among
        return int(choice[int(self.rng.integers(len(choice)))])

    def chance(self, share: float) -> bool:
        """True in `share` of all drills."""
        return bool(self.rng.random() < share)

    def pattern(self) -> tuple[bool, ...]:
        """Permanent, or coming and going."""
        if self.chance(0.75):
            return (True,)
        return ((True, False), (True, True, False), (True, True, True, False, False))[int(self.rng.integers(3))]

    def only(self, ranks: Iterable[int], factor: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """(W,) of ones with `factor` at `ranks`."""
        table = np.ones(self.layout.world)
        table[list(ranks)] = factor
        return table

    def node_of(self, rank: int) -> str:
        """Node name of a rank."""
        return self.layout.node_names[int(self.layout.node[rank])]

    def on_node(self, rank: int) -> list[int]:
        """All ranks on the node of `rank`."""
        return [int(r) for r in np.flatnonzero(self.layout.node == self.layout.node[rank])]


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """What a fault of a given strength changes. Networks: shares that are left, None where it is healthy."""

    effects: tuple[Effect, ...] = ()
    stalls: tuple[Stall, ...] = ()
    network: Network | None = None


MakePieces = Callable[[float], Pieces]


def nothing(strength: float) -> Pieces:
    """No change at any strength."""
    del strength
    return Pieces()


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One fault in its place.

    `pieces(x)`: what it changes at strength x >= 1 (1: nothing). `strengths`: the least and greatest, or the only
    possible ones where `discrete`. `witness(health, x)`: what machines show. `pattern`: active steps from the onset.
    `breakage`: what stops, in a hang. `weather`: changes to the weather that have no strength. `fabric`: flows were
    gathered. `exited`: ranks whose process is gone; `unseen`: ranks that never reported. `quiet_ms`: the last sample is
    taken so long after the last thing that happened. `pause_ms`: samples go on so much longer, to see the job recover.
    `early`: samples begin before the first step ends. `busy`: the GPUs work at the end. `protected`: ranks on whose
    nodes nothing else is wrong or missing.
    """

    truth: Truth
    pieces: MakePieces = nothing
    strengths: tuple[float, ...] = (1.0,)
    discrete: bool = False
    witness: Witness = no_witness
    pattern: tuple[bool, ...] = (True,)
    breakage: Break | None = None
    weather: Callable[[Weather], Weather] = lambda weather: weather
    fabric: bool = False
    exited: tuple[int, ...] = ()
    unseen: tuple[int, ...] = ()
    quiet_ms: float = 0.0
    pause_ms: float = 0.0
    early: bool = False
    busy: bool = True
    protected: tuple[int, ...] = ()


def truth(
    anomaly: str,
    class_: str | None,
    *,
    ranks: Iterable[int] = (),
    nodes: Iterable[str] = (),
    links: Iterable[str] = (),
    causes: Iterable[str] = (),
    action: str = "none",
    kind: str = "rank",
    keep: Iterable[str] = (),
    any_of: Iterable[str] = (),
) -> Truth:
    """What is right, in the form in which verdicts are graded. `keep`: nodes that must not be drained."""
    return {
        "anomaly": anomaly,
        "class": class_,
        "ranks": sorted(ranks),
        "nodes": sorted(set(nodes)),
        "links": list(links),
        "causes": list(causes),
        "action": action,
        "kind": kind,
        "must_not_drain": sorted(set(keep)),
        "any_of": list(any_of),
    }


def joined(first: Truth, second: Truth) -> Truth:
    """The truth where two faults are at work."""
    classes = {first["class"], second["class"]}
    actions = {first["action"], second["action"]}
    out = truth(
        first["anomaly"],
        "S3" if classes == {"S1", "S2"} else first["class"],
        action="drain" if "drain" in actions else first["action"],
    )
    for key in ("ranks", "nodes", "links", "causes", "must_not_drain"):
        out[key] = sorted({*first[key], *second[key]})
    return out
