"""The NCCL plugin and a real libnccl: its layouts, its names, its own wrappers around the plugin, its RAS threads."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from diagnosis.contracts import probeframe
from diagnosis.contracts.probeframe import Algo, Dtype, Op, Proto, Untold
from node_daemon.arming import EVENTS, Arming
from node_daemon.collectors.event_mask import to_be_asked
from node_daemon.collectors.frames import FrameReader
from node_daemon.collectors.process import Processes
from node_daemon.native.nccl.masks import Event, masks_for
from tests.eventually import eventually
from tests.integration.gloo_double import DEADLINE_S
from tests.integration.nccl_double import ALL, INCLUDES, INTERFACES, plugin_library
from tests.integration.nccl_real import Host, Layout, ask_gdb, host, layout, library
from tests.integration.test_nccl_chain import build_other
from tests.integration.test_nccl_chain import counts as chain_counts
from tests.integration.test_nccl_chain import environment as chain_environment

COMM_ID, RANKS, RANK = 0xFEEDBEEF, 16, 3
STEP_BYTES, KERNEL_US = 1 << 19, 250
OLDER = ("2.27.7", "2.28.9", "2.29.7", "2.30.7", "2.31.2")
MEMBERS = {
    "type": "type",
    "parent": "parentObj",
    "rank": "rank",
    "coll.number": "coll.seqNumber",
    "coll.function": "coll.func",
    "coll.count": "coll.count",
    "coll.root": "coll.root",
    "coll.datatype": "coll.datatype",
    "coll.channels": "coll.nChannels",
    "coll.warps": "coll.nWarps",
    "coll.algorithm": "coll.algo",
    "coll.protocol": "coll.proto",
    "p2p.function": "p2p.func",
    "p2p.datatype": "p2p.datatype",
    "p2p.count": "p2p.count",
    "p2p.peer": "p2p.peer",
    "p2p.channels": "p2p.nChannels",
    "proxy_op.pid": "proxyOp.pid",
    "proxy_op.channel": "proxyOp.channelId",
    "proxy_op.peer": "proxyOp.peer",
    "proxy_op.steps": "proxyOp.nSteps",
    "proxy_op.chunk_bytes": "proxyOp.chunkSize",
    "proxy_op.is_send": "proxyOp.isSend",
    "proxy_step.step": "proxyStep.step",
    "kernel_ch.channel": "kernelCh.channelId",
    "kernel_ch.gpu_ns": "kernelCh.pTimer",
}
"""Ours: NCCL's, in every interface."""
MEMBERS_SINCE_5 = {
    "coll.group": "coll.parentGroup",
    "p2p.group": "p2p.parentGroup",
    "coll_api.function": "collApi.func",
    "coll_api.count": "collApi.count",
    "coll_api.datatype": "collApi.datatype",
    "coll_api.root": "collApi.root",
    "coll_api.stream": "collApi.stream",
    "coll_api.graph_captured": "collApi.graphCaptured",
}
NUMBERS = {
    "NCCL_STATE_SEND_GPU_WAIT": "ncclProfilerProxyStepSendGPUWait",
    "NCCL_STATE_SEND_PEER_WAIT": "ncclProfilerProxyStepSendPeerWait_v4",
    "NCCL_STATE_SEND_WAIT": "ncclProfilerProxyStepSendWait",
    "NCCL_STATE_RECV_WAIT": "ncclProfilerProxyStepRecvWait",
    "NCCL_STATE_RECV_FLUSH_WAIT": "ncclProfilerProxyStepRecvFlushWait",
    "NCCL_STATE_RECV_GPU_WAIT": "ncclProfilerProxyStepRecvGPUWait",
    "NCCL_STATE_PROXY_OP_IN_PROGRESS": "ncclProfilerProxyOpInProgress_v4",
    "NCCL_STATE_KERNEL_CH_STOP": "ncclProfilerKernelChStop",
    "NCCL_GROUP": "ncclProfileGroup",
    "NCCL_COLL": "ncclProfileColl",
    "NCCL_P2P": "ncclProfileP2p",
    "NCCL_PROXY_OP": "ncclProfileProxyOp",
    "NCCL_PROXY_STEP": "ncclProfileProxyStep",
    "NCCL_PROXY_CTRL": "ncclProfileProxyCtrl",
    "NCCL_KERNEL_CH": "ncclProfileKernelCh",
    "NCCL_NET_PLUGIN": "ncclProfileNetPlugin",
    "NCCL_GROUP_API": "ncclProfileGroupApi",
    "NCCL_COLL_API": "ncclProfileCollApi",
    "NCCL_P2P_API": "ncclProfileP2pApi",
    "NCCL_KERNEL_LAUNCH": "ncclProfileKernelLaunch",
    "NCCL_CE_COLL": "ncclProfileCeColl",
    "NCCL_CE_SYNC": "ncclProfileCeSync",
    "NCCL_CE_BATCH": "ncclProfileCeBatch",
    "NCCL_KERNEL_PHASE": "ncclProfileKernelPhase",
}


