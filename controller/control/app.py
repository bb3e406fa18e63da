"""The control interface: HTTP on a Unix socket. Who asks is what the kernel says of the peer.

Whoever can open the socket may read; root, the controller's own user and configured admins may change things.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec
import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from controller.captures import Captures
from controller.control.pause import Pause
from controller.control.status import View
from controller.ingest.body import Disconnected, read_body
from controller.registry import Registry
from controller.servers import Peer
from controller.settings import Control
from diagnosis.contracts.errors import AgentFault, OperatorFault
from diagnosis.contracts.report import Refusal

INCIDENTS_MAX: Final = 1000
_BODY_BYTES_MAX: Final = 16 << 10
_BODY_DEADLINE_S: Final = 5.0
_JOB_ID_DIGITS_MAX: Final = 18
_NAME_DEADLINE_S: Final = 1.0
_log = structlog.get_logger("control")


class PauseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /pause`."""

    why: str = ""


class ControlApp:
    """The routes. `settings` may be replaced while running."""

    def __init__(
        self,
        view: View,
        pause: Pause,
        captures: Captures,
        registry: Registry,
        settings: Control,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.settings = settings
        self._view = view
        self._pause = pause
        self._captures = captures
        self._registry = registry
        self._clock = clock

    def asgi(self) -> Starlette:
        """The application to serve."""
        routes = [
            Route("/status", self._status),
            Route("/incidents", self._incidents),
            Route("/incidents/{incident_id:str}", self._incident),
            Route("/incidents/{incident_id:str}/bundle", self._bundle),
            Route("/jobs/{job_id:str}/bundle", self._job_bundle),
            Route("/pause", self._do_pause, methods=["POST"]),
            Route("/resume", self._do_resume, methods=["POST"]),
        ]
        return Starlette(
            routes=routes,
            exception_handlers={HTTPException: _refused, OperatorFault: _cannot, AgentFault: _misasked},
        )

    async def _status(self, request: Request) -> Response:
        return _json(await self._view.status())

    async def _incidents(self, request: Request) -> Response:
        limit = request.query_params.get("limit", "50")
        if not limit.isdecimal() or not 1 <= int(limit) <= INCIDENTS_MAX:
            raise HTTPException(400, f"limit should be a number from 1 to {INCIDENTS_MAX}")
        return _json(await self._view.incidents(int(limit), request.query_params.get("open") == "1"))

    async def _incident(self, request: Request) -> Response:
        detail = await self._view.incident(request.path_params["incident_id"])
        if detail is None:
            raise HTTPException(404, "no such incident")
        return _json(detail)

    async def _bundle(self, request: Request) -> Response:
        incident = request.path_params["incident_id"]
        return _archive(await self._captures.kept(incident), "no inputs are kept of such an incident")

    async def _job_bundle(self, request: Request) -> Response:
        job_id = request.path_params["job_id"]
        if not (job_id.isascii() and job_id.isdecimal() and len(job_id) <= _JOB_ID_DIGITS_MAX):
            raise HTTPException(400, "a job's id is a number")
        made = await self._captures.of_job(self._registry, int(job_id), self._clock)
        return _archive(made, f"job {job_id} is not watched now")

    async def _do_pause(self, request: Request) -> Response:
        who = await self._admin(request)
        try:
            body = await read_body(request.receive, _BODY_BYTES_MAX, _BODY_DEADLINE_S)
            asked = msgspec.json.decode(body or b"{}", type=PauseRequest)
        except (msgspec.DecodeError, RecursionError) as error:
            raise HTTPException(400, f"body is no pause request: {error}") from error
        except Disconnected:
            return Response(status_code=400)
        state = self._pause.pause(who, asked.why, self._clock())
        _log.warning("paused", who=who, why=state.why)
        return _json(state)

    async def _do_resume(self, request: Request) -> Response:
        who = await self._admin(request)
        was_paused = self._pause.resume()
        _log.warning("resumed", who=who, was_paused=was_paused)
        return _json({"was_paused": was_paused})

    async def _admin(self, request: Request) -> str:
        """The peer's name. Raises a 403 unless it may change things."""
        peer: Peer = request.scope["state"]["peer"]
        admins = {0, os.geteuid(), *self.settings.admin_uids}
        if peer.uid not in admins and peer.gid not in self.settings.admin_gids:
            _log.warning("refused", uid=peer.uid, pid=peer.pid, path=request.url.path)
            raise HTTPException(403, f"uid {peer.uid} may read but not change anything; ask an admin")
        return await user_name(peer.uid)


async def user_name(uid: int) -> str:
    """The user's name, or "uid N" where the name service does not know or does not answer: pausing never waits."""
    try:
        found = await asyncio.wait_for(asyncio.to_thread(pwd.getpwuid, uid), _NAME_DEADLINE_S)
    except (KeyError, TimeoutError):
        return f"uid {uid}"
    return found.pw_name


def _archive(content: bytes | None, absent: str) -> Response:
    if content is None:
        raise HTTPException(404, absent)
    return Response(content, media_type="application/zstd")


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = {400: "request", 403: "not_admin", 404: "unknown", 405: "method"}
    reason = words.get(error.status_code, "request")
    return _json(Refusal(reason=reason, detail=error.detail), error.status_code)


async def _cannot(request: Request, error: Exception) -> Response:
    return _json(Refusal(reason=getattr(error, "reason", ""), detail=str(error)), 500)


async def _misasked(request: Request, error: Exception) -> Response:
    return _json(Refusal(reason=getattr(error, "reason", ""), detail=str(error)), 400)
