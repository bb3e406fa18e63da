"""`rounds_of` against a writer that is interrupted anywhere: what it returns was really written as it stands there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnosis.contracts import probeframe as frame

FIELDS = ("seq", "gap_us", "dur_us", "signature")
Truth = dict[int, tuple[int, int, int]]


class Writer:
    """The probe's side of a slot, one store at a time, in the order that the frame's definition promises."""

    def __init__(self, first_seq: int = 1) -> None:
        self.slot = np.zeros(1, frame.SLOT_DTYPE)[0]
        self.slot["stride"] = 1
        self.seq = first_seq - 1
        self.slot["enqueued"] = self.seq
        self.recorded = 0
        self.truth: Truth = {}

    def round(self, stride: int, leaves: bool) -> Iterator[None]:
        """One round; the generator yields between any two stores."""
        slot = self.slot
        self.seq += 1
        slot["stride"] = stride
        yield
        low = self.seq & 0xFFFF_FFFF
        if low != 0 and self.seq % stride == 0:
            entry = slot["rounds"][self.recorded % frame.ROUND_COUNT]
            self.recorded += 1
            words = {"gap_us": low ^ 0x1111, "signature": low ^ 0x2222, "seq": low}
            self.truth[low] = (words["gap_us"], low ^ 0x3333, words["signature"])
            entry["dur_us"] = frame.DUR_OPEN
            yield
            for field, value in words.items():
                entry[field] = value
                yield
            slot["enqueued"] = self.seq
            yield
            if leaves:
                entry["dur_us"] = low ^ 0x3333
                yield
        else:
            slot["enqueued"] = self.seq
            yield


def run(writer: Writer, plan: list[tuple[int, bool]]) -> Iterator[None]:
    for stride_bits, leaves in plan:
        yield from writer.round(1 << stride_bits, leaves)


@dataclass(frozen=True)
class Pause:
    """The reader is held up before one word: of the entry that is `entry` places after the next one to be written."""

    entry: int
    field: str
    stores: int


def read_slowly(writer: Writer, stores: Iterator[None], pauses: list[Pause]) -> np.void:
    """A copy of the slot made word by word in ascending order, while the writer goes on in the pauses."""
    copy: np.void = np.zeros(1, frame.SLOT_DTYPE)[0]
    copy["enqueued"], copy["stride"] = writer.slot["enqueued"], writer.slot["stride"]
    held = {((writer.recorded + p.entry) % frame.ROUND_COUNT, p.field): p.stores for p in pauses}
    for i in range(frame.ROUND_COUNT):
        for field in FIELDS:
            for _ in range(held.get((i, field), 0)):
                next(stores, None)
            copy["rounds"][i][field] = writer.slot["rounds"][i][field]
    return copy


plans = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([True, True, True, False])), max_size=60)
A_FULL_RING = [(0, True)] * frame.ROUND_COUNT
pauses_near_the_writer = st.lists(
    st.builds(Pause, st.sampled_from([0, 0, 0, 1, 2, 31]), st.sampled_from(FIELDS), st.integers(1, 14)),
    min_size=1,
    max_size=3,
)


@settings(max_examples=600, deadline=None)
@given(
    full=st.integers(0, 2),
    before=plans,
    during=plans,
    pauses=pauses_near_the_writer,
    first_seq=st.sampled_from([1, 1000, (1 << 32) - 40, (1 << 33) - 5]),
)
def test_no_returned_round_is_torn_or_was_never_written(
    full: int, before: list[tuple[int, bool]], during: list[tuple[int, bool]], pauses: list[Pause], first_seq: int
) -> None:
    writer = Writer(first_seq)
    for _ in run(writer, A_FULL_RING * full + before):
        pass
    copy = read_slowly(writer, run(writer, during), pauses)
    for entry in frame.rounds_of(copy, int(writer.slot["enqueued"])):
        told = (int(entry["gap_us"]), int(entry["dur_us"]), int(entry["signature"]))
        assert told == writer.truth[int(entry["seq"])]


@given(rounds=st.integers(0, 100), first_seq=st.sampled_from([1, (1 << 32) - 50]))
@settings(max_examples=60, deadline=None)
def test_a_writer_at_rest_shows_its_newest_rounds_in_order(rounds: int, first_seq: int) -> None:
    writer = Writer(first_seq)
    for _ in run(writer, [(0, True)] * rounds):
        pass
    told = frame.rounds_of(writer.slot, int(writer.slot["enqueued"]))["seq"].tolist()
    recorded = [seq & 0xFFFF_FFFF for seq in range(first_seq, first_seq + rounds) if seq & 0xFFFF_FFFF]
    assert told == recorded[-(frame.ROUND_COUNT - frame.WRITERS_MAX) :]


@given(data=st.binary(min_size=frame.SLOT_BYTES, max_size=frame.SLOT_BYTES), after=st.integers(0, (1 << 64) - 1))
def test_random_bytes_never_raise(data: bytes, after: int) -> None:
    slot = np.frombuffer(data, frame.SLOT_DTYPE, 1)[0]
    told = frame.rounds_of(slot, after)
    assert len(told) <= frame.ROUND_COUNT
    assert (told["dur_us"] != frame.DUR_OPEN).all()
