"""NVML's words about each GPU: clocks, event reasons, temperature, power, load. Thin; nothing is judged here.

A driver that lost a GPU may block a call for ever, so `NvmlMonitor` reads on a thread of its own, with a deadline, and
says "hung" while a call is out. A missing library is a fact ("absent"), a single value that NVML refuses is None.
Words of NVIDIA's nvml.h; `nvmlClocksEventReasons` were called throttle reasons before driver 535.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import pynvml

from diagnosis.contracts.report import GPUS_MAX, GpuFacts, HardwareFacts
from node_daemon.log import EventLog
from node_daemon.threads import OwnThread

_ABSENT: Final = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
_log = EventLog("node_daemon.nvml")


@dataclass(frozen=True, slots=True)
class _Gpu:
    """What does not change while the driver is loaded."""

    index: int
    handle: Any
    uuid: str | None
    bus_id: str | None
    sm_clock_max_mhz: int | None
    mem_clock_max_mhz: int | None


class NvmlSource:
    """Reads all GPUs, blocking. Starts NVML at the first reading and anew after an error of the whole library."""

    def __init__(self) -> None:
        self._gpus: list[_Gpu] | None = None

    def read(self) -> HardwareFacts:
        """Facts of all GPUs; state "absent" or "error" (with NVML's own words) where there are none to be had."""
        try:
            if self._gpus is None:
                pynvml.nvmlInit()
                self._gpus = []
            count = min(pynvml.nvmlDeviceGetCount(), GPUS_MAX)
            known = {gpu.index: gpu for gpu in self._gpus if gpu.handle is not None}
            self._gpus = [known.get(index) or _identify(index) for index in range(count)]
            return HardwareFacts("ok", gpus=[_measure(gpu) for gpu in self._gpus])
        except pynvml.NVMLError as error:
            self.close()
            return HardwareFacts("absent" if error.value in _ABSENT else "error", str(error))

    def close(self) -> None:
        """Let go of the library; the next reading starts it again."""
        if self._gpus is not None:
            self._gpus = None
            _ask(pynvml.nvmlShutdown)


def _ask(call: Callable[..., Any], *arguments: object) -> Any:
    """The answer of one NVML call, None where NVML does not give it."""
    try:
        return call(*arguments)
    except pynvml.NVMLError:
        return None


def _identify(index: int) -> _Gpu:
    handle = _ask(pynvml.nvmlDeviceGetHandleByIndex, index)
    if handle is None:  # lost: it keeps its place in the list, all else is unknown
        return _Gpu(index, None, None, None, None, None)
    pci = _ask(pynvml.nvmlDeviceGetPciInfo, handle)
    return _Gpu(
        index,
        handle,
        _text(_ask(pynvml.nvmlDeviceGetUUID, handle)),
        _text(pci.busId) if pci is not None else None,
        _ask(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM),
        _ask(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_MEM),
    )


def _measure(gpu: _Gpu) -> GpuFacts:
    if gpu.handle is None:
        return GpuFacts(gpu.index)
    reasons = _ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons, gpu.handle)
    if reasons is None:
        reasons = _ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, gpu.handle)
    power_mw = _ask(pynvml.nvmlDeviceGetPowerUsage, gpu.handle)
    load = _ask(pynvml.nvmlDeviceGetUtilizationRates, gpu.handle)
    return GpuFacts(
        index=gpu.index,
        uuid=gpu.uuid,
        bus_id=gpu.bus_id,
        sm_clock_mhz=_ask(pynvml.nvmlDeviceGetClockInfo, gpu.handle, pynvml.NVML_CLOCK_SM),
        sm_clock_max_mhz=gpu.sm_clock_max_mhz,
        mem_clock_mhz=_ask(pynvml.nvmlDeviceGetClockInfo, gpu.handle, pynvml.NVML_CLOCK_MEM),
        mem_clock_max_mhz=gpu.mem_clock_max_mhz,
        clocks_event_reasons=reasons,
        temperature_c=_ask(pynvml.nvmlDeviceGetTemperature, gpu.handle, pynvml.NVML_TEMPERATURE_GPU),
        power_w=power_mw / 1000 if power_mw is not None else None,
        utilization_pct=int(load.gpu) if load is not None else None,
    )


def _text(value: str | bytes | None) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


class NvmlMonitor:
    """Keeps the newest facts. `facts` never blocks."""

    def __init__(self, source: NvmlSource, *, period_s: float, deadline_s: float) -> None:
        self._source, self._period_s, self._deadline_s = source, period_s, deadline_s
        self._thread = OwnThread("nvml")
        self._newest: HardwareFacts | None = None
        self._read_at = time.monotonic()

    def facts(self) -> HardwareFacts | None:
        """The newest facts with their age; of a hung driver: since it last answered. None before the first reading."""
        if self._newest is None:
            return None
        age_ms = int((time.monotonic() - self._read_at) * 1000)
        return HardwareFacts(self._newest.state, self._newest.detail, age_ms, self._newest.gpus)

    async def run(self) -> None:
        """Read once a period, for ever."""
        try:
            while True:
                began_at = time.monotonic()
                await self._read(began_at)
                await asyncio.sleep(max(0.0, began_at + self._period_s - time.monotonic()))
        finally:
            self._thread.close()

    async def _read(self, began_at: float) -> None:
        former = self._newest.state if self._newest is not None else None
        try:
            self._newest = await self._thread.run(self._source.read, self._deadline_s)
            self._read_at = began_at
        except TimeoutError:
            if former != "hung":  # its age then runs from the last answer
                self._newest = HardwareFacts("hung", f"the NVIDIA driver gave no answer within {self._deadline_s:g} s")
        if self._newest is not None and self._newest.state != former:
            _log.info("nvml", state=self._newest.state, detail=self._newest.detail, gpus=len(self._newest.gpus))
