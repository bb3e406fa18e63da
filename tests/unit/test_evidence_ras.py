"""RAS's answers as facts: of real releases (recorded from their own RAS threads), and of what is none."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from diagnosis.contracts.gathered import COMMS_MAX, LISTED_MAX, Gathered, RasComm, RasFacts, RasRank, pack, unpack
from diagnosis.evidence.ras.answer import Answer, read_answer, shrunk, standing

RECORDED = Path(__file__).parents[1] / "data" / "nccl_ras"
WITH_JSON = ("2.28.9", "2.32.3")
ALL = ("2.27.7", *WITH_JSON)


def recorded(name: str) -> Answer:
    return read_answer((RECORDED / name).read_bytes())


def told(comms: list[dict[str, object]]) -> bytes:
    return b"SERVER PROTOCOL 2\nOK\nOK\n" + msgspec.json.encode(
        {"nccl_version": "2.30.7", "communicators_count": len(comms), "communicators": comms}
    )


def comm(counts: dict[int, int], size: int | None = None, **more: object) -> dict[str, object]:
    ranks = [
        {"rank": rank, "host": "10.0.0.1", "pid": 100 + rank, "nvml_dev": rank, "collective_counts": {"AllReduce": n}}
        for rank, n in counts.items()
    ]
    return {"hash": "0xabc", "size": len(counts) if size is None else size, "ranks": ranks, **more}


def behind(facts: RasFacts) -> tuple[str, object, list[int], int]:
    (only,) = facts.comms
    (difference,) = only.differs
    least = difference.values[-1]
    return difference.what, least.value, [rank.rank for rank in least.listed], difference.values[0].ranks


@pytest.mark.parametrize("name", [*(f"{v}-verbose.txt" for v in ALL), *(f"{v}-verbose.json" for v in WITH_JSON)])
def test_every_release_and_form_tells_who_is_behind(name: str) -> None:
    facts = recorded(name).facts
    assert (facts.state, facts.form, facts.nccl_version) == (
        "ok",
        Path(name).suffix[1:].replace("txt", "text"),
        name[:6],
    )
    assert behind(facts) == ("AllReduce", 6649, [2], 3)
    (only,) = facts.comms
    assert (only.hash, only.size, only.alike, only.launched) == ("0xfeedbeef", 4, False, 6650)
    (rank,) = only.differs[0].values[-1].listed
    assert (rank.host, rank.gpu, rank.pid is not None) == ("127.0.0.1", 2, True)


@pytest.mark.parametrize("version", ALL)
def test_a_stopped_process_is_told_by_text(version: str) -> None:
    facts = recorded(f"{version}-stopped.txt").facts
    (process,) = facts.processes
    assert (process.host, process.dead, facts.timeouts) == ("127.0.0.1", False, 2)


@pytest.mark.parametrize("version", WITH_JSON)
def test_a_stopped_process_is_told_by_json_although_nccl_lists_it_nowhere(version: str) -> None:
    (only,) = recorded(f"{version}-stopped.json").facts.comms
    assert (only.size, only.heard, only.missing_count, only.missing) == (4, 3, 1, [RasRank(rank=2)])


def test_an_older_release_answers_a_request_for_json_in_text_and_says_so() -> None:
    answer = recorded("2.27.7-asked-for-json.txt")
    assert answer.refusals == ("ERROR: Unknown command set format json",)
    assert behind(answer.facts) == ("AllReduce", 6649, [2], 3)


def test_errors_alone_are_no_report() -> None:
    answer = recorded("2.32.3-nonsense.txt")
    assert (answer.facts.state, len(answer.refusals)) == ("garbage", 2)


def test_the_minority_may_be_ahead() -> None:
    text = """Communicators... (0.00s)
    0         1         4         8        32        32   RUNNING  MISMATCH
#0-0 (aa11bb22cc33dd44) MISMATCH
  Communicator ranks have different AllGather operation counts
  30 ranks have launched up to operation 640
  2 ranks have launched up to operation 641
  Rank 12 -- GPU 4 managed by process 323032 on node 10.9.1.24
  Rank 13 -- GPU 5 (NVML 1) managed by process 323033 on node 10.9.1.24
"""
    (only,) = read_answer(text.encode()).facts.comms
    most, least = only.differs[0].values
    assert (most.value, most.ranks, most.listed) == (640, 30, [])
    assert (least.value, [rank.rank for rank in least.listed]) == (641, [12, 13])
    assert [rank.gpu for rank in least.listed] == [4, 1]


def test_ranks_beyond_a_communicators_size_discredit_it_and_nothing_else() -> None:
    text = """W703 00:59:30 ProcessGroupNCCL.cpp:981] Warning: a line of torch (function operator())
