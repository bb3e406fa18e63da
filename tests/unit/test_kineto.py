"""Traces of torch.profiler: both forms are read, kinds, phases and names are told apart, and anything is survived."""

from __future__ import annotations

import gzip
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnosis.contracts.errors import AgentFault
from diagnosis.contracts.summary import COMM, COMPUTE, HOST, KINDS, MEMCPY, table
from diagnosis.evidence.condense import Condensed, Phase
from diagnosis.evidence.gather import gather, recognise
from diagnosis.evidence.kineto import Trace, read_trace, unpacked
from diagnosis.evidence.kineto_names import Stacks, collective_name, kernel_kind
from diagnosis.evidence.notes import Notes
from diagnosis.evidence.traces import KIND

Item = dict[str, Any]
RING = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def span(cat: str, name: str, ts: float, dur: float, tid: int | str = 1, **args: Any) -> Item:
    """An event with a duration, as Kineto writes it (us)."""
    return {"ph": "X", "cat": cat, "name": name, "pid": 100, "tid": tid, "ts": 5e12 + ts, "dur": dur, "args": args}


def document(*spans: Any, **more: Any) -> bytes:
    """A trace file."""
    return json.dumps({"schemaVersion": 1, "deviceProperties": [], **more, "traceEvents": list(spans)}).encode()


