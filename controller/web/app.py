"""The page: what the controller sees and does, read-only, rendered here, live where the browser runs scripts."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import jinja2
import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from controller.control.status import Status, View
from controller.notify.message import who
from controller.registry import NodeStatus
from controller.store.base import Incident
from controller.web import words
from controller.web.guard import Guard

RECENT_MAX: Final = 50
VIEWERS_MAX: Final = 64
LIVE_PERIOD_S: Final = 2.0
_HERE: Final = Path(__file__).parent


class Page:
    """The application and its open live streams."""

    def __init__(self, view: View, hosts: list[str]) -> None:
        self._view = view
        self._viewers = 0
        self._closing = asyncio.Event()
        self._templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(_HERE / "templates"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters.update(words.FILTERS)
        self._templates.globals.update(who=who, ranks_seen=words.ranks_seen, step_time=words.step_time)
        routes = [
            Route("/", self._overview),
            Route("/incidents/{incident_id:str}", self._incident),
            Route("/events", self._events),
            Mount("/static", StaticFiles(directory=_HERE / "static")),
        ]
        self.asgi = Starlette(
            routes=routes,
            middleware=[Middleware(Guard, hosts=hosts)],
            exception_handlers={HTTPException: self._refused},
        )

    def close(self) -> None:
        """End the live streams."""
        self._closing.set()

    async def _overview(self, request: Request) -> Response:
        status = await self._view.status()
        incidents = await self._view.incidents(RECENT_MAX)
        still_open = await self._view.incidents(RECENT_MAX, open_only=True)
        return self._render(
            "overview.html",
            status,
            open_incidents=still_open,
            recent_incidents=[incident for incident in incidents if incident.phase == "closed"],
            troubled=[node for node in status.nodes if _troubled(node)],
        )

    async def _incident(self, request: Request) -> Response:
        detail = await self._view.incident(request.path_params["incident_id"])
        if detail is None:
            raise HTTPException(404, "There is no such incident.")
        return self._render(
            "incident.html",
            await self._view.status(),
            incident=detail.incident,
            verdict=detail.incident.verdict,
            acts=detail.acts,
            evidence=detail.evidence,
        )

    async def _events(self, request: Request) -> Response:
        if self._viewers >= VIEWERS_MAX:
            raise HTTPException(503, "Too many viewers; the page works without live updates.")
        return StreamingResponse(self._live(), media_type="text/event-stream")

    async def _live(self) -> AsyncIterator[bytes]:
        """A word whenever something that the page shows has changed."""
        self._viewers += 1
        former = b""
        try:
            while not self._closing.is_set():
                newest = _digest(await self._view.status(), await self._view.incidents(RECENT_MAX))
                yield b"event: changed\ndata:\n\n" if newest != former else b":\n\n"
                former = newest
                try:
                    await asyncio.wait_for(self._closing.wait(), LIVE_PERIOD_S)
                except TimeoutError:
                    continue
        finally:
            self._viewers -= 1

    async def _refused(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        status = await self._view.status()
        return self._render("refused.html", status, code=error.status_code, text=error.detail)

    def _render(self, template: str, status: Status, **values: Any) -> HTMLResponse:
        html = self._templates.get_template(template).render(status=status, now=status.now, **values)
        return HTMLResponse(html, values.get("code", 200))


def _troubled(node: NodeStatus) -> bool:
    return node.silent or node.hardware in ("hung", "error") or bool(node.refused) or node.spool_dropped > 0


def _digest(status: Status, incidents: list[Incident]) -> bytes:
    told = msgspec.json.encode((msgspec.structs.replace(status, now=0.0), incidents))
    return hashlib.blake2b(told, digest_size=16).digest()
