"""A controller's ingest on loopback, and one node daemon's side of it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp

from controller.ingest.app import IngestApp
from controller.ingest.channels import ControlChannels
from controller.servers import bind_tcp, tcp_server
from controller.settings import Address, Server
from controller.store.sqlite import SqliteStore
from diagnosis.contracts.control import Evidence
from diagnosis.contracts.credential import authorization, node_key
from diagnosis.contracts.errors import AgentFault
from diagnosis.contracts.report import Acknowledgement, Report

SECRET = b"s" * 32
Reply = tuple[int, dict[str, Any]]


class IngestSite:
    """Both ends. `reports` and `evidence`: what was taken in."""

    def __init__(
        self, directory: Path, settings: Server, connections_max: int = 64, connections_per_peer_max: int | None = None
    ) -> None:
        self.directory, self.settings, self.connections_max = directory, settings, connections_max
        self.connections_per_peer_max = connections_per_peer_max
        self.reports: list[tuple[Report, int]] = []
        self.evidence: list[Evidence] = []
        self.channels = ControlChannels(1000)
        self.counter = 0

    async def start(self) -> IngestSite:
        self.store = await SqliteStore.open(self.directory / "state.db")
        self.app = IngestApp(
            SECRET,
            self.settings,
            await self.store.nodes_seen(),
            self.store,
            self.channels,
            self._accept_report,
            self._accept_evidence,
        )
        self.server = tcp_server(self.app, self.connections_max, self.connections_per_peer_max)
        listener = bind_tcp(Address("127.0.0.1", 0), "server.listen")
        self.port: int = listener.getsockname()[1]
        self._serving = asyncio.create_task(self.server.serve(sockets=[listener]))
        self.session = aiohttp.ClientSession(f"http://127.0.0.1:{self.port}")
        return self

    async def stop(self) -> None:
        await self.session.close()
        self.channels.close()
        self.server.stop()
        await self._serving
        await self.store.close()

    def _accept_report(self, report: Report, /, *, received_at: float, age_ms: int) -> Acknowledgement:
        self.reports.append((report, age_ms))
        return Acknowledgement()

    async def _accept_evidence(self, evidence: Evidence) -> None:
        if evidence.incident == "ffffff":
            raise AgentFault("no such incident", reason="incident")
        self.evidence.append(evidence)

    def claim(self, method: str, path: str, body: bytes, *, node: str = "gpu001", key_of: str = "", **own: int) -> str:
        self.counter += 1
        numbers = {"epoch": 1, "counter": self.counter, "age_ms": 0} | own
        return authorization(
            node_key(SECRET, key_of or node),
            method,
            path,
            node=node,
            epoch=numbers["epoch"],
            counter=numbers["counter"],
            age_ms=numbers["age_ms"],
            body=body,
        )

    async def post(self, body: bytes, header: str | None = None, path: str = "/v1/report") -> Reply:
        headers = {"Authorization": self.claim("POST", path, body) if header is None else header}
        async with self.session.post(path, data=body, headers=headers) as answer:
            return answer.status, json.loads(await answer.read())

    async def connect(self, address: str = "127.0.0.1") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A bare connection, from any loopback address."""
        return await asyncio.open_connection("127.0.0.1", self.port, local_addr=(address, 0))
