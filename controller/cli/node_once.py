"""`tocsin node --once`: the state of this node's ranks as a table for a person at three in the morning."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

from controller.cli.words import clean, columns
from controller.web.words import UNKNOWN, duration, number
from diagnosis.contracts.errors import OperatorFault
from diagnosis.contracts.report import HardwareFacts
from node_daemon import settings as node_settings
from node_daemon.once import FRAME_ROOT, STATE_WORDS, CommNow, NodeNow, RankNow, gpu_of, look, node_of


def node_now(config: Path | None, frame_root: Path | None, node: str | None, seconds: float) -> NodeNow:
    """What is to be seen here: where, as told, else as the daemon's file says, else the usual place.

    Raises OperatorFault where there is nothing to look at, or a file that was named has faults.
    """
    if config is not None or (node_settings.DEFAULT_PATH.exists() and not (frame_root and node)):
        told = _settings(config)
        if told is not None:
            frame_root, node = frame_root or told.frame_root, node or told.node
    root = frame_root or FRAME_ROOT
    return look(root, node or node_of(root, socket.gethostname()), seconds)


def _settings(config: Path | None) -> node_settings.Settings | None:
    try:
        return node_settings.load(config or node_settings.DEFAULT_PATH)
    except OperatorFault:
        if config is not None:
            raise
        return None  # a fault in the daemon's file must not keep anybody from looking


def lines_of(now: NodeNow) -> Iterator[str]:
    """The table: the odd ranks first, why they are odd, and what could not be read."""
    if now.ranks:
        yield from columns(
            [("JOB", "RANK", "PID", "PROCESS", "COMM", "ROUND", "OPERATION", "INSIDE", "WAITS FOR", "STEP", "GPU")]
            + [_row(rank, now.gpus) for rank in now.ranks]
        )
    else:
        yield f"no rank of a watched job is on {clean(now.node)}"
    odd = [rank for rank in now.ranks if rank.odd]
    if odd:
        yield ""
        yield from (clean(f"odd: {_name(rank)}: {'; '.join(rank.odd)}") for rank in odd)
    if now.unread:
        yield ""
        yield from (clean(f"not read: {line}") for line in now.unread)
    yield ""
    users = sorted({rank.user for rank in now.ranks})
    yield clean(
        f"{now.node}: {len(now.ranks)} ranks{' of ' + ', '.join(users) if users else ''}, {len(odd)} of them odd, "
        f"watched for {duration(now.watched_s)}"
    )


def _row(rank: RankNow, gpus: HardwareFacts) -> tuple[str, ...]:
    comm = rank.comms[0] if rank.comms else None
    state = UNKNOWN if rank.process is None else f"{rank.process} {STATE_WORDS.get(rank.process, '')}".strip()
    return (
        f"{'!' if rank.odd else ' '}{rank.job_id}.{rank.restart}",
        f"{number(rank.rank)}/{number(rank.world_size)}",
        str(rank.pid),
        state,
        UNKNOWN if comm is None else f"{comm.comm[:6]} {comm.position}/{comm.size}",
        UNKNOWN if comm is None else str(comm.entered),
        UNKNOWN if comm is None else _operation(comm),
        UNKNOWN if comm is None else _inside(comm),
        UNKNOWN if comm is None or not comm.waits_for else _first(comm.waits_for),
        _step(rank),
        _gpu(rank, gpus),
    )


def _operation(comm: CommNow) -> str:
    size = "" if comm.count is None else f" {number(comm.count)} {comm.dtype or ''}".rstrip()
    return f"{comm.op or UNKNOWN}{size}"


def _inside(comm: CommNow) -> str:
    if comm.inside_s is not None:
        return duration(comm.inside_s)
    if comm.done is None:
        return f"? ({duration(comm.idle_s)})"  # its end is not seen
    return f"out, {duration(comm.idle_s)}"


def _first(waits: list[str]) -> str:
    return waits[0] + (f" +{len(waits) - 1}" if len(waits) > 1 else "")


def _step(rank: RankNow) -> str:
    if rank.step_ms is None:
        return UNKNOWN
    spread = "" if rank.step_jitter_ms is None else f" ±{number(round(rank.step_jitter_ms, 1))}"
    place = "" if rank.step_round is None else f", {rank.step_round}/{rank.step_rounds}"
    return f"{number(round(rank.step_ms, 1))}{spread} ms{place}"


def _gpu(rank: RankNow, gpus: HardwareFacts) -> str:
    if rank.gpu is None:
        return UNKNOWN
    facts = gpu_of(rank, gpus)
    if facts is None:
        return str(rank.gpu)
    told = [
        "" if facts.sm_clock_mhz is None else f"{facts.sm_clock_mhz} MHz",
        "" if facts.utilization_pct is None else f"{facts.utilization_pct} %",
        "" if facts.temperature_c is None else f"{facts.temperature_c} C",
    ]
    return " ".join([str(rank.gpu), *(word for word in told if word)])


def _name(rank: RankNow) -> str:
    return f"rank {rank.rank} of job {rank.job_id}" if rank.rank is not None else f"pid {rank.pid}"
