"""What looks like a fault of a rank and is none: pauses, other phases, uneven work, findings without effect."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from diagnosis.drill import health as machine
from diagnosis.drill.case import ONCE, Case, Pieces, Scene, Truth, truth
from diagnosis.drill.health import Health
from diagnosis.drill.weather import Effect, Stall, Weather


def healthy(scene: Scene) -> list[Case]:
    """Nothing happens."""
    return [Case(_nothing(scene))]


def checkpoint(scene: Scene) -> list[Case]:
    """All ranks write a checkpoint between two steps: over by the last samples, or still at it."""
    over = scene.chance(0.5)
    still_ms = float(scene.rng.uniform(1.5, 5.0)) * scene.step_ms if over else 3e5

    def witness(health: Health, x: float) -> None:
        del x
        for row in health.host.values():
            row["iowait_pct"] = round(float(scene.rng.uniform(2, 14)), 1)

    case = _all_still(scene, still_ms, 0.05, "torch.save", witness)
    return [case if over else replace(case, pause_ms=0.0, quiet_ms=float(scene.rng.uniform(15_000, 90_000)))]


def recompilation(scene: Scene) -> list[Case]:
    """A new shape: every rank compiles for a while, each as long as it takes."""
    return [_all_still(scene, float(scene.rng.uniform(2.0, 6.0)) * scene.step_ms, 0.25, "torch._dynamo.compile")]


def startup(scene: Scene) -> list[Case]:
    """The job has just begun: its first step compiles, there is no healthy past."""
    longest = float(scene.rng.uniform(2.0, 8.0)) * scene.step_ms
    first = longest * scene.rng.uniform(0.6, 1.0, scene.layout.world)

    def change(weather: Weather) -> Weather:
        return replace(weather, warmup={0: first, 1: first * 0.15})

    return [Case(_nothing(scene), weather=change, early=True)]


def idle_end(scene: Scene) -> list[Case]:
    """Training is over; the processes have not ended yet."""
    case = _all_still(scene, np.inf, 0.0, "exit")
    return [replace(case, pause_ms=0.0, quiet_ms=float(scene.rng.uniform(20_000, 600_000)), busy=False)]


def evaluation(scene: Scene) -> list[Case]:
    """Forwards only: no gradients, no norm, shorter steps."""
    return [Case(_nothing(scene), weather=lambda weather: replace(weather, evaluate=True))]


def spike(scene: Scene) -> list[Case]:
    """One rank is late once."""
    ms = np.zeros(scene.layout.world)
    ms[scene.rank()] = float(scene.rng.uniform(0.5, 2.5)) * scene.step_ms
    pieces = Pieces(stalls=(Stall("fwd", ms, "cudaStreamSynchronize"),))
    return [Case(_nothing(scene), lambda x: pieces, pattern=ONCE, pause_ms=float(ms.max()))]


def stage_imbalance(scene: Scene) -> list[Case]:
    """The last pipeline stage has the loss as well and is slower, as it always was."""
    factor = float(scene.rng.uniform(1.2, 1.6))

    def change(weather: Weather) -> Weather:
        base = weather.base.copy()
        base[-1] *= factor
        return replace(weather, base=base)

    return [Case(_nothing(scene), weather=change)]


def sequence_imbalance(scene: Scene) -> list[Case]:
    """Packed sequences of uneven length: another replica is late in every step, as always."""
    sigma = float(scene.rng.uniform(0.15, 0.4))
    return [Case(_nothing(scene), weather=lambda weather: replace(weather, sequence_sigma=(sigma, sigma)))]


def workload_imbalance(scene: Scene) -> list[Case]:
    """From now on the data are uneven."""
    sigma = float(scene.rng.uniform(0.4, 0.7))
    right = _jobwide(scene, ["workload_imbalance", "workload_change"])
    return [Case(right, weather=lambda weather: replace(weather, sequence_sigma=(0.0, sigma)))]


def workload_change(scene: Scene) -> list[Case]:
    """From now on every rank has more to do, all alike."""
    scale = float(scene.rng.uniform(1.2, 2.0))
    right = _jobwide(scene, ["workload_change"])
    return [Case(right, weather=lambda weather: replace(weather, scale=scale))]


def power_cap(scene: Scene) -> list[Case]:
    """Most GPUs run at their power cap, as GPUs under load do; nothing is lost."""

    def witness(health: Health, x: float) -> None:
        del x
        for row in health.nvml.values():
            if scene.chance(0.7):
                row |= {"clocks_event_reasons": machine.POWER_CAP, "power_w": machine.POWER_W - 1}
                row["sm_clock_mhz"] = machine.SM_MHZ - 15 * int(scene.rng.integers(0, 6))

    return [Case(_nothing(scene), witness=witness)]


def innocent_finding(scene: Scene) -> list[Case]:
    """Hardware findings on several nodes, none of which costs time."""

    def witness(health: Health, x: float) -> None:
        del x
        for _ in range(int(scene.rng.integers(2, 5))):
            machine.red_herring(scene.rng, health, scene.rank())

    return [Case(_nothing(scene), witness=witness)]


def jobwide_throttle(scene: Scene) -> list[Case]:
    """The cooling of the room fails: all GPUs are throttled. No rank is to blame and no drain helps."""
    factor = float(scene.rng.uniform(1.2, 1.7))

    def witness(health: Health, x: float) -> None:
        del x
        for row in health.nvml.values():
            row |= {
                "sm_clock_mhz": int(machine.SM_MHZ / factor) // 15 * 15,
                "temperature_c": int(scene.rng.integers(86, 92)),
            }
            row["clocks_event_reasons"] = machine.SW_THERMAL | machine.HW_THERMAL

    pieces = Pieces(effects=(Effect("sm", np.full(scene.layout.world, factor)),))
    right = _jobwide(scene, ["gpu_clock_throttle", "workload_change", "unknown"])
    return [Case(right, lambda x: pieces, witness=witness)]


def _nothing(scene: Scene) -> Truth:
    return truth("none", None, keep=scene.layout.node_names)


def _jobwide(scene: Scene, causes: list[str]) -> Truth:
    return truth(
        "slow", None, causes=causes, action="notify", kind="job", keep=scene.layout.node_names, any_of=["none"]
    )


def _all_still(
    scene: Scene, ms: float, spread: float, operator: str, witness: machine.Witness = machine.no_witness
) -> Case:
    each = ms * np.exp(spread * scene.rng.standard_normal(scene.layout.world))
    pieces = Pieces(stalls=(Stall("start", each, operator),))
    return Case(_nothing(scene), lambda x: pieces, pattern=ONCE, witness=witness, pause_ms=float(each.max()))
