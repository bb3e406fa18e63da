"""Incidents to test with: made by Hypothesis, and as plain values that can be compared."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from diagnosis.contracts.exits import ENDED_WORDS, ExitFacts
from diagnosis.contracts.incident import (
    Communicators,
    Fabric,
    Floats,
    Frames,
    HealthTable,
    Incident,
    Job,
    KernelLine,
    Summaries,
)
from diagnosis.evidence.bundle import files
from diagnosis.evidence.signatures import Signature, signature_text

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=8)
NUMBERS = st.one_of(
    st.just(float("nan")), st.floats(0, 1e15), st.integers(0, 1 << 53).map(float), st.sampled_from([0.0, 1.0])
)


def plain(incident: Incident) -> dict[str, Any]:
    """Everything that a bundle keeps, with names instead of their numbers and None instead of NaN."""
    job, frames = incident.job, incident.frames
    nodes = (*job.node_names, None)
    comms = (*incident.communicators.ids, None)
    signatures = (*frames.signatures, None)
    rows = zip(
        frames.rank[frames.frame].tolist(),
        frames.frame.tolist(),
        [comms[at] for at in frames.comm],
        frames.peer.tolist(),
        frames.state.tolist(),
        [signatures[at] for at in frames.signature],
        *[_told(getattr(frames, name)) for name in files.ROW_NUMBERS],
        strict=True,
    )
    return {
        "job": (job.job_id, job.world_size, job.fidelity, dict(job.groups), dict(job.nic_of_gpu)),
        "places": ([nodes[at] for at in job.node], job.gpu.tolist()),
        "communicators": _communicators(incident.communicators),
        "frames": list(zip(frames.rank.tolist(), _told(frames.t_ms), _told(frames.window_ms), strict=True)),
        "rows": list(rows),
        "summaries": incident.summaries and _summaries(incident.summaries),
        "health": {name: _table(getattr(incident, name), nodes) for name in ("nvml", "ib", "host")},
        "kernel": [(line.node, line.line) for line in incident.kernel_log],
        "fabric": incident.fabric and _fabric(incident.fabric, comms),
        "processes": sorted(incident.process_state.items()),
        "thresholds": dict(incident.thresholds),
        "unseen": incident.unseen,
        "ended": (incident.ended, incident.lost_nodes if incident.ended else ()),
        "exits": incident.exits,
    }


def _told(column: Floats) -> list[float | None]:
    return [None if np.isnan(value) else value for value in column.tolist()]


def _communicators(comms: Communicators) -> list[Any]:
    members = [comms.member[comms.start[at] : comms.start[at + 1]].tolist() for at in range(len(comms.ids))]
    return list(zip(comms.ids, members, comms.kind.tolist(), comms.algo, comms.transport, strict=True))


def _summaries(summaries: Summaries) -> dict[str, Any]:
    operators = [(summaries.operator_names[at], summaries.kind[at]) for at in summaries.operator]
    return {
        "workers": (summaries.rank.tolist(), _told(summaries.step_ms), _told(summaries.steps)),
        "phases": {name: _told(column) for name, column in summaries.phases.items()},
        "rows": list(zip(summaries.worker.tolist(), operators, strict=True)),
        "stats": {name: _told(column) for name, column in summaries.stats.items()},
    }


def _table(table: HealthTable | None, nodes: tuple[str | None, ...]) -> Any:
    if table is None:
        return None
    values = {name: _told(column) for name, column in table.values.items()}
    return [nodes[at] for at in table.node], table.entity, values


def _fabric(fabric: Fabric, comms: tuple[str | None, ...]) -> dict[str, Any]:
    paths = [fabric.path[fabric.path_start[at] : fabric.path_start[at + 1]].tolist() for at in range(len(fabric.comm))]
    return {
        "links": list(zip(fabric.links, fabric.a, fabric.b, _told(fabric.capacity_gbps), strict=True)),
        "flows": list(
            zip(
                [comms[at] for at in fabric.comm],
                fabric.src.tolist(),
                fabric.dst.tolist(),
                _told(fabric.gbps),
                _told(fabric.rtt_us),
                [[fabric.links[link] for link in path] for path in paths],
                strict=True,
            )
        ),
    }


@st.composite
def incidents(draw: st.DrawFn) -> Incident:
    """Small incidents with everything in them that a bundle can hold."""
    world = draw(st.integers(1, 5))
    nodes = tuple(draw(st.lists(NAMES, min_size=1, max_size=3, unique=True)))
    place = st.lists(st.integers(-1, len(nodes) - 1), min_size=world, max_size=world)
    job = Job(
        job_id=draw(st.none() | st.integers(0, 1 << 40)),
        world_size=world,
        node_names=nodes,
        node=np.array(draw(place), np.int32),
        gpu=np.array(draw(st.lists(st.integers(-1, 8), min_size=world, max_size=world)), np.int32),
        fidelity=draw(st.sampled_from(["full", "nccl"])),
        groups=draw(st.sampled_from([{}, {"tp": ((0,),), "dp": (tuple(range(world)),)}])),
        nic_of_gpu=draw(st.dictionaries(st.integers(0, 8), NAMES, max_size=2)),
    )
    comms = draw(_communicator_sets(world))
    return Incident(
        job=job,
        communicators=comms,
        frames=draw(_frame_sets(world, comms)),
        summaries=draw(st.none() | _summary_sets(world)),
        nvml=draw(st.none() | _tables(files.NVML, len(nodes), st.integers(0, 8))),
        ib=draw(st.none() | _tables(files.IB, len(nodes), NAMES)),
        host=draw(st.none() | _tables(files.HOST, len(nodes), st.just(""))),
        kernel_log=tuple(KernelLine(nodes[0], line) for line in draw(st.lists(NAMES, max_size=2))),
        fabric=draw(st.none() | _fabrics(world, len(comms.ids))),
        process_state=draw(st.dictionaries(st.integers(0, world - 1), st.sampled_from("RSDTZX"), max_size=3)),
        thresholds=draw(st.dictionaries(NAMES, st.floats(0, 1e300), max_size=2)),
        unseen=tuple(draw(st.lists(NAMES, max_size=2))),
        ended=draw(st.sampled_from(["", *sorted(ENDED_WORDS)])),
        lost_nodes=tuple(draw(st.lists(NAMES, max_size=2))),
        exits=tuple(draw(_exits(rank)) for rank in sorted(draw(st.sets(st.integers(0, world - 1))))),
    )


def _exits(rank: int) -> st.SearchStrategy[ExitFacts]:
    return st.builds(
        ExitFacts,
        world_rank=st.just(rank),
        pid=st.integers(0, 1 << 22),
        ended_ms=st.none() | st.floats(0, 1e9),
        exit_code=st.none() | st.integers(0, 255),
        signal=st.none() | st.integers(1, 127),
        oom_kills=st.none() | st.integers(0, 9),
    )


@st.composite
def _communicator_sets(draw: st.DrawFn, world: int) -> Communicators:
    ids = draw(st.lists(NAMES, max_size=3, unique=True))
    ranks = st.lists(st.integers(0, world - 1), min_size=1, max_size=world, unique=True)
    members = [draw(ranks) for _ in ids]
    return Communicators(
        ids=tuple(ids),
        start=np.concatenate([[0], np.cumsum([len(one) for one in members])]).astype(np.int64),
        member=np.array([rank for one in members for rank in one], np.int32),
        kind=np.array([draw(st.integers(0, 2)) for _ in ids], np.uint8),
        algo=tuple(draw(st.sampled_from(["", "RING", "TREE"])) for _ in ids),
        transport=tuple(draw(st.sampled_from(["", "NET"])) for _ in ids),
    )


@st.composite
def _frame_sets(draw: st.DrawFn, world: int, comms: Communicators) -> Frames:
    samples = draw(st.integers(0, 3))
    told = [(rank, float(at)) for rank in draw(st.sets(st.integers(0, world - 1))) for at in range(samples)]
    told.sort()
    member_of = [
        [c for c in range(len(comms.ids)) if rank in comms.member[comms.start[c] : comms.start[c + 1]]]
        for rank in range(world)
    ]
    rows = [
        (frame, comm)
        for frame, (rank, _) in enumerate(told)
        for comm in draw(st.permutations(member_of[rank]))
        if draw(st.booleans())
    ]
    count = len(rows)
    words = st.lists(
        st.builds(Signature, NAMES, st.none() | NAMES, st.none() | st.integers(0, 1 << 40), st.none() | st.just(3)),
        min_size=1,
        max_size=3,
    )
    signatures = list(dict.fromkeys(text for one in draw(words) if (text := signature_text(one)) is not None))

    def whole(low: int, high: int) -> list[int]:
        return draw(st.lists(st.integers(low, high), min_size=count, max_size=count))

    def numbers(size: int) -> Floats:
        return np.array(draw(st.lists(NUMBERS, min_size=size, max_size=size)), np.float64)

    return Frames(
        rank=np.array([rank for rank, _ in told], np.int32),
        t_ms=np.array([at for _, at in told]),
        window_ms=numbers(len(told)),
        frame=np.array([frame for frame, _ in rows], np.int32),
        comm=np.array([comm for _, comm in rows], np.int32),
        peer=np.array(whole(-1, world - 1), np.int32),
        state=np.array(whole(0, 4), np.uint8),
        signature=np.array(whole(-1, len(signatures) - 1), np.int32),
        signatures=tuple(signatures),
        **{name: numbers(count) for name in files.ROW_NUMBERS},
    )


@st.composite
def _summary_sets(draw: st.DrawFn, world: int) -> Summaries:
    workers = sorted(draw(st.sets(st.integers(0, world - 1), min_size=1)))
    names = draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))
    rows = [(worker, at) for worker in range(len(workers)) for at in range(len(names)) if draw(st.booleans())]
    phases = draw(st.lists(NAMES, max_size=2, unique=True))

    def numbers(size: int) -> Floats:
        return np.array(draw(st.lists(NUMBERS, min_size=size, max_size=size)), np.float64)

    return Summaries(
        rank=np.array(workers, np.int32),
        step_ms=numbers(len(workers)),
        steps=numbers(len(workers)),
        phases={name: numbers(len(workers)) for name in phases},
        worker=np.array([worker for worker, _ in rows], np.int32),
        operator=np.array([at for _, at in rows], np.int32),
        operator_names=tuple(names),
        kind=tuple(draw(st.sampled_from(["", "compute", "comm"])) for _ in names),
        stats={name: numbers(len(rows)) for name in files.STATS},
    )


@st.composite
def _tables(draw: st.DrawFn, fields: tuple[str, ...], nodes: int, entity: st.SearchStrategy[Any]) -> HealthTable:
    count = draw(st.integers(1, 3))

    def column(name: str) -> Floats:
        yes_or_no = name == "link" or name in files.YES_OR_NO
        values = st.sampled_from([0.0, 1.0, float("nan")]) if yes_or_no else NUMBERS
        return np.array(draw(st.lists(values, min_size=count, max_size=count)), np.float64)

    return HealthTable(
        node=np.array(draw(st.lists(st.integers(0, nodes - 1), min_size=count, max_size=count)), np.int32),
        entity=tuple(draw(entity) for _ in range(count)),
        values={name: column(name) for name in fields},
    )


@st.composite
def _fabrics(draw: st.DrawFn, world: int, comms: int) -> Fabric:
    links = draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))
    paths = draw(st.lists(st.lists(st.integers(0, len(links) - 1), max_size=3), max_size=3))
    count = len(paths)

    def whole(high: int) -> Any:
        return np.array(draw(st.lists(st.integers(-1, high), min_size=count, max_size=count)), np.int32)

    def numbers(size: int) -> Floats:
        return np.array(draw(st.lists(NUMBERS, min_size=size, max_size=size)), np.float64)

    return Fabric(
        links=tuple(links),
        a=tuple(draw(st.sampled_from(["", "leaf0"])) for _ in links),
        b=tuple(draw(st.sampled_from(["", "spine1"])) for _ in links),
        capacity_gbps=numbers(len(links)),
        comm=whole(comms - 1),
        src=whole(world - 1),
        dst=whole(world - 1),
        gbps=numbers(count),
        rtt_us=numbers(count),
        path_start=np.concatenate([[0], np.cumsum([len(path) for path in paths])]).astype(np.int64),
        path=np.array([link for path in paths for link in path], np.int32),
    )
