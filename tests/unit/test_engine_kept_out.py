"""A rank that has called a round which its GPU never began: NCCL tells when kernels begin, and that none runs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.stalls import ROUND, comm, done, enqueued, judged, running
from tests.unit.test_engine_hang_witnesses import node, xid

SIZE = 6
DP = {"dp": comm(range(SIZE), algo="", transport="NVLINK")}
Row = dict[str, Any]


def inside(**more: Any) -> Row:
    """Its kernel runs."""
    return running(None, None, done_seq=ROUND - 1) | more


def idle(**more: Any) -> Row:
    """Called, and no kernel of NCCL's runs in the process. Whether the round before is over, nobody knows."""
    return {"seq": ROUND, "state": None, "send": None, "recv": None, "idle_seq": ROUND - 1} | more


def guilty(comms: dict[str, Row], said: dict[int, dict[str, Row]], **more: Any) -> list[tuple[int | None, str]]:
    return [(culprit.rank, culprit.cause) for culprit in judged(comms, said, **more).culprits]


@pytest.mark.parametrize("told", [{}, {"state": "enqueued", "done_seq": ROUND - 1}])
def test_a_rank_whose_kernel_never_began_is_as_absent_as_one_that_has_not_called(told: Row) -> None:
    said = {rank: {"dp": inside()} for rank in range(SIZE)} | {3: {"dp": idle(**told)}}
    verdict = judged(DP, said)
    (culprit,) = verdict.culprits
    assert (verdict.class_, culprit.rank, culprit.cause, culprit.domain) == ("H1", 3, "process_stuck", "software")
    assert verdict.action.kind != "drain"
    called = {rank: {"dp": inside()} for rank in range(SIZE)} | {3: {"dp": done(send=None, recv=None)}}
    (certain,) = judged(DP, called).culprits
    assert culprit.confidence < certain.confidence
    assert any("its GPU has not begun it" in item.text for item in verdict.evidence)


def test_rounds_that_the_program_has_called_ahead_change_nothing() -> None:
    said = {rank: {"dp": inside(seq=ROUND + rank)} for rank in range(SIZE)} | {3: {"dp": idle(seq=ROUND + 9)}}
    assert guilty(DP, said) == [(3, "process_stuck")]


def test_the_gpu_s_own_words_count_for_more() -> None:
    said = {rank: {"dp": inside()} for rank in range(SIZE)} | {3: {"dp": idle()}}
    health = [xid(48), *node({3: {"ecc_dbe": 1}})]
    verdict = judged(DP, said, health=health)
    (culprit,) = verdict.culprits
    assert (verdict.class_, culprit.rank, culprit.cause) == ("H1", 3, "gpu_fault")
    assert culprit.confidence > 0.9
    assert verdict.action.kind == "drain"


@pytest.mark.parametrize("untold", [None, ROUND])
def test_a_rank_that_may_run_something_else_or_has_begun_it_is_not_blamed(untold: int | None) -> None:
    """A kernel of a point-to-point operation runs, or the round's own is over."""
    said = {rank: {"dp": inside()} for rank in range(SIZE)}
    told = idle(state="enqueued", done_seq=ROUND - 1, idle_seq=untold)
    assert guilty(DP, said | {3: {"dp": told}}) == []
    # Where its state is not told it is the one rank that says nothing, as before.
    assert judged(DP, said | {3: {"dp": idle(idle_seq=untold)}}) == judged(DP, said | {3: {"dp": idle(idle_seq=None)}})


def test_a_round_that_runs_nowhere_accuses_nobody() -> None:
    assert guilty(DP, {rank: {"dp": idle()} for rank in range(SIZE)}) == []
    assert guilty(DP, {rank: {"dp": idle(state="enqueued", done_seq=ROUND - 1)} for rank in range(SIZE)}) == []


def test_where_more_are_outside_than_inside_nobody_is_named() -> None:
    said = {rank: {"dp": idle() if rank < 4 else inside()} for rank in range(SIZE)}
    assert guilty(DP, said) == []


def test_who_stands_in_another_round_is_a_victim_there() -> None:
    """Rank 3 runs `tp`, which rank 6 has not entered; what it has called of `dp` waits behind that."""
    comms = DP | {"tp": comm((3, 6), algo="", transport="NVLINK")}
    said = {rank: {"dp": inside()} for rank in range(SIZE)}
    said |= {3: {"dp": enqueued(), "tp": inside()}, 6: {"tp": done(send=None, recv=None)}}
    assert guilty(comms, said) == [(6, "process_stuck")]


def test_what_else_it_has_called_and_not_begun_is_no_alibi() -> None:
    comms = DP | {"tp": comm((2, 3), algo="", transport="NVLINK")}
    said = {rank: {"dp": inside()} for rank in range(SIZE)}
    said[2]["tp"] = enqueued()
    said[3] = {"dp": idle(), "tp": enqueued(idle_seq=ROUND - 1)}
    assert guilty(comms, said) == [(3, "process_stuck")]
