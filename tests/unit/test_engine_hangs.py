"""Hangs: who has not entered, whose silence counts, where a round stands still when counts are missing, and what
calls prove."""

from __future__ import annotations

import pytest

from tests.stalls import LOOPS, absent, comm, done, enqueued, guilty, judged, running, stopped

SIZE = 8


def ring(counts: list[tuple[int, int]], without: tuple[int, ...] = ()) -> dict[int, dict[str, dict[str, object]]]:
    return {rank: {"dp": running(*both)} for rank, both in enumerate(counts) if rank not in without}


@pytest.mark.parametrize("lost", ["send", "recv"])
@pytest.mark.parametrize("at", range(SIZE))
def test_a_rank_that_stopped_in_a_ring_is_found_without_one_of_its_counts(at: int, lost: str) -> None:
    said = ring(stopped(SIZE, at, 20))
    said[at]["dp"][lost] = None
    verdict = judged({"dp": comm(range(SIZE))}, said)
    assert (verdict.class_, guilty(verdict)) == ("H3", [("rank", at, "unknown")])
    assert (
        verdict.culprits[0].confidence
        < judged({"dp": comm(range(SIZE))}, ring(stopped(SIZE, at, 20))).culprits[0].confidence
    )


def test_who_has_sent_all_owes_nothing() -> None:
    """Rank 3 of four stopped before the last step; nothing piles up, and two others have received and sent all."""
    verdict = judged({"dp": comm(range(4))}, ring(stopped(4, 3, 2 * 3 * LOOPS - 1)))
    assert (verdict.class_, guilty(verdict)) == ("H3", [("rank", 3, "unknown")])


@pytest.mark.parametrize("silent", [rank for rank in range(SIZE) if rank != 3])
def test_a_silent_member_through_which_data_went_is_not_blamed(silent: int) -> None:
    verdict = judged({"dp": comm(range(SIZE))}, ring(stopped(SIZE, 3, 20), (silent,)))
    assert (verdict.class_, guilty(verdict)) == ("H3", [("rank", 3, "unknown")])


@pytest.mark.parametrize("silent", range(SIZE))
def test_a_silent_member_that_passed_nothing_on_is_the_one_that_is_missing(silent: int) -> None:
    verdict = judged({"dp": comm(range(SIZE))}, ring(absent(SIZE, silent), (silent,)))
    assert (verdict.class_, guilty(verdict)) == ("H1", [("rank", silent, "process_exit")])


def test_a_silence_that_began_goes_before_one_that_always_was() -> None:
    said = ring(absent(SIZE, 2), (2, 5, 6))
    comms = {"dp": comm(range(SIZE), algo="")}
    assert guilty(judged(comms, said, fell_silent=(2,))) == [("rank", 2, "process_exit")]
    nobody = judged(comms, said)
    assert (nobody.culprits, nobody.action.kind) == ([], "collect")
    assert nobody.action.collect == "a report from ranks 2, 5, 6"


def test_of_several_silent_ranks_the_one_whose_node_lost_a_process() -> None:
    comms = {"dp": comm((0, 1, 8, 16), algo="")}
    said = {rank: {"dp": running()} for rank in (0, 1)}
    killed = {"node": "n2", "source": "kmsg", "line": "Out of memory: Killed process 4242 (python3) total-vm:1kB"}
    assert judged(comms, said).culprits == []
    verdict = judged(comms, said, health=[killed])
    assert guilty(verdict) == [("rank", 16, "process_exit")]
    assert verdict.action.exclude == ["n2"]


def test_a_silent_rank_seen_inside_one_round_explains_another_that_lacks_it() -> None:
    """Rank 5 is silent; the ring of ranks 0 to 7 shows it inside, where rank 3 stopped. Ranks 8 and 9 wait for it."""
    said = ring(stopped(SIZE, 3, 20), (5,))
    said[3]["dp"]["send"] = None
    said |= {8: {"norm": running(2, 1)}, 9: {"norm": running(1, 0)}}
    verdict = judged({"dp": comm(range(SIZE)), "norm": comm((5, 9, 8))}, said)
    assert (verdict.class_, guilty(verdict)) == ("H3", [("rank", 3, "unknown")])


