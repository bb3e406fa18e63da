"""tocsin deployed on a lab: the controller on its machine, a node daemon on every node, a chat that listens.

Everything runs as on a real cluster, from configuration files, with a key per node. Only the numbers that a laboratory
must shorten are changed: the floor of the hang bound and the dwell times. The nodes' GPUs are fake, their words are
set through `gpus`.
"""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from controller.cli.client import Unreachable, ask
from diagnosis.contracts.credential import node_key
from tests.lab.chat import ChatReceiver
from tests.lab.cluster import Lab
from tests.lab.faults import RankProcess, ranks
from tests.lab.nvml import FakeGpus, build
from tests.lab.system import LabError, eventually

AGENTS_PORT = 8620
PAGE_PORT = 8621
HANG_FLOOR_S = 6.0
POLICY = """\
mode = "{mode}"

[budget]
nodes_held_max = 2
nodes_held_pct_max = 25.0
requeues_per_job_max = 5
acts_per_hour_max = 40

[hang]
dwell_s = 0.0

[slow]
dwell_s = {slow_dwell_s}
checkpoint_signal = "USR1"
checkpoint_grace_s = 2.0
restart_cost_s = 60.0

[completing]
down_after_s = 6.0
"""
CONTROLLER = """\
state_dir = "{state}"
socket = "{socket}"
secret_file = "{secret}"
policy_file = "{policy}"
cycle_period_s = 0.5

[server]
listen = "{address}:{agents_port}"
page = "127.0.0.1:{page_port}"

[slurm]
snapshot_period_s = 1.0

[detect]
hang_floor_s = {hang_floor_s}
startup_floor_s = 90.0
slow_ratio = 1.3

[notify]
messages_per_minute_max = 60

[[notify.targets]]
name = "chat"
webhook = "{chat}"
format = "slack"
"""
NODE = """\
node = "{node}"
controller_url = "http://{address}:{agents_port}"
key_file = "{key}"
state_dir = "{state}"
frame_root = "{frame_root}"

[nvml]
period_s = 1.0

[network]
period_s = 1.0

[spool]
drain_per_s = 50.0
"""


