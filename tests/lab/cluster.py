"""A throw-away Slurm cluster: munged, slurmctld and eight slurmd, up in seconds and gone without a trace.

    with Lab() as lab:
        job = lab.submit(script, nodes=4)
        lab.wait_job(job, "RUNNING")

Everything of a lab lies in one directory, in namespaces that carry its tag (`<owner pid>-<number>`) and in one frame
directory in shared memory. The directory is made first and removed last: whoever finds it without a living owner may
sweep all of it away (`tests.lab.sweep`).
"""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from types import TracebackType

from tests.lab import nvml, processes, sweep, system
from tests.lab.client import Client
from tests.lab.config import GPU_DEVICES, NodePlace, gres_conf, slurm_conf
from tests.lab.network import Network
from tests.lab.relay import Relay
from tests.lab.system import LabError, eventually

START_TIMEOUT_S = 60.0
JOBS = Path(__file__).parent / "jobs"
"""Training as a user would have it in the working directory; copied to `Lab.work`."""
SLURMCTLD_PORT = 6817
SLURMD_PORT = 6818
TASK_PROLOG = Path(__file__).parents[2] / "slurm_plugins" / "task_prolog.py"
_numbers = itertools.count(1)


class Lab(Client):
    """One cluster. `conf` overrides single lines of slurm.conf; `probe`: tocsin's TaskProlog is installed on it.

    `gpus` False: the nodes have none as far as Slurm knows.
    """

    def __init__(
        self,
        *,
        nodes: int = 8,
        gpus: bool = True,
        probe: bool = False,
        cred_expire_s: int = 120,
        conf: Mapping[str, str] | None = None,
    ) -> None:
        self.tag = f"{os.getpid()}-{next(_numbers)}"
        self.directory = sweep.LABS / f"{sweep.LAB_PREFIX}{self.tag}"
        self.frame_root = sweep.SHARED_MEMORY / f"{sweep.LAB_PREFIX}{self.tag}"
        self.work = self.directory / "work"
        self.slurm_conf = self.directory / "etc" / "slurm.conf"
        self.node_names = tuple(f"gpu{number:03d}" for number in range(1, nodes + 1))
        self.network = Network(self.tag, self.node_names)
        self.has_gpus = gpus
        self._cred_expire_s = cred_expire_s
        self._conf = dict(conf or {})
        if probe:
            self._conf["TaskProlog"] = str(self.directory / "etc" / "task_prolog")
        self._nodes = {name: Node(self, name) for name in self.node_names}
        self._processes = processes.Processes(self.directory / "run", self.directory / "log")
        self._was_up = False
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._open: list[Relay | socket.socket | system.Reaper] = []
        super().__init__(self.slurm_conf, self.work, self.network.enter(None), self.environment())

    # -- life ----------------------------------------------------------------------------------------------------

    def start(self) -> float:
        """Bring the cluster up; returns the seconds until every node was idle. What dead owners left goes first."""
        began = time.monotonic()
        sweep.sweep()
        system.become_subreaper()
        with ExitStack() as undo:
            undo.callback(self.stop)
            self._open.append(system.Reaper())
            self._make_directories()
            self.network.up()
            self._write_configuration()
            self._start_munged()
            self.start_slurmctld()
            for node in self._nodes.values():
                node.start_slurmd()
            eventually(self._all_idle, START_TIMEOUT_S, "all nodes idle")
            self._was_up = True
            undo.pop_all()
        return time.monotonic() - began

    def stop(self) -> float:
        """End everything and remove every trace; returns the seconds it took. Safe to call again, or half started."""
        began = time.monotonic()
        while self._open:
            self._open.pop().close()
        daemons = list(self._daemons.values())
        processes.end(one for one in self._processes.running() if one not in daemons)
        if self._was_up:
            self.cancel_all()
            self._was_up = False
        processes.kill(daemons)
        self._daemons.clear()
        processes.kill_members(self.directory, self.network.files())
        self.network.down()
        shutil.rmtree(self.frame_root, ignore_errors=True)
        shutil.rmtree(self.directory, ignore_errors=True)
        return time.monotonic() - began

    def __enter__(self) -> Lab:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # -- parts ---------------------------------------------------------------------------------------------------

    @property
    def switch_address(self) -> str:
        """The address at which the nodes reach the controller's machine."""
        return self.network.switch_address

    def node(self, name: str) -> Node:
        """One node, by name."""
        return self._nodes[name]

    def link(self, name: str, up: bool) -> None:
        """Pull (`up=False`) or plug a node's network cable."""
        self.network.link(name, up)

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of the lab's processes: this Python first on PATH, our Slurm, nothing of the caller's.

        Temporary files go into the lab's directory: a job that is killed leaves some.
        """
        return {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": os.environ.get("HOME", "/"),
            "LANG": "C.UTF-8",
            "TMPDIR": str(self.directory / "tmp"),
            "SLURM_CONF": str(self.slurm_conf),
            system.LAB_VARIABLE: str(self.directory),
            **(extra or {}),
        }

    def popen_controller(
        self, argv: list[str], *, name: str = "controller", env: Mapping[str, str] | None = None, pipes: bool = False
    ) -> subprocess.Popen[bytes]:
        """Start a process on the controller's machine. Output goes to `log/<name>.out`, or `pipes` (in and out)."""
        return self.popen_on(None, argv, name=name, env=env, pipes=pipes)

    def popen_on(
        self, node: str | None, argv: list[str], *, name: str, env: Mapping[str, str] | None, pipes: bool
    ) -> subprocess.Popen[bytes]:
        """Start a process on a node, on the controller's machine when None. It is ended by `stop` at the latest."""
        return self._processes.spawn(name, [*self.network.enter(node), *argv], self.environment(env), pipes=pipes)

    def log(self, name: str) -> str:
        """What `log/<name>` holds ("slurmctld.log", "controller.out"), "" when there is no such file."""
        path = self.directory / "log" / name
        return path.read_text(errors="replace") if path.exists() else ""

    def nvml_library(self) -> Path:
        """The directory of the fake NVML library, built at the first call."""
        home = self.directory / "gpus"
        return home if (home / "libnvidia-ml.so.1").exists() else nvml.build(home)

    # -- sockets on the controller's machine -----------------------------------------------------------------------

    def listen(self, port: int = 0, host: str | None = None) -> socket.socket:
        """A listening TCP socket on the controller's machine, to be served from this process (a chat receiver)."""

        def make() -> socket.socket:
            return socket.create_server((host or self.switch_address, port), backlog=64)

        one = system.in_namespace(self.network.namespace(None), make)
        self._open.append(one)
        return one

    def connect_in_switch(self, host: str, port: int, timeout_s: float = 5.0) -> socket.socket:
        """A TCP connection made from the controller's machine; OSError when nobody listens."""

        def make() -> socket.socket:
            return socket.create_connection((host, port), timeout=timeout_s)

        return system.in_namespace(self.network.namespace(None), make)

    def relay(self, to_port: int, host: str = "127.0.0.1") -> int:
        """Open a port of the controller's machine to a person here; returns the port on this machine's 127.0.0.1."""
        relay = Relay(lambda: self.connect_in_switch(host, to_port))
        self._open.append(relay)
        return relay.port

    # -- daemons -------------------------------------------------------------------------------------------------

    def start_slurmctld(self) -> subprocess.Popen[bytes]:
        """Start slurmctld (again)."""
        return self._daemon("slurmctld", None, ["slurmctld", "-D"])

    def kill_slurmctld(self) -> None:
        """`kill -9` of slurmctld."""
        self._kill("slurmctld")

    def _all_idle(self) -> bool:
        for name, process in self._daemons.items():
            if process.poll() is not None:
                raise LabError(f"{name} ended at once: {self.log(f'{name}.out')[-400:]}")
        return self.idle(self.node_names)

    def _daemon(self, name: str, node: str | None, argv: list[str]) -> subprocess.Popen[bytes]:
        where = self.network.enter(node)
        self._daemons[name] = self._processes.spawn(name, [*where, *argv], self.environment())
        return self._daemons[name]

    def _kill(self, name: str) -> None:
        process = self._daemons.pop(name)
        process.kill()
        process.wait(10)

    def _make_directories(self) -> None:
        self.directory.mkdir(mode=0o755)
        sweep.write_owner(self.directory)
        for part in ("etc", "log", "gpus", "run", "spool", "spool/slurmctld", "munge", "work", "tmp"):
            (self.directory / part).mkdir(mode=0o755)
        frame_directories = (self.frame_root / name for name in self.node_names)
        for shared in (self.frame_root, *frame_directories, self.work, self.directory / "tmp"):
            shared.mkdir(exist_ok=True)
            shared.chmod(0o1777)
        for job in JOBS.iterdir():
            shutil.copy(job, self.work)

    def _write_configuration(self) -> None:
        ports = system.free_ports(len(self.node_names) + 1)
        if self.network.namespaced:
            ports = [SLURMCTLD_PORT] + [SLURMD_PORT] * len(self.node_names)
        places = [
            NodePlace(name, self.network.address(name), port)
            for name, port in zip(self.node_names, ports[1:], strict=True)
        ]
        controller = (self.switch_address, ports[0])
        text = slurm_conf(self.directory, controller, places, self._cred_expire_s, self.has_gpus, self._conf)
        self.slurm_conf.write_text(text)
        if self.has_gpus:
            (self.slurm_conf.parent / "gres.conf").write_text(gres_conf(places))
        (self.slurm_conf.parent / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        prolog = self.slurm_conf.parent / "task_prolog"  # what a site would put into /etc/tocsin/task_prolog.conf
        prolog.write_text(f"#!/bin/sh\nTOCSIN_FRAME_ROOT={self.frame_root} exec {TASK_PROLOG}\n")
        prolog.chmod(0o755)

    def _start_munged(self) -> None:
        home = self.directory / "munge"
        key = home / "key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={home / name}" for option, name in files.items()]
        self._daemon("munged", None, ["munged", "--foreground", "--num-threads=4", *options])
        eventually((home / "socket").exists, 10, f"munged listening (see {self.directory}/log/munged.out)")


