"""From an incident's change to a delivered message, across restarts and in spite of dead chats.

`tell` puts one message per target into the outbox; its key makes sure that the same change is told once, also when
the controller dies in between. `deliver_due` is called every second and never waits: each target has at most one
delivery under way in a task of its own, so a chat that hangs delays nobody else. Above the allowed messages a minute
what is left goes out as one digest. A message that failed too often is given up and stays visible in the status.
A receiver may see a message twice when the controller dies between sending and noting it; `key` tells.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import structlog

from controller.notify.delivery import Delivery, DeliveryFailed, make_delivery
from controller.notify.message import Notice, notice
from controller.settings import Notify
from controller.store.base import Incident, Message, Store
from diagnosis.contracts.errors import OperatorFault

BACK_OFF_S_MAX: Final = 300.0
_DUE_MAX: Final = 500
_MINUTE_S: Final = 60.0
_NOTICE: Final = msgspec.json.Decoder(Notice)
_log = structlog.get_logger("notify")


class _Way:
    """One target: its delivery, when it sent lately, and the task that is sending."""

    def __init__(self, delivery: Delivery) -> None:
        self.delivery = delivery
        self.sent_at: deque[float] = deque()
        self.task: asyncio.Task[None] | None = None

    def room(self, now: float, per_minute_max: int) -> int:
        """How many messages may be sent now."""
        while self.sent_at and self.sent_at[0] <= now - _MINUTE_S:
            self.sent_at.popleft()
        return per_minute_max - len(self.sent_at)


class Notifier:
    """See the module. Raises OperatorFault at once where a target cannot be used."""

    def __init__(self, store: Store, settings: Notify, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._settings = settings
        self._clock = clock
        self._ways = _ways(settings)

    async def tell(self, incident: Incident, change: str, at: float) -> None:
        """Tell all targets of a change. The same change of the same incident is told once, however often asked."""
        told = notice(incident, change, await self._store.acts(incident.id), at)
        body = msgspec.json.encode(told)
        for target in self._settings.targets:
            await self._store.enqueue(f"{told.key}:{target.name}", incident.id, body, at, target=target.name)

    async def deliver_due(self) -> None:
        """Start sending what is due. Returns without waiting for any receiver."""
        now = self._clock()
        waiting: dict[str, list[Message]] = {}
        for message in await self._store.due(now, _DUE_MAX):
            waiting.setdefault(message.target, []).append(message)
        for target, messages in waiting.items():
            way = self._ways.get(target)
            if way is None:
                await self._give_up(messages, "its target is no longer configured", now)
            elif way.task is None or way.task.done():
                way.task = asyncio.create_task(self._send(target, way, messages))

    async def reconfigure(self, settings: Notify) -> None:
        """Take other settings. Raises OperatorFault and keeps the old ones where a target cannot be used."""
        ways = _ways(settings)
        await self.close()
        self._settings, self._ways = settings, ways

    async def close(self) -> None:
        """Stop sending; what was not delivered waits in the outbox for the next start."""
        tasks = [way.task for way in self._ways.values() if way.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for way in self._ways.values():
            await way.delivery.close()

    async def _send(self, target: str, way: _Way, messages: list[Message]) -> None:
        """Single messages while there is room for them, and the rest as one digest."""
        room = way.room(self._clock(), self._settings.messages_per_minute_max)
        singles = len(messages) if len(messages) <= room else room - 1
        parcels = [[message] for message in messages[: max(0, singles)]]
        if 0 < room < len(messages):
            parcels.append(messages[singles:])
        try:
            for parcel in parcels:
                if not await self._send_parcel(target, way, parcel):
                    return
        except OperatorFault as fault:  # the store: what was sent may be sent again
            _log.error("outbox not written", target=target, error=str(fault))

    async def _send_parcel(self, target: str, way: _Way, parcel: Sequence[Message]) -> bool:
        way.sent_at.append(self._clock())
        try:
            notices = [_NOTICE.decode(message.body) for message in parcel]
            await way.delivery.send(notices, self._settings.deadline_s)
        except msgspec.DecodeError as error:
            await self._give_up(parcel, f"cannot be read back: {error}", self._clock())
            return False
        except DeliveryFailed as failure:
            await self._failed(target, parcel, failure)
            return False
        now = self._clock()
        for message in parcel:
            await self._store.sent(message.id, now)
        _log.info("told", target=target, keys=[message.key for message in parcel[:10]], messages=len(parcel))
        return True

    async def _failed(self, target: str, parcel: Sequence[Message], failure: DeliveryFailed) -> None:
        now = self._clock()
        _log.warning("not told", target=target, error=str(failure), attempts=parcel[0].attempts + 1)
        for message in parcel:
            attempts = message.attempts + 1
            if attempts >= self._settings.attempts_max:
                await self._give_up([message], str(failure), now)
            else:
                wait_s = max(min(BACK_OFF_S_MAX, 2.0**attempts), failure.retry_after_s)
                await self._store.failed(message.id, now + wait_s, f"{target}: {failure}", now)

    async def _give_up(self, messages: Sequence[Message], error: str, now: float) -> None:
        for message in messages:
            _log.error("message given up", key=message.key, target=message.target, error=error)
            await self._store.failed(message.id, None, f"{message.target}: {error}", now)


def check_targets(settings: Notify) -> None:
    """Raises OperatorFault naming each target that cannot be used."""
    _ways(settings)


def _ways(settings: Notify) -> dict[str, _Way]:
    faults: list[str] = []
    ways: dict[str, _Way] = {}
    for target in settings.targets:
        try:
            ways[target.name] = _Way(make_delivery(target))
        except OperatorFault as fault:
            faults.append(str(fault))
    if faults:
        raise OperatorFault("\n".join(faults), reason="configuration")
    return ways
