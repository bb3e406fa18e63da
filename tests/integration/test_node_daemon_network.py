"""A whole daemon as a network witness: it pings where the controller suspects a path, and tells what lldpd knows."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from controller.settings import Server
from diagnosis.contracts.control import PingEvent
from diagnosis.contracts.gathered import Gathered, PingFacts, unpack
from node_daemon.collectors.ping import COUNT
from tests import eventually as waiting
from tests.integration.controller_site import IngestSite
from tests.integration.test_node_daemon import NODE, Daemon
from tests.nodeframes import FrameImage, idle_process

JOB = 7
HERE, THERE, STRANGER = "127.0.0.1", "127.0.0.2", "127.0.0.3"
eventually = partial(waiting.eventually, within_s=60.0)


@pytest_asyncio.fixture
async def site(tmp_path: Path) -> AsyncIterator[IngestSite]:
    (tmp_path / "site").mkdir()
    started = await IngestSite(tmp_path / "site", Server()).start()
    started.channels.set_report_period(100)
    yield started
    await started.stop()


@pytest.fixture
def daemon(tmp_path: Path, site: IngestSite) -> Iterator[Daemon]:
    (tmp_path / "node").mkdir()
    one = Daemon(tmp_path / "node", site.port)
    yield one
    if one.process is not None:
        one.process.kill()
        one.process.wait()


@pytest.fixture
def rank(daemon: Daemon) -> Iterator[FrameImage]:
    """A rank of the job with one connection, to THERE."""
    with socket.create_server((THERE, 0)) as listener, socket.create_connection(listener.getsockname()) as connection:
        with idle_process(pass_fds=[connection.fileno()]) as child:
            yield FrameImage(child.pid, rank=0)


def _pings(site: IngestSite) -> list[PingFacts]:
    parts = [unpack(raw) for told, _ in site.reports for raw in told.gathered]
    return [ping for part in parts if isinstance(part, Gathered) for ping in part.pings]


def _flows(site: IngestSite) -> bool:
    return any(told.network is not None and THERE in told.network.addresses for told, _ in site.reports)


def _ask(site: IngestSite) -> bool:
    pairs = [(HERE, STRANGER), (HERE, THERE)]
    return site.channels.send(NODE, PingEvent(incident="a1", job_id=JOB, restart=0, pairs=pairs))


async def test_it_pings_where_the_job_s_connection_leads_and_nowhere_else(
    site: IngestSite, daemon: Daemon, rank: FrameImage
) -> None:
    daemon.configure(network="[network]\nperiod_s = 0.2")
    daemon.start()
    await eventually(lambda: NODE in site.channels.nodes())
    rank.save(daemon.job())
    await eventually(lambda: _flows(site))
    assert _ask(site)
    await eventually(lambda: bool(_pings(site)))
    (ping,) = _pings(site)
    answered = COUNT if os.geteuid() == 0 else ping.heard  # others may not be allowed to ping, which the note then says
    assert (ping.local, ping.remote, ping.heard) == (HERE, THERE, answered)
    assert (ping.heard > 0) != bool(ping.note)


async def test_it_pings_nobody_where_that_is_turned_off(site: IngestSite, daemon: Daemon, rank: FrameImage) -> None:
    daemon.configure(network="[network]\nperiod_s = 0.2\nping = false")
    daemon.start()
    await eventually(lambda: NODE in site.channels.nodes())
    rank.save(daemon.job())
    await eventually(lambda: _flows(site))
    assert _ask(site)
    asked_at = len(site.reports)
    await eventually(lambda: len(site.reports) > asked_at + 40)  # four seconds, twice what pings would take
    assert _pings(site) == []


async def test_it_tells_the_switches_that_lldpd_knows(site: IngestSite, daemon: Daemon, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "lldpctl"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho \'{"lldp": {"interface": {"eth0": {"chassis": {"leaf1": {}}}}}}\'\n')
    program.chmod(0o755)
    daemon.environment["PATH"] = f"{program.parent}:{os.environ['PATH']}"
    daemon.configure(network="[network]\nperiod_s = 0.2")
    daemon.start()
    await eventually(lambda: any(told.network and told.network.uplinks for told, _ in site.reports))
    (uplinks,) = {tuple(told.network.uplinks) for told, _ in site.reports if told.network and told.network.uplinks}
    assert uplinks == (("eth0", "leaf1"),)
