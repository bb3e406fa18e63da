"""What a verdict was given on, kept as a bundle in one archive (`docs/bundle.md`), so that it can be judged again.

An archive is bounded, packed and unpacked, and always within what the reader unpacks. An incident that is larger is cut
down to the suspects and those that share a communicator with them, the smallest communicators first, and the bundle
says so under `unseen`.
"""

from __future__ import annotations

import asyncio
import io
import tarfile
import time
from collections.abc import Callable, Collection
from typing import Final

import numpy as np
import structlog
import zstandard

from controller.registry import Registry
from controller.store.base import INPUTS_BYTES_MAX, Store
from diagnosis.contracts.errors import AgentFault, OperatorFault
from diagnosis.contracts.incident import Incident
from diagnosis.contracts.verdict import Verdict
from diagnosis.engine.live import incident_of
from diagnosis.engine.verdict import judge
from diagnosis.evidence.bundle.narrow import part_of
from diagnosis.evidence.bundle.writer import write_bundle

ROWS_MAX: Final = 50_000
"""Words of ranks about communicators (8,192 ranks with three each, twice). More are not even written, so that packing
takes about a second at most."""
UNPACKED_BYTES_MAX: Final = 60 << 20
"""Below what the reader unpacks whatever the ratio."""
PAUSE_FACTOR: Final = 10.0
SUSPECTS_MAX: Final = 64
SUSPECTS_OF_NOBODY: Final = 8
_log = structlog.get_logger("captures")


class Captures:
    """Keeps the inputs of incidents in the store, and gives bundles out."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._packing = asyncio.Lock()
        self._rested_at = 0.0

    async def keep(self, number: str, inputs: Incident, verdict: Verdict, at: float) -> None:
        """Keep what the newest verdict on an incident was given on, instead of what was kept before.

        Where it cannot be kept that is logged: nothing that is done for a job depends on it.
        """
        try:
            payload = await asyncio.to_thread(pack, f"incident-{number}", inputs, suspects_of(verdict, inputs))
            await self._store.keep_inputs(number, payload, at)
        except (AgentFault, OperatorFault) as fault:
            _log.warning("inputs not kept", incident=number, error=str(fault))

    async def kept(self, number: str) -> bytes | None:
        """The bundle of an incident. None: there is none."""
        return await self._store.inputs(number)

    async def of_job(self, registry: Registry, job_id: int, now: Callable[[], float]) -> bytes | None:
        """A watched job as it is now, its newest attempt. None: it is not watched.

        Anybody may ask, and laying out a large job holds up the loop: one is made at a time, and what it took is paid
        back by a pause of `PAUSE_FACTOR` times that before the next.

        Raises: AgentFault (reason `limits`: the job tells more than a bundle may hold).
        """
        async with self._packing:
            await asyncio.sleep(max(0.0, self._rested_at - time.monotonic()))
            restart = max((restart for known, restart in registry.histories if known == job_id), default=None)
            if restart is None:
                return None
            began = time.monotonic()
            inputs = incident_of(registry.histories[job_id, restart], registry.gpus(now()), now())
            self._rested_at = time.monotonic() + PAUSE_FACTOR * (time.monotonic() - began)
            return await asyncio.to_thread(_judge_and_pack, f"job-{job_id}", inputs)


def suspects_of(verdict: Verdict, inputs: Incident) -> list[int]:
    """The ranks that a verdict is about: its culprits, those on its culprits' nodes, else the first ones. Sorted."""
    node_of = dict(enumerate(inputs.job.node_names))
    blamed = {culprit.node for culprit in verdict.culprits if culprit.rank is None and culprit.node is not None}
    on_nodes = np.flatnonzero(np.isin(inputs.job.node, [at for at, name in node_of.items() if name in blamed]))
    named = {culprit.rank for culprit in verdict.culprits if culprit.rank is not None} | set(on_nodes.tolist())
    return sorted(named)[:SUSPECTS_MAX] or list(range(min(SUSPECTS_OF_NOBODY, inputs.job.world_size)))


def _judge_and_pack(folder: str, inputs: Incident) -> bytes:
    return pack(folder, inputs, suspects_of(judge(inputs), inputs))


def pack(folder: str, inputs: Incident, suspects: Collection[int]) -> bytes:
    """The bundle as `.tar.zst` with its files in `folder`, of at most `INPUTS_BYTES_MAX` bytes.

    Raises: AgentFault (reason `limits`: the job tells more than can be kept even of its suspects).
    """
    for rows_max in (ROWS_MAX, ROWS_MAX // 8, 0):
        part = inputs
        if len(inputs.frames.frame) > rows_max:
            part = part_of(inputs, suspects, rows_max)
        if len(part.frames.frame) > ROWS_MAX:
            continue
        files = write_bundle(part)
        if sum(map(len, files.values())) > UNPACKED_BYTES_MAX:
            continue
        packed = zstandard.ZstdCompressor().compress(_tar(folder, files))
        if len(packed) <= INPUTS_BYTES_MAX:
            return packed
    raise AgentFault(f"more than {INPUTS_BYTES_MAX} bytes even of the suspects alone", reason="limits")


def _tar(folder: str, files: dict[str, bytes]) -> bytes:
    """The same files give the same bytes."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()
