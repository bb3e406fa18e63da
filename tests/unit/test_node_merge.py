"""Two frames of one process, gloo's and NCCL's, become one rank."""

from __future__ import annotations

import numpy as np

from diagnosis.contracts import probeframe
from diagnosis.contracts.probeframe import Transport
from node_daemon.collectors.frames import FrameSample
from node_daemon.collectors.merge import frame_name, one_per_process
from node_daemon.collectors.process import STATE_UNKNOWN
from tests.nodeframes import FrameImage


def sample(image: FrameImage, read_ns: int = 5, state: int = ord("S")) -> FrameSample:
    frame = probeframe.parse(image.tobytes())
    header = frame.header
    return FrameSample(
        int(header["pid"]), int(header["pid_start_ticks"]), state, read_ns, header, frame.slots, frame.slots
    )


def image(transport: Transport, *comms: int, pid: int = 7, **header: int) -> FrameImage:
    made = FrameImage(pid, 5, transport=transport, **header)
    for slot, comm_id in enumerate(comms):
        made.join(slot, comm_id=comm_id)
        made.slots[slot]["t_enqueued_ns"] = comm_id
    return made


def test_both_frames_speak_for_one_rank_with_all_their_communicators() -> None:
    gloo = image(Transport.GLOO, 1, 2, rank=3, world_size=8, gpu=-1, last_leave_ns=40)
    nccl = image(Transport.NCCL, 11, 12, rank=0, world_size=2, gpu=5, last_leave_ns=70)
    (merged,) = one_per_process([sample(nccl, read_ns=9), sample(gloo)])
    assert [int(merged.header[name]) for name in ("rank", "world_size", "gpu", "last_leave_ns")] == [3, 8, 5, 70]
    assert merged.slots["comm_id"].tolist() == merged.again["comm_id"].tolist() == [1, 2, 11, 12]
    assert merged.read_ns == 9


def test_other_processes_stay_apart_and_in_their_order() -> None:
    samples = [sample(image(Transport.NCCL, 1, pid=pid)) for pid in (9, 4)] + [sample(image(Transport.GLOO, 2, pid=9))]
    assert [(one.pid, len(one.slots)) for one in one_per_process(samples)] == [(9, 2), (4, 1)]


def test_no_more_communicators_are_told_than_one_frame_holds_and_those_in_use_come_first() -> None:
    gloo = image(Transport.GLOO, *range(1, 17))
    nccl = image(Transport.NCCL, *range(101, 117))
    gloo.slots[3]["t_enqueued_ns"] = 1000
    (merged,) = one_per_process([sample(gloo), sample(nccl)])
    assert merged.slots["comm_id"].tolist() == [4, *range(102, 117)]


def test_a_state_that_one_look_does_not_know_is_unknown() -> None:
    frames = [sample(image(Transport.GLOO, 1)), sample(image(Transport.NCCL, 2), state=STATE_UNKNOWN)]
    assert [one.state for one in one_per_process(frames)] == [STATE_UNKNOWN]


def test_a_merged_header_does_not_change_what_was_read() -> None:
    read = sample(image(Transport.GLOO, 1, gpu=-1))
    one_per_process([read, sample(image(Transport.NCCL, 2, gpu=3))])
    assert np.int32(read.header["gpu"]) == -1


def test_each_transport_has_its_file() -> None:
    assert [frame_name(7, one) for one in Transport] == ["7.frame", "7.frame", "7.nccl.frame"]
