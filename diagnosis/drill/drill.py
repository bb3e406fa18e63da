"""One drill: a job, a fault in it, what would be recorded of it, and what is true.

The strength of a fault is found on the job itself: a noise-free step is simulated with and without the fault until
the wanted share of the step is lost. So the loss is what the dependencies make of the fault, not what was painted.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import numpy as np

from diagnosis.contracts.errors import OperatorFault
from diagnosis.drill import health as machine
from diagnosis.drill import record
from diagnosis.drill.case import Case, Scene, Truth, joined
from diagnosis.drill.catalogue import KINDS
from diagnosis.drill.layout import Layout, draw_layout
from diagnosis.drill.network import Fabric, Network, build_fabric, fabric_record, hops, track_bandwidth
from diagnosis.drill.probe import Probe
from diagnosis.drill.program import PARTS, Program, compile_step
from diagnosis.drill.summaries import summaries
from diagnosis.drill.timeline import Simulation, Timeline
from diagnosis.drill.weather import STEPS_MAX, Weather, step_work

ATTEMPTS: Final = 24
LOSS_MIN: Final = 0.08
STEPS_TRIED: Final = 2
ROUNDS_OF_SEARCH: Final = 4


@dataclass(frozen=True, slots=True)
class Limits:
    """What a drill may be like; None: drawn. `effect`: share of the step time that is lost. `noise`: spread (sigma of
    the logarithm) of own times. `missing`: share of ranks without reports. `nulls`: share of measured values that are
    null. `fidelity`: "full" or "nccl". `herring`: a finding without effect is added."""

    world_min: int = 16
    world_max: int = 256
    effect: float | None = None
    noise: float | None = None
    missing: float | None = None
    nulls: float | None = None
    fidelity: str | None = None
    herring: bool | None = None

    def __post_init__(self) -> None:
        for name, low, high in (("effect", 0.02, 0.9), ("noise", 0, 0.3), ("missing", 0, 0.5), ("nulls", 0, 0.5)):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise OperatorFault(f"{name} is {value}, must be {low} to {high}")
        if self.fidelity not in (None, "full", "nccl"):
            raise OperatorFault(f"fidelity is {self.fidelity!r}, must be full or nccl")


def kinds() -> tuple[str, ...]:
    """Names of all kinds of drills."""
    return tuple(KINDS)


def draw(seed: int, limits: Limits | None = None) -> Drill:
    """A drill of a kind drawn by weight. The same seed and limits give the same drill."""
    weights = np.array([kind.weight for kind in KINDS.values()])
    chosen = int(_stream(seed, "kind").choice(len(weights), p=weights / weights.sum()))
    return Drill(seed, tuple(KINDS)[chosen], limits)


def files(drill: Drill) -> dict[str, bytes]:
    """The bundle as files by name."""
    out = {"job.json": msgspec.json.encode(drill.job) + b"\n"}
    for name in ("communicators", "frames", "summaries", "health"):
        rows = getattr(drill, name)
        if rows:
            out[f"{name}.jsonl"] = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
    if drill.fabric is not None:
        out["fabric.json"] = msgspec.json.encode(drill.fabric) + b"\n"
    return out


class Drill:
    """A drill of one kind. `job`, `communicators`, `frames`, `summaries`, `health`, `fabric` (None: flows were not
    gathered) are the records of the bundle; `truth` is what a verdict is graded by. `layout`, `timeline`, `strengths`
    (of each fault, 1: none) are the simulator's own and in no file.

    Raises OperatorFault for an unknown kind and where no job within the limits can have this fault.
    """

    def __init__(self, seed: int, kind: str = "healthy", limits: Limits | None = None) -> None:
        if kind not in KINDS:
            raise OperatorFault(f"no drill is called {kind!r}; there are {', '.join(KINDS)}")
        if not 0 <= seed < 1 << 63:
            raise OperatorFault(f"seed is {seed}, must be 0 to 2^63 - 1")
        self.seed, self.kind, self.limits = seed, kind, limits or Limits()
        rng = _stream(seed, f"conditions {kind}")
        fidelity = self.limits.fidelity or ("nccl" if rng.random() < 0.3 else "full")
        noise = float(rng.uniform(0.008, 0.04)) if self.limits.noise is None else self.limits.noise
        stage = _prepare(seed, kind, self.limits, noise)
        self.layout, self.strengths = stage.scene.layout, stage.strengths
        self.step_ms = stage.scene.step_ms
        self.truth = stage.cases[0].truth if len(stage.cases) == 1 else joined(*(c.truth for c in stage.cases))
        self.timeline = stage.timeline
        if self.truth["class"] == "H1":
            self.truth = _came_to_it(self.truth, self.timeline, self.layout)
        protected = tuple(rank for case in stage.cases for rank in case.protected)
        missing = _drawn(rng, self.limits.missing, 0.4, 0.08)
        silent = record.unreported(rng, self.layout, missing, protected)
        if stage.cases[0].unseen:
            silent = set(stage.cases[0].unseen)
        self._frames(stage, fidelity, silent, _drawn(rng, self.limits.nulls, 0.3, 0.03))
        self._evidence(stage, rng, silent, protected, fidelity)

    def _frames(self, stage: _Stage, fidelity: str, silent: set[int], nulls: float) -> None:
        rng = _stream(self.seed, f"frames {self.kind}")
        case, samples, timeline = stage.cases[0], stage.samples, self.timeline
        probe = Probe(self.layout, timeline, fidelity, rng)
        times = list(samples.times)
        armed = samples.healthy
        since = 0.0
        hang = self.truth["anomaly"] == "hang"
        if hang or case.quiet_ms:
            since = record.last_activity_ms(timeline) if hang else float(timeline.starts[timeline.onset].max())
            wait = case.quiet_ms or float(rng.uniform(130_000, 1_500_000))
            times = [*times[: samples.healthy], since + wait]
            armed = len(times)
        by_rank = samples.frames(probe, times, armed)
        if case.exited:
            # A process that is gone has no last sample; perhaps there was one more just before.
            last_word = samples.frames(probe, [since + samples.window_ms / 10], 1) if rng.random() < 0.5 else None
            for rank in case.exited:
                by_rank[rank][-1:] = last_word[rank] if last_word else []
        self.frames = [frame for rank, rows in enumerate(by_rank) if rank not in silent for frame in rows]
        record.blank(rng, self.frames, nulls)
        self.communicators = record.communicator_records(rng, self.layout)

    def _evidence(
        self, stage: _Stage, rng: np.random.Generator, silent: set[int], protected: tuple[int, ...], fidelity: str
    ) -> None:
        layout, case = self.layout, stage.cases[0]
        health = machine.healthy(_stream(self.seed, f"health {self.kind}"), layout, case.busy)
        for each, strength in zip(stage.cases, stage.strengths, strict=True):
            each.witness(health, strength)
        herring = self.limits.herring
        if herring or (herring is None and rng.random() < 0.3):
            apart = np.flatnonzero(~np.isin(layout.node, layout.node[list(protected)]))
            if len(apart):
                rank = int(apart[int(rng.integers(len(apart)))])
                machine.red_herring(rng, health, rank)
                keep = {*self.truth["must_not_drain"], layout.node_names[layout.node[rank]]}
                self.truth = self.truth | {"must_not_drain": sorted(keep)}
        nics = record.nic_names(rng, layout)
        self.job = record.job_record(rng, layout, fidelity, nics)
        self.health = record.health_records(health, layout, nics, silent)
        wanted = self.truth["anomaly"] == "slow" or (self.truth["anomaly"] == "none" and rng.random() < 0.5)
        rows = []
        if wanted and not case.quiet_ms and not case.early:
            rows = summaries(layout, self.timeline, stage.weather, stage.scene.words)
        self.summaries = [row for row in rows if row["worker_rank"] not in silent]
        gathered = any(each.fabric for each in stage.cases) or rng.random() < 0.05
        self.fabric: dict[str, Any] | None = None
        if gathered:
            dead = case.breakage.dead if case.breakage is not None else {}
            self.fabric = fabric_record(rng, layout, stage.scene.fabric, stage.network, dead)


def _came_to_it(right: Truth, timeline: Timeline, layout: Layout) -> Truth:
    """The truth without those whom another's fault keeps inside a round before their own: theirs never showed."""
    kept = np.any([((track.enter < np.inf) & (track.leave == np.inf)).any(0) for track in timeline.tracks.values()], 0)
    ranks = [rank for rank in right["ranks"] if not kept[rank]]
    nodes = sorted({layout.node_names[layout.node[rank]] for rank in ranks})
    return right | {"ranks": ranks, "nodes": nodes} if ranks else right


