"""The lab's tools, one by one: fake GPUs, chat, gate, faults, the check for left-overs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import nvml, sweep, system
from tests.lab.chat import ChatReceiver
from tests.lab.cluster import Lab
from tests.lab.faults import Duty, let_go, stop_forever
from tests.lab.gate import ScontrolGate
from tests.lab.system import eventually

ROOT = Path(__file__).parents[2]
READER = """
import json, sys, time, pynvml
pynvml.nvmlInit()
for line in sys.stdin:
    began = time.monotonic()
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(1)
        told = {
            "count": pynvml.nvmlDeviceGetCount(),
            "uuid": pynvml.nvmlDeviceGetUUID(handle),
            "bus": pynvml.nvmlDeviceGetPciInfo(handle).busId,
            "sm": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "sm_max": pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "reasons": pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
            "old_reasons": pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
            "temperature": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
            "processes": pynvml.nvmlDeviceGetComputeRunningProcesses(handle),
        }
    except pynvml.NVMLError as error:
        told = {"error": type(error).__name__}
    told["seconds"] = time.monotonic() - began
    print(json.dumps(told), flush=True)
"""


class NvmlReader:
    """A process that asks the fake library through nvidia-ml-py each time it is told to."""

    def __init__(self, gpus: nvml.FakeGpus) -> None:
        argv = [sys.executable, "-c", READER]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(argv, env={**os.environ, **gpus.environment}, stdin=pipe, stdout=pipe)

    def ask(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, object]:
        assert self.process.stdout is not None
        told: dict[str, object] = json.loads(self.process.stdout.readline())
        return told

    def read(self) -> dict[str, object]:
        self.ask()
        return self.answer()


@pytest.fixture
def gpus(tmp_path: Path) -> nvml.FakeGpus:
    return nvml.FakeGpus(tmp_path / "gpus.ini", nvml.build(tmp_path), "gpu001")


@pytest.fixture
def reader(gpus: nvml.FakeGpus) -> Iterator[NvmlReader]:
    running = NvmlReader(gpus)
    yield running
    running.process.communicate(timeout=10)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def test_healthy_fake_gpus_run_at_full_clock_without_a_reason(reader: NvmlReader) -> None:
    told = reader.read()
    told.pop("seconds")
    assert told == {
        "count": 2,
        "uuid": "GPU-gpu001-0001",
        "bus": "00000000:20:00.0",
        "sm": 1980,
        "sm_max": 1980,
        "reasons": 0,
        "old_reasons": 0,
        "temperature": 45,
        "processes": [],
    }


def test_a_fault_reaches_a_reader_that_runs_already(gpus: nvml.FakeGpus, reader: NvmlReader) -> None:
    assert reader.read()["sm"] == 1980
    gpus.throttle(0)
    assert reader.read()["sm"] == 1980
    gpus.throttle(1)
    told = reader.read()
    assert (told["sm"], told["sm_max"], told["reasons"], told["old_reasons"]) == (1080, 1980, 8, 8)


def test_errors_are_injected_for_one_gpu_and_one_function(gpus: nvml.FakeGpus, reader: NvmlReader) -> None:
    gpus.fail("nvmlDeviceGetTemperature", nvml.GPU_IS_LOST, gpu=0)
    assert "error" not in reader.read()
    gpus.fail("nvmlDeviceGetTemperature", nvml.GPU_IS_LOST, gpu=1)
    assert reader.read()["error"] == "NVMLError_GpuIsLost"
    gpus.fail("nvmlDeviceGetTemperature", 0, gpu=1)
    gpus.fail("nvmlDeviceGetCount_v2", nvml.DRIVER_NOT_LOADED)
    assert reader.read()["error"] == "NVMLError_DriverNotLoaded"


def test_a_hung_driver_blocks_its_caller_until_it_is_freed(gpus: nvml.FakeGpus, reader: NvmlReader) -> None:
    reader.read()
    gpus.hang(600)
    reader.ask()
    eventually(lambda: _waits_in_library(reader.process.pid), 10, "the reader blocked in the library")
    gpus.hang(0)
    assert reader.answer()["count"] == 2


def test_the_chat_keeps_messages_in_order_and_refuses_or_hangs_on_request(lab: Lab) -> None:
    chat = ChatReceiver(lab.listen())
    port = int(chat.url.rpartition(":")[2].partition("/")[0])
    relayed = f"http://127.0.0.1:{lab.relay(port, lab.switch_address)}/hook"
    assert _post(relayed, {"text": "one"}) == 200
    chat.answer(500)
    assert _post(relayed, {"text": "refused"}) == 500
    chat.answer(200)
    chat.hang()
    with pytest.raises(TimeoutError):
        _post(relayed, {"text": "late"}, timeout_s=0.5)
    chat.resume()
    assert [post.body for post in chat.wait(2)] == [{"text": "one"}, {"text": "late"}]
    assert len(chat.refusals) == 1
    chat.close()


def test_the_gate_holds_a_call_before_slurm_sees_it_and_lets_it_go_on(lab: Lab, tmp_path: Path) -> None:
    gate = ScontrolGate(tmp_path / "gate")
    rule = gate.block("update NodeName")
    drain = ["scontrol", "update", "NodeName=gpu005", "State=DRAIN", "Reason=held"]
    held = lab.popen_controller(drain, env=gate.path(lab.environment()))
    gate.wait_blocked(rule)
    assert lab.drain_reasons() == {}
    gate.release(rule)
    assert held.wait(10) == 0
    assert lab.drain_reasons() == {"gpu005": "held"}
    lab.run("scontrol", "update", "NodeName=gpu005", "State=RESUME")
    lab.wait_idle(["gpu005"])


def test_the_gate_holds_a_caller_after_slurm_obeyed_and_gives_up_on_request(lab: Lab, tmp_path: Path) -> None:
    gate = ScontrolGate(tmp_path / "gate")
    rule = gate.block("State=DRAIN", after=True)
    drain = ["scontrol", "update", "NodeName=gpu006", "State=DRAIN", "Reason=done"]
    held = lab.popen_controller(drain, env=gate.path(lab.environment()))
    gate.wait_blocked(rule)
    assert lab.drain_reasons() == {"gpu006": "done"}
    gate.drop()
    assert held.wait(10) == 1
    lab.run("scontrol", "update", "NodeName=gpu006", "State=RESUME")
    lab.wait_idle(["gpu006"])


def test_a_call_dropped_at_the_gate_never_reaches_slurm(lab: Lab, tmp_path: Path) -> None:
    gate = ScontrolGate(tmp_path / "gate")
    rule = gate.block("State=DRAIN")
    drain = ["scontrol", "update", "NodeName=gpu005", "State=DRAIN", "Reason=dropped"]
    held = lab.popen_controller(drain, env=gate.path(lab.environment()))
    gate.wait_blocked(rule)
    gate.drop()
    assert held.wait(10) == 1
    assert lab.drain_reasons() == {}


def test_the_gate_fails_as_often_as_told_and_notes_every_call(lab: Lab, tmp_path: Path) -> None:
    gate = ScontrolGate(tmp_path / "gate")
    gate.fail("scontrol ping", times=2)
    environment = gate.path(lab.environment())
    codes = [lab.run("scontrol", "ping", check=False, env=environment).returncode for _ in range(3)]
    lab.run("sinfo", "-h", env=environment)
    assert codes == [1, 1, 0]
    assert [call.line for call in gate.calls()] == ["scontrol ping"] * 3 + ["sinfo -h"]
    assert len(gate.calls("ping")) == 3


def test_a_duty_cycle_stops_a_process_again_and_again_and_ends_with_it_running(
    sleeper: subprocess.Popen[bytes],
) -> None:
    with Duty(sleeper.pid, stop_ms=20, run_ms=20):
        for _ in range(2):
            eventually(lambda: _state(sleeper.pid) == "T", 5, "stopped", 0.001)
            eventually(lambda: _state(sleeper.pid) == "S", 5, "running", 0.001)
    assert _state(sleeper.pid) != "T"


def test_a_duty_cycle_on_a_process_that_dies_just_ends(sleeper: subprocess.Popen[bytes]) -> None:
    with Duty(sleeper.pid, stop_ms=5, run_ms=5):
        sleeper.kill()
        assert sleeper.wait(5) == -signal.SIGKILL


def test_a_process_stopped_for_ever_stays_stopped_until_let_go(sleeper: subprocess.Popen[bytes]) -> None:
    stop_forever(sleeper.pid)
    eventually(lambda: _state(sleeper.pid) == "T", 5, "stopped")
    let_go(sleeper.pid)
    eventually(lambda: _state(sleeper.pid) == "S", 5, "running")


def test_a_run_that_leaves_a_process_memory_or_namespace_fails_and_names_them(tmp_path: Path) -> None:
    name = "tocsin-left-behind"
    leaky = tmp_path / "test_leaky.py"
    leaky.write_text(
        "import os, pathlib, subprocess\n"
        "def test_leaky():\n"
        "    subprocess.run(['sh', '-c', 'sleep 61 & exit 0'], start_new_session=True)\n"
        f"    pathlib.Path('/dev/shm/{name}').touch()\n"
        "    if os.geteuid() == 0:\n"
        "        subprocess.run(['ip', 'netns', 'add', f'tocsin-{os.getpid()}-1-gpu001'], check=True)\n"
    )
    options = ["-p", "tests.lab.leaks", "-p", "no:cacheprovider", "-c", os.devnull]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(leaky)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    Path(f"/dev/shm/{name}").unlink()
    sweep.sweep()
    for process in system.descendants(os.getpid()):
        if system.command_line(process.pid) == "sleep 61":
            os.kill(process.pid, signal.SIGKILL)
    assert done.returncode == 1, done.stdout
    assert "1 passed" in done.stdout
    left = done.stdout.partition("left behind")[2]
    assert "sleep 61" in left and name in left
    assert ("-1-gpu001" in left) == (os.geteuid() == 0)


def _state(pid: int) -> str:
    found = system.stat(pid)
    return found.state if found else ""


def _waits_in_library(pid: int) -> bool:
    where = Path(f"/proc/{pid}/wchan").read_text()
    return "hrtimer" in where or "nanosleep" in where


def _post(url: str, body: dict[str, str], timeout_s: float = 5.0) -> int:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