GPU = (
    span("user_annotation", "ProfilerStep#7", 0, 1000),
    span("user_annotation", "ProfilerStep#8", 1000, 1000),
    span("cpu_op", "aten::addmm", 10, 20),
    span("cuda_runtime", "cudaLaunchKernel", 20, 5, correlation=1),
    span("kernel", "sgemm(float*)", 100, 300, 7, correlation=1, stream=7),
    span("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", 50, 40, 2),
    span("cuda_runtime", "cudaLaunchKernel", 60, 5, 2, correlation=2),
    span("kernel", "sgemm_bwd(float*)", 400, 500, 7, correlation=2),
    span("user_annotation", "nccl:all_reduce", 70, 5, 2),
    span("cuda_runtime", "cudaLaunchKernelExC", 72, 2, 2, correlation=3),
    span(
        "kernel",
        RING,
        700,
        400,
        20,
        correlation=3,
        dtype="Float",
        **{"Collective name": "allreduce", "In msg nelems": 1 << 20, "Group size": 8},
    ),
    span("user_annotation", "Optimizer.step#AdamW.step", 120, 30),
    span("cuda_driver", "cuLaunchKernel", 130, 5, correlation=4),
    span("kernel", "multi_tensor_apply", 1200, 100, 7, correlation=4),
    span("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 1400, 50, 9, bytes=4096),
    span("gpu_user_annotation", "ProfilerStep#7", 0, 1000, 7),
    {"ph": "M", "name": "thread_name", "pid": 100, "tid": 1, "args": {"name": "python"}},
    {"ph": "s", "id": 1, "pid": 100, "tid": 1, "ts": 5e12, "cat": "ac2g", "name": "ac2g"},
)


def read(content: bytes, file: str = "trace.json") -> Trace:
    """The trace, which must not be notable."""
    notes = Notes()
    trace = read_trace(file, content, notes)
    assert notes.lines() == ()
    return trace


def _ids(own: int, caller: int | None) -> dict[str, Any]:
    return {"Python id": own, "Python parent id": caller}


def by_name(trace: Trace) -> dict[str, tuple[int, int]]:
    """Kind and phase of every function."""
    events = trace.events
    return {
        events.names[name]: (int(kind), int(phase))
        for name, kind, phase in zip(events.name, events.kind, events.phase, strict=True)
    }


def totals(done: Condensed) -> dict[str, float]:
    """Total us by name."""
    rows, _ = table(done.summary)
    return {done.names[int(row["name"])][1]: float(row["total_ns"]) / 1e3 for row in rows}


def test_a_gpu_trace() -> None:
    trace = read(document(*GPU, distributedInfo={"backend": "nccl", "rank": 5, "world_size": 8}))
    assert (trace.rank, trace.world_size) == (5, 8)
    told = by_name(trace)
    assert told["sgemm(float*)"] == (COMPUTE, Phase.OTHER)
    assert told["sgemm_bwd(float*)"] == (COMPUTE, Phase.BACKWARD)
    assert told["multi_tensor_apply"] == (COMPUTE, Phase.OPTIMIZER)
    assert told["nccl:allreduce Float of 1048576, 8 ranks"] == (COMM, Phase.BACKWARD)
    assert told["Memcpy HtoD (Pinned -> Device)"][0] == MEMCPY
    assert told["aten::addmm"][0] == told["nccl:all_reduce"][0] == HOST
    assert not any("ProfilerStep" in name for name in told)
    summary = trace.condensed(5).summary
    assert (summary.first_step, summary.last_step, summary.steps, summary.step_ms) == (7, 8, 2, 1.0)
    assert summary.phases["backward_compute_ms"] == 0.25
    assert summary.phases["comm_barrier_wait_ms"] == 0.1
    assert summary.phases["optimizer_step_ms"] == 0.05
    rows, _ = table(summary)
    comm = rows[rows["kind"] == COMM][0]
    assert (comm["bytes"], comm["members"]) == (4 << 20, 8)
    assert rows[rows["kind"] == MEMCPY]["bytes"].tolist() == [4096]


def test_a_cpu_trace_computes_with_operators_and_moves_with_gloo() -> None:
    trace = read(
        document(
            span("user_annotation", "Optimizer.step#SGD.step", 0, 100),
            span("cpu_op", "aten::mm", 200, 300),
            span("cpu_op", "c10d::allreduce_", 600, 10, 2),
            span("user_annotation", "gloo:all_reduce", 610, 200, 3),
            span("user_annotation", "Optimizer.step#SGD.step", 900, 100),
        ),
        "rank12_trace.json",
    )
    told = by_name(trace)
    assert told["aten::mm"][0] == COMPUTE
    assert told["c10d::allreduce_"][0] == HOST
    assert told["gloo:all_reduce"][0] == COMM
    assert trace.rank == 12
    assert (trace.window.start_ns, trace.window.end_ns, trace.window.steps) == (100_000, 1_000_000, 1)


def test_a_slow_python_function_is_named_with_its_callers() -> None:
    def call(name: str, ts: float, dur: float, own: int, caller: int | None) -> Item:
        return span("python_function", name, ts, dur, **_ids(own, caller))

    trace = read(
        document(
            call("<string>(1): <module>", 0, 1000, 1, None),
            call("train.py(40): main", 1, 998, 2, 1),
            call("torch/nn/modules/module.py(1779): _call_impl", 2, 990, 3, 2),
            call("data.py(5): augment", 10, 900, 4, 3),
            call("<built-in method sleep of object at 0x7f00deadbeef>", 20, 880, 5, 4),
        )
    )
    took = totals(trace.condensed(0))
    assert took["<built-in method sleep of object> < data.py(5): augment < train.py(40): main"] == 880
    assert took["data.py(5): augment < train.py(40): main"] == 20
    assert trace.unseen == ("the trace has no marks of steps: times are of the whole trace",)


def test_a_stack_is_cut_at_whole_frames_and_cannot_run_in_circles() -> None:
    stacks = Stacks()
    caller = None
    for depth in range(500):
        name = stacks.name(f"module_{depth}.py(1): function", depth, caller)
        caller = depth
    assert len(name) <= 256
    assert name.startswith("module_499.py(1): function < module_498.py(1): function")
    assert name.endswith(": function")
    assert stacks.name("own", 7, 7).startswith("own < module_7")


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", "nccl:AllReduce float"),
        (RING, "nccl:AllReduce f32"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", "nccl:ReduceScatter bf16"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)", "nccl:SendRecv int8_t"),
        ("ncclDevKernel_AllGather_RING_LL(x)", "nccl:AllGather"),
        ("ncclDevKernel_Generic_4(x)", "nccl:ncclDevKernel_Generic_4"),
    ],
)
def test_collectives_of_all_releases_are_known(kernel: str, name: str) -> None:
    assert kernel_kind(kernel) == COMM
    assert collective_name(kernel, None, None, None, None) == name


def test_computation_is_no_collective() -> None:
    assert kernel_kind("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>") == COMPUTE


