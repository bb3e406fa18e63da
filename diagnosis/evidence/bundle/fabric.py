"""`fabric.json` as `Fabric`: links, and which of them each flow takes."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from diagnosis.contracts.gathered import PINGS_SENT_MAX
from diagnosis.contracts.incident import UNKNOWN, Fabric, Floats, Probe
from diagnosis.evidence.bundle.files import FABRIC, PROBE, FabricFile, FlowItem, mended_flows, mended_links
from diagnosis.evidence.limits import Limits, Names
from diagnosis.evidence.notes import Notes
from diagnosis.evidence.values import Decoder

PROBES_MAX: Final = 256
_DECODER = Decoder(FabricFile, {"links": mended_links, "flows": mended_flows})


def read_fabric(file: str, content: bytes, notes: Notes) -> FabricFile | None:
    """The file, or None (noted) where it is no JSON object."""
    return _DECODER.decode(file, 0, content, notes)


def build_fabric(raw: FabricFile, world: int, comms: dict[str, int], limits: Limits, notes: Notes) -> Fabric:
    """Columns. `comms`: index of each communicator. A link on a path that was not declared is one without ends."""
    names = Names(limits)
    a: list[str] = []
    b: list[str] = []
    capacity: list[float | None] = []
    for link in raw.links or []:
        if link is None or link.id is None or names.index(link.id) != len(a):
            notes.add(FABRIC, "a link without an id, or told twice, is left out")
            continue
        a.append(link.a or "")
        b.append(link.b or "")
        capacity.append(link.gbps)
    flows: list[FlowItem] = []
    probes: list[Probe] = []
    paths: list[list[int]] = []
    hops = 0
    for flow in raw.flows or []:
        if flow is None or hops > limits.members_max or len(flows) >= limits.rows_max:
            notes.add(FABRIC, "a flow that is none, or one beyond the reader's limit, is left out")
            continue
        path = [index for name in flow.path or [] if (index := names.index(name)) >= 0]
        hops += len(path)
        if flow.kind == PROBE:
            probes.append(_probe(flow, path, world))
            continue
        flows.append(flow)
        paths.append(path)
    missing = len(names) - len(a)
    notes.add(FABRIC, "a link on a path is not among the links", count=missing)
    return Fabric(
        links=names.all(),
        a=(*a, *[""] * missing),
        b=(*b, *[""] * missing),
        capacity_gbps=_sound(capacity + [None] * missing, notes),
        comm=np.array([comms.get(flow.comm or "", UNKNOWN) for flow in flows], np.int32),
        src=np.array([_rank(flow.src_rank, world) for flow in flows], np.int32),
        dst=np.array([_rank(flow.dst_rank, world) for flow in flows], np.int32),
        gbps=_sound([flow.gbps for flow in flows], notes),
        rtt_us=_sound([flow.rtt_us for flow in flows], notes),
        path_start=np.concatenate([[0], np.cumsum([len(path) for path in paths])]).astype(np.int64),
        path=np.array([index for path in paths for index in path], np.int32),
        resent=_sound([flow.resent for flow in flows], notes),
        dragged=_sound([flow.dragged for flow in flows], notes),
        probes=tuple(probes[:PROBES_MAX]),
    )


def _probe(flow: FlowItem, path: list[int], world: int) -> Probe:
    """Impossible numbers are taken as unknown."""
    loss = flow.loss if flow.loss is not None and 0 <= flow.loss <= 1 else math.nan
    rtt_us = flow.rtt_us if flow.rtt_us is not None and 0 <= flow.rtt_us < math.inf else math.nan
    sent = flow.sent if flow.sent is not None and 0 < flow.sent <= PINGS_SENT_MAX else 0
    return Probe(_rank(flow.src_rank, world), _rank(flow.dst_rank, world), sent, loss, rtt_us, tuple(path))


def _rank(rank: int | None, world: int) -> int:
    return rank if rank is not None and 0 <= rank < world else UNKNOWN


def _sound(values: list[float | None], notes: Notes) -> Floats:
    column = np.array(values, np.float64)
    with np.errstate(invalid="ignore"):
        bad = np.isinf(column) | (column < 0)
    notes.add(FABRIC, "an impossible rate or time is taken as unknown", count=int(bad.sum()))
    return np.where(bad, np.nan, column)