@pytest.mark.parametrize("at", range(15))
def test_a_rank_that_stopped_in_a_tree_is_the_lowest_of_those_with_the_fewest_steps(at: int) -> None:
    said = ring(stopped(15, at, 5, "TREE"))
    verdict = judged({"dp": comm(range(15), "TREE")}, said)
    assert (verdict.class_, guilty(verdict)) == ("H3", [("rank", at, "unknown")])


def test_a_sample_that_cut_a_round_does_not_change_what_is_usual() -> None:
    """Some ranks were sampled inside a round: the steps they told are of that round, not of four."""
    half = {rank: {"dp": {"state": "running", "send": 3, "recv": 3}} for rank in range(0, 15, 2)}
    said = ring(stopped(15, 11, 5, "TREE"))
    verdict = judged({"dp": comm(range(15), "TREE")}, said, healthy=half)
    assert guilty(verdict) == [("rank", 11, "unknown")]


def test_a_leaf_that_received_proves_that_a_silent_member_of_a_tree_has_begun() -> None:
    comms = {"dp": comm(range(15), "TREE")}
    began = judged(comms, ring(stopped(15, 2, 5, "TREE"), (6,)))
    assert (began.class_, guilty(began)) == ("H3", [("rank", 2, "unknown")])
    assert began.culprits[0].confidence == 0.5  # or its silent child
    missing = judged(comms, ring(absent(15, 6, "TREE"), (6,)))
    assert (missing.class_, guilty(missing)) == ("H1", [("rank", 6, "process_exit")])


def test_a_member_of_a_tree_that_sent_proves_that_a_silent_one_below_it_has_begun() -> None:
    """Rank 13 stopped before its first part, so nothing came down to anybody; what rank 1 sent came from rank 9 too."""
    said = ring(stopped(15, 13, 0, "TREE"), (9,))
    verdict = judged({"dp": comm(range(15), "TREE")}, said)
    assert (verdict.class_, guilty(verdict)) == ("H3", [("rank", 13, "unknown")])


def test_two_members_alone_are_not_compared_by_the_fewest_steps() -> None:
    """The other one tells no steps and may not have begun: no step was made that shows where it stands."""
    said = {0: {"dp": enqueued(recv=0)}, 1: {"dp": running(1, 0)}}
    verdict = judged({"dp": comm((0, 1))}, said)
    assert guilty(verdict) == []


def test_a_receive_whose_age_is_not_told_is_as_long_as_the_others_waits() -> None:
    """Rank 0 waits for a message of silent rank 2; the others wait for rank 0. It is a victim."""
    said = {
        0: {"pp": running(0, 0, age_ms=None, peer=2), "dp": done()},
        1: {"dp": running()},
        3: {"dp": running()},
    }
    comms = {"pp": comm((0, 2), kind="p2p"), "dp": comm((0, 1, 3), algo="")}
    verdict = judged(comms, said, fell_silent=(2,))
    assert (verdict.class_, guilty(verdict)) == ("H1", [("rank", 2, "process_exit")])


def test_a_rank_that_goes_on_is_not_long_inside_because_its_age_is_not_told() -> None:
    said = {rank: {"dp": running(age_ms=None), "tp": done(rounds=4)} for rank in range(2)}
    comms = {"dp": comm((0, 1, 2)), "tp": comm((0, 1))}
    assert judged(comms, said | {2: {"dp": done()}}).anomaly == "none"


def test_a_state_that_is_not_told_is_read_from_the_rounds() -> None:
    """Rank 1 tells no state of the round that it has not finished: it waits there, and rank 2 is the one missing."""
    said = {
        0: {"dp": running(), "tp": done()},
        1: {"dp": done(), "tp": running() | {"state": None, "done_seq": 9}},
        2: {"tp": done()},
    }
    verdict = judged({"dp": comm((0, 1), algo=""), "tp": comm((1, 2), algo="")}, said)
    assert guilty(verdict) == [("rank", 2, "process_stuck")]


def test_who_is_inside_without_saying_in_which_round_waits() -> None:
    said = {0: {"dp": running(seq=None), "tp": done()}, 1: {"dp": running()}, 2: {"dp": done()}, 3: {"tp": running()}}
    verdict = judged({"dp": comm((0, 1, 2), algo=""), "tp": comm((0, 3), algo="")}, said)
    assert guilty(verdict) == [("rank", 2, "process_stuck")]


