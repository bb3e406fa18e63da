"""A bundle may hold anything: whatever is in its files, reading ends soon, in little memory, without an error."""

from __future__ import annotations

import json
import pickle
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnosis.contracts.incident import WORLD_MAX, Incident
from diagnosis.evidence.bundle.files import FRAMES, JOB, NAMES, ROW_NUMBERS
from diagnosis.evidence.bundle.reader import read_bundle
from diagnosis.evidence.bundle.writer import write_bundle
from diagnosis.evidence.gather import gather
from diagnosis.evidence.limits import Limits
from tests.incidents import incidents, plain
from tests.unit.test_evidence_flight import dump, entry

SMALL = Limits(line_bytes_max=4096, document_bytes_max=1 << 16, total_bytes_max=1 << 20, names_max=64, members_max=256)
MIB = 1 << 20

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
WORDS = (
    "rank comms comm ranks peer state op count t_ms world_size nodes gpus kind groups nic_of_gpu node source gpu nic"
)
MORE_WORDS = "line worker_rank phases operators links flows path id gbps src_rank operator_name fidelity since job_id"
FIELDS = st.sampled_from([*ROW_NUMBERS, *WORDS.split(), *MORE_WORDS.split()])
VALUES = st.one_of(
    JSON,
    st.sampled_from(
        [float("nan"), float("inf"), -1, -0.5, 10**400, 1 << 63, True, "", "12", "nvml", "ib", "kmsg", "done"]
    ),
    st.lists(st.integers(-2, 5), max_size=5),
    st.lists(st.dictionaries(FIELDS, JSON, max_size=6), max_size=3),
)
LINES = st.dictionaries(FIELDS, VALUES, max_size=10).map(lambda item: json.dumps(item).encode())


def check(incident: Incident) -> None:
    """The promises of the column form, which the engine relies on."""
    frames, comms, world = incident.frames, incident.communicators, incident.job.world_size
    assert 0 <= world <= WORLD_MAX
    assert len(incident.job.node) == len(incident.job.gpu) == world
    assert incident.job.node.max(initial=-1) < len(incident.job.node_names)
    assert (np.diff(frames.rank) >= 0).all() and frames.rank.max(initial=-1) < world
    assert (np.diff(frames.frame) >= 0).all() and frames.frame.max(initial=-1) < len(frames.rank)
    assert frames.frame.min(initial=0) >= 0 and frames.comm.min(initial=0) >= 0
    assert frames.comm.max(initial=-1) < len(comms.ids) and frames.peer.max(initial=-1) < world
    assert frames.signature.max(initial=-1) < len(frames.signatures)
    assert len(comms.start) == len(comms.ids) + 1 and comms.start[-1] == len(comms.member)
    assert comms.member.max(initial=-1) < world and comms.member.min(initial=0) >= 0
    for at in range(len(comms.ids)):
        members = comms.member[comms.start[at] : comms.start[at + 1]].tolist()
        assert len(set(members)) == len(members)
    for name in ROW_NUMBERS:
        column = getattr(frames, name)
        assert len(column) == len(frames.frame)
        assert not np.isinf(column).any() and not (column < 0).any()


@given(incidents())
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_read_again(incident: Incident) -> None:
    written = write_bundle(incident)
    again = read_bundle((name, [content]) for name, content in written.items())
    assert plain(again) == plain(incident)
    check(again)


@given(incidents(), st.permutations(NAMES), st.integers(1, 64))
@settings(max_examples=25, deadline=None)
def test_neither_the_order_of_files_nor_the_cuts_of_chunks_matter(
    incident: Incident, order: list[str], size: int
) -> None:
    written = write_bundle(incident)
    cut = [
        (name, [written[name][at : at + size] for at in range(0, len(written[name]), size)])
        for name in order
        if name in written
    ]
    assert plain(read_bundle(cut)) == plain(read_bundle((name, [content]) for name, content in written.items()))


@given(st.dictionaries(st.sampled_from(NAMES), st.lists(LINES, max_size=6), min_size=1))
@settings(max_examples=60, deadline=None)
def test_any_json_is_read_or_noted(contents: dict[str, list[bytes]]) -> None:
    check(read_bundle(((name, [b"\n".join(lines)]) for name, lines in contents.items()), SMALL))


@given(st.dictionaries(st.sampled_from([*NAMES, "rank_0.json", "x.pickle"]), st.binary(max_size=400), min_size=1))
@settings(max_examples=150, deadline=None)
def test_any_bytes_are_read_or_noted(contents: dict[str, bytes]) -> None:
    evidence = gather(((name, [content]) for name, content in contents.items()), SMALL)
    if evidence.incident is not None:
        check(evidence.incident)


@given(incidents(), st.data())
@settings(max_examples=60, deadline=None)
def test_a_bundle_with_broken_bytes_is_read_as_far_as_it_goes(incident: Incident, data: st.DataObject) -> None:
    broken: dict[str, bytes] = {}
    for name, content in write_bundle(incident).items():
        raw = bytearray(content)
        for at in data.draw(st.lists(st.integers(0, len(raw) - 1), max_size=8)):
            raw[at] = data.draw(st.integers(0, 255))
        broken[name] = bytes(raw[: data.draw(st.integers(0, len(raw)))])
    check(read_bundle((name, [content]) for name, content in broken.items()))


