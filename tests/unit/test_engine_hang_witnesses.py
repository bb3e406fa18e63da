"""Hangs: what the hardware says, whose it is, and what it explains."""

from __future__ import annotations

from typing import Any

import pytest

from tests.stalls import ROUND, Said, comm, enqueued, guilty, judged, running, stopped

TP = comm(range(8), transport="NVLINK")
ENQUEUED = {rank: {"tp": enqueued()} for rank in range(8)}
PCI = "0000:9d:00"


def xid(number: int, pci: str = PCI, node: str = "n0") -> dict[str, Any]:
    return {"node": node, "source": "kmsg", "line": f"NVRM: Xid (PCI:{pci}): {number}, pid=77, name=python3, said"}


def nvml(gpu: int, node: str = "n0", **values: Any) -> dict[str, Any]:
    told: dict[str, Any] = {"ecc_dbe": 0, "row_remap_pending": False, "nvlink_down": 0, "temperature_c": 40}
    return {"node": node, "gpu": gpu, "source": "nvml"} | told | values


def node(changed: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    return [nvml(gpu, **changed.get(gpu, {})) for gpu in range(8)]


NOTHING = dict.fromkeys(("ecc_dbe", "row_remap_pending", "nvlink_down", "temperature_c"))


@pytest.mark.parametrize(
    ("number", "trace"),
    [(48, {"ecc_dbe": 1}), (95, {"row_remap_pending": True}), (79, NOTHING), (74, {"nvlink_down": 3})],
)
def test_an_xid_is_about_the_gpu_that_has_its_trace(number: int, trace: dict[str, Any]) -> None:
    verdict = judged({"tp": TP}, ENQUEUED, health=[xid(number), *node({5: trace})])
    cause = "nvlink_fault" if number == 74 else "gpu_fault"
    assert guilty(verdict) == [("gpu", 5, cause)]
    assert verdict.action.nodes == ["n0"]


@pytest.mark.parametrize(
    "health",
    [
        [xid(119), *node({})],
        [xid(48), *node({2: {"ecc_dbe": 1}, 5: {"ecc_dbe": 1}})],
        [xid(48), xid(48, "0000:1b:00"), *node({5: {"ecc_dbe": 1}})],
        [xid(79), *node(dict.fromkeys(range(8), NOTHING))],
        [xid(119), *node({5: {"ecc_dbe": 1}})],
    ],
    ids=["no trace", "two traces", "two addresses", "a tool that reads nothing", "the trace of another fault"],
)
def test_an_xid_whose_gpu_nothing_tells_is_about_its_node(health: list[dict[str, Any]]) -> None:
    verdict = judged({"tp": TP}, ENQUEUED, health=health)
    assert guilty(verdict) == [("node", None, "gpu_fault")]


def test_a_node_is_named_once_however_many_of_its_rounds_stand() -> None:
    said = {rank: {name: enqueued()} for name, pair in (("a", (0, 1)), ("b", (2, 3))) for rank in pair}
    comms = {"a": comm((0, 1), transport="NVLINK"), "b": comm((2, 3), transport="NVLINK")}
    assert guilty(judged(comms, said, health=[xid(119), *node({})])) == [("node", None, "gpu_fault")]


def test_a_gpu_that_tells_nothing_is_no_fault_without_the_driver() -> None:
    verdict = judged({"tp": TP}, ENQUEUED, health=node({5: NOTHING}))
    assert (verdict.culprits, verdict.action.kind) == ([], "collect")


def test_a_fault_of_another_gpu_of_the_node_says_nothing_about_a_member() -> None:
    """Ranks 0 and 1 stand in a round; the memory fault is on GPU 5, which nobody waits for."""
    said = {rank: {"tp": enqueued()} for rank in range(2)}
    verdict = judged(
        {"tp": comm((0, 1), transport="NVLINK")}, said, world=8, health=[xid(48), *node({5: {"ecc_dbe": 1}})]
    )
    assert (verdict.culprits, verdict.action.kind) == ([], "collect")


def nic(rank: int, link: str) -> dict[str, Any]:
    return {"node": f"n{rank // 8}", "nic": f"mlx5_{rank % 8}", "source": "ib", "link": link}


def test_the_one_broken_nic_that_a_standing_round_goes_through_is_guilty() -> None:
    """Stock NCCL: all of node 1 have a round over NVLink enqueued, and nobody knows that it waits behind another."""
    comms = {"tp": comm(range(8, 16), transport="NVLINK"), "dp": comm((0, 8))}
    said = {rank: {"tp": enqueued()} for rank in range(9, 16)}
    said |= {0: {"dp": running(1, 0)}, 8: {"tp": enqueued(), "dp": enqueued(send=0, recv=0)}}
    verdict = judged(comms, said, health=[nic(0, "down"), nic(8, "up")])
    assert guilty(verdict) == [("nic", 0, "nic_fault")]
    assert (verdict.action.kind, verdict.action.nodes, verdict.action.flag) == ("drain", ["n0"], "nic")


def test_a_broken_nic_that_no_standing_round_needs_is_not() -> None:
    verdict = judged({"tp": TP}, ENQUEUED, health=[nic(0, "down")])
    assert (verdict.culprits, verdict.action.kind) == ([], "collect")


def test_a_dead_nvlink_holds_up_the_hops_inside_its_node() -> None:
    """A communicator over the network uses NVLink where two of its members share a node, and only there."""
    apart = {rank: {"dp": enqueued()} for rank in (0, 8, 16)}
    down = [nvml(0, nvlink_down=2)]
    assert judged({"dp": comm((0, 8, 16))}, apart, health=down).culprits == []
    beside = {rank: {"dp": enqueued()} for rank in (0, 1, 8)}
    assert guilty(judged({"dp": comm((0, 1, 8))}, beside, health=down)) == [("gpu", 0, "nvlink_fault")]


def test_a_guess_beside_a_conviction_is_no_culprit() -> None:
    """Rank 3 stopped in a ring and one of its counts is missing; the driver says that the GPU of rank 13 is gone."""
    counts = stopped(8, 3, 20)
    said = {rank: {"a": running(*both)} for rank, both in enumerate(counts)}
    said[3]["a"]["recv"] = None
    said |= {8 + rank: {"b": running(*both)} for rank, both in enumerate(stopped(8, 5, 20))}
    health = [xid(79, node="n1"), *[nvml(gpu, "n1", **(NOTHING if gpu == 5 else {})) for gpu in range(8)]]
    verdict = judged({"a": comm(range(8)), "b": comm(range(8, 16))}, said, health=health)
    assert guilty(verdict) == [("gpu", 13, "gpu_fault")]


FLOW = {"comm": "dp", "path": ["leaf0-spine1", "spine1-leaf1"], "gbps": 0.0, "rtt_us": None}
FABRIC = {
    "links": [
        {"id": "leaf0-spine1", "a": "leaf0", "b": "spine1", "gbps": 400},
        {"id": "spine1-leaf1", "a": "spine1", "b": "leaf1", "gbps": 400},
        {"id": "leaf0-spine0", "a": "leaf0", "b": "spine0", "gbps": 400},
        {"id": "spine0-leaf1", "a": "spine0", "b": "leaf1", "gbps": 400},
    ],
    "flows": [
        FLOW | {"src_rank": 0, "dst_rank": 8},
        FLOW | {"src_rank": 0, "dst_rank": 8},
        FLOW | {"src_rank": 8, "dst_rank": 16, "path": ["leaf0-spine0", "spine0-leaf1"], "gbps": 90.0, "rtt_us": 9.0},
        FLOW | {"src_rank": 16, "dst_rank": 8, "path": ["leaf0-spine0", "spine0-leaf1"], "gbps": 90.0, "rtt_us": 9.0},
    ],
}


INSIDE = {rank: {"dp": running(1, 0)} for rank in (0, 8, 16)}
LEFT_BEHIND = INSIDE | {rank: {"dp": running(1, 0, seq=ROUND + 1)} for rank in (0, 16)}


@pytest.mark.parametrize("said", [INSIDE, LEFT_BEHIND], ids=["all inside", "one left behind"])
def test_dead_flows_of_a_rank_whose_nic_is_well_are_their_path(said: Said) -> None:
    comms = {"dp": comm((0, 8, 16))}
    well = judged(comms, said, health=[nic(rank, "up") for rank in (0, 8, 16)], fabric=FABRIC)
    assert [(culprit.kind, culprit.link, culprit.cause) for culprit in well.culprits] == [
        ("link", "leaf0-spine1", "link_fault")
    ]
    assert well.action.nodes == []
    unknown = judged(comms, said, fabric=FABRIC)
    assert [culprit.link for culprit in unknown.culprits if culprit.link == "leaf0-spine1"] == []
