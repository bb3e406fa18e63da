"""What must hold of every verdict, whatever the fault: names, order and units do not matter, less evidence never drains
an innocent node, and what a job alone can write never drains.

The incidents are drills, taken to pieces and changed as JSON, so that reader and engine are examined together. Choices
are seeded: a failure is found again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnosis.contracts.verdict import Verdict
from diagnosis.drill import Drill, Limits, files, kinds
from diagnosis.engine.thresholds import Thresholds
from diagnosis.engine.verdict import judge
from tests.fleet import GPUS, Fault, job
from tests.judged import verdict_on

Bundle = dict[str, list[dict[str, Any]]]
SEED: Final = 1_700_000
LOST_REPORTS: Final = 0.05
DP: Final = 8
SCALES: Final = (0.1, 8.0)
HARDWARE: Final = (
    "gpu_clock_throttle",
    "hbm_degraded",
    "pcie_degraded",
    "gpu_xid",
    "nvlink_down",
    "nic_down",
    "nic_fault",
)


@functools.cache
def drill(kind: str) -> Drill:
    return Drill(SEED, kind, Limits(world_max=64, effect=0.3, noise=0.02))


def bundle(kind: str) -> Bundle:
    """The drill's files as records; a document is a file of one record."""
    return {
        name: [msgspec.json.decode(line) for line in content.splitlines()]
        for name, content in files(drill(kind)).items()
    }


def encoded(contents: Bundle) -> dict[str, bytes]:
    return {name: b"".join(msgspec.json.encode(row) + b"\n" for row in rows) for name, rows in contents.items()}


def told(verdict: Verdict, name: Callable[[int], int] = lambda rank: rank) -> dict[str, Any]:
    """What a verdict says, without the order of its words; ranks under other names."""
    return {
        "anomaly": verdict.anomaly,
        "class": verdict.class_,
        "culprits": sorted(
            (c.kind, c.node or "", -1 if c.rank is None else name(c.rank), c.nic or c.link or c.switch or "", c.cause)
            for c in verdict.culprits
        ),
        "sure": sorted(round(culprit.confidence, 2) for culprit in verdict.culprits),
        "act": (verdict.action.kind, sorted(verdict.action.nodes), sorted(verdict.action.exclude), verdict.action.flag),
        "victims": verdict.victims,
    }


def renamed(contents: Bundle, new: list[int]) -> Bundle:
    """The same job under other rank numbers: rank r is now `new[r]`, on the same GPU of the same node."""
    (head,) = contents["job.json"]
    for key in ("nodes", "gpus"):
        old = list(head[key])
        for rank, value in enumerate(old):
            head[key][new[rank]] = value
    for groups in head.get("groups", {}).values():
        groups[:] = [[new[rank] for rank in group] for group in groups]
    for row in contents["communicators.jsonl"]:
        row["ranks"] = [new[rank] for rank in row["ranks"]]
    for frame in contents["frames.jsonl"]:
        frame["rank"] = new[frame["rank"]]
        for entry in frame["comms"]:
            entry |= {key: new[entry[key]] for key in ("peer", "root") if key in entry}
    for row in contents.get("summaries.jsonl", []):
        row["worker_rank"] = new[row["worker_rank"]]
    for fabric in contents.get("fabric.json", []):
        for flow in fabric["flows"]:
            flow |= {key: new[flow[key]] for key in ("src_rank", "dst_rank")}
    return contents


@pytest.mark.parametrize("kind", kinds())
def test_renaming_the_ranks_renames_the_verdict(kind: str) -> None:
    new = np.random.default_rng(SEED).permutation(drill(kind).layout.world).tolist()
    before = verdict_on(files(drill(kind)))
    after = verdict_on(encoded(renamed(bundle(kind), new)))
    assert told(after) == told(before, lambda rank: new[rank])


@pytest.mark.parametrize("kind", kinds())
def test_the_order_of_lines_changes_nothing(kind: str) -> None:
    contents = bundle(kind)
    random = np.random.default_rng(SEED)
    shuffled = {name: [rows[at] for at in random.permutation(len(rows))] for name, rows in contents.items()}
    assert told(verdict_on(encoded(shuffled))) == told(verdict_on(files(drill(kind))))


@pytest.mark.parametrize("fault", [Fault(slow=(77, 1.5)), Fault(stuck=77), Fault()])
def test_more_healthy_ranks_and_nodes_change_no_culprit(fault: Fault) -> None:
    small, large, larger = (told(judge(job(world, DP, fault=fault))) for world in (128, 512, 2048))
    for key in ("anomaly", "class", "culprits", "act"):
        assert small[key] == large[key] == larger[key]
    assert bool(small["culprits"]) == (fault != Fault())


