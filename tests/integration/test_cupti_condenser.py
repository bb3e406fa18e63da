"""The native condenser on records as each release of CUPTI lays them out, against the same window condensed here."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from diagnosis.contracts import histogram, kernelwindow, summary
from diagnosis.contracts.kernelwindow import KernelWindow, Unseen
from diagnosis.contracts.summary import COMM, COMPUTE, HOST, MEMCPY, OTHERS
from diagnosis.evidence import condense
from diagnosis.evidence.condense import Events, Window
from diagnosis.evidence.kernel_window import functions_of, summary_of
from diagnosis.evidence.kineto_names import kernel_kind
from node_daemon.native.cupti.generate import HERE, RENDERED
from tests.integration import cupti_double as double
from tests.integration.cupti_double import Feed, Names, kernels

GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas"
REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("feed")


@pytest.fixture
def feed(base: Path) -> Iterator[Feed]:
    made = Feed(base)
    made.sizes(kernel=13)
    yield made
    made.close()


def row(window: KernelWindow, name: str) -> np.void:
    found: np.void = window.rows[window.names.index(name)]
    return found


@pytest.mark.parametrize("name", list(RENDERED))
def test_the_headers_are_what_the_generator_writes_today(name: str) -> None:
    assert (HERE / name).read_text() == RENDERED[name](), "run python -m node_daemon.native.cupti.generate"


def test_both_languages_put_every_duration_into_the_same_bucket(feed: Feed) -> None:
    borders = {border + off for border in histogram.BORDERS for off in (-1, 0, 1) if border + off >= 0}
    random = np.random.default_rng(5)
    durations = {*borders, *(2 ** random.uniform(0, 50, 20_000)).astype(np.int64).tolist(), (1 << 64) - 1}
    for duration in durations:
        assert feed.calls.feed_bucket(ctypes.c_uint64(duration)) == histogram.bucket_of(duration), duration


@pytest.mark.parametrize("version", list(double.KERNEL_BYTES))
@pytest.mark.parametrize("kind", [double.CONCURRENT_KERNEL, double.KERNEL])
def test_a_kernel_is_read_from_the_records_of_every_version(
    feed: Feed, version: int, kind: int, tmp_path: Path
) -> None:
    feed.sizes(kernel=version, copy=6 if version < 13 else 7, memset=4 if version < 13 else 5)
    names = Names()
    gemm = kernels(version, names.address(GEMM), [1000, 3000, 9000], [1500, 3700, 9100], kind)
    gemm["graph"] = [0, 7, 0]
    reduce = kernels(version, names.address(REDUCE), 2000, 2900, kind)
    copy = np.zeros(1, double.COPIES[6 if version < 13 else 7])
    copy["kind"], copy["copy_kind"], copy["bytes"], copy["start"], copy["end"] = double.MEMCPY, 1, 4096, 5000, 5600
    wiped = np.zeros(1, double.SETS[4 if version < 13 else 5])
    wiped["kind"], wiped["bytes"], wiped["start"], wiped["end"] = double.MEMSET, 64, 6000, 6010
    feed.give(gemm[:2], copy, reduce, wiped, gemm[2:])
    window = feed.window(tmp_path)
    told = window.header
    assert [int(told[one]) for one in ("records", "kernels", "copies", "sets", "in_graphs")] == [6, 4, 1, 1, 1]
    assert {name: int(one["kind"]) for name, one in zip(window.names, window.rows, strict=True)} == {
        GEMM: COMPUTE,
        REDUCE: COMM,
        "Memcpy HtoD": MEMCPY,
        "Memset": MEMCPY,
    }
    one = row(window, GEMM)
    assert [int(one[part]) for part in ("count", "total_ns", "max_ns", "critical_ns")] == [3, 1300, 700, 1300]
    assert float(one["scatter"]) == pytest.approx(np.var([500, 700, 100]) * 3)
    assert int(row(window, "Memcpy HtoD")["bytes"]) == 4096


def test_every_kind_of_record_is_counted_and_calls_have_their_names(feed: Feed, tmp_path: Path) -> None:
    calls = np.zeros(3, double.CALL)
    calls["kind"], calls["call"] = double.RUNTIME, [13, 13, 20]
    calls["start"], calls["end"] = [100, 300, 500], [150, 390, 501]
    overhead = np.zeros(1, double.OVERHEAD_RECORD)
    overhead["kind"], overhead["start"], overhead["end"] = double.OVERHEAD, 10, 25
    mark, correlation = np.zeros(2, double.MARK), np.zeros(1, double.CORRELATION)
    mark["kind"], correlation["kind"] = double.MARKER, double.EXTERNAL_CORRELATION
    peer = np.zeros(1, double.PEER_COPY)
    peer["kind"], peer["start"], peer["end"], peer["bytes"] = double.MEMCPY_PEER, 1000, 1100, 9
    stranger = np.zeros(4, "<u4")
    stranger[0] = 60
    feed.give(calls, overhead, mark, correlation, peer, stranger)
    window = feed.window(tmp_path)
    told = {name: int(window.header[name]) for name in ("calls", "overheads", "markers", "correlations", "copies")}
    assert told == {"calls": 3, "overheads": 1, "markers": 2, "correlations": 1, "copies": 1}
    assert (int(window.header["overhead_ns"]), int(window.header["unknown"])) == (15, 1)
    assert set(window.names) == {"cudaMalloc_v3020", "cuda runtime call 20", "Memcpy PtoP"}
    assert int(row(window, "cudaMalloc_v3020")["kind"]) == HOST
    assert int(row(window, "cudaMalloc_v3020")["total_ns"]) == 140


def test_a_window_is_cut_at_its_borders_and_what_has_no_time_is_said(feed: Feed, tmp_path: Path) -> None:
    feed.clear(1000, 2000)
    name = Names()
    address = name.address("k")
    feed.give(kernels(13, address, [900, 1100, 1900, 100, 2000, 0, 1500], [1050, 1200, 2500, 1000, 2100, 5, 1400]))
    window = feed.window(tmp_path)
    assert [int(window.header[one]) for one in ("kernels", "outside", "untimed")] == [7, 2, 2]
    one = row(window, "k")
    assert [int(one[part]) for part in ("count", "total_ns", "max_ns")] == [3, 250, 100]


def test_equal_texts_at_different_places_are_one_function_and_long_ones_stay_apart(feed: Feed, tmp_path: Path) -> None:
    names = Names()
    long = "x" * 2000
    mangled = "_ZN7cutlass6KernelILi3EEEvv"
    for at, text in enumerate(["same", "same", long + "a", long + "b", mangled, "Ünïcode"]):
        feed.give(kernels(13, names.address(text), 1000 + 100 * at, 1010 + 100 * at))
    feed.give(kernels(13, 0, 5000, 5010))
    window = feed.window(tmp_path)
    assert int(row(window, "same")["count"]) == 2
    told = functions_of(window)
    assert len(told.name) == 6 and all(len(name) <= summary.NAME_CHARS_MAX for name in told.name)
    assert sum(name.startswith("xxx") for name in told.name) == 2
    assert {"same", "Ünïcode", "(unnamed kernel)"} <= set(told.name)
    assert {"void cutlass::Kernel<3>()", mangled} & set(told.name)  # readable where the process has a C++ library


@pytest.mark.parametrize(
    "name",
    [
        REDUCE,
        "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)",
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
        "_Z39ncclDevKernel_AllGather_RING_LLDev",
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(...)",
        "ncclSymkDevKernel_AllReduce",
        "nvshmemi_barrier_kernel",
        "NCCL_kernel",
        GEMM,
        "void at::native::vectorized_elementwise_kernel<4, ...>",
        "nccl is named, a kernel too",
        "",
        "kernel_of_nccl",
        "ncc",
    ],
)
def test_a_collective_is_told_by_its_name_as_in_traces(feed: Feed, name: str) -> None:
    assert feed.calls.feed_is_collective(name.encode()) == (kernel_kind(name) == COMM)


def test_more_names_than_rows_are_added_up_and_counted(feed: Feed, tmp_path: Path) -> None:
    names = Names()
    many = kernelwindow.ROWS_MAX + 300
    addresses = np.array([names.address(f"kernel {number}") for number in range(many)])
    start = np.arange(2 * many) * 1000 + 1
    feed.give(kernels(13, np.tile(addresses, 2), start, start + 10))
    window = feed.window(tmp_path)
    assert int(window.header["unseen"]) == Unseen.NAMES
    told = functions_of(window)
    others = told.name.index(OTHERS[COMPUTE])
    assert (len(told.name), int(told.functions[others])) == (kernelwindow.ROWS_MAX + 1, 300)
    assert (int(told.count[others]), int(told.count.sum())) == (600, 2 * many)
    feed.clear()
    feed.give(kernels(13, addresses[:3], [100, 200, 300], [150, 250, 350]))
    assert sorted(feed.window(tmp_path).names) == ["kernel 0", "kernel 1", "kernel 2"]


def test_more_executions_than_are_kept_leave_the_critical_path_unknown(feed: Feed, tmp_path: Path) -> None:
    names = Names()
    buffer = kernels(13, names.address("k"), np.arange(4096) * 100 + 1, np.arange(4096) * 100 + 51)
    times = kernelwindow.EXECUTIONS_MAX // 4096 + 1
    feed.time_ns(buffer, times)
    window = feed.window(tmp_path)
    assert int(window.header["unseen"]) == Unseen.CRITICAL
    assert int(window.rows[0]["count"]) == 4096 * times
    told = summary_of(window, 3, 10).summary
    assert told.phases == {} and told.overlap is None
    assert any("critical path" in note for note in told.unseen)


@pytest.mark.parametrize("seed", range(8))
def test_it_tells_what_the_reader_of_traces_tells_of_the_same_window(feed: Feed, seed: int, tmp_path: Path) -> None:
    """Any streams, overlaps and borders: counts, times, spread, critical path and overlap are equal."""
    random = np.random.default_rng(seed)
    names = Names()
    texts = [*(f"kernel {number}" for number in range(20)), *(f"ncclDevKernel_{number}" for number in range(4))]
    addresses = np.array([names.address(text) for text in texts])
    executions = 3000
    which = random.integers(0, len(texts), executions)
    start = np.sort(random.choice(np.arange(1, 4_000_000), executions, replace=False))
    length = (2 ** random.uniform(0, 14 if seed % 2 else 9, executions)).astype(np.int64)
    feed.clear(500_000, 3_500_000)
    shuffled = random.permutation(executions)
    feed.give(kernels(13, addresses[which], start, start + length)[shuffled])
    window = feed.window(tmp_path)
    native = functions_of(window)
    events = Events(
        names=tuple(texts),
        name=which.astype(np.int64),
        kind=np.where(which < 20, COMPUTE, COMM).astype(np.int64),
        start=start.astype(np.int64),
        end=(start + length).astype(np.int64),
        lane=np.zeros(executions, np.int64),
        nests=np.zeros(executions, bool),
        phase=np.zeros(executions, np.int64),
        bytes=np.full(executions, np.nan),
        members=np.full(executions, np.nan),
    )
    traced = condense.condense(events, Window(500_000, 3_500_000, 10), 0)
    here = summary_of(window, 0, 10)
    assert here.summary.overlap == traced.summary.overlap
    ours, theirs = summary.table(here.summary), summary.table(traced.summary)
    order = [np.argsort(one[0]["name"]) for one in (ours, theirs)]
    for part in ("name", "kind", "count", "total_ns", "max_ns", "deviation_ns", "beta"):
        assert ours[0][part][order[0]].tolist() == theirs[0][part][order[1]].tolist(), part
    parts = np.array([0.5, 0.9, 0.95, 0.99])
    assert np.array_equal(
        histogram.quantiles(ours[1], parts)[order[0]], histogram.quantiles(theirs[1], parts)[order[1]]
    )
    assert here.names == traced.names
    assert native.count.sum() == ours[0]["count"].sum()


def test_a_summary_of_5000_kernels_a_step_fits_the_wire(feed: Feed, tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    names = Names()
    addresses = np.array([names.address(f"void cutlass::Kernel2<cutlass_80_tensorop_{n}>(Params)") for n in range(300)])
    length = random.lognormal(10, 1, 50_000).astype(np.int64)
    start = np.cumsum(length + 500) + 1
    feed.give(kernels(13, addresses[random.zipf(1.5, 50_000) % 300], start, start + length))
    told = summary_of(feed.window(tmp_path), 0, 10).summary
    assert summary.rank_bytes(told) <= summary.RANK_BYTES_MAX
