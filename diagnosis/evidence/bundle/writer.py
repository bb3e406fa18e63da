"""An `Incident` as the files of a bundle: what `tocsin capture` keeps and what another site can read.

What is unknown is written as null, or left out where the whole file is. Reading the files again gives the same
incident, but for operations that are told in another form.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Final

import msgspec
import numpy as np

from diagnosis.contracts.incident import (
    Communicators,
    Fabric,
    Floats,
    Frames,
    HealthTable,
    Incident,
    Kind,
    Probe,
    State,
    Summaries,
)
from diagnosis.evidence.bundle import files
from diagnosis.evidence.signatures import signature_parts

_STATE_NAMES: Final = {code: name for name, code in files.STATES.items()}
_KIND_NAMES: Final = {code: name for name, code in files.KINDS.items()}
Item = dict[str, object]


def write_bundle(incident: Incident) -> dict[str, bytes]:
    """File name to content. What a job has nothing of (summaries, fabric, ras, ...) is no file."""
    out = {
        files.JOB: msgspec.json.format(msgspec.json.encode(_job(incident)), indent=1) + b"\n",
        files.COMMUNICATORS: _lines(_communicators(incident.communicators)),
        files.FRAMES: _lines(_frames(incident.frames, incident.communicators.ids)),
        files.HEALTH: _lines(_health(incident)),
    }
    if incident.summaries is not None:
        out[files.SUMMARIES] = _lines(_summaries(incident.summaries))
    if incident.fabric is not None:
        fabric = _fabric(incident.fabric, incident.communicators.ids)
        out[files.FABRIC] = msgspec.json.format(msgspec.json.encode(fabric), indent=1) + b"\n"
    if incident.ras is not None:
        out[files.RAS] = msgspec.json.format(msgspec.json.encode(incident.ras), indent=1) + b"\n"
    out[files.FLIGHTS] = b"".join(msgspec.json.encode(line) + b"\n" for line in incident.flights)
    out[files.PROCESSES] = b"".join(msgspec.json.encode(line) + b"\n" for line in incident.processes)
    out[files.EXITS] = b"".join(msgspec.json.encode(line) + b"\n" for line in incident.exits)
    return {name: content for name, content in out.items() if content}


def _lines(items: Iterable[Item]) -> bytes:
    return b"".join(msgspec.json.encode(item) + b"\n" for item in items)


def _job(incident: Incident) -> Item:
    job = incident.job
    told: Item = {
        "schema": files.SCHEMA,
        "job_id": job.job_id,
        "world_size": job.world_size,
        "nodes": [job.node_names[node] if node >= 0 else None for node in job.node.tolist()],
        "gpus": [gpu if gpu >= 0 else None for gpu in job.gpu.tolist()],
        "fidelity": job.fidelity,
        "groups": {kind: [list(group) for group in groups] for kind, groups in job.groups.items()},
        "nic_of_gpu": {str(gpu): nic for gpu, nic in job.nic_of_gpu.items()},
        "step_ms": job.step_ms if math.isfinite(job.step_ms) else None,
        "thresholds": dict(incident.thresholds),
        "unseen": list(incident.unseen),
    }
    if incident.ended:
        told |= {"ended": incident.ended, "lost_nodes": list(incident.lost_nodes)}
    return told


def _communicators(comms: Communicators) -> Iterator[Item]:
    for at, name in enumerate(comms.ids):
        yield {
            "comm": name,
            "ranks": comms.member[comms.start[at] : comms.start[at + 1]].tolist(),
            "kind": _KIND_NAMES.get(int(comms.kind[at])) if comms.kind[at] != Kind.UNKNOWN else None,
            "algo": comms.algo[at] or None,
            "transport": comms.transport[at] or None,
        }


def _frames(frames: Frames, comm_ids: tuple[str, ...]) -> Iterator[Item]:
    numbers = {name: _told(getattr(frames, name)) for name in files.ROW_NUMBERS}
    signatures = [asdict(signature_parts(text)) for text in frames.signatures]
    first = np.searchsorted(frames.frame, np.arange(len(frames.rank) + 1)).tolist()
    t_ms, window_ms = _told(frames.t_ms), _told(frames.window_ms)
    for at, rank in enumerate(frames.rank.tolist()):
        rows = []
        for row in range(first[at], first[at + 1]):
            item: Item = {"comm": comm_ids[frames.comm[row]]}
            if frames.peer[row] >= 0:
                item["peer"] = int(frames.peer[row])
            if frames.signature[row] >= 0:
                item |= signatures[frames.signature[row]]
            if frames.state[row] != State.UNKNOWN:
                item["state"] = _STATE_NAMES[int(frames.state[row])]
            rows.append(item | {name: column[row] for name, column in numbers.items()})
        yield {"rank": rank, "t_ms": t_ms[at], "window_ms": window_ms[at], "comms": rows}


def _summaries(summaries: Summaries) -> Iterator[Item]:
    stats = {name: _told(column) for name, column in summaries.stats.items()}
    phases = {name: _told(column) for name, column in summaries.phases.items()}
    first = np.searchsorted(summaries.worker, np.arange(len(summaries.rank) + 1)).tolist()
    step_ms, steps = _told(summaries.step_ms), _told(summaries.steps)
    for at, rank in enumerate(summaries.rank.tolist()):
        yield {
            "worker_rank": rank,
            "step_duration_ms": step_ms[at],
            "profiled_steps": steps[at],
            "phases": {name: column[at] for name, column in phases.items()},
            "operators": [
                {
                    "operator_name": summaries.operator_names[summaries.operator[row]],
                    "kind": summaries.kind[summaries.operator[row]] or None,
                    **{name: column[row] for name, column in stats.items()},
                }
                for row in range(first[at], first[at + 1])
            ],
        }


def _health(incident: Incident) -> Iterator[Item]:
    names = incident.job.node_names
    for source, table, entity in (
        ("nvml", incident.nvml, "gpu"),
        ("ib", incident.ib, "nic"),
        ("host", incident.host, ""),
    ):
        if table is not None:
            yield from _observations(source, table, entity, names)
    for rank, state in incident.process_state.items():
        node = incident.job.node[rank]
        yield {"node": names[node] if node >= 0 else None, "source": "process", "rank": rank, "state": state}
    for line in incident.kernel_log:
        yield {"node": line.node, "source": "kmsg", "line": line.line}


def _observations(source: str, table: HealthTable, entity: str, names: tuple[str, ...]) -> Iterator[Item]:
    columns = {name: _told(column) for name, column in table.values.items()}
    for at, node in enumerate(table.node.tolist()):
        item: Item = {"node": names[node], "source": source}
        if entity:
            item[entity] = table.entity[at]
        for name, column in columns.items():
            value = column[at]
            if name == "link" and value is not None:
                item[name] = "up" if value else "down"
            elif name in files.YES_OR_NO and value is not None:
                item[name] = bool(value)
            else:
                item[name] = value
        yield item


def _fabric(fabric: Fabric, comm_ids: tuple[str, ...]) -> Item:
    capacity, gbps, rtt = _told(fabric.capacity_gbps), _told(fabric.gbps), _told(fabric.rtt_us)
    more = {"resent": fabric.resent, "dragged": fabric.dragged}
    extra = {name: _told(column) for name, column in more.items() if len(column)}
    return {
        "links": [
            {"id": name, "a": fabric.a[at] or None, "b": fabric.b[at] or None, "gbps": capacity[at]}
            for at, name in enumerate(fabric.links)
        ],
        "flows": [
            {
                "comm": comm_ids[comm] if comm >= 0 else None,
                "src_rank": int(fabric.src[at]) if fabric.src[at] >= 0 else None,
                "dst_rank": int(fabric.dst[at]) if fabric.dst[at] >= 0 else None,
                "path": [fabric.links[link] for link in fabric.path[fabric.path_start[at] : fabric.path_start[at + 1]]],
                "gbps": gbps[at],
                "rtt_us": rtt[at],
                **{name: column[at] for name, column in extra.items() if column[at] is not None},
            }
            for at, comm in enumerate(fabric.comm.tolist())
        ]
        + [_probe(fabric, probe) for probe in fabric.probes],
    }


def _probe(fabric: Fabric, probe: Probe) -> Item:
    return {
        "kind": files.PROBE,
        "src_rank": probe.src if probe.src >= 0 else None,
        "dst_rank": probe.dst if probe.dst >= 0 else None,
        "path": [fabric.links[link] for link in probe.path],
        "sent": probe.sent,
        "loss": None if math.isnan(probe.loss) else probe.loss,
        "rtt_us": None if math.isnan(probe.rtt_us) else probe.rtt_us,
    }


def _told(column: Floats) -> list[float | int | None]:
    """Whole numbers without a point: shorter, and as people write them."""
    return [
        None if math.isnan(value) else int(value) if value.is_integer() and abs(value) < 1 << 53 else value
        for value in column.tolist()
    ]
