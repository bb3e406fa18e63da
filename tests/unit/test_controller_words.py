"""Numbers and times as people read them, and what is told to the service manager."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from controller import systemd
from controller.cli.words import clean, columns
from controller.web.words import UNKNOWN, ago, duration, iso, moment, number, percent, ranks_seen


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, UNKNOWN),
        (0.0, "0.0 s"),
        (9.94, "9.9 s"),
        (59.0, "59 s"),
        (119.0, "119 s"),
        (120.0, "2 min"),
        (7200.0, "2 h"),
        (200_000.0, "2 d"),
    ],
)
def test_durations_have_one_unit(seconds: float | None, words: str) -> None:
    assert duration(seconds) == words


def test_unknown_is_a_dash_and_never_zero() -> None:
    assert {ago(None, 5.0), moment(None), number(None), number(None, "ms")} == {UNKNOWN}
    assert ranks_seen(3, None) == f"3 of {UNKNOWN}"
    assert (number(0), number(0, "ms")) == ("0", "0 ms")


def test_times_and_numbers_are_told_shortly() -> None:
    assert (moment(0.0), iso(0.0)) == ("1970-01-01 00:00:00", "1970-01-01T00:00:00+00:00")
    assert (ago(10.0, 9.0), percent(0.5), number(12345), number(30.25, "ms")) == (
        "0.0 s ago",
        "50 %",
        "12,345",
        "30.2 ms",
    )


def test_columns_stand_below_each_other() -> None:
    assert columns([("A", "LONG", "X"), ("bbb", "c", "")]) == ["A    LONG  X", "bbb  c"]


def test_a_terminal_is_not_driven_by_what_a_job_wrote() -> None:
    assert clean("\x1b]0;title\x07\x9b2J\u202ename\r\n") == "?]0;title??2J?name??"


@pytest.mark.parametrize("abstract", [False, True])
def test_the_service_manager_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abstract: bool) -> None:
    name = f"@tocsin-test-{os.getpid()}" if abstract else str(tmp_path / "notify.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name[1:] if abstract else name)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        systemd.notify("READY=1", "STATUS=well")
        assert manager.recv(100) == b"READY=1\nSTATUS=well"
        systemd.reloading()
        assert manager.recv(100).startswith(b"RELOADING=1\nMONOTONIC_USEC=")


def test_a_service_manager_that_is_absent_gone_or_asleep_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    systemd.notify("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone.sock"))
    systemd.notify("READY=1")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asleep:
        asleep.bind(str(tmp_path / "asleep.sock"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "asleep.sock"))
        for _ in range(5000):  # more than its queue holds
            systemd.cycle_ended()