NCCL version 2.27.3 compiled with CUDA 12.9

    0         1         1         1         2         1   RUNNING  INCOMPLETE
    2         4         0         0         0         0    NOCOMM  INCOMPLETE,MISMATCH

INCOMPLETE
  Missing communicator data from 1 job process
  Process 60004 on node 10.9.1.13 managing GPU 0

#0-0 (aa33bb44cc55dd66) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 1 -- GPU 0 managed by process 60004 on node 10.9.1.13

#2-0 (93d7000200000001) INCOMPLETE
  Missing communicator data from 255 ranks
  Rank 1057455228 --
"""
    facts = read_answer(text.encode()).facts
    assert [(one.hash, [rank.rank for rank in one.missing]) for one in facts.comms] == [("0xaa33bb44cc55dd66", [1])]
    assert [process.pid for process in facts.processes] == [60004]
    assert len(facts.notes) == 2
    assert "1057455228" not in msgspec.json.encode(facts).decode()


def test_dead_processes_missing_ranks_and_ranks_that_launched_nothing() -> None:
    text = """    0         1         4       1-2        32        32  FINALIZE  MISMATCH
DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 77 on node 10.0.0.2 managing GPUs 4,5
#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 3 ranks
  The missing ranks: 3, 5-6
#0-0 (cf264af53edbe986) MISMATCH
  Communicator ranks have different Reduce operation counts
  28 ranks have launched up to operation 7
  Rank 9 has not launched any operations -- [process information not found]
