"""What the simulated cluster must obey: times come from dependencies, culprits wait least, steps obey the algorithm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from diagnosis.drill import Drill, Limits
from diagnosis.drill.layout import draw_layout, step_totals
from diagnosis.drill.network import Network, build_fabric, hops, track_bandwidth
from diagnosis.drill.program import PARTS, compile_step
from diagnosis.drill.steps import SLOTS, settled, totals
from diagnosis.drill.timeline import LATENCY_MS, Simulation
from diagnosis.drill.weather import Effect, Weather, step_work

FULL = Limits(world_max=64, fidelity="full", nulls=0.0, missing=0.0, herring=False)
FAR = 1 << 40


def _last(drill: Drill) -> dict[int, dict[str, Any]]:
    return {frame["rank"]: frame for frame in drill.frames}


def _own_ms(drill: Drill, frame: dict[str, Any]) -> float:
    """Per round of its busiest communicator: windows hold more or fewer steps."""
    rounds = int(max(entry["rounds"] for entry in frame["comms"]))
    return float(sum(entry["gap_ms"] for entry in frame["comms"])) / rounds


def _waited_ms(drill: Drill, frame: dict[str, Any]) -> float:
    rounds = int(max(entry["rounds"] for entry in frame["comms"]))
    return float(sum(entry["dur_ms"] for entry in frame["comms"])) / rounds


def test_a_step_without_noise_lasts_as_long_as_its_critical_path() -> None:
    """Data parallelism alone: the slowest rank's own work, then the rings one after the other."""
    rng = np.random.default_rng(0)
    layout = next(x for x in (draw_layout(rng, 16, 16, frozenset()) for _ in range(200)) if x.shape == (1, 1, 16))
    fabric, program = build_fabric(rng, layout), compile_step(layout)
    calm = Network(np.ones(16), np.ones(16))
    bandwidth = track_bandwidth(layout, {n: hops(layout, fabric, calm, f) for n, f in layout.families.items()})
    weather = Weather(base=np.ones(1), personal=np.linspace(1.0, 1.2, 16), noise=0.0)
    simulation = Simulation(layout, (program, program), weather, [bandwidth, bandwidth])
    own, still = step_work(layout, weather, program.rows, PARTS, 0, -1, None)
    simulation.step(program, own + still, -1)
    expected = 0.0
    for track, ops in program.slots.items():
        for op in ops:
            expected += LATENCY_MS[track] + layout.ops[op].hop_bytes / bandwidth[track][0] / 1e6
    work = {kind: sum(own[i] for i, row in enumerate(program.rows) if row[0] == kind) for kind, _ in program.rows}
    before = sum(work[kind] for kind in ("start", "copy", "fwd", "bwd"))
    slowest = before.max() + work["grad"].max() + work["opt"].max()
    assert simulation.clock.max() == pytest.approx(expected + slowest, rel=1e-6)


def test_a_slow_rank_costs_what_it_is_late_and_its_peers_wait_as_long() -> None:
    rng = np.random.default_rng(1)
    layout = next(x for x in (draw_layout(rng, 16, 16, frozenset()) for _ in range(200)) if x.shape == (1, 1, 16))
    fabric, program = build_fabric(rng, layout), compile_step(layout)
    calm = Network(np.ones(16), np.ones(16))
    bandwidth = track_bandwidth(layout, {n: hops(layout, fabric, calm, f) for n, f in layout.families.items()})
    lasted = []
    for factor in (1.0, 1.5):
        slow = np.ones(16)
        slow[5] = factor
        weather = Weather(np.ones(1), np.ones(16), 0.0, (Effect("sm", slow),))
        simulation = Simulation(layout, (program, program), weather, [bandwidth, bandwidth])
        own, still = step_work(layout, weather, program.rows, PARTS, 0, 0, None)
        simulation.step(program, own + still, 0)
        enter, leave = (simulation.store["dp"][0][i, 0] for i in (0, 1))
        lasted.append((float(simulation.clock.max()), leave - enter, own.sum(0)))
    lost = lasted[1][0] - lasted[0][0]
    assert lost == pytest.approx(lasted[1][2][5] - lasted[0][2][5], rel=1e-6)
    waits = lasted[1][1] - lasted[0][1]
    assert waits[5] == pytest.approx(0.0, abs=1e-6)
    assert np.delete(waits, 5) == pytest.approx(np.full(15, lost), rel=1e-6)


