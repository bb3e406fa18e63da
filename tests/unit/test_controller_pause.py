"""The pause file stops everything, whoever made it and whatever is in it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from controller.control.pause import WHY_CHARS_MAX, Pause, PauseState
from diagnosis.contracts.errors import OperatorFault


def test_pause_and_resume(tmp_path: Path) -> None:
    pause = Pause(tmp_path)
    assert pause.state() is None
    pause.pause("ada", "maintenance", 5.0)
    assert Pause(tmp_path).state() == PauseState(who="ada", why="maintenance", at=5.0)
    assert pause.resume()
    assert pause.state() is None
    assert not pause.resume()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1, 2]", b"\xff\xfe", b'{"who": 5}', b"x" * 100_000, b'{"x":' + b"[" * 16_000]
)
def test_any_file_pauses(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "paused.json").write_bytes(content)
    assert Pause(tmp_path).state() == PauseState()


def test_what_cannot_be_read_pauses(tmp_path: Path) -> None:
    (tmp_path / "paused.json").mkdir()
    assert Pause(tmp_path).state() is not None
    with pytest.raises(OperatorFault, match="still paused"):
        Pause(tmp_path).resume()


def test_a_directory_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(OperatorFault, match="not paused"):
        Pause(tmp_path / "absent").pause("ada", "", 5.0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_full_disk_pauses_too(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", tmp_path], check=True)
    try:
        with pytest.raises(OSError, match="No space"):
            (tmp_path / "filler").write_bytes(bytes(1 << 20))
        Pause(tmp_path).pause("ada", "", 5.0)
        assert Pause(tmp_path).state() == PauseState()
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_long_reason_is_cut(tmp_path: Path) -> None:
    assert len(Pause(tmp_path).pause("ada", "x" * 10_000, 5.0).why or "") == WHY_CHARS_MAX
    state = Pause(tmp_path).state()
    assert state is not None and state.who == "ada"