@dataclass(frozen=True, slots=True, eq=False)
class _Stage:
    """A job with its faults, played."""

    scene: Scene
    cases: list[Case]
    strengths: list[float]
    weather: Weather
    network: Network
    samples: record.Samples
    timeline: Timeline


def _prepare(seed: int, kind: str, limits: Limits, noise: float) -> _Stage:
    """The first job of a few that can have this fault with the wanted effect."""
    last = OperatorFault("no attempt")
    for attempt in range(ATTEMPTS):
        rng = _stream(seed, f"{kind} {attempt}")
        layout = draw_layout(rng, limits.world_min, limits.world_max, frozenset(KINDS[kind].needs))
        fabric, program = build_fabric(rng, layout), compile_step(layout)
        weather = _fair_weather(rng, layout, noise)
        calm = Network(np.ones(layout.world), np.ones(layout.world))
        scene = Scene(rng, layout, fabric, program, _step_ms(layout, fabric, program, weather, calm), _words(rng))
        try:
            cases = KINDS[kind].build(scene)
            strengths = [_strength(scene, weather, case, limits.effect) for case in cases]
            return _play(scene, weather, cases, strengths, _stream(seed, f"noise {kind}"))
        except OperatorFault as fault:
            last = fault
    raise OperatorFault(f"no job of {limits.world_min} to {limits.world_max} ranks can have {kind}: {last}")