class Node:
    """One machine of the lab, as far as its network reaches; the file system is shared, as on most clusters."""

    def __init__(self, lab: Lab, name: str) -> None:
        self._lab = lab
        self.name = name

    @property
    def address(self) -> str:
        """The node's address in the lab."""
        return self._lab.network.address(self.name)

    @cached_property
    def gpus(self) -> nvml.FakeGpus:
        """What this node's GPUs say; give `gpus.environment` to the node's daemon."""
        library = self._lab.nvml_library()
        return nvml.FakeGpus(library / f"{self.name}.ini", library, self.name, count=len(GPU_DEVICES))

    @property
    def frame_directory(self) -> Path:
        """Where the probe frames of jobs on this node appear, one directory per job attempt."""
        return self._lab.frame_root / self.name

    def popen(
        self, argv: list[str], *, name: str = "", env: Mapping[str, str] | None = None, pipes: bool = False
    ) -> subprocess.Popen[bytes]:
        """Start a process here. Output goes to `log/<node>-<name>.out`, or `pipes` (in and out)."""
        label = f"{self.name}-{name or Path(argv[0]).name}"
        return self._lab.popen_on(self.name, argv, name=label, env=env, pipes=pipes)

    def start_slurmd(self) -> subprocess.Popen[bytes]:
        """Start slurmd (again)."""
        return self._lab._daemon(self.name, self.name, ["slurmd", "-D", "-N", self.name])

    def kill_slurmd(self) -> None:
        """`kill -9` of slurmd; the steps it started live on, as they do on a real node."""
        self._lab._kill(self.name)

    def link(self, up: bool) -> None:
        """Pull or plug this node's network cable."""
        self._lab.link(self.name, up)
