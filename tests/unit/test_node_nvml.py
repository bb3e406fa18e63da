"""What the daemon says of GPUs when NVML is absent, answers, fails in parts, or never answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from diagnosis.contracts.report import HardwareFacts
from node_daemon.collectors.nvml import NvmlMonitor, NvmlSource
from node_daemon.threads import OwnThread


class Driver:
    """pynvml's functions, answered here. `errors`: function name to NVML error code."""

    def __init__(self, count: int = 2) -> None:
        self.count, self.errors, self.starts = count, dict[str, int](), 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clocks = {pynvml.NVML_CLOCK_SM: (1080, 1980), pynvml.NVML_CLOCK_MEM: (2619, 2620)}
        answers: dict[str, Callable[..., Any]] = {
            "nvmlInit": self._start,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: self.count,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetUUID": lambda gpu: f"GPU-{gpu}",
            "nvmlDeviceGetPciInfo": lambda gpu: SimpleNamespace(busId=b"00000000:0B:00.0"),
            "nvmlDeviceGetMaxClockInfo": lambda gpu, kind: clocks[kind][1],
            "nvmlDeviceGetClockInfo": lambda gpu, kind: clocks[kind][0],
            "nvmlDeviceGetCurrentClocksEventReasons": lambda gpu: 0x8,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda gpu: 0x40,
            "nvmlDeviceGetTemperature": lambda gpu, sensor: 45,
            "nvmlDeviceGetPowerUsage": lambda gpu: 520_500,
            "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=97),
        }
        for name, answer in answers.items():
            monkeypatch.setattr(pynvml, name, self._guarded(name, answer))

    def _guarded(self, name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: object) -> Any:
            if name in self.errors:
                raise pynvml.NVMLError(self.errors[name])
            return answer(*arguments)

        return call

    def _start(self) -> None:
        self.starts += 1


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    one = Driver()
    one.install(monkeypatch)
    return one


def test_all_words_of_a_gpu_are_told(driver: Driver) -> None:
    facts = NvmlSource().read()
    assert (facts.state, [gpu.index for gpu in facts.gpus]) == ("ok", [0, 1])
    gpu = facts.gpus[1]
    assert (gpu.uuid, gpu.bus_id) == ("GPU-1", "00000000:0B:00.0")
    assert (gpu.sm_clock_mhz, gpu.sm_clock_max_mhz, gpu.mem_clock_mhz, gpu.mem_clock_max_mhz) == (
        1080,
        1980,
        2619,
        2620,
    )
    assert (gpu.clocks_event_reasons, gpu.temperature_c, gpu.power_w, gpu.utilization_pct) == (0x8, 45, 520.5, 97)


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED])
def test_no_driver_is_absent_and_found_once_it_is_there(driver: Driver, code: int) -> None:
    source = NvmlSource()
    driver.errors["nvmlInit"] = code
    assert (source.read().state, source.read().gpus) == ("absent", [])
    driver.errors.clear()
    assert source.read().state == "ok"


def test_one_value_that_is_not_told_is_none_and_the_others_are_told(driver: Driver) -> None:
    driver.errors = {
        "nvmlDeviceGetPowerUsage": pynvml.NVML_ERROR_NOT_SUPPORTED,
        "nvmlDeviceGetUtilizationRates": pynvml.NVML_ERROR_UNKNOWN,
        "nvmlDeviceGetPciInfo": pynvml.NVML_ERROR_UNKNOWN,
    }
    facts = NvmlSource().read()
    gpu = facts.gpus[0]
    assert (facts.state, gpu.power_w, gpu.utilization_pct, gpu.bus_id) == ("ok", None, None, None)
    assert (gpu.temperature_c, gpu.uuid) == (45, "GPU-0")


def test_an_old_driver_tells_throttle_reasons(driver: Driver) -> None:
    driver.errors["nvmlDeviceGetCurrentClocksEventReasons"] = pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
    assert NvmlSource().read().gpus[0].clocks_event_reasons == 0x40


def test_a_lost_gpu_keeps_its_place_and_comes_back(driver: Driver) -> None:
    source = NvmlSource()
    driver.errors["nvmlDeviceGetHandleByIndex"] = pynvml.NVML_ERROR_GPU_IS_LOST
    assert [(gpu.index, gpu.uuid, gpu.sm_clock_mhz) for gpu in source.read().gpus] == [(0, None, None), (1, None, None)]
    driver.errors.clear()
    assert [gpu.uuid for gpu in source.read().gpus] == ["GPU-0", "GPU-1"]


def test_an_error_of_the_whole_library_is_told_and_the_library_started_again(driver: Driver) -> None:
    source = NvmlSource()
    source.read()
    driver.errors["nvmlDeviceGetCount"] = pynvml.NVML_ERROR_UNKNOWN
    facts = source.read()
    assert (facts.state, facts.gpus) == ("error", [])
    assert facts.detail
    driver.errors.clear()
    assert source.read().state == "ok"
    assert driver.starts == 2


class Hanging(NvmlSource):
    """A driver whose calls block until they are released."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()
        self.free.set()
        self.reads = 0

    def read(self) -> HardwareFacts:
        self.reads += 1
        assert self.free.wait(30)
        return HardwareFacts("ok")


async def _until_state(monitor: NvmlMonitor, state: str) -> HardwareFacts:
    async with asyncio.timeout(60):
        while True:
            facts = monitor.facts()
            if facts is not None and facts.state == state:
                return facts
            await asyncio.sleep(0.005)


async def test_a_driver_that_does_not_answer_is_hung_with_a_growing_age_until_it_answers() -> None:
    source = Hanging()
    monitor = NvmlMonitor(source, period_s=0.02, deadline_s=0.05)
    assert monitor.facts() is None
    task = asyncio.create_task(monitor.run())
    try:
        await _until_state(monitor, "ok")
        source.free.clear()
        first = await _until_state(monitor, "hung")
        assert "no answer" in first.detail
        assert first.age_ms >= 50
        reads = source.reads
        async with asyncio.timeout(60):
            while (later := monitor.facts()) and later.age_ms < first.age_ms + 100:  # noqa: ASYNC110 - a clock's doing
                await asyncio.sleep(0.005)
        assert later is not None
        assert (later.state, source.reads) == ("hung", reads)
        source.free.set()
        assert (await _until_state(monitor, "ok")).age_ms < later.age_ms
    finally:
        source.free.set()
        task.cancel()
        await asyncio.wait([task])


async def test_a_thread_that_is_stuck_refuses_further_calls_at_once_and_serves_again_afterwards() -> None:
    thread, free = OwnThread("test"), threading.Event()
    try:
        with pytest.raises(TimeoutError):
            await thread.run(lambda: free.wait(30), 0.05)
        assert thread.hung
        with pytest.raises(TimeoutError, match="busy"):
            await thread.run(lambda: True, 10)
        free.set()
        async with asyncio.timeout(60):
            while thread.hung:  # noqa: ASYNC110 - another thread's doing
                await asyncio.sleep(0.005)
        assert await thread.run(lambda: 7, 10) == 7
    finally:
        free.set()
        thread.close()


async def test_an_error_on_the_thread_belongs_to_the_caller() -> None:
    thread = OwnThread("test")
    try:
        with pytest.raises(ZeroDivisionError):
            await thread.run(lambda: 1 // 0, 10)
        assert await thread.run(lambda: 7, 10) == 7
    finally:
        thread.close()
