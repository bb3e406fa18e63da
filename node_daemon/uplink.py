"""Brings reports to the controller: each is kept until it is acknowledged, in memory first and then on disk.

The newest report goes first, since only it tells about now; one that could not be delivered, or was overtaken by a
newer one while another was on its way, goes to the spool. In quiet moments the spool is emptied oldest first, at a
bounded rate, each report with its true age at the moment of sending.

* 200 with an Acknowledgement: delivered. A 200 of anybody else at that address is no acknowledgement.
* 4xx: the controller will never take it, so it is not sent again. `replayed` means that it has it.
* anything else, no answer included: unknown. It is sent again; the controller knows a duplicate when it sees one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

import msgspec

from diagnosis.contracts.report import Acknowledgement
from node_daemon.backoff import Backoff
from node_daemon.client import Answer, Client
from node_daemon.log import EventLog
from node_daemon.spool import Spool, Spooled
from node_daemon.threads import OwnThread

PATH: Final = "/v1/report"
OVERTAKEN_MAX: Final = 128
DISK_DEADLINE_S: Final = 2.0
_ACKNOWLEDGEMENT: Final = msgspec.json.Decoder(Acknowledgement)
Result = TypeVar("Result")
_log = EventLog("node_daemon.uplink")


class Uplink:
    """See the module. `offer` never waits, `run` does the work."""

    def __init__(
        self, client: Client, spool: Spool, boot_id: str, *, drain_per_s: float, backoff: Backoff | None = None
    ) -> None:
        self._client, self._spool, self._boot_id = client, spool, boot_id
        self._drain_every_s = 1 / drain_per_s
        self._backoff = backoff or Backoff()
        self._disk = OwnThread("spool")
        self._newest: Spooled | None = None
        self._on_its_way: Spooled | None = None
        self._overtaken: list[Spooled] = []
        self._offered = asyncio.Event()
        self._quiet_until = self._drain_at = 0.0
        self._away = False
        self._lost = 0

    @property
    def dropped(self) -> int:
        """Reports lost since the start because the disk could not keep them."""
        return self._spool.dropped + self._lost

    def offer(self, report: Spooled) -> None:
        """Hand over the newest report; the one before it, if still here, will go to the spool."""
        if self._newest is not None:
            self._keep(self._newest)
        self._newest = report
        self._offered.set()

    async def run(self) -> None:
        """Deliver for ever. On cancellation what is still here goes to the spool."""
        await self._with_disk(self._spool.open, None)
        try:
            while True:
                report, spooled = await self._next()
                self._on_its_way = None if spooled else report
                age_ms = report.age_ms(self._boot_id, time.monotonic_ns(), time.time_ns())
                answer = await self._client.post(PATH, report.body, kind="application/zstd", age_ms=age_ms)
                self._on_its_way = None
                await self._settle(report, spooled, answer)
        finally:
            for left in (self._on_its_way, self._newest):
                if left is not None:
                    self._keep(left)
            await self._spool_overtaken()
            self._disk.close()

    async def _next(self) -> tuple[Spooled, bool]:
        """The report to send now, and whether it lies in the spool. Waits while there is none or we must be quiet."""
        while True:
            await self._spool_overtaken()
            now = time.monotonic()
            if now >= self._quiet_until:
                if self._newest is not None:
                    report, self._newest = self._newest, None
                    return report, False
                if now >= self._drain_at and len(self._spool):
                    self._drain_at = now + self._drain_every_s
                    oldest = await self._with_disk(self._spool.oldest, None)
                    if oldest is not None:
                        return oldest, True
            wait_until = max(self._quiet_until, self._drain_at if len(self._spool) else 0.0)
            self._offered.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_until - now if wait_until > now else None):
                    await self._offered.wait()

    async def _settle(self, report: Spooled, spooled: bool, answer: Answer) -> None:
        """Act on how a delivery ended; see the module."""
        acknowledged = answer.taken and _is_acknowledgement(answer.body)
        if acknowledged or answer.refused:
            self._backoff.succeeded()
            if self._away:
                self._away = False
                _log.info("controller back", spooled=len(self._spool))
            if answer.refused:
                _log.sparsely(f"refused {answer.reason}", "report refused", reason=answer.reason, detail=answer.detail)
            if spooled:
                await self._with_disk(partial(self._spool.remove, report), None)
            return
        reason = "not an acknowledgement" if answer.taken else answer.reason
        if not self._away:
            self._away = True
            _log.warning("controller away", reason=reason, detail=answer.detail)
        self._quiet_until = time.monotonic() + answer.retry_after_s + self._backoff.failed()
        if not spooled:
            self._keep(report)

    def _keep(self, report: Spooled) -> None:
        """Meant for the spool; written by `_spool_overtaken`. Bounded, in case the disk does not answer."""
        self._overtaken.append(report)
        if len(self._overtaken) > OVERTAKEN_MAX:
            del self._overtaken[0]
            self._lost += 1

    async def _spool_overtaken(self) -> None:
        batch = list(self._overtaken)
        done = bool(batch) and await self._with_disk(partial(_put_all, self._spool, batch), False)
        if done:
            written = {(report.epoch, report.sample) for report in batch}
            self._overtaken = [left for left in self._overtaken if (left.epoch, left.sample) not in written]

    async def _with_disk(self, call: Callable[[], Result], otherwise: Result) -> Result:
        """A spool call on its own thread, so that a disk that hangs delays nothing else."""
        try:
            return await self._disk.run(call, DISK_DEADLINE_S)
        except OSError as error:  # TimeoutError is one
            _log.sparsely("disk", "spool fails", error=str(error))
            return otherwise


def _put_all(spool: Spool, reports: list[Spooled]) -> bool:
    for report in reports:
        spool.put(report)
    return True


def _is_acknowledgement(body: bytes) -> bool:
    try:
        _ACKNOWLEDGEMENT.decode(body)
    except msgspec.DecodeError:
        return False
    return True
