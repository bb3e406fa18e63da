"""The frame's layout as numpy and the compiler see it, and the reading of whole files."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from diagnosis.contracts import probeframe as frame
from diagnosis.contracts.errors import AgentFault
from node_daemon.native.frame.generate import HEADER_PATH, render

Offsets = dict[tuple[str, str], tuple[int, int]]


def numpy_offsets() -> Offsets:
    """(struct, field) -> (offset, size), and (struct, "") -> (0, size of the struct)."""
    seen: Offsets = {}
    for name, _, dtype in frame.STRUCTS:
        seen[name, ""] = (0, dtype.itemsize)
        assert dtype.names and dtype.fields
        for field in dtype.names:
            seen[name, field] = (dtype.fields[field][1], dtype.fields[field][0].itemsize)
    return seen


def layout_program() -> str:
    lines = ["#include <stdio.h>", '#include "tocsin_frame.h"', "int main(void) {"]
    for name, fields, _ in frame.STRUCTS:
        lines.append(f'printf("{name} . 0 %zu\\n", sizeof({name}));')
        for field, *_ in fields:
            lines.append(
                f'printf("{name} {field} %zu %zu\\n", offsetof({name}, {field}), sizeof((({name} *)0)->{field}));'
            )
    return "\n".join([*lines, "return 0; }"])


@pytest.mark.parametrize("compiler", [("cc", "c11", ".c"), ("c++", "c++17", ".cpp")], ids=["c", "c++"])
def test_the_compiler_and_numpy_see_every_field_at_the_same_bytes(
    tmp_path: Path, compiler: tuple[str, str, str]
) -> None:
    command, standard, suffix = compiler
    assert shutil.which(command), f"{command} is needed to build tocsin at all"
    source, program = tmp_path / f"layout{suffix}", tmp_path / "layout"
    source.write_text(layout_program())
    build = [command, f"-std={standard}", "-Wall", "-Wextra", "-Werror", f"-I{HEADER_PATH.parent}"]
    subprocess.run([*build, str(source), "-o", str(program)], check=True, timeout=60)
    told = subprocess.run([str(program)], check=True, timeout=10, capture_output=True, text=True).stdout
    seen: Offsets = {}
    for line in told.splitlines():
        struct, field, offset, size = line.split()
        seen[struct, field.rstrip(".")] = (int(offset), int(size))
    assert seen == numpy_offsets()


def test_the_header_file_is_what_the_generator_writes_today() -> None:
    assert HEADER_PATH.read_text() == render(), "run python -m node_daemon.native.frame.generate"


def test_no_field_is_wider_than_one_store_and_each_stands_on_its_own_alignment() -> None:
    for name, fields, dtype in frame.STRUCTS:
        assert dtype.fields is not None
        for field, code, *_ in fields:
            if code and not code.startswith("S"):
                width = np.dtype(code).itemsize
                assert width <= 8, (name, field)
                assert dtype.fields[field][1] % width == 0, (name, field)
    # Slots and what they nest start on a multiple of 8, so alignment inside the structs is alignment in the file.
    assert frame.HEADER_BYTES % 8 == 0
    assert frame.SLOT_BYTES % 8 == 0
    for nested in ("open", "lanes", "rounds"):
        assert frame.SLOT_DTYPE.fields is not None
        assert frame.SLOT_DTYPE.fields[nested][1] % 8 == 0


def test_a_slot_is_no_larger_than_the_published_frame() -> None:
    assert frame.SLOT_DTYPE.itemsize == frame.SLOT_BYTES == 1184
    assert frame.HEADER_DTYPE.itemsize == frame.HEADER_BYTES == 128


def sound_frame() -> bytearray:
    data = bytearray(frame.FILE_BYTES)
    header = np.frombuffer(data, frame.HEADER_DTYPE, 1)
    header["magic"], header["version"] = frame.MAGIC, frame.VERSION
    header["header_bytes"], header["slot_bytes"] = frame.HEADER_BYTES, frame.SLOT_BYTES
    header["slot_count"] = frame.SLOT_COUNT
    slots = np.frombuffer(data, frame.SLOT_DTYPE, frame.SLOT_COUNT, frame.HEADER_BYTES)
    slots["comm_id"][:3], slots["comm_size"][:3], slots["comm_rank"][:3] = 7, 4, [0, 3, 4]
    return data


def test_a_sound_frame_is_parsed_and_slots_that_contradict_themselves_are_left_out() -> None:
    parsed = frame.parse(bytes(sound_frame()))
    assert parsed.slots["comm_rank"].tolist() == [0, 3]  # position 4 of 4 does not exist


@pytest.mark.parametrize("version", frame.VERSIONS_READ)
def test_every_version_up_to_this_one_is_read(version: int) -> None:
    data = sound_frame()
    np.frombuffer(data, frame.HEADER_DTYPE, 1)["version"] = version
    assert len(frame.parse(bytes(data)).slots) == 2


def test_the_channels_of_nccl_lie_in_the_bytes_of_the_lanes() -> None:
    data = sound_frame()
    slots = np.frombuffer(data, frame.SLOT_DTYPE, frame.SLOT_COUNT, frame.HEADER_BYTES)
    slots["lanes"]["send_steps"][1, 31] = 7
    channels = frame.channels_of(frame.parse(bytes(data)).slots)
    assert channels.shape == (2, frame.LANE_COUNT)
    assert channels["send_steps"][1, 31] == 7


def test_the_control_word_stands_where_its_writer_expects_it() -> None:
    assert frame.HEADER_DTYPE.fields is not None
    assert frame.HEADER_DTYPE.fields["control"][1] == frame.CONTROL_OFFSET
    assert frame.control_word(0x50, 3) == 3 << 32 | 0x50


def lie(field: str, value: int) -> Callable[[bytearray], bytes]:
    def told(data: bytearray) -> bytes:
        np.frombuffer(data, frame.HEADER_DTYPE, 1)[field] = value
        return bytes(data)

    return told


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda data: b"", "short"),
        (lambda data: bytes(data[: frame.HEADER_BYTES - 1]), "short"),
        (lie("magic", 0), "magic"),
        (lie("magic", frame.MAGIC + 1), "magic"),
        (lie("version", frame.VERSION + 1), "version"),
        (lie("version", 0), "version"),
        (lie("header_bytes", 64), "sizes"),
        (lie("slot_bytes", 1 << 31), "sizes"),
        (lie("slot_count", 17), "sizes"),
        (lambda data: bytes(data[: frame.HEADER_BYTES]), "sizes"),
        (lambda data: bytes(data[:-1]), "sizes"),
        (lambda data: bytes(data) + b"\0", "sizes"),
    ],
)
def test_a_file_that_is_no_frame_or_lies_about_itself_is_refused_with_its_reason(
    spoil: Callable[[bytearray], bytes], reason: str
) -> None:
    with pytest.raises(AgentFault) as caught:
        frame.parse(spoil(sound_frame()))
    assert caught.value.reason == reason


def test_the_signature_tells_operations_apart_but_not_the_counts_of_an_all_to_all() -> None:
    op = np.array([1, 2, 1, 1, 2, 6, 6], np.uint8)
    dtype = np.array([7, 7, 8, 7, 7, 7, 7], np.uint8)
    count = np.array([10, 10, 10, 11, 10, 5, 6], np.uint64)
    root = np.array([-1, -1, -1, -1, 3, -1, -1], np.int32)
    told = frame.signatures(op, dtype, count, root)
    assert len(set(told[:6].tolist())) == 6
    assert told[5] == told[6]
    assert frame.SIGNATURE_UNKNOWN not in told
