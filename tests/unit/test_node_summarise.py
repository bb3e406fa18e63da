"""Two looks at a job's frames become tables; whatever a job writes, the tables are sound."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnosis.contracts import probeframe, report
from diagnosis.contracts.columns import Table, null_of, unpack
from diagnosis.contracts.probeframe import Untold
from diagnosis.contracts.report import CommState, JobSample
from node_daemon.collectors.frames import FrameSample, JobFrames, _same_communicators
from node_daemon.summarise import Memory, summarise
from tests.nodeframes import FrameImage

U4, U8 = null_of(np.dtype("<u4")), null_of(np.dtype("<u8"))
SECOND_NS = 1_000_000_000


def sample_of(first: bytes, second: bytes | None = None, read_ns: int = 100 * SECOND_NS) -> FrameSample:
    left, right = probeframe.parse(first), probeframe.parse(second or first)
    slots, again = _same_communicators(left.slots, right.slots)
    header = left.header
    return FrameSample(int(header["pid"]), int(header["pid_start_ticks"]), ord("S"), read_ns, header, slots, again)


def look(*frames: FrameSample, before: Memory | None = None) -> tuple[JobSample, Memory]:
    return summarise(JobFrames(7, 0, 1000, 1000, list(frames)), before if before is not None else {})


def tables(sample: JobSample) -> tuple[Table, Table, Table]:
    return (
        unpack(sample.ranks, report.RANK_DTYPE, report.RANKS_MAX),
        unpack(sample.comms, report.COMM_DTYPE, report.COMM_ROWS_MAX),
        unpack(sample.rounds, report.ROUND_DTYPE, report.ROUND_ROWS_MAX),
    )


def image(pid: int = 77, **header: int) -> FrameImage:
    frame = FrameImage(pid, 5, **header)
    frame.join()
    return frame


def test_the_first_look_knows_no_differences() -> None:
    frame = image(rank=3, world_size=16, gpu=-1)
    frame.step()
    ranks, comms, rounds = tables(look(sample_of(frame.tobytes()))[0])
    assert (ranks["rank"][0], ranks["world_size"][0], chr(ranks["process_state"][0])) == (3, 16, "S")
    assert ranks["gpu"][0] == null_of(np.dtype("<i4"))
    row = comms[0]
    assert (row["state"], row["seq"], row["done_seq"]) == (CommState.DONE, 1, 1)
    assert (row["rounds"], row["send"], row["dur_us"], row["gap_us"]) == (U4, U4, U8, U8)
    assert rounds[["seq", "gap_us", "dur_us", "signature"]].tolist() == [(1, 30_000, 10_000, 7)]


def test_a_round_that_the_gpu_has_not_begun_is_enqueued() -> None:
    frame = image()
    frame.step()
    frame.enter()
    assert tables(look(sample_of(frame.tobytes()))[0])[1]["state"][0] == CommState.RUNNING
    frame.slots[0]["started"] = 1
    assert tables(look(sample_of(frame.tobytes()))[0])[1]["state"][0] == CommState.ENQUEUED


def test_what_a_probe_cannot_tell_is_null_and_stays_so_for_the_window_in_which_it_could_not() -> None:
    frame, every = image(), Untold.DONE | Untold.TIMES | Untold.STEPS
    frame.enter()
    frame.slots[0]["unknown"], frame.slots[0]["started"] = every, 0
    told, memory = look(sample_of(frame.tobytes()))
    row = tables(told)[1][0]
    assert (row["state"], row["seq"], row["done_seq"]) == (null_of(np.dtype("u1")), 1, U8)
    frame.leave()
    frame.step()
    frame.slots[0]["unknown"] = 0
    told, memory = look(sample_of(frame.tobytes()), before=memory)
    row = tables(told)[1][0]
    assert (row["state"], row["done_seq"]) == (CommState.DONE, 2)
    assert (row["rounds"], row["send"], row["recv"], row["dur_us"], row["gap_us"]) == (U4, U4, U4, U8, U8)
    frame.step()
    row = tables(look(sample_of(frame.tobytes()), before=memory)[0])[1][0]
    assert (row["rounds"], row["send"], row["recv"], row["dur_us"], row["gap_us"]) == (1, 14, 14, 10_000, 30_000)


def test_errors_that_a_probe_cannot_see_are_not_none() -> None:
    frame = image()
    frame.step()
    assert tables(look(sample_of(frame.tobytes()))[0])[1]["errors"][0] == 0
    frame.slots[0]["unknown"] = Untold.ERRORS
    assert tables(look(sample_of(frame.tobytes()))[0])[1]["errors"][0] == U4


def newest(frame: FrameImage) -> tuple[int, int]:
    row = tables(look(sample_of(frame.tobytes()))[0])[1][0]
    return int(row["state"]), int(row["done_seq"])


NOT_TOLD = (null_of(np.dtype("u1")), U8)


def test_the_ends_of_transfers_tell_what_they_do_tell_and_leave_the_rest_open() -> None:
    frame = image(library_version=23200)
    frame.step()
    frame.slots[0]["unknown"] = Untold.DONE | Untold.TIMES | Untold.ERRORS
    assert newest(frame) == (CommState.DONE, 1)
    frame.enter()
    assert newest(frame) == (CommState.RUNNING, 1)
    frame.slots[0]["started"] = 1  # this rank had no part in the round's transfers: it may be over or not
    assert newest(frame) == NOT_TOLD


def test_a_round_whose_end_nccl_may_have_lost_does_not_pass_for_one_that_hangs() -> None:
    for version, lost in ((22907, NOT_TOLD), (23102, (CommState.RUNNING, 1))):
        frame = image(library_version=version)
        frame.step()
        frame.enter()
        frame.slots[0]["unknown"] = Untold.ERRORS
        assert newest(frame) == lost
        channels = frame.slots["lanes"].view(probeframe.CHANNEL_DTYPE)
        channels["kernel_us"][0, 3] = probeframe.DUR_OPEN
        assert newest(frame) == (CommState.RUNNING, 1)
        channels["kernel_us"][0, 3] = 7
        frame.leave()
        assert newest(frame) == (CommState.DONE, 2)


def test_the_age_of_a_state_that_is_not_told_runs_from_the_last_sign_of_life() -> None:
    frame = image()
    frame.enter()
    frame.slots[0]["unknown"], frame.slots[0]["started"] = Untold.DONE, 0
    frame.slots[0]["t_enqueued_ns"], frame.header["last_leave_ns"] = 90 * SECOND_NS, 97 * SECOND_NS
    row = tables(look(sample_of(frame.tobytes(), read_ns=100 * SECOND_NS))[0])[1][0]
    assert row["age_us"] == 3_000_000


def test_where_rounds_are_too_many_each_communicator_tells_its_newest() -> None:
    frame = image()
    frame.join(1, comm_id=0xBEEF)
    for slot, steps in ((0, 20), (1, 3)):
        for _ in range(steps):
            frame.step(slot)
    job = JobFrames(7, 0, 1000, 1000, [sample_of(frame.tobytes())])
    assert tables(summarise(job, {}, 23)[0])[2]["seq"].tolist() == [*range(1, 21), 1, 2, 3]
    sample, memory = summarise(job, {}, 10)
    assert tables(sample)[2]["seq"].tolist() == [*range(16, 21), 1, 2, 3]
    assert len(tables(summarise(job, memory, 10)[0])[2]) == 0
    assert len(tables(summarise(job, {}, 0)[0])[2]) == 0


def test_differences_to_the_last_look_are_told_and_each_round_once() -> None:
    frame = image()
    frame.step()
    _, memory = look(sample_of(frame.tobytes()))
    for _ in range(3):
        frame.step(gap_us=20_000, dur_us=5_000)
    sample, memory = look(sample_of(frame.tobytes()), before=memory)
    _, comms, rounds = tables(sample)
    row = comms[0]
    assert (row["rounds"], row["gap_us"], row["dur_us"], row["send"]) == (3, 60_000, 15_000, 42)
    assert rounds["seq"].tolist() == [2, 3, 4]
    sample, memory = look(sample_of(frame.tobytes()), before=memory)
    _, comms, rounds = tables(sample)
    assert (comms[0]["rounds"], len(rounds)) == (0, 0)


def test_an_open_round_shows_its_own_steps_and_its_age() -> None:
    frame = image()
    frame.step()
    frame.enter()
    frame.slots[0]["t_enqueued_ns"] = 98 * SECOND_NS
    frame.slots[0]["open"][:] = [(9, 5, 6, 0), (2, 3, 4, 0)]
    row = tables(look(sample_of(frame.tobytes()))[0])[1][0]
    assert (row["state"], row["seq"], row["done_seq"]) == (CommState.RUNNING, 2, 1)
    assert (row["send"], row["recv"], row["age_us"]) == (3, 4, 2_000_000)


def test_the_age_of_an_idle_communicator_runs_from_the_last_leaving_of_any_round() -> None:
    frame = image()
    frame.step()
    frame.header["last_leave_ns"] = 99 * SECOND_NS
    assert tables(look(sample_of(frame.tobytes()))[0])[1][0]["age_us"] == 1_000_000


def test_times_that_lie_ahead_are_cut_to_zero_and_absent_ones_are_unknown() -> None:
    frame = image()
    frame.step()
    frame.header["last_leave_ns"] = U8
    assert tables(look(sample_of(frame.tobytes()))[0])[1][0]["age_us"] == 0
    frame.header["last_leave_ns"] = 0
    assert tables(look(sample_of(frame.tobytes()))[0])[1][0]["age_us"] == U8


def test_counters_that_run_backwards_are_unknown_and_neither_zero_nor_negative() -> None:
    frame = image()
    for _ in range(5):
        frame.step()
    _, memory = look(sample_of(frame.tobytes()))
    frame.slots[0]["dur_sum_ns"] = 1
    frame.step()
    row = tables(look(sample_of(frame.tobytes()), before=memory)[0])[1][0]
    assert (row["rounds"], row["gap_us"], row["dur_us"], row["send"], row["recv"]) == (U4, U8, U8, U4, U4)


def test_another_process_with_the_same_number_starts_anew() -> None:
    frame = image()
    frame.step()
    _, memory = look(sample_of(frame.tobytes()))
    frame.header["pid_start_ticks"] = 6
    frame.step()
    assert tables(look(sample_of(frame.tobytes()), before=memory)[0])[1][0]["rounds"] == U4


def test_a_communicator_that_was_away_for_a_look_starts_anew() -> None:
    frame = image()
    frame.step()
    _, memory = look(sample_of(frame.tobytes()))
    _, memory = look(before=memory)
    frame.step()
    assert tables(look(sample_of(frame.tobytes()), before=memory)[0])[1][0]["rounds"] == U4


def test_a_round_that_ends_after_a_later_one_is_told_all_the_same() -> None:
    frame = image()
    frame.enter()
    frame.enter()
    frame.slots[0]["rounds"][2]["dur_us"] = 5
    frame.slots[0]["done"] = 1
    sample, memory = look(sample_of(frame.tobytes()))
    assert tables(sample)[2]["seq"].tolist() == [2]
    frame.slots[0]["rounds"][1]["dur_us"] = 9
    frame.slots[0]["done"] = 2
    assert tables(look(sample_of(frame.tobytes()), before=memory)[0])[2]["seq"].tolist() == [1]


def test_a_round_that_differs_between_both_readings_waits_for_the_next_look() -> None:
    frame = image()
    frame.step()
    first = frame.tobytes()
    frame.slots[0]["rounds"][1]["gap_us"] = 1
    sample, memory = look(sample_of(first, frame.tobytes()))
    assert len(tables(sample)[2]) == 0
    frame.step()
    assert tables(look(sample_of(frame.tobytes()), before=memory)[0])[2]["seq"].tolist() == [1, 2]


def test_round_numbers_beyond_32_bits_are_whole() -> None:
    frame = image()
    frame.slots[0]["enqueued"] = frame.slots[0]["done"] = (5 << 32) + 10
    frame.step()
    assert tables(look(sample_of(frame.tobytes()))[0])[2]["seq"].tolist() == [(5 << 32) + 11]


def test_the_signature_is_that_of_the_newest_round_worked_out_where_it_was_not_written() -> None:
    frame = image()
    frame.enter(signature=5)
    assert tables(look(sample_of(frame.tobytes()))[0])[1][0]["signature"] == 5
    frame.leave()
    frame.slots[0]["enqueued"] += 1  # a round that the stride passed over
    frame.slots[0]["open"][0] = (2, 0, 0, 6)
    assert tables(look(sample_of(frame.tobytes()))[0])[1][0]["signature"] == 6
    frame.slots[0]["open"][0] = (0, 0, 0, 0)
    slots = frame.slots[:1]
    wanted = probeframe.signatures(slots["op"], slots["dtype"], slots["count"], slots["root"])[0]
    assert tables(look(sample_of(frame.tobytes()))[0])[1][0]["signature"] == wanted
    assert tables(look(sample_of(image().tobytes()))[0])[1][0]["signature"] == U4


def test_a_round_whose_operation_was_not_known_has_no_signature() -> None:
    frame = image()
    frame.step()
    frame.slots[0]["rounds"]["signature"] = probeframe.SIGNATURE_UNKNOWN
    assert tables(look(sample_of(frame.tobytes()))[0])[2]["signature"].tolist() == [U4]


def test_rounds_on_both_sides_of_the_32_bit_boundary_keep_their_numbers() -> None:
    frame = image()
    frame.slots[0]["enqueued"] = frame.slots[0]["done"] = (1 << 32) - 3
    for _ in range(5):
        frame.step()
    told = tables(look(sample_of(frame.tobytes()))[0])[2]["seq"].tolist()
    # The entry of number 2^32 says 0 and counts as unused.
    assert set(told) <= {(1 << 32) + offset for offset in (-2, -1, 1, 2)}
    assert (1 << 32) + 2 in told and (1 << 32) - 1 in told


def test_rows_of_several_frames_point_at_their_own_rank() -> None:
    frames = []
    for rank in range(3):
        frame = image(pid=100 + rank, rank=rank)
        if rank == 1:
            frame.join(4, comm_id=99)
        frame.step()
        frames.append(sample_of(frame.tobytes()))
    ranks, comms, rounds = tables(look(*frames)[0])
    assert ranks["pid"].tolist() == [100, 101, 102]
    assert comms["rank_row"].tolist() == [0, 1, 1, 2]
    assert rounds["comm_row"].tolist() == [0, 1, 3]


def test_a_job_without_communicators_has_ranks_alone() -> None:
    ranks, comms, rounds = tables(look(sample_of(FrameImage(7, 5).tobytes()))[0])
    assert (len(ranks), len(comms), len(rounds)) == (1, 0, 0)


def hostile(slots: bytes, header: bytes) -> bytes:
    """Random bytes where a job may write anything; only what `parse` itself refuses is put right."""
    sound = FrameImage(77, 5)
    head = np.frombuffer(header, probeframe.HEADER_DTYPE).copy()
    for name in ("magic", "version", "header_bytes", "slot_bytes", "slot_count", "pid", "pid_start_ticks"):
        head[name] = sound.header[name]
    return head.tobytes() + slots


HEADERS = st.binary(min_size=probeframe.HEADER_BYTES, max_size=probeframe.HEADER_BYTES)
SLOTS_BYTES = probeframe.FILE_BYTES - probeframe.HEADER_BYTES


@st.composite
def slot_bytes(draw: st.DrawFn) -> bytes:
    """Slots of noise, in which counters and sizes also take the values at which sums and casts break."""
    seed = draw(st.integers(0, 2**32 - 1))
    data = np.random.default_rng(seed).bytes(SLOTS_BYTES)
    slots = np.frombuffer(data, probeframe.SLOT_DTYPE).copy()
    edges = st.sampled_from([0, 1, 2, 31, 32, 33, 2**31, 2**32 - 1])
    for slot in slots:
        slot["comm_id"] = draw(st.sampled_from([1, 2, 3, 2**64 - 1]))
        slot["comm_size"], slot["comm_rank"] = draw(edges), draw(st.sampled_from([0, 1, 5]))
        slot["stride"] = draw(edges)
        for name in ("enqueued", "done", "t_enqueued_ns", "dur_sum_ns"):
            if draw(st.booleans()):
                slot[name] = draw(st.sampled_from([0, 1, 40, 2**32, 2**63, 2**64 - 1]))
        if draw(st.booleans()):
            slot["rounds"]["seq"] = np.arange(32) + draw(edges) % 1000
    return slots.tobytes()


@settings(max_examples=60, deadline=None)
@given(HEADERS, slot_bytes(), slot_bytes(), slot_bytes())
def test_whatever_a_job_writes_the_report_is_sound(header: bytes, one: bytes, two: bytes, three: bytes) -> None:
    memory: Memory = {}
    for first, second in ((one, one), (two, three), (three, three), (one, two)):
        sample, memory = look(sample_of(hostile(first, header), hostile(second, header)), before=memory)
        body = report.encode(report.Report("gpu001", "", 1, 1, 0, 0, 1000, [sample]))
        ranks, comms, rounds = tables(report.decode(body).jobs[0])
        assert len(ranks) == 1
        assert (comms["rank_row"] == 0).all()
        assert ((comms["done_seq"] <= comms["seq"]) | (comms["done_seq"] == U8)).all()
        told = {CommState.NONE, CommState.RUNNING, CommState.ENQUEUED, CommState.DONE, null_of(np.dtype("u1"))}
        assert set(comms["state"].tolist()) <= told
        assert (rounds["comm_row"] < len(comms)).all()
        assert (rounds["dur_us"] != probeframe.DUR_OPEN).all()
        assert len(memory) <= probeframe.SLOT_COUNT
        assert all(len(told.rounds) <= probeframe.ROUND_COUNT for told in memory.values())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=12))
def test_whatever_the_pace_each_recorded_round_is_told_once_and_the_windows_add_up(paces: list[int]) -> None:
    frame, memory = image(), Memory()
    told: list[int] = []
    summed = 0
    look_first, memory = look(sample_of(frame.tobytes()), before=memory)
    del look_first
    for pace in paces:
        for _ in range(pace):
            frame.step(gap_us=1000, dur_us=2000)
        sample, memory = look(sample_of(frame.tobytes()), before=memory)
        _, comms, rounds = tables(sample)
        told += rounds["seq"].tolist()
        summed += int(comms[0]["rounds"])
        assert int(comms[0]["dur_us"]) == pace * 2000
    assert summed == sum(paces)
    assert len(told) == len(set(told))
    assert set(told) <= set(range(1, sum(paces) + 1))
    assert sum(paces) == 0 or max(told, default=0) == sum(paces)
