"""The controller as a process: start, signals, reload, a Slurm that fails or hangs, an end and a new start."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from controller.cli.client import Unreachable, ask
from controller.control.status import Status
from diagnosis.contracts.credential import authorization, node_key
from diagnosis.contracts.report import Report, encode

DEADLINE_S = 30.0
SLURM_AWAY = (
    "#!/bin/sh\necho 'slurm_load_node error: Unable to contact slurm controller (connect failure)' >&2\nexit 1\n"
)
SLURM_HANGS = "#!/bin/sh\nexec sleep 600\n"


class Controller:
    """One controller process with a state directory, a socket and a Slurm of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = directory / "controller.toml"
        self.policy = directory / "policy.toml"
        self.socket = directory / "controller.sock"
        self.process: subprocess.Popen[bytes] | None = None
        self.told: list[str] = []
        (directory / "secret").write_text("ab" * 32)
        (directory / "secret").chmod(0o600)
        self.policy.write_text('mode = "observe"\n')
        self.slurm(SLURM_AWAY)
        self.configure()
        self._manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._manager.bind(str(directory / "notify.sock"))

    def slurm(self, script: str) -> None:
        (self.directory / "slurm").mkdir(exist_ok=True)
        for name in ("scontrol", "squeue"):
            path = self.directory / "slurm" / name
            path.write_text(script)
            path.chmod(0o755)

    def configure(self, extra: str = "", listen: str = "127.0.0.1:0") -> None:
        self.config.write_text(
            f'state_dir = "{self.directory}/state"\nsocket = "{self.socket}"\nsecret_file = "{self.directory}/secret"\n'
            f'policy_file = "{self.policy}"\ncycle_period_s = 0.1\n'
            f'[slurm]\npath = "{self.directory}/slurm"\ncall_deadline_s = 60\n'
            f'[server]\nlisten = "{listen}"\npage = "127.0.0.1:0"\n{extra}'
        )

    def start(self) -> Controller:
        self.spawn()
        self.wait_for("READY=1")
        return self

    def spawn(self) -> subprocess.Popen[bytes]:
        self.log = self.directory / "log"
        environment = os.environ | {"NOTIFY_SOCKET": str(self.directory / "notify.sock")}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", "from controller.cli.main import main; main()", "controller", "-c", self.config],
                env=environment,
                cwd=Path(__file__).parents[2],
                stderr=log,
            )
        return self.process

    def wait_for(self, line: str) -> None:
        """Read the service manager's socket until it says `line`."""
        deadline = time.monotonic() + DEADLINE_S
        while line not in self.told:
            readable, _, _ = select.select([self._manager], [], [], max(0.0, deadline - time.monotonic()))
            assert readable, f"{line} was not told; log: {self.log.read_text()}"
            self.told += self._manager.recv(4096).decode().splitlines()
        self.told.clear()

    def status(self) -> Status:
        return msgspec.json.decode(ask(self.socket, "GET", "/status"), type=Status)

    def wait_until(self, words: str) -> Status:
        """The first status that has `words` anywhere in it."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            answer = ask(self.socket, "GET", "/status")
            if words in answer.decode():
                return msgspec.json.decode(answer, type=Status)
            assert time.monotonic() < deadline, f"{words} was not seen in {answer!r}"
            self.wait_for("WATCHDOG=1")

    def address(self, what: str) -> tuple[str, int]:
        found = re.search(rf'"{what}": "([0-9.]+):(\d+)"', self.log.read_text())
        assert found is not None
        return found[1], int(found[2])

    def end(self, number: int = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(DEADLINE_S)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._manager.close()


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    made = Controller(tmp_path)
    yield made
    made.close()


def test_it_starts_serves_tells_its_manager_and_ends_on_sigterm(controller: Controller) -> None:
    controller.start()
    controller.wait_for("WATCHDOG=1")
    status = controller.status()
    assert status.loop.mode == "observe" and status.loop.cycles > 0 and status.paused is None
    host, port = controller.address("page")
    with urllib.request.urlopen(f"http://{host}:{port}/", timeout=DEADLINE_S) as page:
        assert b"tocsin" in page.read()
    idle = socket.create_connection(controller.address("agents"))
    watching = socket.create_connection((host, port))
    watching.sendall(f"GET /events HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    assert watching.recv(4096).startswith(b"HTTP/1.1 200")
    assert controller.end() == 0
    controller.wait_for("STOPPING=1")
    assert not controller.socket.exists()
    for connection in (idle, watching):
        connection.close()
    assert {json.loads(line)["event"] for line in controller.log.read_text().splitlines()} >= {"listening", "ended"}


def test_a_silent_slurm_is_said_and_stops_nothing_else(controller: Controller) -> None:
    controller.start()
    status = controller.wait_until("Unable to contact")
    assert status.loop.fault is not None and status.loop.world_at is None


def test_a_hanging_slurm_delays_neither_answers_nor_the_end(controller: Controller) -> None:
    controller.slurm(SLURM_HANGS)
    controller.start()
    assert controller.status().loop.cycles == 0
    assert controller.end() == 0
    controller.wait_for("STOPPING=1")


def test_a_report_is_taken_and_its_number_outlives_kill_9(controller: Controller) -> None:
    controller.start()
    report = Report(node="gpu001", boot_id="b", epoch=1, sample=1, mono_ms=1, wall_ms=1, window_ms=1000)
    body = encode(report)
    key = node_key(b"\xab" * 32, "gpu001")
    header = authorization(key, "POST", "/v1/report", node="gpu001", epoch=1, counter=1, age_ms=0, body=body)

    def post() -> int:
        host, port = controller.address("agents")
        url = f"http://{host}:{port}/v1/report"
        request = urllib.request.Request(url, body, {"Authorization": header})
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as refused:
            refused.close()
            return refused.code

    assert post() == 200
    assert controller.status().nodes[0].node == "gpu001"
    controller.end(signal.SIGKILL)
    assert controller.socket.exists()
    controller.start()
    assert post() == 409
    assert controller.status().requests == {"replayed": 1}


def test_sighup_takes_both_files_or_neither(controller: Controller) -> None:
    controller.start()
    assert controller.process is not None
    controller.policy.write_text('mode = "act"\n[slow]\ncheckpoint_signal = "none"\n')
    controller.process.send_signal(signal.SIGHUP)
    controller.wait_for("READY=1")
    controller.wait_until('"mode":"act"')
    controller.configure(extra="report_period_ms = 500\n[detect]\nhang_flor_s = 6\n")
    controller.policy.write_text('mode = "observe"\n')
    controller.process.send_signal(signal.SIGHUP)
    controller.wait_for("READY=1")
    status = controller.wait_until("hang_flor_s")
    assert status.loop.mode == "act"
    assert status.config_fault is not None and ":14: detect.hang_flor_s: unknown key" in status.config_fault
    controller.configure(extra="connections_max = 100\n")
    controller.process.send_signal(signal.SIGHUP)
    controller.wait_for("READY=1")
    status = controller.wait_until('"mode":"observe"')
    assert status.config_fault is None
    lines = [json.loads(line) for line in controller.log.read_text().splitlines()]
    assert [line["needs_restart"] for line in lines if line["event"] == "reloaded"] == [[], ["server"]]


def test_a_second_controller_on_the_same_state_is_refused_and_the_first_goes_on(
    controller: Controller, tmp_path: Path
) -> None:
    controller.start()
    assert controller.process is not None
    first = controller.process
    log = controller.log.read_text()
    second = controller.spawn()
    assert second.wait(DEADLINE_S) == 1
    assert f"another controller (pid {first.pid})" in controller.log.read_text()
    controller.process = first
    controller.log.write_text(log)
    assert controller.status().loop.mode == "observe"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ("socket in use", "server.listen: cannot listen on"),
        ("policy", "policy.toml:1: mode"),
        ("secret", "chmod 600"),
        ("target", "target chat"),
        ("config", "controller.toml:12: nonsense"),
    ],
)
def test_what_forbids_a_start_is_told_in_one_go(controller: Controller, spoil: str, words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        if spoil == "socket in use":
            controller.configure(listen=f"127.0.0.1:{taken.getsockname()[1]}")
        elif spoil == "policy":
            controller.policy.write_text('mode = "maybe"\n')
        elif spoil == "secret":
            (controller.directory / "secret").chmod(0o644)
        elif spoil == "target":
            controller.configure(extra='[[notify.targets]]\nname = "chat"\nurl = "nosuchservice://x"\n')
        else:
            controller.configure(extra="[nonsense]\n")
        assert controller.spawn().wait(DEADLINE_S) == 1
    log = controller.log.read_text()
    assert words in log and "Traceback" not in log
    with pytest.raises(Unreachable):
        controller.status()


def test_pausing_survives_a_restart(controller: Controller) -> None:
    controller.start()
    ask(controller.socket, "POST", "/pause", b'{"why": "maintenance"}')
    controller.end()
    controller.start()
    status = controller.status()
    assert status.paused is not None and status.paused.why == "maintenance"