def _play(
    scene: Scene, weather: Weather, cases: list[Case], strengths: list[float], noise: np.random.Generator
) -> _Stage:
    layout, case = scene.layout, cases[0]
    calm = Network(np.ones(layout.world), np.ones(layout.world))
    bad = calm
    for each, strength in zip(cases, strengths, strict=True):
        pieces = each.pieces(strength)
        weather = replace(
            each.weather(weather),
            effects=(*weather.effects, *(replace(effect, pattern=each.pattern) for effect in pieces.effects)),
            stalls=(*weather.stalls, *(replace(stall, pattern=each.pattern) for stall in pieces.stalls)),
        )
        if pieces.network is not None:
            bad = pieces.network
    pattern = next((each.pattern for each, x in zip(cases, strengths, strict=True) if each.pieces(x).network), (True,))
    samples = record.Samples(scene.rng, layout, scene.step_ms, case.early, case.pause_ms)
    programs = (scene.program, compile_step(layout, evaluate=True))
    bandwidth = [_bandwidth(layout, scene.fabric, network) for network in (calm, bad)]
    simulation = Simulation(layout, programs, weather, bandwidth, pattern, case.breakage, noise)
    hang = case.truth["anomaly"] == "hang"
    end_ms = np.inf if hang else samples.onset_ms if case.quiet_ms else samples.end_ms
    timeline = simulation.run(samples.onset_ms, end_ms)
    if len(timeline.starts) == STEPS_MAX:
        raise OperatorFault("the job runs on: nothing depends on what breaks")
    return _Stage(scene, cases, strengths, weather, bad, samples, timeline)


