"""The daemon asks lldpctl where it is there, and what it answers wrongly changes nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from diagnosis.evidence.topology.lldp import Uplink
from node_daemon.collectors import lldp
from node_daemon.collectors.lldp import LldpWatch
from tests.eventually import eventually

ANSWER = '{"lldp": {"interface": {"eth0": {"chassis": {"leaf1": {"id": {"type": "mac", "value": "x"}}}}}}}'


def script(path: Path, text: str) -> Path:
    """A program in the place of lldpctl, which notes each call. Put there whole: it may be started at any moment."""
    part = path.with_suffix(".part")
    part.write_text(f'#!/bin/sh\necho "$@" >> {path}.calls\n{text}\n')
    part.chmod(0o755)
    part.replace(path)
    return path


async def test_what_lldpd_knows_is_known(tmp_path: Path) -> None:
    program = script(tmp_path / "lldpctl", f"echo '{ANSWER}'")
    watch = LldpWatch(period_s=3600, program=str(program), first_after_s=0.0)
    task = asyncio.create_task(watch.run())
    await eventually(lambda: watch.uplinks == [("eth0", "leaf1")])
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert Path(f"{program}.calls").read_text() == "-f json\n"


@pytest.mark.parametrize("wrong", ["exit 1", "echo nothing", f"echo '{ANSWER}'; exit 3", "exec yes", "exec sleep 60"])
async def test_a_wrong_answer_leaves_what_was_known(
    tmp_path: Path, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lldp, "DEADLINE_S", 1.0)
    program = script(tmp_path / "lldpctl", wrong)
    watch = LldpWatch(period_s=3600, program=str(program))
    watch.uplinks = [Uplink("eth0", "leaf1")]
    async with asyncio.timeout(30.0):  # a program that hangs, or never ends, is given up
        await watch._ask(str(program))
    assert watch.uplinks == [("eth0", "leaf1")]


async def test_where_it_is_not_installed_nothing_is_told(tmp_path: Path) -> None:
    watch = LldpWatch(period_s=0.01, program=str(tmp_path / "none"), first_after_s=0.0)
    await watch.run()
    assert watch.uplinks == []