def test_packed_traces_are_unpacked_within_a_bound() -> None:
    content = document(*GPU)
    assert unpacked(gzip.compress(content), 1 << 20) == content
    assert unpacked(content, 10) == content
    for packed, reason in (
        (gzip.compress(b" " * (1 << 20)), "oversized"),
        (gzip.compress(content)[:-20], "garbage"),
        (b"\x1f\x8bnonsense", "garbage"),
    ):
        with pytest.raises(AgentFault) as refused:
            unpacked(packed, 1 << 16)
        assert refused.value.reason == reason


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"traceEvents": 3}',
        b'{"traceEvents": []}',
        b'{"traceEvents": [{"ph": "X"}]}',
        b"\xff",
    ],
)
def test_what_is_no_trace_is_refused(content: bytes) -> None:
    with pytest.raises(AgentFault):
        read_trace("x", content, Notes())


def test_one_odd_value_costs_that_value() -> None:
    odd = span("kernel", "odd", 100, 50, 7, correlation="seven")
    notes = Notes()
    trace = read_trace("x", document(*GPU, odd, 17, {"ph": 3, "ts": []}), notes)
    assert by_name(trace)["odd"][0] == COMPUTE
    assert by_name(trace)["sgemm_bwd(float*)"] == (COMPUTE, Phase.BACKWARD)
    assert "a value of the wrong kind is taken as unknown" in notes.lines()[0]


def test_times_that_no_event_has_are_left_out() -> None:
    notes = Notes()
    far = [span("kernel", "far", 1e14, 5), span("kernel", "long", 0, 1e300), span("kernel", "back", 3, -5)]
    trace = read_trace("x", document(*GPU, *far), notes)
    assert set(by_name(trace)) == set(by_name(read(document(*GPU))))
    assert notes.lines() == ("x: events a day after the others are left out",)


_any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_event = st.fixed_dictionaries(
    {},
    optional={
        "ph": st.just("X"),
        "cat": st.sampled_from(
            ["kernel", "cpu_op", "python_function", "user_annotation", "cuda_runtime", "gpu_memcpy"]
        ),
        "name": st.sampled_from(["ProfilerStep#1", "ProfilerStep#3", "Optimizer.step#A", RING, "aten::mm"]) | _any,
        "pid": _any,
        "tid": _any,
        "ts": st.integers(0, 50) | st.floats() | _any,
        "dur": st.integers(0, 50) | st.floats() | _any,
        "args": _any
        | st.dictionaries(
            st.sampled_from(["correlation", "Python id", "Python parent id", "bytes", "dtype", "Group size"]),
            st.integers(-1, 3) | _any,
        ),
    },
)


@given(
    st.lists(_event, max_size=12), st.dictionaries(st.sampled_from(["rank", "world_size"]), st.integers(-2, 4) | _any)
)
def test_any_json_is_read_or_refused(events: list[Item], about: Item) -> None:
    try:
        trace = read_trace("x", document(*events, distributedInfo=about), Notes())
    except AgentFault:
        return
    done = trace.condensed(0)
    rows, _ = table(done.summary)
    assert len(rows) <= len(trace.events)
    steps = done.summary.steps or 1
    assert sum(done.summary.phases.values()) * steps == pytest.approx(done.summary.window_ms, rel=1e-3, abs=1e-3)


def test_traces_are_recognised_among_other_evidence_and_become_summaries() -> None:
    about = {"pg_config": [], "nccl_version": "2.17.1", "world_size": 4}
    contents = [(f"t{rank}.json", document(*GPU, distributedInfo={**about, "rank": rank})) for rank in (3, 1)]
    assert recognise(*contents[0]) == KIND
    evidence = gather([(name, [content]) for name, content in contents])
    assert evidence.incident is not None
    summaries = evidence.incident.summaries
    assert evidence.incident.job.world_size == 4
    assert summaries is not None
    assert summaries.rank.tolist() == [1, 3]
    assert summaries.step_ms.tolist() == [1.0, 1.0]
    assert set(summaries.kind) == set(KINDS)
    assert np.isfinite(summaries.stats["beta"]).all()


def test_a_trace_of_nobody_is_said() -> None:
    evidence = gather([("trace.json", [document(*GPU)]), ("broken.json", [b'{"traceEvents": [{]}'])])
    assert evidence.incident is None
    assert any("name the file rankN.json" in line for line in evidence.unseen)
    assert any("broken.json: the profiler trace cannot be read" in line for line in evidence.unseen)