"""
    facts = read_answer(text.encode()).facts
    assert [(process.pid, process.dead) for process in facts.processes] == [(77, True)]
    (only,) = facts.comms
    assert [rank.rank for rank in only.missing] == [3, 5, 6]
    assert behind(facts) == ("Reduce", 0, [9], 28)


# -- JSON that lies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        comm({0: 1, 5: 1}, size=2),
        comm({0: 1, -1: 1}, size=2),
        comm({0: 1}, size=0),
        comm({0: 1}, size=1 << 40),
        comm({0: -4}),
        comm({0: 1 << 60}),
        comm({0: 1}, size=2, missing_ranks=[{"rank": 0}]),
        comm({0: 1}) | {"hash": "0x" + "f" * 17},
        comm({0: 1}) | {"hash": "-1"},
    ],
)
def test_a_communicator_that_cannot_be_is_left_out_and_noted(bad: dict[str, object]) -> None:
    good = comm({0: 5, 1: 4}) | {"hash": "0x0000000000000def"}
    facts = read_answer(told([bad, good])).facts
    assert [one.hash for one in facts.comms] == ["0xdef"]
    assert len(facts.notes) == 1


def test_states_are_told_apart() -> None:
    states: list[dict[str, object]] = [
        {},
        {"init_state": 7},
        {"abort_flag": True},
        {"async_error": 6},
        {"finalize_called": True},
    ]
    ranks = [
        {"rank": rank, "status": {"init_state": 0, "async_error": 0} | state, "collective_counts": {}}
        for rank, state in enumerate(states)
    ]
    (only,) = read_answer(told([{"hash": "1", "size": 5, "ranks": ranks}])).facts.comms
    (difference,) = only.differs
    assert difference.what == "status"
    assert {value.value for value in difference.values} == {"RUNNING", "INIT", "ABORT", "ERROR 6", "FINALIZE"}
    assert only.alike is True


def test_large_groups_are_counted_and_not_listed_and_facts_have_a_bound() -> None:
    counts = {rank: 9 - (rank == 700) for rank in range(1000)}
    facts = read_answer(told([comm(counts) | {"hash": f"{number:x}"} for number in range(COMMS_MAX + 9)])).facts
    assert len(facts.comms) == COMMS_MAX
    most, least = facts.comms[0].differs[0].values
    assert (most.ranks, most.listed, [rank.rank for rank in least.listed]) == (999, [], [700])
    assert any("not listed" in note for note in facts.notes)
    less = shrunk(facts, 0, 3)
    assert (len(less.comms), less.comms[0].differs[0].values[1].listed) == (3, [])


@pytest.mark.parametrize("content", [b"", b"\n\n", b"OK\n", b"SERVER PROTOCOL 2", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_what_is_no_report_gives_no_facts(content: bytes) -> None:
    facts = read_answer(content).facts
    assert facts.state in ("silent", "garbage")
    assert not facts.comms


def test_truncated_and_mangled_answers_never_raise_and_never_name_impossible_ranks() -> None:
    chance = random.Random(7)
    for path in sorted(RECORDED.iterdir()):
        whole = path.read_bytes()
        for _ in range(60):
            cut = bytearray(whole[: chance.randrange(len(whole))])
            for _ in range(chance.randrange(4)):
                if cut:
                    cut[chance.randrange(len(cut))] = chance.randrange(256)
            for one in read_answer(bytes(cut)).facts.comms:
                ranks = [rank.rank for value in one.differs for said in value.values for rank in said.listed]
                assert all(0 <= rank < (one.size or 1 << 21) for rank in ranks)


def test_a_hostile_text_of_many_lines_is_read_in_bounds() -> None:
    lines = [
        "    0  1  1  4  900000  4  RUNNING  OK",
        "#0-0 (1) MISMATCH",
        "  Communicator ranks have different X operation counts",
    ]
    lines += [f"  Rank {rank} has launched up to operation {rank}" for rank in range(50_000)]
    lines += ["#0-0 (1) INCOMPLETE", "  Missing communicator data from 9 ranks", "  The missing ranks: 0-899999"]
    facts = read_answer("\n".join(lines).encode()).facts
    (only,) = facts.comms
    assert len(only.missing) == LISTED_MAX
    assert len(only.differs[0].values) <= 16


# -- asked twice -------------------------------------------------------------------------------------------------------


def answer(*comms: dict[str, object]) -> Answer:
    return read_answer(told(list(comms)))


def test_a_mismatch_that_stands_in_both_answers_is_left() -> None:
    facts = standing(answer(comm({0: 9, 1: 8, 2: 9})), answer(comm({0: 9, 1: 8, 2: 9})), 5.04)
    assert (facts.answers, facts.apart_s, facts.comms[0].moved) == (2, 5.0, False)
    assert behind(facts)[1:3] == (8, [1])


@pytest.mark.parametrize("later", [{0: 10, 1: 9}, {0: 8, 1: 9}, {0: 9, 1: 9}])
def test_a_mismatch_of_a_job_that_races_is_none(later: dict[int, int]) -> None:
    (only,) = standing(answer(comm({0: 9, 1: 8})), answer(comm(later)), 5).comms
    assert (only.differs, only.moved) == ([], True)


def test_who_is_missing_once_is_not_missing() -> None:
    first, second = answer(comm({0: 9, 1: 9}, size=4)), answer(comm({0: 9, 1: 9, 2: 9}, size=4))
    (only,) = standing(first, second, 5).comms
    assert ([rank.rank for rank in only.missing], only.missing_count, only.alike) == ([3], 1, True)


def test_a_communicator_that_is_new_in_the_second_answer_says_nothing_yet() -> None:
    (only,) = standing(answer(), answer(comm({0: 9, 1: 8}, size=3)), 5).comms
    assert (only.differs, only.missing, only.alike, only.moved) == ([], [], None, None)


def test_where_one_of_the_two_failed_it_is_no_answer() -> None:
    good, bad = answer(comm({0: 9, 1: 8})), read_answer(b"")
    for facts in (standing(good, bad, 5), standing(bad, good, 5)):
        assert (facts.state, facts.comms) == ("silent", [])


# -- on the wire -------------------------------------------------------------------------------------------------------


def part(**more: object) -> Gathered:
    return Gathered(job_id=7, restart=0, uid=1000, suspicion=1, **more)  # type: ignore[arg-type]


def test_a_part_comes_back_as_it_was() -> None:
    sent = part(ras=recorded("2.32.3-verbose.json").facts, quiet_ms=None)
    assert unpack(pack(sent)) == sent


def test_what_another_version_sends_is_passed_over_with_its_reason() -> None:
    assert unpack(msgspec.msgpack.encode((2, {"anything": 1}))) == "version"
    assert unpack(msgspec.msgpack.encode((0, {}))) == "garbage"
    newer = msgspec.msgpack.encode((1, {"job_id": 7, "restart": 0, "uid": 1, "suspicion": 1, "of_a_newer_one": [1]}))
    assert unpack(newer) == Gathered(job_id=7, restart=0, uid=1, suspicion=1)


@pytest.mark.parametrize(
    "raw", [b"", b"\xc1", b"\x92\x01", b"\x91" * 100_000, msgspec.msgpack.encode((1, {"job_id": "x"}))]
)
def test_a_part_that_is_none_is_garbage(raw: bytes) -> None:
    assert unpack(raw) == "garbage"


def test_a_part_beyond_its_bounds_is_refused() -> None:
    comms = [RasComm(hash=f"{number:#x}") for number in range(COMMS_MAX + 1)]
    assert unpack(pack(part(ras=RasFacts(state="ok", comms=comms)))) == "limits"
    assert unpack(pack(part(age_ms=-1))) == "limits"
    assert unpack(b"\x00" * (1 << 20)) == "limits"