@pytest.fixture(scope="module")
def newest() -> Layout:
    return layout(library())


def compiled(tmp_path: Path) -> dict[str, int]:
    """What the compiler makes of profiler_abi.h: offsets, numbers, sizes."""
    members = {**MEMBERS, **MEMBERS_SINCE_5}
    lines = ["#include <stdio.h>", '#include "profiler_abi.h"', "int main(void) {"]
    lines += [f'printf("{one} %zu\\n", offsetof(nccl_event, {one}));' for one in members]
    lines += [f'printf("{one} %d\\n", {one});' for one in NUMBERS]
    lines += [f'printf("{one} %zu\\n", sizeof({one}));' for one in ("nccl_profiler_v4", "nccl_profiler_v5")]
    lines += ['printf("nccl_state_args %zu\\n", sizeof(nccl_state_args));', "return 0; }"]
    source, program = tmp_path / "abi.c", tmp_path / "abi"
    source.write_text("\n".join(lines))
    subprocess.run(["gcc", "-Wall", "-Werror", *INCLUDES, source, "-o", program], check=True, timeout=DEADLINE_S)
    told = subprocess.run([program], check=True, capture_output=True, text=True, timeout=DEADLINE_S).stdout
    return {name: int(value) for name, value in (line.split() for line in told.splitlines())}


def numbers_in(path: Path, **expressions: str) -> dict[str, int]:
    asked = [f'printf "{name.replace("__", ".")} %ld\\n", (long)({what})' for name, what in expressions.items()]
    return {name: int(value) for name, value in re.findall(r"^(\S+) (\d+)$", ask_gdb(path, *asked), re.MULTILINE)}


@pytest.mark.parametrize("interface", INTERFACES)
def test_the_layout_is_that_of_the_library_s_debug_information(tmp_path: Path, interface: int) -> None:
    ours, event = compiled(tmp_path), f"ncclProfilerEventDescr_v{interface}_t"
    members = {**MEMBERS, **(MEMBERS_SINCE_5 if interface > 4 else {})}
    theirs = numbers_in(
        library(),
        **{one.replace(".", "__"): f"&(({event}*)0)->{name}" for one, name in members.items()},
        type_bytes=f"sizeof((({event}*)0)->type)",
        interface_bytes=f"sizeof(ncclProfiler_v{interface}_t)",
        args_bytes=f"sizeof(ncclProfilerEventStateArgs_v{interface}_t)",
    )
    assert {one: theirs[one] for one in members} == {one: ours[one] for one in members}
    assert theirs["type_bytes"] == (1 if interface == 4 else 8)
    assert theirs["interface_bytes"] == ours[f"nccl_profiler_v{min(interface, 5)}"]
    assert theirs["args_bytes"] == ours["nccl_state_args"]


def test_the_numbers_of_events_and_states_are_the_library_s(tmp_path: Path) -> None:
    ours = compiled(tmp_path)
    theirs = numbers_in(library(), **NUMBERS)
    assert theirs == {one: ours[one] for one in NUMBERS}
    assert {f"NCCL_{event.name}": int(event) for event in Event if event} == {
        name: value for name, value in theirs.items() if "STATE" not in name
    }


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def frame_of(frames: Path, process: Host) -> probeframe.Frame:
    return probeframe.parse((frames / f"{process.pid}.nccl.frame").read_bytes())


def drive(of: Layout, frames: Path, events: int = ALL) -> Iterator[Any]:
    """Two collectives through the library's own wrappers; the frame after each, and the release."""
    with host(of, frames, plugin_library(), free_port(), TOCSIN_NCCL_EVENTS=str(events)) as process:
        version = process.ask("version")
        assert process.ask("comm", COMM_ID, RANKS, RANK) == [0, True, events]
        for _ in range(2):
            process.ask("collective", 4, 14)
        yield version, frame_of(frames, process)
        assert process.ask("finalize") == 0
        assert len(frame_of(frames, process).slots) == 0