@pytest.mark.parametrize("kind", ["gpu_clock_throttle", "hbm_degraded", "gc_stall", "unknown_slow", "allocator_stall"])
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_the_culprits_own_time_grew_most_and_it_waits_least_of_its_group(kind: str, seed: int) -> None:
    drill = Drill(seed, kind, FULL)
    (culprit,) = drill.truth["ranks"]
    frames: dict[int, list[dict[str, Any]]] = {}
    for frame in drill.frames:
        frames.setdefault(frame["rank"], []).append(frame)
    grew = {r: _own_ms(drill, rows[-1]) / _own_ms(drill, rows[0]) for r, rows in frames.items()}
    assert max(grew, key=lambda rank: grew[rank]) == culprit
    family = drill.layout.families.get("tp") or drill.layout.families["dp"]
    (group,) = (row.tolist() for row in family.groups if culprit in row)
    waited = {rank: _waited_ms(drill, frames[rank][-1]) for rank in group}
    assert min(waited, key=lambda rank: waited[rank]) == culprit


@pytest.mark.parametrize("effect", [0.1, 0.3])
@pytest.mark.parametrize("kind", ["gpu_clock_throttle", "transceiver_errors", "workload_change"])
def test_the_wanted_share_of_the_step_is_lost(kind: str, effect: float) -> None:
    limits = Limits(world_max=64, fidelity="full", effect=effect, noise=0.0)
    drill = next(d for d in (Drill(seed, kind, limits) for seed in range(20)) if not _comes_and_goes(d))
    if kind == "workload_change":
        effect = 1.0 - _step(drill, before=True) / _step(drill, before=False)
        assert effect > 0.1
        return
    lost = 1.0 - _step(drill, before=True) / _step(drill, before=False)
    assert lost == pytest.approx(effect, abs=0.03)


def _step(drill: Drill, before: bool) -> float:
    starts = np.array([start.max() for start in drill.timeline.starts])
    onset = drill.timeline.onset
    part = starts[1 : onset + 1] if before else starts[onset + 1 :]
    return float(np.diff(part).mean())


def _comes_and_goes(drill: Drill) -> bool:
    starts = np.array([start.max() for start in drill.timeline.starts])
    spans = np.diff(starts[drill.timeline.onset + 1 :])
    return bool(spans.max() > 1.05 * spans.min())


@pytest.mark.parametrize("seed", range(4))
def test_a_healthy_job_keeps_its_pace_and_nobody_stands_out(seed: int) -> None:
    drill = Drill(seed, "healthy", Limits(world_max=64, noise=0.01, fidelity="full", nulls=0.0))
    assert _step(drill, before=False) == pytest.approx(_step(drill, before=True), rel=0.02)
    assert _step(drill, before=True) == pytest.approx(drill.step_ms, rel=0.05)


def test_one_missing_member_leaves_a_ring_in_the_known_staircase() -> None:
    here = np.ones((1, 8), bool)
    here[0, 5] = False
    far = np.full((1, 8), FAR)
    send, recv = settled("AllReduce", "RING", 64, None, here, far, far)
    assert send[0].tolist() == [3, 4, 5, 6, 7, 0, 1, 2]
    assert recv[0].tolist() == [2, 3, 4, 5, 6, 0, 0, 1]


@pytest.mark.parametrize(("op", "algo"), [("AllReduce", "RING"), ("AllGather", "RING"), ("Broadcast", "RING"),
                                          ("AllReduce", "TREE"), ("AllToAll", "RING")])  # fmt: skip
@pytest.mark.parametrize("n", [2, 3, 8, 16])
def test_steps_at_rest_are_those_that_an_eager_ring_of_events_reaches(op: str, algo: str, n: int) -> None:
    """The greatest solution of the constraints is a whole round if all are there, and less than it if one is not."""
    root = 0 if op == "Broadcast" else None
    whole = totals(op, algo, n, 12, root)
    far = np.full((1, n), FAR)
    full = settled(op, algo, 12, root, np.ones((1, n), bool), far, far)
    assert full[0][0].tolist() == whole[0].tolist()
    assert full[1][0].tolist() == whole[1].tolist()
    for absent in range(n):
        here = np.ones((1, n), bool)
        here[0, absent] = False
        send, recv = (x[0] for x in settled(op, algo, 12, root, here, far, far))
        assert send[absent] == recv[absent] == 0
        assert (send <= whole[0]).all()
        assert (recv <= whole[1]).all()
        assert send.sum() - recv.sum() <= SLOTS * n
        assert send.sum() >= recv.sum()
        if op != "Broadcast":
            assert (recv[np.arange(n) != absent] < whole[1][np.arange(n) != absent]).all()


def test_a_ring_played_event_by_event_stops_in_the_same_state() -> None:
    rng = np.random.default_rng(7)
    for _ in range(20):
        n, loops = int(rng.integers(2, 9)), int(rng.integers(1, 20))
        here = rng.random(n) < 0.8
        cap = np.where(rng.random(n) < 0.2, rng.integers(0, 10, n), FAR)
        want = settled("AllReduce", "RING", loops, None, here[None], cap[None], cap[None])
        total = 2 * (n - 1) * loops
        send, recv = np.zeros(n, int), np.zeros(n, int)
        moved = True
        while moved:
            moved = False
            for i in rng.permutation(np.flatnonzero(here)).tolist():
                if send[i] < min(total, cap[i], recv[i] + 1, recv[(i + 1) % n] + SLOTS):
                    send[i] += 1
                    moved = True
                if recv[i] < min(total, cap[i], send[i - 1], send[i]):
                    recv[i] += 1
                    moved = True
        assert (send.tolist(), recv.tolist()) == (want[0][0].tolist(), want[1][0].tolist())


