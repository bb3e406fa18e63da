"""What the ranks' own time is made of, and what makes it longer.

Own time is work on a resource: matrix kernels on the clock of the streaming multiprocessors ("sm"), kernels bound by
memory ("hbm"), copies over PCIe ("pcie"), the host ("host": loading data, launching). A fault makes one resource of
some ranks slower by a factor, or stops them for a while. Nothing here knows what the job will look like: how long a
step takes comes out of the timeline.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from diagnosis.drill.layout import Floats, Layout

STEPS_MAX: Final = 128
# Shares of each kind of work by resource. Attention and matrix kernels follow the clock, norms and element-wise
# kernels the memory.
SHARES: Final[dict[str, dict[str, float]]] = {
    "fwd": {"sm": 0.84, "hbm": 0.14, "host": 0.02},
    "bwd": {"sm": 0.84, "hbm": 0.14, "host": 0.02},
    "start": {"host": 1.0},
    "copy": {"pcie": 1.0},
    "grad": {"hbm": 1.0},
    "opt": {"hbm": 1.0},
}
RESOURCES: Final = ("sm", "hbm", "pcie", "host")


@dataclass(frozen=True, slots=True, eq=False)
class Effect:
    """One resource of some ranks is slower. `factor` (W,): times as long. `pattern`: active or not, per step from the
    onset on, repeated; `always`: before the onset too."""

    resource: str
    factor: Floats
    pattern: tuple[bool, ...] = (True,)
    always: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Stall:
    """Some ranks stand still. `kind`: of the work in which they do; `ms` (W,): in all, per step; spread over `pieces`
    pieces of that work. `operator`: what a profiler sees."""

    kind: str
    ms: Floats
    operator: str
    pattern: tuple[bool, ...] = (True,)
    pieces: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Weather:
    """Everything that decides own times. `base` (PP,): stage factors by design. `personal` (W,): each GPU's own pace.
    `sequence_sigma`: spread of micro-batch lengths before and from the onset on. `scale`: job-wide factor from the
    onset on. `evaluate`: steps from the onset on that only run forwards."""

    base: Floats
    personal: Floats
    noise: float
    effects: tuple[Effect, ...] = ()
    stalls: tuple[Stall, ...] = ()
    sequence_sigma: tuple[float, float] = (0.0, 0.0)
    scale: float = 1.0
    evaluate: bool = False
    warmup: dict[int, Floats] = field(default_factory=dict)


def active(pattern: tuple[bool, ...], since: int) -> bool:
    """Is a thing with this pattern active in the step `since` steps after the onset (negative: before)?"""
    return since >= 0 and pattern[since % len(pattern)]


def speed_factors(weather: Weather, world: int, since: int) -> dict[str, Floats]:
    """Times as long as healthy, per kind of work, (W,) each."""
    resource = {name: np.ones(world) for name in RESOURCES}
    for effect in weather.effects:
        if effect.always or active(effect.pattern, since):
            resource[effect.resource] = resource[effect.resource] * effect.factor
    return {kind: sum((w * resource[r] for r, w in shares.items()), np.zeros(world)) for kind, shares in SHARES.items()}


def step_work(
    layout: Layout,
    weather: Weather,
    rows: tuple[tuple[str, int], ...],
    parts: int,
    step: int,
    since: int,
    rng: np.random.Generator | None,
) -> tuple[Floats, Floats]:
    """Own time of one step in ms, (rows, W): at work, and standing still. `since`: steps after the onset. Without a
    generator there is no noise."""
    world = layout.world
    factors = speed_factors(weather, world, since)
    pace = {kind: np.ones(world) for kind in SHARES}
    pace["fwd"] = pace["bwd"] = weather.base[layout.pp] * weather.personal
    scale = weather.scale if since >= 0 else 1.0
    work = np.empty((len(rows), world))
    divide = {"fwd": parts, "bwd": parts}
    for kind, base in layout.work_ms.items():
        chosen = [i for i, (name, _) in enumerate(rows) if name == kind]
        grown = scale if kind in ("fwd", "bwd") else 1.0
        work[chosen] = base / divide.get(kind, 1) * factors[kind] * pace[kind] * grown
    if rng is not None:
        work *= np.exp(weather.noise * rng.standard_normal(work.shape))
        sigma = weather.sequence_sigma[since >= 0]
        if sigma > 0:
            _lengths(layout, rows, work, sigma, rng)
    still = np.zeros_like(work)
    for stall in weather.stalls:
        if active(stall.pattern, since):
            _stall(rows, still, stall, rng)
    if step in weather.warmup:
        still[0] += weather.warmup[step]
    return work, still


def _lengths(
    layout: Layout, rows: tuple[tuple[str, int], ...], work: Floats, sigma: float, rng: np.random.Generator
) -> None:
    """Packed sequences: a micro-batch of one replica is longer or shorter on all its stages alike."""
    lengths = np.exp(sigma * rng.standard_normal((layout.micro_batches, layout.shape[2])) - sigma * sigma / 2)
    for i, (kind, micro_batch) in enumerate(rows):
        if kind in ("fwd", "bwd"):
            work[i] *= lengths[micro_batch, layout.dp]


def _stall(rows: tuple[tuple[str, int], ...], still: Floats, stall: Stall, rng: np.random.Generator | None) -> None:
    chosen: NDArray[np.int64] = np.array([i for i, (kind, _) in enumerate(rows) if kind == stall.kind], np.int64)
    pieces = min(stall.pieces, len(chosen))
    if rng is not None:
        chosen = rng.permutation(chosen)
    shares = np.full(pieces, 1.0) if rng is None else rng.uniform(0.6, 1.4, pieces)
    still[chosen[:pieces]] += (shares / pieces)[:, None] * stall.ms