def check_driven(of: Layout, frames: Path) -> None:
    for version, frame in drive(of, frames):
        assert frame.header["library_version"] == version
        (slot,) = frame.slots
        (channels,) = probeframe.channels_of(frame.slots)
        names = ("comm_id", "comm_size", "comm_rank", "enqueued", "started", "done", "op", "dtype", "algo", "proto")
        assert [int(slot[name]) for name in names] == [
            *(COMM_ID, RANKS, RANK, 2, 2, 2),
            *(Op.ALL_REDUCE, Dtype.FLOAT32, Algo.RING, Proto.SIMPLE),
        ]
        assert [int(slot[name]) for name in ("count", "bytes")] == [1 << 20, 2 * 4 * 14 * STEP_BYTES]
        for name, each in (("send_steps", 28), ("recv_steps", 28), ("kernel_us", KERNEL_US)):
            assert channels[name].tolist() == [each] * 4 + [0] * 28, name
        assert channels["peer"][:4].tolist() == [RANK + 1] * 4
        told = probeframe.rounds_of(slot, int(slot["enqueued"]) - probeframe.WRITERS_MAX)
        assert told["dur_us"].tolist() == [KERNEL_US] * 2
        assert int(slot["unknown"]) == Untold.ERRORS


def test_a_real_nccl_loads_and_drives_the_plugin(newest: Layout, tmp_path: Path) -> None:
    check_driven(newest, tmp_path)


def test_a_real_nccl_is_asked_for_what_the_table_says(newest: Layout, tmp_path: Path) -> None:
    with host(newest, tmp_path, plugin_library(), free_port()) as process:
        version = process.ask("version")
        assert isinstance(version, int)
        row = masks_for(version)
        assert row is not None
        assert process.ask("comm", COMM_ID, RANKS, RANK) == [0, True, int(row.standing)]
        process.ask("collective", 4, 14)
        (slot,) = frame_of(tmp_path, process).slots
        assert [int(slot[name]) for name in ("enqueued", "started", "done")] == [1, 1, 1]
        assert Untold(int(slot["unknown"])) == Untold(23)  # all, at its call


def test_a_real_nccl_delivers_what_the_daemon_arms(newest: Layout, tmp_path: Path) -> None:
    frames = tmp_path / "node" / "42.0"
    frames.mkdir(parents=True)
    tmp_path.chmod(0o755)
    look = FrameReader(tmp_path, "node", Processes(), gone_keep_s=60, idle_keep_s=60)
    arming = Arming(tmp_path, "node")
    with host(newest, frames, plugin_library(), free_port()) as process:
        process.ask("comm", COMM_ID, RANKS, RANK)
        process.ask("collective", 4, 14)
        standing = Event(int(frame_of(frames, process).header["event_mask"]))
        wanted = to_be_asked(frame_of(frames, process).header, EVENTS)
        assert wanted and not wanted & standing
        arming.due(look.collect().jobs, {})
        arming.ask(42, 0)
        assert arming.arm(arming.due(look.collect().jobs, {})) == 1
        for _ in range(2):  # for the first one NCCL had read the mask before
            process.ask("collective", 4, 14)
        frame = frame_of(frames, process)
        assert frame.header["event_mask"] == standing | wanted
        assert [int(frame.slots[0][name]) for name in ("done", "send_steps", "unknown")] == [3, 56, Untold.ERRORS]


def test_a_real_nccl_goes_on_where_the_plugin_is_off(newest: Layout, tmp_path: Path) -> None:
    with host(newest, tmp_path / "absent", plugin_library(), free_port()) as process:
        assert process.ask("comm", COMM_ID, RANKS, RANK) == [0, False, 0]
        process.ask("collective", 4, 14)
        assert process.ask("finalize") == 0


def test_every_name_that_nccl_has_is_known(newest: Layout, tmp_path: Path) -> None:
    with host(newest, tmp_path, plugin_library(), free_port()) as process:
        told = process.ask("names")
    assert isinstance(told, dict)
    known = (Path(__file__).parents[2] / "node_daemon" / "native" / "nccl" / "names.c").read_text()
    without = {
        "Func": {"Invalid", "SendRecv", "PutSignal", "Signal", "WaitSignal"},  # no collective, or no name
        "Datatype": {"Unknown", "ncclUint32", "ncclUint64", "ncclFloat8e4m3", "ncclFloat8e5m2"},  # "other"
        "Algo": {"Unknown"},
        "Proto": {"Unknown"},
    }
    for kind, names in told.items():
        listed = {name.lower() for name in re.findall(r'\{"(\w+)", TOCSIN_', known)}
        assert {name for name in names if name.lower() not in listed} == without[kind], kind


