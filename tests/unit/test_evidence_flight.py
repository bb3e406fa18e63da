"""Flight-recorder dumps: where each rank stands, by whose word, and that a pickle is data and nothing else."""

from __future__ import annotations

import json
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diagnosis.contracts.errors import AgentFault
from diagnosis.contracts.incident import Incident, Kind, State
from diagnosis.evidence.flight_dump import rank_of_name
from diagnosis.evidence.gather import gather
from diagnosis.evidence.pickles import load_plain

SAMPLES = Path(__file__).parents[3] / "shared" / "samples"
BASE_NS = 1_800_000_000_000_000_000


def entry(number: int, ended: bool, **more: Any) -> dict[str, Any]:
    return {
        "record_id": number - 1,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "collective_seq_id": number,
        "op_id": number,
        "profiling_name": "gloo:all_reduce",
        "input_sizes": [[4, 8]],
        "input_dtypes": ["Float"],
        "state": "scheduled",
        "retired": ended,
        "time_created_ns": BASE_NS + number * 10_000_000,
    } | more


def dump(*entries: dict[str, Any], **more: Any) -> dict[str, Any]:
    config = {"": {"name": "", "desc": "", "ranks": "[0, 1, 2, 3]"}}
    return {
        "version": "2.10",
        "comm_lib_version": "",
        "pg_config": config,
        "pg_status": {},
        "entries": list(entries),
    } | more


def incident_of(dumps: dict[str, Any], form: str = "json") -> Incident:
    encoded = {name: pickle.dumps(raw) if form == "pickle" else json.dumps(raw).encode() for name, raw in dumps.items()}
    evidence = gather((name, [content]) for name, content in encoded.items())
    assert evidence.incident is not None, evidence.unseen
    return evidence.incident


def newest(incident: Incident) -> dict[int, dict[str, tuple[int, float, float]]]:
    """Per rank and communicator: state, newest round and newest ended round in the rank's newest frame."""
    frames, ids = incident.frames, incident.communicators.ids
    last = {rank: at for at, rank in enumerate(frames.rank.tolist())}
    out: dict[int, dict[str, tuple[int, float, float]]] = {}
    for row, at in enumerate(frames.frame.tolist()):
        rank = int(frames.rank[at])
        if last[rank] == at:
            words = (int(frames.state[row]), float(frames.seq[row]), float(frames.done_seq[row]))
            out.setdefault(rank, {})[ids[frames.comm[row]]] = words
    return out


@pytest.mark.parametrize("form", ["json", "pickle"])
def test_who_has_not_entered_is_done_where_the_others_run(form: str) -> None:
    inside = dump(entry(1, True), entry(2, False))
    incident = incident_of({"rank_0": inside, "rank_1": inside, "rank_2": dump(entry(1, True))}, form)
    assert incident.job.world_size == 4  # rank 3 has no dump
    assert newest(incident) == {
        0: {"0": (State.RUNNING, 2, 1)},
        1: {"0": (State.RUNNING, 2, 1)},
        2: {"0": (State.DONE, 1, 1)},
    }
    assert incident.communicators.member.tolist() == [0, 1, 2, 3]


def test_who_never_entered_anything_of_a_group_is_told_from_who_lost_its_beginning() -> None:
    other = {"process_group": ["9", "dp"], "record_id": 7}
    config = {name: {"name": name, "desc": "", "ranks": [0, 1]} for name in ("0", "9")}
    inside = dump(entry(1, False), pg_config=config)
    fresh = incident_of(
        {"rank_0": inside, "rank_1": dump(entry(1, True, **other | {"record_id": 0}), pg_config=config)}
    )
    assert newest(fresh)[1]["0"][0] == State.NONE
    later = incident_of({"rank_0": inside, "rank_1": dump(entry(1, True, **other), pg_config=config)})
    assert "0" not in newest(later)[1]


