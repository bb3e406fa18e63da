"""The daemon's configuration file: defaults, bounds, and every fault at once with its line."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from diagnosis.contracts.errors import OperatorFault
from node_daemon.identity import next_epoch, read_key
from node_daemon.settings import SETTINGS, load, parse

LEAST = 'node = "gpu001"\ncontroller_url = "http://head:8620"\n'


def test_two_keys_are_enough() -> None:
    settings = parse(LEAST)
    assert (settings.node, settings.controller_url) == ("gpu001", "http://head:8620")
    assert settings.frame_root == Path("/dev/shm/tocsin")
    assert settings.nvml_period_s == 10.0


def test_whole_numbers_are_taken_where_a_number_is_wanted() -> None:
    assert parse(LEAST + "[nvml]\nperiod_s = 1\n").nvml_period_s == 1.0


def test_all_faults_of_a_file_are_told_at_once_with_line_and_key() -> None:
    text = 'node = "gpu 1"\nreport_period_ms = 5\n\n[nvml]\nperiod_s = "often"\ncolour = 3\n[spoool]\n'
    with pytest.raises(OperatorFault) as caught:
        parse(text, "node.toml")
    assert [line.split(": ")[:2] for line in str(caught.value).splitlines()] == [
        ["node.toml", "controller_url"],
        ["node.toml:1", "node"],
        ["node.toml:2", "report_period_ms"],
        ["node.toml:5", "nvml.period_s"],
        ["node.toml:6", "nvml.colour"],
        ["node.toml:7", "spoool"],
    ]


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('controller_url = "head:8620"', "controller_url"),
        ('controller_url = "http://head/base"', "controller_url"),
        ('controller_url = "http://head:99999"', "controller_url"),
        ('controller_url = "ftp://head"', "controller_url"),
        ('key_file = "node.key"', "key_file"),
        ("report_period_ms = 1000.0", "report_period_ms"),
        ("report_period_ms = true", "report_period_ms"),
        ("request_timeout_s = nan", "request_timeout_s"),
        ("request_timeout_s = inf", "request_timeout_s"),
        ("nvml = 3", "nvml"),
        ("[evidence]\nenabled = 1", "evidence.enabled"),
        ('[evidence]\npy_spy = "py-spy"', "evidence.py_spy"),
        ("[spool]\nreports_max = -1", "spool.reports_max"),
    ],
)
def test_a_wrong_value_is_refused_under_its_key(line: str, key: str) -> None:
    kept = "".join(f"{known}\n" for known in LEAST.splitlines() if known.split(" ")[0] != line.split(" ")[0])
    with pytest.raises(OperatorFault, match=rf": {re.escape(key)}: "):
        parse(kept + line + "\n")


def test_a_file_that_is_no_toml_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text("node = \n")
    with pytest.raises(OperatorFault, match="line 1"):
        load(path)


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(OperatorFault, match="No such file"):
        load(tmp_path / "absent.toml")


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(OperatorFault, match="UTF-8"):
        load(path)


def test_every_key_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "node-daemon.md").read_text()
    assert [key for key in SETTINGS if f"`{key}`" not in page] == []


def test_a_key_is_read_from_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    path.write_text("ab" * 32 + "\n")
    path.chmod(0o600)
    assert read_key(path) == b"\xab" * 32


@pytest.mark.parametrize(("mode", "text", "word"), [(0o640, "ab" * 32, "chmod 600"), (0o600, "ab" * 31, "64 hex")])
def test_a_key_that_others_read_or_that_is_none_is_refused(tmp_path: Path, mode: int, text: str, word: str) -> None:
    path = tmp_path / "node.key"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(OperatorFault, match=word):
        read_key(path)


def test_a_key_behind_a_link_or_a_fifo_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "node.key")
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name in ("link", "fifo"):
        with pytest.raises(OperatorFault):
            read_key(tmp_path / name)


def test_each_life_has_a_greater_number_even_when_the_clock_goes_back(tmp_path: Path) -> None:
    epochs = [next_epoch(tmp_path, wall_s) for wall_s in (1000, 1000, 10, 2000, 2000)]
    assert epochs == [1000, 1001, 1002, 2000, 2001]


def test_a_garbage_epoch_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "epoch").write_text("9" * 400)
    assert next_epoch(tmp_path, 1000) == 1000
    assert next_epoch(tmp_path, 1000) == 1001


def test_without_a_place_to_write_the_clock_alone_numbers_the_life(tmp_path: Path) -> None:
    assert next_epoch(tmp_path / "absent", 1000) == 1000
