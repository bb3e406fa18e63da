"""What node daemons may ask of the controller: three routes, bare ASGI, nothing taken on trust.

`POST /v1/report` (zstd), `POST /v1/evidence` (JSON), `GET /v1/control` (server-sent events). The order of checks is
the order of cost: route, head, size, room, body, proof, replay, and only then is the body unpacked and believed to be
its sender's. Each refusal is a `Refusal` with a stable reason and is counted; an answer of 200 means that the report
has been taken in and that its request number is on disk.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

import msgspec
import structlog

from controller.ingest.body import (
    Admission,
    Disconnected,
    Receive,
    Room,
    Scope,
    Send,
    claimed_bytes,
    discard_body,
    header,
    peer_of,
    read_body,
)
from controller.ingest.channels import ControlChannels
from controller.ingest.replay import ReplayGuard
from controller.settings import Server
from controller.store.base import NodeMark
from diagnosis.contracts import control, credential, report
from diagnosis.contracts.errors import AgentFault, OperatorFault

STATUS_OF_REASON: Final = {
    "credential": 401,
    "node": 403,
    "path": 404,
    "method": 405,
    "slow": 408,
    "replayed": 409,
    "oversized": 413,
    "version": 422,
    "busy": 503,
    "store": 503,
}
"""Any other reason is a 400."""
RETRY_AFTER_S: Final = 2
_WRITE_DEADLINE_S: Final = 30.0
_LOG_EVERY_S: Final = 60.0
_METHODS: Final = {"/v1/report": "POST", "/v1/evidence": "POST", "/v1/control": "GET"}
_EVIDENCE: Final = msgspec.json.Decoder(control.Evidence)
_log = structlog.get_logger("ingest")


class AcceptReport(Protocol):
    """`controller.registry.Registry.accept`."""

    def __call__(self, report: report.Report, /, *, received_at: float, age_ms: int) -> report.Acknowledgement: ...


class MarkStore(Protocol):
    """The part of the store that ingest needs."""

    async def see_node(self, node: str, mark: NodeMark) -> None: ...


class IngestApp:
    """The ASGI application of the agents' listener. `counts`: requests by "taken" or the reason of their refusal."""

    def __init__(
        self,
        secret: bytes,
        settings: Server,
        marks: dict[str, NodeMark],
        store: MarkStore,
        channels: ControlChannels,
        accept_report: AcceptReport,
        accept_evidence: Callable[[control.Evidence], Awaitable[None]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._secret = secret
        self._settings = settings
        self._replays = ReplayGuard(marks)
        self._store = store
        self._channels = channels
        self._accept_report = accept_report
        self._accept_evidence = accept_evidence
        self._clock = clock
        self._logged_at: dict[str, float] = {}
        self.admission = Admission(settings.bytes_in_flight_max)
        self.counts: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._route(scope, receive, send)
        except AgentFault as fault:
            await self._refuse(fault, scope, receive, send)
        except OperatorFault as fault:
            _log.error("store failed", error=str(fault))
            await self._refuse(
                AgentFault("the controller cannot write, come back", reason="store"), scope, receive, send
            )
        except Disconnected:
            self.counts["disconnected"] += 1

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if path not in _METHODS:
            raise AgentFault("no such path", reason="path")
        if method != _METHODS[path]:
            raise AgentFault(f"{path} is for {_METHODS[path]}", reason="method")
        claim = credential.read_claim(header(scope, b"authorization"))
        if path == "/v1/report":
            await self._report(claim, scope, receive, send)
        elif path == "/v1/evidence":
            await self._evidence(claim, scope, receive, send)
        else:
            await self._control(claim, scope, receive, send)

    async def _report(self, claim: credential.Claim, scope: Scope, receive: Receive, send: Send) -> None:
        with self._room(scope, report.WIRE_BYTES_MAX) as room:
            body = await read_body(receive, report.WIRE_BYTES_MAX, self._settings.body_deadline_s, room)
            mark = self._prove(claim, scope, body)
            told = report.decode(body)
        self._same_node(claim, told.node)
        answer = self._accept_report(told, received_at=mark.at, age_ms=claim.age_ms)
        await self._store.see_node(claim.node, mark)
        self.counts["duplicate" if answer.duplicate else "taken"] += 1
        await _answer(send, 200, msgspec.json.encode(answer))

    async def _evidence(self, claim: credential.Claim, scope: Scope, receive: Receive, send: Send) -> None:
        with self._room(scope, control.EVIDENCE_BYTES_MAX) as room:
            body = await read_body(receive, control.EVIDENCE_BYTES_MAX, self._settings.body_deadline_s, room)
            mark = self._prove(claim, scope, body)
            told = _read_evidence(body)
        self._same_node(claim, told.node)
        await self._store.see_node(claim.node, mark)
        await self._accept_evidence(told)
        self.counts["evidence"] += 1
        await _answer(send, 200, b"{}")

    async def _control(self, claim: credential.Claim, scope: Scope, receive: Receive, send: Send) -> None:
        mark = self._prove(claim, scope, b"")
        await self._store.see_node(claim.node, mark)
        channel = self._channels.open(claim.node)
        gone = asyncio.create_task(_close_when_gone(receive, channel.close))
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for chunk in channel.chunks():
                async with asyncio.timeout(_WRITE_DEADLINE_S):
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except TimeoutError:
            _log.info("control stream stalled", node=claim.node)
        finally:
            gone.cancel()
            self._channels.leave(claim.node, channel)

    def _room(self, scope: Scope, bytes_max: int) -> Room:
        """Room for a body; refused at once where what it says of itself is too much."""
        self.admission.check(peer_of(scope), claimed_bytes(scope, bytes_max))
        return Room(self.admission, peer_of(scope))

    def _prove(self, claim: credential.Claim, scope: Scope, body: bytes) -> NodeMark:
        credential.verify(self._secret, scope["method"], scope["path"], claim, body)
        return self._replays.take(claim, self._clock())

    @staticmethod
    def _same_node(claim: credential.Claim, node: str) -> None:
        if node != claim.node:
            raise AgentFault(f"node {claim.node} may not speak for another", reason="node")

    async def _refuse(self, fault: AgentFault, scope: Scope, receive: Receive, send: Send) -> None:
        self.counts[fault.reason] += 1
        now = self._clock()
        if now - self._logged_at.get(fault.reason, 0.0) >= _LOG_EVERY_S:
            self._logged_at[fault.reason] = now
            _log.warning("refused", reason=fault.reason, detail=str(fault), peer=scope["client"])
        status = STATUS_OF_REASON.get(fault.reason, 400)
        headers: list[tuple[bytes, bytes]] = []
        if status == 503:
            headers.append((b"retry-after", str(RETRY_AFTER_S).encode()))
        if status == 401:
            headers.append((b"www-authenticate", b"Tocsin"))
        if status == 405:
            headers.append((b"allow", _METHODS[scope["path"]].encode()))
        if status in (408, 413):
            headers.append((b"connection", b"close"))
        if status == 413:
            await discard_body(receive, self._settings.body_deadline_s)
        refusal = report.Refusal(reason=fault.reason, detail=str(fault))
        await _answer(send, status, msgspec.json.encode(refusal), headers)


def _read_evidence(body: bytes) -> control.Evidence:
    try:
        told = _EVIDENCE.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise AgentFault(f"body is no evidence: {error}", reason="garbage") from error
    texts = [
        text
        for process in told.processes
        for text in (process.state, process.wchan, process.kernel_stack, process.python_stack, *process.notes)
    ]
    if len(told.processes) > control.PROCESSES_MAX or any(len(text or "") > control.TEXT_BYTES_MAX for text in texts):
        raise AgentFault("more processes or longer texts than are taken", reason="limits")
    return told


async def _close_when_gone(receive: Receive, close: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    close()


async def _answer(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *(headers or [])]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})
