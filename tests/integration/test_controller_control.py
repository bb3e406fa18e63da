"""The control socket: who asks is what the kernel says, and only admins change things."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from controller.cli.client import Refused, Unreachable, ask
from controller.control.app import user_name
from controller.servers import unix_server
from controller.settings import Control
from diagnosis.contracts.errors import OperatorFault
from tests.integration.controller_view import ControlSite
from tests.unit.test_store import make_incident

NOBODY = 65534


@pytest_asyncio.fixture
async def site() -> AsyncIterator[ControlSite]:
    started = await ControlSite().start()
    yield started
    await started.stop()


def _request_as(uid: int, path: str, request: bytes, answers: Any) -> None:
    """In a child: become another user and say what the socket answers."""
    if uid != os.geteuid():
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(10)
        peer.connect(path)
        peer.sendall(request)
        answers.send(b"".join(iter(lambda: peer.recv(65536), b"")).decode())


async def ask_as(uid: int, site: ControlSite, method: str, url: str) -> str:
    """The raw answer that a process of `uid` gets."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    request = f"{method} {url} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
    child = context.Process(target=_request_as, args=(uid, str(site.socket), request, theirs))
    child.start()
    theirs.close()
    try:
        return await asyncio.to_thread(ours.recv)
    finally:
        await asyncio.to_thread(child.join)


@pytest_asyncio.fixture
async def stranger(site: ControlSite, monkeypatch: pytest.MonkeyPatch) -> int:
    """A uid that is no admin: nobody's. Who cannot become nobody is made a stranger to the controller instead."""
    if os.geteuid() == 0:
        return NOBODY
    own = os.geteuid()
    monkeypatch.setattr("controller.control.app.os.geteuid", lambda: own + 1)
    return own


async def test_everybody_may_read(site: ControlSite, stranger: int) -> None:
    await site.reading.store.add_incident(make_incident())
    for url in ("/status", "/incidents", "/incidents/a1b2c3"):
        assert (await ask_as(stranger, site, "GET", url)).startswith("HTTP/1.1 200")


async def test_a_stranger_may_not_pause_or_resume(site: ControlSite, stranger: int) -> None:
    answer = await ask_as(stranger, site, "POST", "/pause")
    assert answer.startswith("HTTP/1.1 403") and '"not_admin"' in answer and f"uid {stranger}" in answer
    assert site.reading.pause.state() is None
    site.reading.pause.pause("ada", "", 5.0)
    assert (await ask_as(stranger, site, "POST", "/resume")).startswith("HTTP/1.1 403")
    assert site.reading.pause.state() is not None


@pytest.mark.parametrize("kind", ["uid", "gid"])
async def test_a_configured_admin_may_and_is_recorded(site: ControlSite, stranger: int, kind: str) -> None:
    site.app.settings = Control(admin_uids=[stranger]) if kind == "uid" else Control(admin_gids=[NOBODY, os.getegid()])
    assert (await ask_as(stranger, site, "POST", "/pause")).startswith("HTTP/1.1 200")
    state = site.reading.pause.state()
    assert state is not None and state.who == await user_name(stranger)


async def test_the_controllers_own_user_pauses_with_a_reason_and_resumes(site: ControlSite) -> None:
    paused = await site.ask("POST", "/pause", b'{"why": "fabric maintenance"}')
    assert paused["who"] == await user_name(os.geteuid())
    assert (await site.ask("GET", "/status"))["paused"]["why"] == "fabric maintenance"
    assert await site.ask("POST", "/resume") == {"was_paused": True}
    assert await site.ask("POST", "/resume") == {"was_paused": False}
    assert (await site.ask("GET", "/status"))["paused"] is None


async def test_the_answers_are_whole(site: ControlSite) -> None:
    await site.reading.add_hostile_incident()
    status = await site.ask("GET", "/status")
    assert (status["schema"], status["loop"]["mode"], status["jobs"][0]["job_id"]) == ("tocsin.status/1", "act", 42)
    assert status["requests"] == {"taken": 3, "garbage": 1}
    (incident,) = await site.ask("GET", "/incidents?limit=5&open=1")
    assert incident["id"] == "a1b2c3"
    detail = await site.ask("GET", "/incidents/a1b2c3")
    assert detail["acts"][0]["outcome"] == "failed"
    assert [row["told"] is None for row in detail["evidence"]] == [False, True]


async def test_what_is_asked_wrongly_is_refused_with_a_reason(site: ControlSite) -> None:
    for method, url, body, words in [
        ("GET", "/incidents/ffffff", None, "no such incident"),
        ("GET", "/incidents?limit=0", None, "limit"),
        ("GET", "/incidents?limit=x", None, "limit"),
        ("POST", "/pause", b"{", "no pause request"),
        ("POST", "/pause", b"x" * 100_000, "body of more than"),
        ("GET", "/pause", None, "Method Not Allowed"),
        ("GET", "/nothing", None, "Not Found"),
    ]:
        with pytest.raises(Refused, match=words):
            await site.ask(method, url, body)


async def test_a_pause_that_cannot_be_written_is_told(site: ControlSite) -> None:
    (site.directory / "paused.json.part").mkdir()
    with pytest.raises(Refused, match="not paused"):
        await site.ask("POST", "/pause")


async def test_a_socket_that_nobody_serves_is_replaced_and_one_in_use_is_not(site: ControlSite) -> None:
    with pytest.raises(OperatorFault, match="another process answers"):
        unix_server(site.app.asgi(), site.socket)
    left_over = site.directory / "left-over.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(left_over))
    unix_server(site.app.asgi(), left_over)
    assert not left_over.exists()
    with pytest.raises(OperatorFault, match="directory"):
        unix_server(site.app.asgi(), site.directory / "absent" / "controller.sock")


async def test_a_socket_without_a_controller_is_unreachable(site: ControlSite) -> None:
    with pytest.raises(Unreachable, match="No such file"):
        await asyncio.to_thread(ask, site.directory / "absent.sock", "GET", "/status")


async def test_a_user_without_a_name_has_a_number(site: ControlSite) -> None:
    assert await user_name(3_999_999_999) == "uid 3999999999"