def test_operations_of_one_round_that_differ_have_different_signatures() -> None:
    odd = dump(entry(2, False, profiling_name="gloo:all_gather"))
    incident = incident_of({"rank_0": dump(entry(2, False)), "rank_1": odd})
    names = {incident.frames.signatures[at] for at in incident.frames.signature if at >= 0}
    assert names == {"all_reduce Float 32", "all_gather Float 32"}


def test_sizes_that_may_differ_are_not_compared() -> None:
    uneven = [dump(entry(2, False, profiling_name="nccl:all_to_all", input_sizes=[[size]])) for size in (4, 9)]
    incident = incident_of({"rank_0": uneven[0], "rank_1": uneven[1]})
    assert incident.frames.signatures == ("all_to_all Float ?",)


def test_a_rank_stands_in_its_earliest_operation_and_in_no_other() -> None:
    config = {name: {"name": name, "desc": "", "ranks": [0, 1]} for name in ("tp", "dp")}
    tp, dp = {"process_group": ["tp", "tp"], "pg_id": 1}, {"process_group": ["dp", "dp"], "pg_id": 2}
    entries = [entry(5, False, **tp), entry(9, False, **dp), entry(6, False, **tp)]
    incident = incident_of({"rank_0": dump(*entries, pg_config=config)})
    assert newest(incident)[0] == {"tp": (State.RUNNING, 5, 4), "dp": (State.DONE, 8, 8)}


def test_a_receiver_waits_for_its_peer_in_a_communicator_of_the_pair() -> None:
    config = {"pp": {"name": "pp", "desc": "pp", "ranks": [4, 6]}}
    waiting = entry(1, False, process_group=["pp", "pp"], profiling_name="nccl:recv 1<-0", is_p2p=True)
    incident = incident_of({"rank_6": dump(waiting, pg_config=config)})
    row = int(np.flatnonzero(incident.frames.state == State.RUNNING)[0])
    at = int(incident.frames.comm[row])
    assert incident.communicators.ids[at] == "pp:4>6" and incident.communicators.kind[at] == Kind.P2P
    assert incident.frames.peer[row] == 4


def test_what_a_dump_leaves_out_stands_in_its_status_under_the_rank_s_own_number() -> None:
    config = {"tp": {"name": "tp", "desc": "TP", "ranks": [0, 1]}}
    status = {"5": {"last_enqueued_collective": "8", "last_completed_collective": "7"}}
    idle = {"5": {"last_enqueued_collective": "6", "last_completed_collective": "6"}}
    waiting = entry(8, False, process_group=["tp", "TP"], pg_id=5, profiling_name="nccl:all_reduce")
    incident = incident_of(
        {
            "_dump_0": dump(waiting, pg_config=config, pg_status=status),
            "_dump_1": dump(pg_config=config, pg_status=idle),
        }
    )
    assert newest(incident) == {0: {"tp": (State.RUNNING, 8, 7)}, 1: {"tp": (State.DONE, 6, 6)}}
    assert incident.job.fidelity == "nccl"


def test_calls_of_a_library_on_the_host_tell_each_rank_s_own_time() -> None:
    def steps(late_ms: int) -> dict[str, Any]:
        late_ns = late_ms * 1_000_000
        return dump(*[entry(at, True, time_created_ns=BASE_NS + at * 70_000_000 + late_ns) for at in range(1, 31)])

    ranks = {"rank_0": steps(0), "rank_1": steps(0), "rank_2": steps(50), "rank_3": steps(0)}
    frames = incident_of(ranks).frames
    assert np.round(frames.gap_ms / frames.rounds).tolist() == [20, 20, 70, 20]
    assert np.round(frames.dur_ms / frames.rounds).tolist() == [50, 50, 0, 50]