@pytest.mark.parametrize("kind", kinds())
@pytest.mark.parametrize("whole_ranks", [False, True], ids=["reports", "ranks"])
def test_losing_reports_never_drains_an_innocent_node(kind: str, whole_ranks: bool) -> None:
    contents, truth = bundle(kind), drill(kind).truth
    random = np.random.default_rng([SEED, len(kind)])
    frames = contents["frames.jsonl"]
    lost_ranks = random.random(drill(kind).layout.world) < LOST_REPORTS
    lost = [bool(lost_ranks[f["rank"]]) if whole_ranks else bool(random.random() < LOST_REPORTS) for f in frames]
    contents["frames.jsonl"] = [frame for frame, gone in zip(frames, lost, strict=True) if not gone]
    drained = set(verdict_on(encoded(contents)).action.nodes)
    assert drained <= set(truth["nodes"])
    assert not drained & set(truth["must_not_drain"])


def scaled(contents: Bundle, by: float) -> Bundle:
    """All times of the job are `by` times as long, all rates as much lower."""
    for frame in contents["frames.jsonl"]:
        for record in (frame, *frame["comms"]):
            for key, value in record.items():
                if value is not None and key.endswith("_ms"):
                    record[key] = value * by
                elif value is not None and key.endswith("_rate"):
                    record[key] = value / by
    for row in contents.get("summaries.jsonl", []):
        for table in (row, row["phases"], *row["operators"]):
            for key, value in table.items():
                power = 2 if key.endswith("_us2") else 1 if key.endswith(("_ms", "_us")) else 0
                if power and value is not None:
                    table[key] = value * by**power
    return contents


@pytest.mark.parametrize("by", SCALES)
@pytest.mark.parametrize("kind", kinds())
def test_a_job_that_is_slower_throughout_has_the_same_fault(kind: str, by: float) -> None:
    usual = Thresholds()
    limits = Thresholds(
        hang_floor_s=usual.hang_floor_s * by,
        startup_floor_s=usual.startup_floor_s * by,
        stale_after_s=usual.stale_after_s * by,
        window_s=usual.window_s * by,
    )
    before, after = verdict_on(files(drill(kind))), verdict_on(encoded(scaled(bundle(kind), by)), limits)
    assert (after.anomaly, after.class_) == (before.anomaly, before.class_)
    assert told(after)["culprits"] == told(before)["culprits"]


@pytest.mark.parametrize("kind", kinds())
def test_what_the_job_alone_says_never_drains(kind: str) -> None:
    contents = {
        name: content for name, content in files(drill(kind)).items() if name not in ("health.jsonl", "fabric.json")
    }
    assert verdict_on(contents).action.kind != "drain"


@pytest.mark.parametrize("kind", HARDWARE)
def test_the_same_words_with_a_machine_that_agrees_do_drain(kind: str) -> None:
    """Else the test before would hold of an engine that never drains."""
    assert verdict_on(files(drill(kind))).action.kind == "drain"


@given(st.integers(0, 127), st.floats(1.3, 20.0))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_a_slow_rank_on_a_healthy_gpu_is_not_drained(rank: int, factor: float) -> None:
    incident = job(128, DP, fault=Fault(slow=(rank, factor)))
    assert incident.nvml is not None
    healthy = job(128, DP).nvml
    assert judge(incident).action.nodes == [incident.job.node_names[rank // GPUS]]
    assert healthy is not None
    incident.nvml.values["sm_clock_mhz"][:] = healthy.values["sm_clock_mhz"]
    incident.nvml.values["clocks_event_reasons"][:] = healthy.values["clocks_event_reasons"]
    assert judge(incident).action.kind != "drain"


@given(st.data())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_a_job_on_healthy_machines_cannot_write_itself_a_drain(data: st.DataObject) -> None:
    """A forged bundle: any numbers of any ranks, while the machines say what healthy machines say."""
    contents = bundle("healthy")
    world = drill("healthy").layout.world
    forged = data.draw(st.sets(st.integers(0, world - 1), min_size=1, max_size=4))
    fields = data.draw(
        st.dictionaries(
            st.sampled_from(["seq", "age_ms", "send", "recv", "send_rate", "rounds", "dur_ms", "gap_ms", "state"]),
            st.sampled_from([0.0, 0.01, 0.5, 3.0, 50.0, 1e9]),
            min_size=1,
        )
    )
    for frame in contents["frames.jsonl"][len(contents["frames.jsonl"]) // 3 :]:
        for entry in frame["comms"] if frame["rank"] in forged else ():
            for key, factor in fields.items():
                if key == "state":
                    entry[key] = "running" if factor > 1 else "done"
                elif entry.get(key) is not None:
                    entry[key] = entry[key] * factor
    assert verdict_on(encoded(contents)).action.kind != "drain"