def test_who_leaves_a_state_out_may_stand_there() -> None:
    """Rank 1 is waited for; whether it waits itself it does not tell. With somebody who tells all, it is a victim."""
    said = {0: {"dp": running()}, 1: {"dp": done(), "tp": {"seq": None, "state": None}}, 2: {"tp": done()}}
    comms = {"dp": comm((0, 1), algo=""), "tp": comm((1, 2), algo="")}
    alone = judged(comms, said)
    assert guilty(alone) == [("rank", 1, "process_stuck")]
    assert alone.culprits[0].confidence == 0.6
    others = {"pp": comm((2, 3), algo="")} | comms
    said = said | {2: {"tp": done(), "pp": done()}, 3: {"pp": running()}}
    assert guilty(judged(others, said)) == [("rank", 2, "process_stuck")]


def test_calls_that_contradict_each_other_are_a_divergence_wherever_the_ranks_stand() -> None:
    """Stock NCCL, NVLink: nothing runs for certain. Ranks 0 to 2 have called `tp` and not `norm`, rank 3 the reverse;
    elsewhere a round is enqueued on all of its members."""
    said = {rank: {"tp": enqueued(), "norm": done(done_seq=9, send=None, recv=None)} for rank in range(3)}
    said[3] = {"tp": done(done_seq=9, send=None, recv=None), "norm": enqueued()}
    said |= {rank: {"other": enqueued()} for rank in (4, 5)}
    inside = {name: comm(range(4), transport="NVLINK") for name in ("tp", "norm")}
    verdict = judged(inside | {"other": comm((4, 5), transport="NVLINK")}, said)
    assert (verdict.class_, guilty(verdict)) == ("H2", [("rank", 3, "program_divergence")])


def test_a_circle_that_may_be_names_nobody_beside_one_that_is_proven() -> None:
    """Ranks 4 and 5 have called `a` and `b` in contrary orders. Rank 3 would be in a circle with 0 to 2 if it stood in
    `far`, of which it tells too little; in truth it waits for rank 4."""
    none = {"send": None, "recv": None}
    said = {rank: {"near": running(1, 0), "far": enqueued(send=0, recv=0)} for rank in (1, 2)}
    said |= {0: {"near": running(1, 0), "far": done()}}
    said |= {3: {"near": enqueued(send=0, recv=0), "far": enqueued(recv=0), "first": enqueued()}}
    said |= {4: {"a": enqueued(), "b": done(**none), "first": done(**none)}, 5: {"a": done(**none), "b": enqueued()}}
    inside = {"a": (4, 5), "b": (4, 5), "first": (3, 4)}
    comms = {name: comm(ranks, transport="NVLINK") for name, ranks in inside.items()}
    verdict = judged(comms | {name: comm(range(4), algo="") for name in ("near", "far")}, said)
    assert (verdict.class_, verdict.culprits, verdict.action.kind) == ("H2", [], "collect")


def test_a_tie_of_two_operations_is_broken_by_what_the_program_ran_before() -> None:
    said = {0: {"tp": running(count=1024)}, 1: {"tp": running(count=1031)}}
    verdict = judged({"tp": comm((0, 1))}, said)
    assert (verdict.class_, guilty(verdict)) == ("H2", [("rank", 1, "program_divergence")])
    both = {rank: {"tp": {"count": 1024 + 7 * rank}} for rank in (0, 1)}
    undecided = judged({"tp": comm((0, 1))}, said, healthy=both)
    assert (undecided.class_, undecided.culprits, undecided.action.kind) == ("H2", [], "collect")


def test_a_rank_that_sends_a_frame_without_a_state_has_not_exited() -> None:
    said = ring(absent(SIZE, 3), (3,))
    gone = judged({"dp": comm(range(SIZE))}, said, fell_silent=(3,))
    mute = judged({"dp": comm(range(SIZE))}, said | {3: {"dp": {"seq": None, "state": None, "op": None}}})
    assert guilty(gone) == [("rank", 3, "process_exit")]
    assert guilty(mute) == [("rank", 3, "process_stuck")]
    assert mute.culprits[0].confidence < gone.culprits[0].confidence
