"""What a profiler that looked at a few steps of every rank would sum up (`summaries.jsonl`).

Times are those of the simulated work and rounds; operators share the work by resource, so that a slow clock makes
matrix kernels longer and slow memory makes the others longer.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from diagnosis.drill.layout import Floats, Layout
from diagnosis.drill.timeline import Timeline
from diagnosis.drill.weather import RESOURCES, Weather, active, speed_factors

PROFILED_STEPS: Final = 2
RECENT_STEPS: Final = 6
# Kernels of a pass: share of its healthy time and the resource that it hangs on.
KERNELS: Final[dict[str, tuple[float, str]]] = {
    "gemm_bf16_tn_128x128": (0.62, "sm"),
    "flash_attention_kernel": (0.22, "sm"),
    "layer_norm_kernel": (0.08, "hbm"),
    "elementwise_add_kernel": (0.06, "hbm"),
    "cudaLaunchKernel": (0.02, "host"),
}
QUANTILES: Final = (50.0, 90.0, 95.0, 99.0)
Sample = tuple[str, str, Floats]


def summaries(layout: Layout, timeline: Timeline, weather: Weather, words: dict[str, str]) -> list[dict[str, Any]]:
    """One record per rank over the last whole steps. `words`: names that this job's framework gives to things."""
    steps = _profiled(timeline)
    if not steps:
        return []
    samples = _own(layout, timeline, weather, steps, words) + _rounds(timeline, steps)
    spans = [timeline.starts[step + 1] - timeline.starts[step] for step in steps]
    phases = _phases(timeline, steps)
    phases["comm_barrier_wait_ms"] = _waited(samples, layout.world) / len(steps)
    columns = [(name, kind, _statistics(durations)) for name, kind, durations in samples]
    duration = np.mean(spans, 0)
    out = []
    for rank in range(layout.world):
        operators = []
        for name, kind, stats in columns:
            if stats["invocation_count"][rank] > 0:
                values = {
                    key: round(float(column[rank]), 6 if key.endswith("ms") else 3) for key, column in stats.items()
                }
                values["invocation_count"] = int(values["invocation_count"])
                operators.append({"operator_name": name, "kind": kind} | values)
        out.append(
            {
                "worker_rank": rank,
                "tp_rank": int(layout.tp[rank]),
                "dp_rank": int(layout.dp[rank]),
                "pp_rank": int(layout.pp[rank]),
                "step_id": steps[-1],
                "step_duration_ms": round(float(duration[rank]), 4),
                "profiled_steps": len(steps),
                "phases": {name: round(float(value[rank]), 4) for name, value in phases.items()},
                "operators": operators,
            }
        )
    return out


def _profiled(timeline: Timeline) -> list[int]:
    """The steps that the profiler saw: it was armed because steps were slow, and caught the slowest of the last."""
    begin = np.array([start.max() for start in timeline.starts])
    whole = np.flatnonzero(np.isfinite(begin[1:]))[-RECENT_STEPS:]
    first = int(whole[0]) if len(whole) else 0
    spans = (
        begin[first + PROFILED_STEPS : first + len(whole) + 1] - begin[first : first + len(whole) + 1 - PROFILED_STEPS]
    )
    if len(spans) == 0:
        return []
    chosen = first + int(spans.argmax())
    return list(range(chosen, chosen + PROFILED_STEPS))


def _waited(samples: list[Sample], world: int) -> Floats:
    """Time inside rounds in ms, (W,)."""
    waited = np.zeros(world)
    for _, kind, durations in samples:
        if kind == "comm":
            waited += np.nansum(durations, 0) / 1000.0
    return waited


def _phases(timeline: Timeline, steps: list[int]) -> dict[str, Floats]:
    names = {"fwd": "forward_compute_ms", "bwd": "backward_compute_ms", "start": "host_ms", "copy": "host_ms"}
    names |= {"opt": "optimizer_step_ms", "grad": "optimizer_step_ms"}
    world = timeline.work[0][0].shape[1]
    phases = {name: np.zeros(world) for name in dict.fromkeys(names.values())}
    for step in steps:
        passed = timeline.programs[step].passed
        for row, (kind, _) in enumerate(timeline.programs[step].rows):
            if row in passed:
                phases[names[kind]] += (timeline.work[step][0][row] + timeline.work[step][1][row]) / len(steps)
    return phases


