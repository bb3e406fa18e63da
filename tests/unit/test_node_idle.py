"""What the kernels that run, or that none does, tell of a communicator whose program is ahead of the GPU."""

from __future__ import annotations

from diagnosis.contracts import probeframe
from diagnosis.contracts.probeframe import Untold
from diagnosis.contracts.report import CommState
from tests.nodeframes import FrameImage
from tests.unit.test_node_summarise import NOT_TOLD, U8, image, look, newest, sample_of, tables


def in_kernel(frame: FrameImage, runs: bool, slot: int = 0) -> None:
    """Whether a kernel of NCCL's runs on a channel of the communicator."""
    frame.slots["lanes"].view(probeframe.CHANNEL_DTYPE)["kernel_us"][slot, 3] = probeframe.DUR_OPEN if runs else 7


def behind(version: int = 22907) -> FrameImage:
    """The program has called rounds 2 to 4, and the GPU has begun round 2."""
    frame = image(library_version=version)
    frame.step()
    for _ in range(3):
        frame.enter()
    frame.slots[0]["unknown"], frame.slots[0]["started"] = Untold.ERRORS, 2
    in_kernel(frame, runs=True)
    return frame


def idle_seq(frame: FrameImage) -> list[int]:
    idle: list[int] = tables(look(sample_of(frame.tobytes()))[0])[1]["idle_seq"].tolist()
    return idle


def test_a_round_that_runs_is_told_where_the_program_is_ahead_of_the_gpu() -> None:
    row = tables(look(sample_of(behind().tobytes()))[0])[1][0]
    assert (row["state"], row["seq"], row["done_seq"]) == (CommState.RUNNING, 4, 1)


def test_the_newest_round_that_began_is_told_where_no_kernel_runs() -> None:
    frame = behind()
    assert idle_seq(frame) == [U8]
    in_kernel(frame, runs=False)
    assert idle_seq(frame) == [2]
    assert newest(frame) == NOT_TOLD  # it may have lost its end


def test_nothing_is_said_to_be_idle_where_a_kernel_may_run_unseen() -> None:
    def idle(version: int = 22907) -> FrameImage:
        frame = behind(version)
        in_kernel(frame, runs=False)
        return frame

    elsewhere = idle()
    elsewhere.join(5, comm_id=99)
    assert idle_seq(elsewhere) == [2, U8]  # point-to-point operations alone: no round, but its kernels are seen
    in_kernel(elsewhere, runs=True, slot=5)
    assert idle_seq(elsewhere) == [U8, U8]
    unseen = idle(23203)
    assert idle_seq(unseen) == [2]
    unseen.join(5, comm_id=99)
    assert idle_seq(unseen) == [U8, U8]  # nothing widens its mask
    for blind in (Untold.DONE, Untold.GRAPHS):
        frame = idle()
        frame.slots[0]["unknown"] |= blind
        assert idle_seq(frame) == [U8]
    crowded = idle()
    crowded.header["slots_reused"] = 1
    assert idle_seq(crowded) == [U8]
    gloo = idle()
    gloo.slots[0]["unknown"] = 0
    assert idle_seq(gloo) == [U8]
