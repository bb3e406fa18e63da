"""Jobs that ended by themselves: whom the verdict names by what they left and the kernel's word, and when nobody."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import pytest

from diagnosis.contracts.verdict import Verdict
from tests.judged import verdict_on

Row = dict[str, Any]
KILL, TERM, ABRT = 9, 15, 6
USUAL, OTHER = 1024, 77


def open_round(**more: Any) -> Row:
    """Stood in round 10 when it ended."""
    return {"seq": 10, "done_seq": 9, "state": "running", "count": USUAL, "errors": 0} | more


def failed_round(**more: Any) -> Row:
    """Left round 10 with an error."""
    return {"seq": 10, "done_seq": 10, "state": "done", "count": USUAL, "errors": 1} | more


def before(**more: Any) -> Row:
    """Had not entered round 10."""
    return {"seq": 9, "done_seq": 9, "state": "done", "count": USUAL, "errors": 0} | more


def verdict(
    said: list[Row],
    exits: Mapping[int, Row],
    *,
    ended: str = "FAILED",
    per_node: int = 1,
    health: Iterable[Row] = (),
    lost_nodes: Iterable[str] = (),
) -> Verdict:
    """The verdict on a job of as many ranks as there are words in `said`. `exits`: by rank, `at` in ms."""
    world = len(said)
    nodes = [f"n{rank // per_node}" for rank in range(world)]
    job = {"schema": "tocsin.bundle/1", "job_id": 1, "world_size": world, "nodes": nodes}
    job |= {"gpus": [rank % per_node for rank in range(world)], "ended": ended, "lost_nodes": list(lost_nodes)}
    words = {"comm": "dp", "op": "AllReduce", "dtype": "f32"}
    files: dict[str, list[Row]] = {
        "job.json": [job],
        "communicators.jsonl": [{"comm": "dp", "ranks": list(range(world)), "kind": "collective"}],
        "frames.jsonl": [{"rank": rank, "t_ms": 1.0, "comms": [words | row]} for rank, row in enumerate(said)],
        "exits.jsonl": [_exit(rank, row) for rank, row in exits.items()],
        "health.jsonl": list(health),
    }
    return verdict_on(
        {name: b"".join(msgspec.json.encode(row) + b"\n" for row in rows) for name, rows in files.items()}
    )


def _exit(rank: int, row: Row) -> Row:
    return {"world_rank": rank, "ended_ms": row.get("at")} | {name: row[name] for name in row if name != "at"}


def died(at: float | None, signal: int | None = None, code: int | None = None, **more: Any) -> Row:
    return {"at": at, "signal": signal, "exit_code": code} | more


def victims(*ranks: int, at: float = 900.0) -> dict[int, Row]:
    """These exited with 1, one after the other."""
    return {rank: died(at + 10 * place, code=1) for place, rank in enumerate(ranks)}


def named(told: Verdict) -> list[tuple[str, int | None, str | None, str]]:
    return [(one.kind, one.rank, one.node, one.cause) for one in told.culprits]


def nobody(told: Verdict) -> bool:
    return told.anomaly == "failed" and not told.culprits and told.action.kind == "collect"


# -- killed ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", [open_round(), before()])
def test_a_killed_rank_is_named_with_its_signal(last: Row) -> None:
    said = [failed_round(), failed_round(), last, failed_round()]
    told = verdict(said, {2: died(0, KILL)} | victims(0, 1, 3))
    assert (told.anomaly, told.class_) == ("failed", None)
    assert named(told) == [("rank", 2, "n2", "process_exit")]
    assert told.action.kind == "notify"
    assert not told.action.nodes
    assert not told.action.requeue
    assert "SIGKILL" in told.summary
    assert told.victims == {"ranks": 3}
    assert {item.witness for item in told.evidence} >= {"kernel", "slurm"}


def test_a_kill_for_want_of_memory_is_said() -> None:
    said = [failed_round(), failed_round(), open_round(), failed_round()]
    told = verdict(said, {2: died(0, KILL, oom_kills=1)} | victims(0, 1, 3), ended="OUT_OF_MEMORY")
    assert named(told) == [("rank", 2, "n2", "process_exit")]
    assert any("want of memory" in item.text and item.witness == "kernel" for item in told.evidence)


def test_who_is_ended_by_the_launcher_afterwards_is_no_culprit() -> None:
    said = [open_round(), open_round(), failed_round(), failed_round()]
    ends = {0: died(0, KILL), 1: died(40, TERM), 2: died(500, KILL), 3: died(510, KILL)}
    assert named(verdict(said, ends, per_node=2)) == [("rank", 0, "n0", "process_exit")]


def test_who_is_ended_by_its_launcher_after_a_neighbour_that_failed_is_no_first_on_another_node_either() -> None:
    said = [failed_round()] * 4 + [open_round(), failed_round(), failed_round(), open_round()]
    ends = {4: died(0, KILL), 5: died(9, TERM), 6: died(20, code=1), 7: died(30, TERM)} | victims(0, 1, 2, 3, at=180)
    assert named(verdict(said, ends, per_node=2)) == [("rank", 4, "n2", "process_exit")]


def test_a_victim_that_went_at_nearly_the_same_time_on_another_node_had_seen_an_error() -> None:
    said = [failed_round(), open_round(), failed_round(), failed_round()]
    assert named(verdict(said, {1: died(30, KILL)} | victims(0, 2, 3, at=0))) == [("rank", 1, "n1", "process_exit")]


def test_two_that_were_killed_together_are_both_named() -> None:
    said = [open_round() if rank in (1, 6) else failed_round() for rank in range(8)]
    told = verdict(said, {1: died(0, KILL), 6: died(20, KILL)} | victims(0, 2, 3, 4, 5, 7))
    assert [one.rank for one in told.culprits] == [1, 6]


def test_when_most_are_killed_at_once_somebody_outside_did_it() -> None:
    told = verdict([open_round()] * 4, {rank: died(5 * rank, KILL) for rank in range(4)})
    assert told.anomaly == "none"
    assert "outside" in told.summary


def test_the_first_of_all_is_not_named_where_it_had_seen_an_error() -> None:
    said = [failed_round(), failed_round(), failed_round(), open_round()]
    assert nobody(verdict(said, victims(0, 1, 2)))


def test_an_end_that_nobody_saw_how_is_told_so() -> None:
    said = [failed_round(), open_round(), failed_round(), failed_round()]
    told = verdict(said, {1: died(0)} | victims(0, 2, 3))
    assert named(told) == [("rank", 1, "n1", "process_exit")]
    assert "nobody saw how" in told.summary


def test_without_any_times_the_one_that_no_error_reached_is_named() -> None:
    said = [failed_round(), open_round(), failed_round(), failed_round()]
    told = verdict(said, {})
    assert named(told) == [("rank", 1, "n1", "process_exit")]
    assert told.culprits[0].confidence < 0.8
    assert nobody(verdict([failed_round(), open_round(), open_round(), failed_round()], {}))


def test_ranks_apart_by_less_than_reports_can_be_late_are_not_put_in_order() -> None:
    assert nobody(verdict([open_round()] * 4, {0: died(0, KILL), 1: died(100, code=1)} | victims(2, 3)))


def test_on_one_node_milliseconds_count() -> None:
    told = verdict([open_round()] * 4, {0: died(0, KILL), 1: died(5, code=1)} | victims(2, 3), per_node=2)
    assert named(told) == [("rank", 0, "n0", "process_exit")]


# -- left by itself --------------------------------------------------------------------------------------------------


def test_a_rank_that_leaves_while_others_need_it_is_named_with_less_certainty() -> None:
    said = [failed_round(), failed_round(), before(), failed_round()]
    told = verdict(said, {2: died(0, code=3)} | victims(0, 1, 3))
    assert named(told) == [("rank", 2, "n2", "process_exit")]
    assert told.culprits[0].confidence < 0.9
    assert "exited with 3" in told.summary


def test_ranks_that_just_exit_are_nothing() -> None:
    for code in (0, 1):
        assert verdict([before()] * 4, {rank: died(rank, code=code) for rank in range(4)}).anomaly == "none"
    assert verdict([before()] * 4, {}).anomaly == "none"


def test_without_any_word_there_is_nothing_to_say() -> None:
    assert verdict([], {}).anomaly == "none"


# -- another operation -----------------------------------------------------------------------------------------------


def test_another_size_is_a_divergent_program_whoever_died_of_it_first() -> None:
    said = [failed_round(), open_round(), failed_round(count=OTHER), failed_round()]
    told = verdict(said, {1: died(0, ABRT)} | victims(0, 2, 3))
    assert (told.anomaly, told.class_) == ("failed", "H2")
    assert named(told) == [("rank", 2, "n2", "program_divergence")]
    assert told.action.kind == "notify"


@pytest.mark.parametrize("other", [{"op": "AllGather"}, {"dtype": "f64"}, {"root": 3}])
def test_any_part_of_the_operation_may_differ(other: Row) -> None:
    told = verdict([failed_round(**other), failed_round(), failed_round()], victims(0, 1, 2))
    assert (told.class_, [one.rank for one in told.culprits]) == ("H2", [0])


def test_a_tie_names_nobody() -> None:
    told = verdict([failed_round(), failed_round(count=OTHER)], {0: died(0, KILL), 1: died(900, code=1)})
    assert told.class_ == "H2"
    assert nobody(told)


def test_different_operations_in_rounds_that_ended_well_are_no_reason() -> None:
    said = [before(), before(count=OTHER), before(), before()]
    assert verdict(said, victims(0, 1, 2, 3)).anomaly == "none"


def test_ranks_in_different_rounds_are_not_compared() -> None:
    said = [failed_round(), failed_round(), before(count=OTHER), failed_round()]
    assert verdict(said, {2: died(0, KILL)} | victims(0, 1, 3)).class_ is None


# -- nodes -----------------------------------------------------------------------------------------------------------


def test_hardware_that_is_broken_for_certain_explains_the_end() -> None:
    line = "NVRM: Xid (PCI:0000:0b:00): 79, pid=1, GPU has fallen off the bus."
    said = [failed_round(), failed_round(), open_round(), failed_round()]
    told = verdict(said, {2: died(0, ABRT)} | victims(0, 1, 3), health=[{"node": "n2", "source": "kmsg", "line": line}])
    assert (told.anomaly, told.class_) == ("failed", "H3")
    assert named(told) == [("node", None, "n2", "gpu_fault")]
    assert (told.action.kind, told.action.nodes, told.action.requeue) == ("drain", ["n2"], False)


def test_what_a_job_wrote_alone_never_asks_for_a_drain() -> None:
    for said in (
        [failed_round(), failed_round(), failed_round(count=OTHER)],
        [failed_round(), failed_round(), before()],
    ):
        assert not verdict(said, {2: died(0, KILL)} | victims(0, 1)).action.nodes


def test_a_node_that_slurm_has_lost_is_named() -> None:
    said = [failed_round(), failed_round(), open_round(), failed_round()]
    told = verdict(said, victims(0, 1, 3), ended="NODE_FAIL", lost_nodes=["n2", "n9"])
    assert named(told) == [("node", None, "n2", "unknown")]
    assert told.action.kind == "collect"
    assert nobody(verdict(said, victims(0, 1, 3), ended="NODE_FAIL"))


# -- how Slurm says that it ended ------------------------------------------------------------------------------------


def test_what_slurm_ended_and_starts_anew_is_nothing_but_for_the_program() -> None:
    said = [failed_round(), failed_round(), open_round(), failed_round()]
    assert verdict(said, {2: died(0, KILL)} | victims(0, 1, 3), ended="REQUEUED").anomaly == "none"
    said[2] = failed_round(count=OTHER)
    assert verdict(said, victims(0, 1, 2, 3), ended="REQUEUED").class_ == "H2"


def test_ranks_that_are_gone_from_a_running_job_are_judged_alike() -> None:
    said = [failed_round(), failed_round(), open_round(), failed_round()]
    told = verdict(said, {2: died(0, KILL)} | victims(0, 1, 3), ended="GONE")
    assert named(told) == [("rank", 2, "n2", "process_exit")]


@pytest.mark.parametrize("word", ["CANCELLED", "COMPLETED", "TIMEOUT", "PREEMPTED", "DEADLINE", ""])
def test_an_end_that_is_nobodys_fault_is_no_end_here(word: str) -> None:
    said = [failed_round(), failed_round(), open_round(), failed_round()]
    assert verdict(said, {2: died(0, KILL)} | victims(0, 1, 3), ended=word).anomaly != "failed"


def hang(said: Mapping[int, Row], exits: Mapping[int, Row]) -> Verdict:
    """The verdict on a job of four ranks, one a node, that still runs."""
    quiet = {"comm": "dp", "op": "AllReduce", "count": USUAL, "age_ms": 300_000.0, "rounds": 0}
    frames = [{"rank": rank, "t_ms": 1.0, "comms": [quiet | row]} for rank, row in said.items()]
    health = [{"node": f"n{rank}", "source": "process", "rank": rank, "state": "X"} for rank in exits]
    files: dict[str, list[Row]] = {
        "job.json": [{"job_id": 1, "world_size": 4, "nodes": ["n0", "n1", "n2", "n3"]}],
        "communicators.jsonl": [{"comm": "dp", "ranks": [0, 1, 2, 3]}],
        "frames.jsonl": frames,
        "health.jsonl": health,
        "exits.jsonl": [_exit(rank, row) for rank, row in exits.items()],
    }
    return verdict_on(
        {name: b"".join(msgspec.json.encode(row) + b"\n" for row in rows) for name, rows in files.items()}
    )


# -- in a hang -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["exits.jsonl", "processes.jsonl"])
def test_a_hang_reads_how_the_rank_that_is_waited_for_ended(file: str) -> None:
    quiet = {"comm": "dp", "op": "AllReduce", "count": USUAL, "age_ms": 300_000.0, "rounds": 0}
    rows = [quiet | (before() if rank == 2 else open_round()) for rank in range(4)]
    told = verdict_on(
        {
            "job.json": msgspec.json.encode({"job_id": 1, "world_size": 4, "nodes": ["n0", "n1", "n2", "n3"]}),
            "communicators.jsonl": msgspec.json.encode({"comm": "dp", "ranks": [0, 1, 2, 3]}),
            "frames.jsonl": b"\n".join(
                msgspec.json.encode({"rank": rank, "t_ms": 1.0, "comms": [row]}) for rank, row in enumerate(rows)
            ),
            file: msgspec.json.encode({"world_rank": 2, "pid": 7, "state": "X", "signal": KILL, "oom_kills": 1}),
        }
    )
    assert (told.anomaly, told.class_) == ("hang", "H1")
    assert named(told) == [("rank", 2, "n2", "process_exit")]
    texts = [item.text for item in told.evidence if item.witness == "kernel"]
    assert any("SIGKILL" in text for text in texts)
    assert any("want of memory" in text for text in texts)


def test_in_a_hang_who_ended_later_is_a_victim_of_the_first() -> None:
    said = {0: open_round(), 1: open_round(), 2: open_round(), 3: open_round()}
    told = hang(said, {2: died(0, KILL), 1: died(400, ABRT)})
    assert (told.anomaly, told.class_) == ("hang", "H1")
    assert named(told) == [("rank", 2, "n2", "process_exit")]


def test_in_a_hang_two_that_ended_together_are_both_named() -> None:
    said = {0: open_round(), 1: before(), 2: before(), 3: open_round()}
    assert [one.rank for one in hang(said, {2: died(0, KILL), 1: died(40, KILL)}).culprits] == [1, 2]


def test_in_a_hang_the_calls_of_those_that_have_ended_count() -> None:
    said = {0: open_round(), 1: open_round(), 2: failed_round(count=OTHER), 3: failed_round()}
    told = hang(said, {3: died(0, code=1), 2: died(400, code=1)})
    assert told.class_ == "H2"
    assert [one.rank for one in told.culprits] == [2]