def test_clocks_that_contradict_causality_tell_no_times() -> None:
    ahead = dump(*[entry(at, True, time_created_ns=BASE_NS + at * 70_000_000 + 10**12) for at in range(1, 31)])
    usual = dump(*[entry(at, True, time_created_ns=BASE_NS + at * 70_000_000) for at in range(1, 31)])
    incident = incident_of({"rank_0": usual, "rank_1": ahead, "rank_2": usual, "rank_3": usual})
    assert np.isnan(incident.frames.gap_ms).all()
    assert any("the clocks of the ranks do not agree" in note for note in incident.unseen)


def test_sends_that_gloo_does_not_record_are_told_of() -> None:
    incident = incident_of({"rank_0": dump(entry(1, True), entry(2, False, op_id=5)), "rank_1": dump(entry(1, True))})
    assert newest(incident)[1] == {"0": (State.UNKNOWN, 1, 1)}  # it may wait in one of them
    assert any("do not record (a send or receive) was called (3 times)" in note for note in incident.unseen)


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank_3.json", 3),
        ("a/b7/comm_lib_trace_rank_12", 12),
        ("_dump_10", 10),
        ("gpu001-rank5-2026.pkl", 5),
        ("dump.json", None),
    ],
)
def test_whose_a_dump_is_stands_in_its_name(name: str, rank: int | None) -> None:
    assert rank_of_name(name) == rank


class _Payload:
    """Runs a command when it is unpickled by whoever trusts it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.path}",)


def test_a_pickle_that_would_run_something_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    for protocol in range(6):
        content = pickle.dumps({"entries": [_Payload(mark)]}, protocol)
        with pytest.raises(AgentFault) as refused:
            load_plain(content)
        assert refused.value.reason == "pickle_names_code"
    evidence = gather([("rank_0.pkl", [pickle.dumps(_Payload(mark))])])
    assert not evidence.readable and "cannot be read: its instruction" in evidence.unseen[0]
    assert not mark.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04" + b"r\xff\xff\xff\x7f.",
        b"\x80\x04N" + b"r\xff\xff\xff\x7f.",
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x80\x04\x96\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x80\x04\x8b\xff\xff\xff\x7f.",
        b"\x80\x04" + b"(" * 1000,
        b"\x80\x04h\x05.",
        b"\x80\x04I" + b"9" * 100_000 + b"\n.",
        b"\x80\x04}Na.",
    ],
)
def test_a_broken_pickle_is_an_error_and_costs_nothing(content: bytes) -> None:
    with pytest.raises(AgentFault):
        load_plain(content + b".")


def test_plain_data_may_contain_itself_and_is_still_walked_once() -> None:
    looped: dict[str, Any] = dump(entry(1, False))
    looped["entries"].append(looped)
    looped["pg_config"]["x"] = looped
    shared: list[Any] = [9]
    for _ in range(60):
        shared = [shared, shared]
    looped["entries"].append(entry(2, False, input_sizes=shared))
    incident = incident_of({"rank_0": looped}, "pickle")
    assert newest(incident)[0]["0"] == (State.RUNNING, 1, 0)


def test_the_sample_dumps_show_where_each_rank_stands() -> None:
    cases = {
        "fr_dumps/not_entered": {2},
        "fr_dumps/subgroup_not_entered": {3},
        "fr_dumps/healthy": {0, 1, 2, 3},
        "nvrx_fr_traces/lock_gil_2nd": {10, 15},
        "nvrx_fr_traces/gpu_error_1st": set(),
    }
    if not SAMPLES.is_dir():
        warnings.warn("the sample dumps are not at hand: none was read", stacklevel=1)
        return
    for case, outside in cases.items():
        paths = sorted(path for path in (SAMPLES / case).iterdir() if path.suffix not in (".log", ".out"))
        evidence = gather((path.name, [path.read_bytes()]) for path in paths)
        assert evidence.incident is not None
        standing = newest(evidence.incident)
        nowhere = {rank for rank, rows in standing.items() if State.RUNNING not in {row[0] for row in rows.values()}}
        assert nowhere == outside, case