def test_a_real_nccl_drives_another_plugin_behind_ours(newest: Layout, tmp_path: Path) -> None:
    asked = Event.COLL | Event.PROXY_STEP
    env = chain_environment(build_other(tmp_path), tmp_path / "out", asked)
    with host(newest, tmp_path, plugin_library(), free_port(), **env) as process:
        answer = process.ask("comm", COMM_ID, RANKS, RANK)
        assert isinstance(answer, list)
        assert answer[:2] == [0, True]
        assert answer[2] & asked == asked
        process.ask("collective", 4, 14)
        (slot,) = frame_of(tmp_path, process).slots
        assert [int(slot[name]) for name in ("done", "send_steps")] == [1, 56]
        assert process.ask("finalize") == 0
    assert chain_counts(tmp_path / "out")[Event.PROXY_STEP] == (112, 112, 336)


# -- RAS ---------------------------------------------------------------------------------------------------------------


def ask_ras(port: int, *commands: str, ends_with: str | None = None) -> str:
    """The whole answer: to where NCCL closes the connection, or to these words where it keeps it."""
    told = b""
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as client:
        client.sendall("".join(f"{command}\n" for command in ("client protocol 2", *commands)).encode())
        while (more := client.recv(65536)) and (ends_with is None or not (told + more).decode().endswith(ends_with)):
            told += more
    return (told + more).decode()


def test_ras_widens_the_mask_without_the_plugin_and_the_plugin_tells_it(newest: Layout, tmp_path: Path) -> None:
    port = free_port()
    with host(newest, tmp_path, plugin_library(), port) as process:
        process.ask("comm", COMM_ID, RANKS, RANK)
        assert process.ask("ras") == 0
        wanted = Event.COLL | Event.COLL_API | Event.KERNEL_CH | Event.PROXY_STEP
        assert "ERROR" not in ask_ras(port, f"control profiler_mask 0x{int(wanted):x}", ends_with="OK\n")
        process.ask("collective", 4, 14)
        frame = frame_of(tmp_path, process)
        assert frame.header["event_mask"] == wanted
        assert [int(frame.slots[0][name]) for name in ("done", "send_steps", "unknown")] == [1, 56, Untold.ERRORS]


async def test_four_processes_tell_ras_who_is_behind_and_who_is_silent(newest: Layout, tmp_path: Path) -> None:
    ports = [free_port() for _ in range(4)]
    with ExitStack() as stack:
        hosts = [stack.enter_context(host(newest, tmp_path, "none", port)) for port in ports]
        told = []
        for rank, process in enumerate(hosts):
            process.ask("comm", COMM_ID, 4, rank)
            assert process.ask("ras") == 0
            told.append(process.ask("ras_rank"))
        for rank, process in enumerate(hosts):
            assert process.ask("join", told, 6649 if rank == 2 else 6650) == 0

        def status() -> dict[str, Any]:
            answer = ask_ras(ports[0], "timeout 5", "set format json", "status")
            found: dict[str, Any] = json.loads(answer[answer.index("{") :])
            return found

        await eventually(lambda: status()["communicators"][0]["ranks_count"] == 4, within_s=30)
        (communicator,) = status()["communicators"]
        counts = {rank["rank"]: rank["collective_counts"]["AllReduce"] for rank in communicator["ranks"]}
        assert counts == {0: 6650, 1: 6650, 2: 6649, 3: 6650}
        assert {rank["pid"] for rank in communicator["ranks"]} == {process.pid for process in hosts}
        assert "MISMATCH" in ask_ras(ports[0], "verbose status")
        os.kill(hosts[2].pid, signal.SIGSTOP)
        silent = ask_ras(ports[0], "timeout 5", "verbose status")
        assert "INCOMPLETE" in silent
        assert f"Process {hosts[2].pid} on node 127.0.0.1" in silent
        assert [rank["rank"] for rank in status()["communicators"][0]["ranks"]] == [0, 1, 3]


# -- older releases ----------------------------------------------------------------------------------------------------


@pytest.mark.acceptance
@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", OLDER)
def test_older_releases_load_and_drive_the_plugin(tmp_path: Path, version: str) -> None:
    where = tmp_path / "nccl"
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--target", where, f"nvidia-nccl-cu12=={version}"], check=True, timeout=600)
    frames = tmp_path / "frames"
    frames.mkdir()
    of = layout(where / "nvidia" / "nccl" / "lib" / "libnccl.so.2")
    check_driven(of, frames)
