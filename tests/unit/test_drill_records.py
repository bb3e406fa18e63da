"""The bundles of the drill simulator: the same seed the same bytes, every kind as the bundle's description has it,
what a stock library cannot tell is null, and nothing gives the truth away."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from diagnosis.contracts.errors import OperatorFault
from diagnosis.drill import Drill, Limits, draw, files, kinds

SMALL = Limits(world_max=32)
Number = (int, float)
ENTRY: dict[str, Any] = {
    "comm": str,
    "peer": int,
    "seq": int,
    "done_seq": int,
    "op": str,
    "dtype": str,
    "count": int,
    "algo": str,
    "proto": str,
    "root": int,
    "state": str,
    "age_ms": Number,
    "send": int,
    "recv": int,
    "send_rate": Number,
    "recv_rate": Number,
    "rounds": int,
    "dur_ms": Number,
    "dur_min_ms": Number,
    "dur_max_ms": Number,
    "gap_ms": Number,
}
NEVER_NULL = {"comm", "peer", "seq", "done_seq", "op", "dtype", "count", "algo", "proto", "root", "state", "rounds"}
TRUTH = {"anomaly", "class", "ranks", "nodes", "links", "causes", "action", "kind", "must_not_drain", "any_of"}
CAUSES = {
    "gpu_clock_throttle",
    "hbm_degraded",
    "gpu_fault",
    "nvlink_fault",
    "pcie_degraded",
    "nic_fault",
    "nic_degraded",
    "transceiver_errors",
    "pfc_storm",
    "ecmp_polarization",
    "link_fault",
    "link_congestion",
    "allocator_stall",
    "dataloader_starvation",
    "gc_stall",
    "host_contention",
    "storage_stall",
    "process_stuck",
    "process_exit",
    "program_divergence",
    "workload_imbalance",
    "workload_change",
    "unknown",
}


@pytest.fixture(scope="module")
def one_of_each() -> dict[str, Drill]:
    return {kind: Drill(number, kind, SMALL) for number, kind in enumerate(kinds())}


@pytest.fixture(scope="module")
def written(one_of_each: dict[str, Drill]) -> dict[str, dict[str, bytes]]:
    return {kind: files(drill) for kind, drill in one_of_each.items()}


def _lines(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in data.splitlines()]


def _is(value: object, wanted: Any) -> bool:
    return isinstance(value, wanted) and not isinstance(value, bool)


def test_the_same_seed_gives_the_same_bytes_and_another_one_does_not() -> None:
    for kind in ("gpu_xid", "mixed", "checkpoint"):
        assert files(Drill(5, kind, SMALL)) == files(Drill(5, kind, SMALL))
        assert files(Drill(5, kind, SMALL)) != files(Drill(6, kind, SMALL))
    assert draw(9, SMALL).kind == draw(9, SMALL).kind
    assert files(draw(9, SMALL)) == files(draw(9, SMALL))


def test_a_draw_keeps_its_limits_and_finds_many_kinds() -> None:
    drawn = [draw(seed, Limits(world_min=16, world_max=32, fidelity="nccl")) for seed in range(16)]
    assert len({drill.kind for drill in drawn}) > 7
    assert all(16 <= drill.layout.world <= 32 for drill in drawn)
    assert all(drill.job["fidelity"] == "nccl" for drill in drawn)


@pytest.mark.parametrize(
    ("seed", "kind", "limits"),
    [
        (1, "no_such_kind", {}),
        (-1, "healthy", {}),
        (1, "healthy", {"fidelity": "some"}),
        (1, "healthy", {"effect": 2.0}),
        (1, "link_cut", {"world_max": 16}),
        (1, "healthy", {"world_min": 20, "world_max": 30}),
    ],
)
def test_what_cannot_be_drilled_is_the_callers_fault(seed: int, kind: str, limits: dict[str, Any]) -> None:
    with pytest.raises(OperatorFault):
        Drill(seed, kind, Limits(**limits))


def test_files_are_json_without_nan(written: dict[str, dict[str, bytes]]) -> None:
    known = {"job.json", "fabric.json", *(f"{x}.jsonl" for x in ("communicators", "frames", "summaries", "health"))}
    for bundle in written.values():
        assert {"job.json", "communicators.jsonl", "frames.jsonl", "health.jsonl"} <= set(bundle) <= known
        for data in bundle.values():
            assert _lines(data)
            assert b"NaN" not in data
            assert b"Infinity" not in data


def test_the_job_and_its_communicators_fit_together(one_of_each: dict[str, Drill]) -> None:
    for drill in one_of_each.values():
        job, world = drill.job, drill.layout.world
        assert job["schema"] == "tocsin.bundle/1"
        assert len(job["nodes"]) == len(job["gpus"]) == job["world_size"] == world
        assert len(set(zip(job["nodes"], job["gpus"], strict=True))) == world
        for row in drill.communicators:
            assert len(set(row["ranks"])) == len(row["ranks"]) >= 2
            assert row["kind"] in ("collective", "p2p")
            nodes = {job["nodes"][rank] for rank in row["ranks"]}
            assert row["transport"] == ("NVLINK" if len(nodes) == 1 else "NET")
        ids = [row["comm"] for row in drill.communicators]
        assert len(set(ids)) == len(ids)


def test_every_frame_has_the_fields_types_and_ranges_of_the_description(one_of_each: dict[str, Drill]) -> None:
    for kind, drill in one_of_each.items():
        members = {row["comm"]: row["ranks"] for row in drill.communicators}
        for frame in drill.frames:
            assert set(frame) == {"rank", "t_ms", "window_ms", "comms"}
            assert frame["comms"]
            for entry in frame["comms"]:
                assert set(entry) <= set(ENTRY), kind
                for key, value in entry.items():
                    assert _is(value, ENTRY[key]) or (value is None and key not in NEVER_NULL), (kind, key, value)
                    assert not isinstance(value, float) or math.isfinite(value)
                    assert key in ("seq", "done_seq") or not _is(value, Number) or value >= 0, (kind, key, value)
                assert frame["rank"] in members[entry["comm"]]
                assert entry["state"] in ("running", "enqueued", "done", "none")
                assert ("peer" in entry) == (entry["op"] == "Recv")


def test_times_of_a_rank_only_grow_and_durations_lie_between_their_extremes(one_of_each: dict[str, Drill]) -> None:
    for drill in one_of_each.values():
        latest: dict[int, float] = {}
        for frame in drill.frames:
            assert frame["t_ms"] > latest.get(frame["rank"], -math.inf)
            latest[frame["rank"]] = frame["t_ms"]
            for entry in frame["comms"]:
                if entry["rounds"] and None not in (low := [entry[f"dur{x}_ms"] for x in ("_min", "", "_max")]):
                    assert low[0] * entry["rounds"] <= low[1] + 0.01
                    assert low[1] <= low[2] * entry["rounds"] + 0.01


def test_rounds_of_a_window_are_what_the_counter_gained() -> None:
    drill = Drill(2, "healthy", Limits(world_max=32, fidelity="full", nulls=0.0, missing=0.0))
    before: dict[tuple[int, str], int] = {}
    seen = 0
    for frame in drill.frames:
        for entry in frame["comms"]:
            key = frame["rank"], entry["comm"]
            done = entry["seq"] - (entry["state"] == "running")
            if key in before:
                assert done - before[key] == entry["rounds"]
                seen += 1
            before[key] = done
    assert seen > 100


def test_truths_speak_the_words_of_verdicts_and_name_what_exists(one_of_each: dict[str, Drill]) -> None:
    for kind, drill in one_of_each.items():
        right = drill.truth
        assert set(right) == TRUTH
        assert right["anomaly"] in ("none", "hang", "slow")
        assert right["class"] in (None, "H1", "H2", "H3", "S1", "S2", "S3")
        assert right["action"] in ("drain", "requeue", "notify", "collect", "none")
        assert set(right["causes"]) <= CAUSES
        assert {drill.job["nodes"][rank] for rank in right["ranks"]} == set(right["nodes"]), kind
        assert set(right["nodes"]) | set(right["must_not_drain"]) <= set(drill.job["nodes"])
        assert right["action"] != "drain" or not set(right["nodes"]) & set(right["must_not_drain"])
        if right["links"] and drill.fabric is not None:
            names = {row["id"] for row in drill.fabric["links"]}
            assert all(any(link in name for name in names) for link in right["links"])


def test_health_rows_belong_to_the_job(one_of_each: dict[str, Drill]) -> None:
    for drill in one_of_each.values():
        for row in drill.health:
            assert row["node"] in drill.job["nodes"]
            assert row["source"] in ("nvml", "ib", "host", "kmsg")
        served = drill.job.get("nic_of_gpu", {})
        nics = {row["nic"] for row in drill.health if row["source"] == "ib"}
        assert nics <= ({*served.values()} if served else {f"mlx5_{gpu}" for gpu in drill.job["gpus"]})


def test_summaries_add_up_to_the_step(one_of_each: dict[str, Drill]) -> None:
    rows = [row for drill in one_of_each.values() for row in drill.summaries]
    assert rows
    for row in rows:
        assert row["profiled_steps"] >= 1
        assert sum(row["phases"].values()) == pytest.approx(row["step_duration_ms"], rel=0.1)
        for operator in row["operators"]:
            assert operator["kind"] in ("compute", "comm", "memcpy", "host")
            assert operator["p50_us"] <= operator["p99_us"] <= operator["max_us"]
            mean = operator["total_time_ms"] * 1000 / operator["invocation_count"]
            assert operator["mean_us"] == pytest.approx(mean, rel=0.01, abs=0.01)


@pytest.mark.parametrize("kind", ["gpu_clock_throttle", "process_stuck", "wrong_op", "nic_degraded"])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_stock_library_tells_no_more_than_it_can(kind: str, seed: int) -> None:
    drill = Drill(seed, kind, Limits(world_max=64, fidelity="nccl", nulls=0.0, missing=0.0))
    inside = {row["comm"] for row in drill.communicators if row["transport"] == "NVLINK"}
    frames: dict[int, list[dict[str, Any]]] = {}
    for frame in drill.frames:
        frames.setdefault(frame["rank"], []).append(frame)
    for rows in frames.values():
        for entry in (entry for frame in rows for entry in frame["comms"]):
            steps = [entry[key] for key in ("send", "recv", "send_rate", "recv_rate")]
            assert (entry["comm"] in inside) == (steps == [None] * 4) or entry["rounds"] == 0
            assert entry["comm"] not in inside or steps == [None] * 4
        for entry in rows[0]["comms"]:
            assert entry["gap_ms"] is None
            assert entry["comm"] not in inside or entry["dur_ms"] is None
            assert entry["comm"] in inside or entry["dur_ms"] is not None
    last = [entry for rows in frames.values() for entry in rows[-1]["comms"]]
    if drill.truth["anomaly"] == "slow":
        assert all(entry["gap_ms"] is not None for entry in last)
    else:
        assert {"enqueued", "running"} & {entry["state"] for entry in last}
        assert all(entry["comm"] not in inside for entry in last if entry["state"] == "running")
        assert all(entry["done_seq"] <= entry["seq"] for entry in last)
        assert any(entry["done_seq"] + 1 < entry["seq"] for entry in last) or kind == "wrong_op"


def test_a_rank_whose_process_is_gone_sends_nothing_at_the_end() -> None:
    for seed in range(6):
        drill = Drill(seed, "process_exit", Limits(world_max=64, missing=0.0))
        (gone,) = drill.truth["ranks"]
        count = dict.fromkeys(range(drill.layout.world), 0)
        longest = dict.fromkeys(count, 0.0)
        for frame in drill.frames:
            count[frame["rank"]] += 1
            quiet = [entry["age_ms"] for entry in frame["comms"] if entry.get("age_ms") is not None]
            longest[frame["rank"]] = max([longest[frame["rank"]], *quiet])
        assert longest[gone] < 100_000
        assert all(longest[rank] > 100_000 for rank in count if rank != gone)


def test_shares_of_missing_ranks_and_nulls_are_kept() -> None:
    drill = Drill(3, "gpu_clock_throttle", Limits(world_min=64, world_max=64, missing=0.3, nulls=0.2, fidelity="full"))
    seen = {frame["rank"] for frame in drill.frames}
    assert set(drill.truth["ranks"]) <= seen
    assert 0.1 < 1.0 - len(seen) / 64 < 0.5
    values = [entry[key] for frame in drill.frames for entry in frame["comms"] for key in ("send", "gap_ms", "dur_ms")]
    assert 0.1 < values.count(None) / len(values) < 0.3


def test_nothing_but_the_evidence_tells_the_truth(written: dict[str, dict[str, bytes]]) -> None:
    """No name of a kind or cause in any file, and the fault is in any place."""
    plain = {"healthy", "spike", "startup", "unknown", "mixed", "nvlink_down"}
    words = {word.encode() for word in (set(kinds()) | CAUSES) - plain}
    for kind, bundle in written.items():
        whole = b"".join(bundle.values())
        assert [word for word in words if word in whole] == [], kind
    places = [Drill(s, "process_stuck", Limits(world_min=32, world_max=32)).truth["ranks"][0] for s in range(16)]
    assert len(set(places)) > 8
    assert np.mean(places) == pytest.approx(15.5, abs=8)