class Stack:
    """`lab` must have been made with the probe and be running. `path`: put first on the controller's PATH.
    `slow_dwell_s`: how long a verdict on a slow job must have stood before it is acted upon."""

    def __init__(self, lab: Lab, *, mode: str = "act", path: Path | None = None, slow_dwell_s: float = 0.0) -> None:
        self.lab = lab
        self.directory = lab.directory / "tocsin"
        self.directory.mkdir()
        self.state = self.directory / "state"
        self.socket = self.directory / "controller.sock"
        self.chat = ChatReceiver(lab.listen())
        self.controller: subprocess.Popen[bytes] | None = None
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._path = path
        self._secret = secrets.token_bytes(32)
        library = build(self.directory)
        self.gpus = {name: FakeGpus(self.directory / f"{name}.gpus", library, name) for name in lab.node_names}
        self._write_configuration(mode, slow_dwell_s)

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start everything and wait until every daemon has been heard."""
        self.start_controller()
        for name in self.lab.node_names:
            self.start_daemon(name)
        eventually(self._all_heard, 30, "a report from every node")

    def stop(self) -> None:
        """End the controller and the daemons; the lab ends what is left."""
        for process in (*self.daemons.values(), self.controller):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in (*self.daemons.values(), self.controller):
            if process is not None:
                process.wait(15)
        self.chat.close()

    def __enter__(self) -> Stack:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start_controller(self) -> None:
        """Start the controller (again) and wait until it answers."""
        environment = {"PATH": f"{self._path}:{self.lab.environment()['PATH']}"} if self._path else {}
        argv = [sys.executable, "-m", "controller", "controller", "--config", str(self._file("controller"))]
        self.controller = self.lab.popen_controller(argv, env={**environment, **_source_path()})
        eventually(self._answers, 20, f"the controller answering (see {self.lab.directory}/log/controller.out)")

    def kill_controller(self) -> None:
        """`kill -9`."""
        assert self.controller is not None
        self.controller.kill()
        self.controller.wait(10)

    def start_daemon(self, node: str) -> None:
        """Start a node's daemon (again)."""
        argv = [sys.executable, "-m", "node_daemon", "--config", str(self._file(node))]
        environment = {**self.gpus[node].environment, **_source_path()}
        self.daemons[node] = self.lab.node(node).popen(argv, name="daemon", env=environment)

    def kill_daemon(self, node: str) -> None:
        """`kill -9`."""
        self.daemons[node].kill()
        self.daemons[node].wait(10)

    # -- what it says ----------------------------------------------------------------------------------------------

    def get(self, url: str) -> Any:
        """An answer of the control socket."""
        return msgspec.json.decode(ask(self.socket, "GET", url))

    def status(self) -> dict[str, Any]:
        """`tocsin status --json`."""
        return dict(self.get("/status"))

    def incidents(self) -> list[dict[str, Any]]:
        """`tocsin incidents --json`, newest first."""
        return list(self.get("/incidents"))

    def detail(self, incident: str) -> dict[str, Any]:
        """`tocsin show ID --json`."""
        return dict(self.get(f"/incidents/{incident}"))

    def capture(self, incident: str, file: Path) -> None:
        """`tocsin capture`: what an incident's verdict was given on."""
        argv = [sys.executable, "-m", "controller", "capture", incident, "--force", "--out", str(file)]
        options = ["--socket", str(self.socket)]
        environment = {**self.lab.environment(), **_source_path()}
        subprocess.run([*argv, *options], check=True, capture_output=True, timeout=30, env=environment)

    def job(self, job: int) -> dict[str, Any] | None:
        """The newest attempt of a job as the controller sees it."""
        found = [one for one in self.status()["jobs"] if one["job_id"] == job]
        return max(found, key=lambda one: int(one["restart"]), default=None)

    def wait_healthy(self, job: int, timeout_s: float = 90.0) -> None:
        """Wait until all ranks step and the controller has learnt their normal speed."""

        def known() -> bool:
            told = self.job(job)
            return told is not None and told["ranks_seen"] == told["world_size"] and told["baseline_ms"] is not None

        eventually(known, timeout_s, f"job {job} stepping", 0.2)

    def wait_incident(self, job: int, timeout_s: float = 30.0) -> dict[str, Any]:
        """Wait for an incident of a job."""
        return eventually(
            lambda: next((one for one in self.incidents() if one["job_id"] == job), None), timeout_s, "an incident", 0.1
        )

    def wait_closed(self, incident: str, timeout_s: float = 60.0) -> dict[str, Any]:
        """Wait until an incident is closed; LabError with its timeline if not."""

        def closed() -> dict[str, Any] | None:
            detail = self.detail(incident)
            return detail if detail["incident"]["phase"] == "closed" else None

        try:
            return eventually(closed, timeout_s, f"incident {incident} closed", 0.1)
        except LabError as error:
            raise LabError(f"{error}: {self.detail(incident)['incident']['timeline']}") from error

    def ranks(self, job: int, restart: int = 0) -> dict[int, RankProcess]:
        """The processes of a job's ranks."""
        return ranks(self.lab.frame_root, job, restart)

    def cpu_share(self) -> Mapping[str, float]:
        """CPU seconds used so far by the controller and by all node daemons."""
        daemons = sum(_cpu_s(process.pid) for process in self.daemons.values())
        return {"controller": _cpu_s(self.controller.pid) if self.controller else 0.0, "daemons": daemons}

    # -- parts -----------------------------------------------------------------------------------------------------

    def _file(self, name: str) -> Path:
        return self.directory / f"{name}.toml"

    def _write_configuration(self, mode: str, slow_dwell_s: float) -> None:
        secret = self.directory / "secret"
        self._write_private(secret, self._secret.hex())
        policy = self._file("policy")
        policy.write_text(POLICY.format(mode=mode, slow_dwell_s=slow_dwell_s))
        address = self.lab.switch_address
        self._file("controller").write_text(
            CONTROLLER.format(
                state=self.state,
                socket=self.socket,
                secret=secret,
                policy=policy,
                address=address,
                agents_port=AGENTS_PORT,
                page_port=PAGE_PORT,
                hang_floor_s=HANG_FLOOR_S,
                chat=self.chat.url,
            )
        )
        for name in self.lab.node_names:
            key = self.directory / f"{name}.key"
            self._write_private(key, node_key(self._secret, name).hex())
            state = self.directory / f"{name}.state"
            state.mkdir(mode=0o700)
            self._file(name).write_text(
                NODE.format(
                    node=name,
                    address=address,
                    agents_port=AGENTS_PORT,
                    key=key,
                    state=state,
                    frame_root=self.lab.frame_root,
                )
            )

    @staticmethod
    def _write_private(path: Path, text: str) -> None:
        path.touch(mode=0o600)
        path.write_text(text)

    def _answers(self) -> bool:
        assert self.controller is not None
        if self.controller.poll() is not None:
            raise LabError(f"the controller ended: {self.lab.log('controller.out')[-2000:]}")
        try:
            return bool(self.status())
        except Unreachable:
            return False

    def _all_heard(self) -> bool:
        for name, process in self.daemons.items():
            if process.poll() is not None:
                raise LabError(f"the daemon of {name} ended: {self.lab.log(f'{name}-daemon.out')[-2000:]}")
        return len(self.status()["nodes"]) == len(self.lab.node_names)


def _source_path() -> dict[str, str]:
    """Lets `-m` find the packages wherever the process is started."""
    return {"PYTHONPATH": str(Path(__file__).parents[2])}


def _cpu_s(pid: int) -> float:
    """CPU time of a process, user and system, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100