@pytest.mark.parametrize("kind", ["process_stuck", "several_stuck"])
@pytest.mark.parametrize("seed", range(4))
def test_in_a_hang_only_those_who_never_come_stand_outside_every_round(kind: str, seed: int) -> None:
    drill = Drill(seed, kind, FULL)
    outside = [r for r, f in _last(drill).items() if all(entry["state"] == "done" for entry in f["comms"])]
    assert outside == drill.truth["ranks"]


@pytest.mark.parametrize("kind", ["gpu_xid", "gpu_silent", "nic_down", "nvlink_down", "link_cut", "wrong_op"])
@pytest.mark.parametrize("seed", range(3))
def test_where_hardware_or_words_stop_a_job_everybody_is_inside_a_round(kind: str, seed: int) -> None:
    drill = Drill(seed, kind, FULL)
    states = {r: [entry["state"] for entry in f["comms"]] for r, f in _last(drill).items()}
    assert all("running" in each for each in states.values())


@pytest.mark.parametrize("seed", range(6))
def test_the_gpu_that_stopped_has_taken_the_fewest_steps_of_its_ring(seed: int) -> None:
    drill = Drill(seed, "gpu_silent", FULL)
    (culprit,) = drill.truth["ranks"]
    family = drill.layout.families["dp"]
    (row,) = np.flatnonzero((family.groups == culprit).any(1))
    comm = family.ids[int(row)]
    steps = {r: e["send"] for r, f in _last(drill).items() for e in f["comms"] if e["comm"] == comm}
    if family.algo == "RING":
        assert steps[culprit] == min(steps.values())
        assert max(steps.values()) < step_totals(family, drill.layout.ops["dp.AllReduce"])[0].max()


@pytest.mark.parametrize("seed", range(3))
def test_a_crossed_order_is_a_cycle(seed: int) -> None:
    drill = Drill(seed, "wrong_order", FULL)
    (culprit,) = drill.truth["ranks"]
    families = {comm: name for name, family in drill.layout.families.items() for comm in family.ids}
    members = {row["comm"]: set(row["ranks"]) for row in drill.communicators}
    inside = {r: {e["comm"] for e in f["comms"] if e["state"] == "running"} for r, f in _last(drill).items()}
    (here,) = inside[culprit]
    assert families[here] == "norm"
    absent = {r for r in members[here] if here not in inside[r]}
    there = {comm for r in absent for comm in inside[r] if culprit in members[comm]}
    assert there
    assert here not in there


@pytest.mark.parametrize("seed", range(4))
def test_a_slow_nic_slows_only_the_rings_that_it_is_in(seed: int) -> None:
    drill = Drill(seed, "transceiver_errors", Limits(world_max=64, fidelity="full", nulls=0, missing=0, noise=0.01))
    (culprit,) = drill.truth["ranks"]
    family = drill.layout.families["dp"]
    track, onset = drill.timeline.tracks["dp"], drill.timeline.onset
    per_step = len(drill.timeline.programs[0].slots["dp"])
    transfer = track.leave - track.ready
    before, after = transfer[: onset * per_step], transfer[(onset + 1) * per_step :]
    for group in family.groups:
        ratio = float(after[:, group[0]].max() / np.median(before[:, group[0]]))
        crosses = len(set(drill.layout.node[group].tolist())) > 1
        assert (ratio > 1.2) == (culprit in group and crosses)


@pytest.mark.parametrize("seed", range(3))
def test_only_flows_over_a_cut_link_stop_and_they_are_the_broken_rounds(seed: int) -> None:
    drill = Drill(seed, "link_cut", FULL)
    assert drill.fabric is not None
    still = [flow for flow in drill.fabric["flows"] if flow["gbps"] == 0.0]
    assert still
    assert all(set(flow["path"]) & set(drill.truth["links"]) for flow in still)
    assert {flow["comm"] for flow in drill.fabric["flows"]} <= {row["comm"] for row in drill.communicators}
    flowing = [flow for flow in drill.fabric["flows"] if flow["gbps"] > 0.0]
    assert not any(set(flow["path"]) & set(drill.truth["links"]) for flow in flowing)


def test_nothing_flows_through_a_nic_that_is_down() -> None:
    found = 0
    for seed in range(12):
        drill = Drill(seed, "nic_down", FULL)
        (culprit,) = drill.truth["ranks"]
        for flow in drill.fabric["flows"] if drill.fabric is not None else ():
            assert (flow["gbps"] == 0.0) == (culprit in (flow["src_rank"], flow["dst_rank"]))
            found += 1
    assert found > 0