def _own(layout: Layout, timeline: Timeline, weather: Weather, steps: list[int], words: dict[str, str]) -> list[Sample]:
    """Kernels, copies and host functions: (name, kind, durations in us (invocations, W))."""
    tables: dict[str, list[Floats]] = {}
    kinds = {words["copy"]: "memcpy", words["start"]: "host", "cudaLaunchKernel": "host"}
    for step in steps:
        since = step - timeline.onset
        own, still = timeline.work[step]
        program = timeline.programs[step]
        rows = [row if i in program.passed else ("", 0) for i, row in enumerate(program.rows)]
        speed = speed_factors(weather, layout.world, since)
        resource = {name: np.ones(layout.world) for name in RESOURCES}
        for effect in weather.effects:
            if effect.always or active(effect.pattern, since):
                resource[effect.resource] = resource[effect.resource] * effect.factor
        for kind, name in (("start", words["start"]), ("copy", words["copy"]), ("opt", "adam_multi_tensor")):
            chosen = [i for i, row in enumerate(rows) if row[0] == kind]
            waiting = any(stall.operator == name for stall in weather.stalls)
            tables.setdefault(name, []).append(own[chosen] + still[chosen] if waiting else own[chosen])
        passes = [i for i, row in enumerate(rows) if row[0] in ("fwd", "bwd")]
        for name, (share, by) in KERNELS.items():
            tables.setdefault(name, []).append(own[passes] * (share * resource[by] / speed["fwd"]))
        for stall in weather.stalls:
            if active(stall.pattern, since) and stall.operator != words["start"]:
                kinds[stall.operator] = "host"
                chosen = [i for i, row in enumerate(rows) if row[0] == stall.kind]
                tables.setdefault(stall.operator, []).append(np.where(stall.ms > 0, still[chosen], 0.0))
    joined = {name: np.concatenate(parts) * 1000.0 for name, parts in tables.items()}
    return [(name, kinds.get(name, "compute"), np.where(d > 0, d, np.nan)) for name, d in joined.items() if len(d)]


def _rounds(timeline: Timeline, steps: list[int]) -> list[Sample]:
    """Communication kernels by operation, waiting included, as a profiler sees them."""
    out: dict[str, list[Floats]] = {}
    for name, track in timeline.tracks.items():
        at = 0
        for step, program in enumerate(timeline.programs):
            ops = program.slots.get(name, ())
            if step in steps:
                for slot, op in enumerate(ops):
                    with np.errstate(invalid="ignore"):
                        lasting = (track.leave[at + slot] - track.enter[at + slot]) * 1000.0
                    word = "SendRecv" if op.endswith(("Recv", "AllToAll")) else f"{op.split('.')[1]}_{name}"
                    out.setdefault(f"ncclDevKernel_{word}", []).append(np.where(np.isfinite(lasting), lasting, np.nan))
            at += len(ops)
    return [(name, "comm", np.array(parts)) for name, parts in out.items()]


def _statistics(durations: Floats) -> dict[str, Floats]:
    """Columns of the record over invocations (n, W); NaN: no invocation."""
    count = np.isfinite(durations).sum(0)
    filled = np.where(count > 0, durations, 0.0)
    if np.isfinite(filled).all():
        quantiles = np.percentile(filled, QUANTILES, axis=0)
    else:
        quantiles = np.nanpercentile(filled, QUANTILES, axis=0)
    stats = {
        "invocation_count": count.astype(float),
        "total_time_ms": np.nansum(filled, 0) / 1000.0,
        "mean_us": np.nanmean(filled, 0),
    }
    stats |= {f"p{int(q)}_us": value for q, value in zip(QUANTILES, quantiles, strict=True)}
    stats |= {"max_us": np.nanmax(filled, 0), "variance_us2": np.nanvar(filled, 0)}
    return stats
