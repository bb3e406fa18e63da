"""The outbox against a real receiver on loopback that fails, hangs, and comes back."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from pydantic import SecretStr

from controller.notify.notifier import BACK_OFF_S_MAX, Notifier
from controller.settings import Notify, Target
from controller.store.sqlite import SqliteStore
from diagnosis.contracts.errors import OperatorFault
from tests.eventually import eventually
from tests.unit.test_store import make_incident


class Chat:
    """A receiver. `status`: what it answers; `hang`: it does not, until released."""

    def __init__(self) -> None:
        self.status = 200
        self.headers: dict[str, str] = {}
        self.got: list[Any] = []
        self.asked = 0
        self.hang = asyncio.Event()
        self.hang.set()

    async def start(self) -> Chat:
        app = web.Application()
        app.router.add_post("/hook/{secret}", self._take)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def stop(self) -> None:
        self.hang.set()
        await self._runner.cleanup()

    async def _take(self, request: web.Request) -> web.Response:
        self.asked += 1
        body = await request.json()
        await self.hang.wait()
        if self.status == 200:
            self.got.append(body)
        return web.Response(status=self.status, headers=self.headers)

    def target(self, name: str = "chat", **settings: Any) -> Target:
        return Target(name=name, webhook=SecretStr(f"http://127.0.0.1:{self.port}/hook/TOPSECRET"), **settings)


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest_asyncio.fixture
async def chat() -> AsyncIterator[Chat]:
    started = await Chat().start()
    yield started
    await started.stop()


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    opened = await SqliteStore.open(tmp_path / "state.db")
    yield opened
    await opened.close()


async def settle(notifier: Notifier) -> None:
    """One round of delivery, to its end."""
    await notifier.deliver_due()
    await eventually(lambda: all(way.task is None or way.task.done() for way in notifier._ways.values()))


async def test_slack_and_json_receivers_each_get_their_own_shape(chat: Chat, store: SqliteStore) -> None:
    notifier = Notifier(store, Notify(targets=[chat.target(), chat.target("audit", format="json")]), Clock())
    await notifier.tell(make_incident(user="<a&b>"), "opened", 10.0)
    await settle(notifier)
    slack = next(body for body in chat.got if "text" in body)
    assert list(slack) == ["text"] and "job 42 (&lt;a&amp;b&gt;) is slow" in slack["text"]
    audit = next(body for body in chat.got if "schema" in body)
    assert (audit["schema"], audit["key"], audit["user"]) == ("tocsin.notice/1", "a1b2c3:opened", "<a&b>")
    await notifier.close()


async def test_the_same_change_is_told_once_even_by_the_next_controller(chat: Chat, store: SqliteStore) -> None:
    for _ in range(2):
        notifier = Notifier(store, Notify(targets=[chat.target()]), Clock())
        for _ in range(3):
            await notifier.tell(make_incident(), "opened", 10.0)
            await settle(notifier)
        await notifier.close()
    assert len(chat.got) == 1


async def test_a_receiver_that_fails_is_asked_again_with_growing_pauses(chat: Chat, store: SqliteStore) -> None:
    clock = Clock()
    notifier = Notifier(store, Notify(targets=[chat.target()]), clock)
    await notifier.tell(make_incident(), "opened", 10.0)
    chat.status = 500
    pauses: list[float] = []
    for _ in range(10):
        asked, waited_from = chat.asked, clock.now
        while chat.asked == asked:
            clock.now += 1.0
            await settle(notifier)
        pauses.append(clock.now - waited_from)
    assert pauses == sorted(pauses) and pauses[-1] == BACK_OFF_S_MAX
    chat.status = 200
    clock.now += BACK_OFF_S_MAX
    await settle(notifier)
    assert len(chat.got) == 1
    assert (await store.outbox_counts()).sent == 1
    await notifier.close()


async def test_a_message_is_given_up_in_the_end_and_counted(chat: Chat, store: SqliteStore) -> None:
    clock = Clock()
    notifier = Notifier(store, Notify(targets=[chat.target()], attempts_max=3), clock)
    await notifier.tell(make_incident(), "opened", 10.0)
    chat.status = 404
    for _ in range(5):
        await settle(notifier)
        clock.now += BACK_OFF_S_MAX
    counts = await store.outbox_counts()
    assert (chat.asked, counts.dead, counts.waiting) == (3, 1, 0)
    assert counts.last_error == "chat: answered 404"
    await notifier.close()


async def test_a_receiver_that_asks_for_time_gets_it(chat: Chat, store: SqliteStore) -> None:
    clock = Clock()
    notifier = Notifier(store, Notify(targets=[chat.target()]), clock)
    await notifier.tell(make_incident(), "opened", 10.0)
    chat.status, chat.headers = 429, {"Retry-After": "600"}
    await settle(notifier)
    clock.now += 599.0
    await settle(notifier)
    assert chat.asked == 1
    clock.now += 1.0
    await settle(notifier)
    assert chat.asked == 2
    await notifier.close()


async def test_a_receiver_that_hangs_delays_nobody_else_and_is_asked_again(chat: Chat, store: SqliteStore) -> None:
    quick = await Chat().start()
    clock = Clock()
    settings = Notify(targets=[chat.target("dead"), quick.target("quick")], deadline_s=0.3)
    notifier = Notifier(store, settings, clock)
    chat.hang.clear()
    await notifier.tell(make_incident(), "opened", 10.0)
    await notifier.deliver_due()
    await eventually(lambda: len(quick.got) == 1)
    await notifier.tell(make_incident(), "closed", 11.0)
    await notifier.deliver_due()  # returns though the dead one still hangs
    await settle(notifier)
    assert (await store.outbox_counts()).last_error == "dead: no answer in time"
    chat.hang.set()
    clock.now += BACK_OFF_S_MAX
    await settle(notifier)
    assert (await store.outbox_counts()).sent == 4
    assert len(quick.got) == 2
    await notifier.close()
    await quick.stop()


async def test_a_receiver_that_is_not_there_is_told_without_its_secret(
    chat: Chat, store: SqliteStore, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    targets = [
        chat.target(),
        Target(name="apprise", url=SecretStr(f"json://127.0.0.1:{chat.port}/TOPSECRET")),
        Target(name="bad", webhook=SecretStr("http://[/TOPSECRET")),
    ]
    await chat.stop()
    notifier = Notifier(store, Notify(targets=targets), Clock())
    await notifier.tell(make_incident(), "opened", 10.0)
    with caplog.at_level(logging.DEBUG):
        await settle(notifier)
    counts = await store.outbox_counts()
    assert counts.waiting == 3
    told = capsys.readouterr()
    assert "not told" in told.out + told.err
    assert "TOPSECRET" not in counts.last_error + caplog.text + told.out + told.err
    await notifier.close()


async def test_a_storm_goes_out_as_single_messages_and_one_digest(chat: Chat, store: SqliteStore) -> None:
    clock = Clock()
    notifier = Notifier(store, Notify(targets=[chat.target()], messages_per_minute_max=5), clock)
    for number in range(40):
        await notifier.tell(make_incident(f"{number:06x}"), "opened", 10.0)
    await settle(notifier)
    assert len(chat.got) == 5
    assert chat.got[-1]["text"].startswith("tocsin: 36 messages at once")
    await notifier.tell(make_incident("ffffff"), "opened", 10.0)
    await settle(notifier)
    assert len(chat.got) == 5  # the minute is full
    clock.now += 60.0
    await settle(notifier)
    assert len(chat.got) == 6
    await notifier.close()


async def test_apprise_delivers_to_any_of_its_services(chat: Chat, store: SqliteStore) -> None:
    target = Target(name="apprise", url=SecretStr(f"json://127.0.0.1:{chat.port}/hook/TOPSECRET"))
    notifier = Notifier(store, Notify(targets=[target]), Clock())
    await notifier.tell(make_incident(), "opened", 10.0)
    await settle(notifier)
    assert chat.got[0]["title"] == "tocsin a1b2c3: job 42 (ada) is slow"
    assert "Who: node gpu002" in chat.got[0]["message"]
    await notifier.close()


async def test_an_apprise_service_that_hangs_is_not_given_a_second_message(chat: Chat, store: SqliteStore) -> None:
    target = Target(name="apprise", url=SecretStr(f"json://127.0.0.1:{chat.port}/hook/x"))
    clock = Clock()
    notifier = Notifier(store, Notify(targets=[target], deadline_s=0.2), clock)
    chat.hang.clear()
    await notifier.tell(make_incident(), "opened", 10.0)
    await settle(notifier)
    assert (await store.outbox_counts()).last_error == "apprise: no answer in time"
    clock.now += BACK_OFF_S_MAX
    await settle(notifier)
    assert chat.asked == 1
    assert "still hangs" in (await store.outbox_counts()).last_error
    chat.hang.set()
    await notifier.close()


async def test_a_target_that_cannot_be_used_is_told_at_once_and_the_old_ones_stay(
    chat: Chat, store: SqliteStore
) -> None:
    notifier = Notifier(store, Notify(targets=[chat.target()]), Clock())
    bad = Notify(targets=[Target(name="bad", url=SecretStr("nosuchservice://TOPSECRET"))])
    with pytest.raises(OperatorFault, match="target bad") as caught:
        await notifier.reconfigure(bad)
    assert "TOPSECRET" not in str(caught.value)
    await notifier.tell(make_incident(), "opened", 10.0)
    await settle(notifier)
    assert len(chat.got) == 1
    await notifier.close()


async def test_messages_for_a_target_that_was_removed_are_given_up(chat: Chat, store: SqliteStore) -> None:
    notifier = Notifier(store, Notify(targets=[chat.target()]), Clock())
    await notifier.tell(make_incident(), "opened", 10.0)
    await notifier.reconfigure(Notify())
    await settle(notifier)
    counts = await store.outbox_counts()
    assert (counts.dead, chat.asked) == (1, 0)
    assert json.dumps(counts.last_error).count("no longer configured") == 1
    await notifier.close()