def _strength(scene: Scene, weather: Weather, case: Case, effect: float | None) -> float:
    """The strength at which the wanted share of the step is lost. Raises OperatorFault where the fault cannot cost
    a noticeable share in this place."""
    if len(case.strengths) == 1:
        return case.strengths[0]
    share = float(scene.rng.uniform(0.1, 0.45)) if effect is None else effect
    duty = sum(case.pattern) / len(case.pattern)
    # What comes and goes costs more while it is there, so that as much is lost on the whole.
    enough = scene.step_ms * (1.0 + min(share, LOSS_MIN) / (1.0 - min(share, LOSS_MIN)) / duty)
    wanted = scene.step_ms * (1.0 + share / (1.0 - share) / duty)

    def lasting(x: float) -> float:
        pieces = case.pieces(x)
        changed = replace(weather, effects=pieces.effects, stalls=pieces.stalls)
        calm = Network(np.ones(scene.layout.world), np.ones(scene.layout.world))
        return _step_ms(scene.layout, scene.fabric, scene.program, changed, pieces.network or calm)

    if case.discrete:
        tried = [(x, lasting(x)) for x in case.strengths]
        able = [x for x, ms in tried if ms >= enough]
        if not able:
            raise OperatorFault("the fault costs nothing here")
        return min(able, key=lambda x: abs(dict(tried)[x] - wanted))
    low, high = case.strengths
    low_ms, high_ms = scene.step_ms, lasting(high)
    if high_ms < enough:
        raise OperatorFault("the fault costs nothing here")
    if high_ms <= wanted:
        return high
    x = high
    for _ in range(ROUNDS_OF_SEARCH):
        x = low + (high - low) * (wanted - low_ms) / (high_ms - low_ms)
        ms = lasting(x)
        if abs(ms - wanted) < 0.01 * wanted:
            break
        if ms < wanted:
            low, low_ms = x, ms
        else:
            high, high_ms = x, ms
    return x if lasting(x) >= enough else high


def _step_ms(layout: Layout, fabric: Fabric, program: Program, weather: Weather, network: Network) -> float:
    """Length of a step without noise, with the fault active."""
    bandwidth = _bandwidth(layout, fabric, network)
    simulation = Simulation(layout, (program, program), replace(weather, noise=0.0), [bandwidth, bandwidth])
    before = 0.0
    for step in range(STEPS_TRIED):
        before = float(simulation.clock.max())
        own, still = step_work(layout, weather, program.rows, PARTS, step, 0, None)
        simulation.step(program, own + still, 0)
    return float(simulation.clock.max()) - before


def _bandwidth(layout: Layout, fabric: Fabric, network: Network) -> dict[str, Any]:
    table = {name: hops(layout, fabric, network, family) for name, family in layout.families.items()}
    return track_bandwidth(layout, table)


def _fair_weather(rng: np.random.Generator, layout: Layout, noise: float) -> Weather:
    base = 1.0 + 0.02 * rng.standard_normal(layout.shape[1])
    return Weather(base=base, personal=np.exp(0.006 * rng.standard_normal(layout.world)), noise=noise)


def _words(rng: np.random.Generator) -> dict[str, str]:
    loaders = (
        "dataloader.next",
        "DataLoader.__next__",
        "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__",
    )
    return {"start": loaders[int(rng.integers(len(loaders)))], "copy": "Memcpy HtoD (Pinned -> Device)"}


def _drawn(rng: np.random.Generator, fixed: float | None, chance: float, most: float) -> float:
    """The given share, or in `chance` of all drills one up to `most`."""
    share = float(rng.uniform(0.0, most)) if rng.random() < chance else 0.0
    return share if fixed is None else fixed


def _stream(seed: int, purpose: str) -> np.random.Generator:
    """A generator of its own for each purpose, so that more of one thing changes nothing else."""
    return np.random.default_rng([seed, zlib.crc32(purpose.encode())])