def _broken(content: bytes, data: st.DataObject) -> bytes:
    raw = bytearray(content)
    for at in data.draw(st.lists(st.integers(0, len(raw) - 1), min_size=1, max_size=4)):
        raw[at] = data.draw(st.integers(0, 255))
    return bytes(raw)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_broken_pickle_of_a_dump_is_read_or_noted(data: st.DataObject) -> None:
    dumps = [dump(entry(1, True), entry(2, rank != 1)) for rank in range(2)]
    contents = [_broken(pickle.dumps(one, data.draw(st.integers(2, 5))), data) for one in dumps]
    evidence = gather([(f"rank_{rank}", [content]) for rank, content in enumerate(contents)], SMALL)
    if evidence.incident is not None:
        check(evidence.incident)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_a_broken_json_dump_is_read_or_noted(data: st.DataObject) -> None:
    raw = dump(entry(1, True), entry(2, False))
    target = data.draw(st.sampled_from([raw, raw["entries"][1], raw["pg_config"]]))
    target[data.draw(st.sampled_from([*target, "0", "2000000"]))] = data.draw(VALUES)
    evidence = gather([("rank_0", [json.dumps(raw).encode()]), ("rank_1", [json.dumps(dump()).encode()])], SMALL)
    if evidence.incident is not None:
        check(evidence.incident)


def _endless_line(mib: int) -> Iterator[bytes]:
    yield b'{"rank": 0, "comms": ['
    for _ in range(mib):
        yield b"x" * MIB
    yield b'\n{"rank": 1, "t_ms": 5, "comms": []}\n'


def test_a_line_of_a_gigabyte_is_passed_over_in_little_memory() -> None:
    tracemalloc.start()
    try:
        incident = read_bundle([(FRAMES, _endless_line(1024))])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 * MIB
    assert incident.frames.rank.tolist() == [1]
    assert f"{FRAMES}:1: the line is longer than the reader's limit and skipped" in incident.unseen


def test_a_document_of_a_gigabyte_is_left_out_in_little_memory() -> None:
    tracemalloc.start()
    try:
        incident = read_bundle([(JOB, _endless_line(1024))], Limits(document_bytes_max=8 * MIB))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 * MIB
    assert incident.unseen == (f"{JOB}: the file is larger than the reader's limit and left out",)


NESTED = b"[" * 200_000
ODD_LINES = [
    b'{"rank": 0, "comms": ' + NESTED,
    b'{"rank": 0, "x": ' + NESTED + b"]" * 200_000 + b"}",
    b"\x00\xff\xfe",
    b"[]",
    b"null",
    b'"words"',
    b'{"rank": ' + b"9" * 10_000 + b"}",
    b'{"rank": -1, "comms": []}',
    b'{"rank": 1e300, "comms": []}',
    b'{"rank": 4294967296, "comms": []}',
    b'{"rank": true, "comms": []}',
    b'{"comms": []}',
]


@pytest.mark.parametrize("line", ODD_LINES, ids=range(len(ODD_LINES)))
def test_a_line_that_is_no_frame_is_noted_with_its_place(line: bytes) -> None:
    incident = read_bundle([(FRAMES, [b'{"rank": 0}\n' + line + b'\n{"rank": 1}\n'])])
    assert incident.frames.rank.tolist() == [0, 1]
    assert any(note.startswith(f"{FRAMES}:2: ") for note in incident.unseen)


def test_a_million_faults_are_a_few_notes() -> None:
    limits = Limits(skipped_max=2000)
    incident = read_bundle([(FRAMES, [b"nonsense\n" * 1_000_000])], limits)
    assert len(incident.unseen) == 5
    assert incident.unseen[-2] == f"{FRAMES}: not a JSON object, skipped, 1998 more"
    assert incident.unseen[-1].startswith(f"{FRAMES}: the rest from line 2002 on is not read")


@pytest.mark.parametrize(
    ("job", "world"),
    [
        ({"world_size": 1 << 40}, 0),
        ({"world_size": -4}, 0),
        ({"world_size": 2, "nodes": ["a"] * 5, "gpus": [0, "x", None, -7]}, 2),
        ({"nodes": ["a", None, 3, {"b": 1}]}, 4),
        ({"world_size": 4, "groups": {"tp": [[0, 1], [1, 9]], "dp": "x", "pp": [[0, 1], [2, 3]]}}, 4),
        ({"world_size": 2, "nic_of_gpu": {"0": "mlx5_3", "x": "y", "1": 4}}, 2),
    ],
)
def test_a_job_that_cannot_be_is_read_as_far_as_it_can(job: dict[str, Any], world: int) -> None:
    incident = read_bundle([(JOB, [json.dumps(job).encode()])])
    assert incident.job.world_size == world
    check(incident)


def test_all_inputs_together_are_bounded() -> None:
    def many() -> Iterator[tuple[str, Iterator[bytes]]]:
        for at in range(100):
            yield f"{at}/{FRAMES}", iter([b'{"rank": 0}\n' * 1000] * 10)

    incident = read_bundle(many(), Limits(total_bytes_max=MIB))
    assert len(incident.frames.rank) <= MIB // 12
    assert any("larger than the reader's limit" in note for note in incident.unseen)
