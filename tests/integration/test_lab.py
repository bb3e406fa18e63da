"""The lab itself: a real cluster that comes up in seconds, runs jobs, and leaves nothing."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from tests.lab import network, sweep, system
from tests.lab.cluster import Lab
from tests.lab.system import LabError, eventually

ROOT = Path(__file__).parents[2]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root; without them nothing is cut")


def test_a_batch_job_runs_over_four_nodes_with_two_gpus_each(lab: Lab, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\nsrun bash -c 'echo on $SLURMD_NODENAME with $CUDA_VISIBLE_DEVICES'\n")
    job = lab.submit(script, nodes=4, gpus_per_node=2)
    lab.wait_job(job, "COMPLETED")
    assert sorted(lab.output(job).splitlines()) == [f"on {node} with 0,1" for node in lab.node_names[:4]]
    assert lab.job_nodes(job) == lab.node_names[:4]


def test_a_stopped_lab_leaves_no_directory_namespace_or_frame() -> None:
    lab = Lab(nodes=2)
    lab.start()
    assert lab.directory.exists() and lab.frame_root.exists()
    lab.stop()
    assert not lab.directory.exists() and not lab.frame_root.exists()
    assert [name for name in network.namespaces() if lab.tag in name] == []
    assert lab.tag not in sweep.sweep()


def test_two_labs_live_side_by_side_and_do_not_see_each_other(lab: Lab) -> None:
    with Lab(nodes=1) as other:
        assert list(other.node_states()) == ["gpu001"]
        assert len(lab.node_states()) == 8


def test_slurm_keeps_its_own_requeue_delay_unless_asked(lab: Lab) -> None:
    assert "cred_expire=120" in lab.run("scontrol", "show", "config").stdout
    with Lab(nodes=1, cred_expire_s=7, conf={"KillWait": "3"}) as other:
        config = other.run("scontrol", "show", "config").stdout
    assert "cred_expire=7" in config
    assert "KillWait                = 3 sec" in config


@pytest.mark.parametrize(
    ("argv", "env"),
    [
        (("scancel", "--clusters=production", "1"), {}),
        (("squeue", "-M", "production"), {}),
        (("sinfo",), {"SLURM_CONF": "/etc/slurm/slurm.conf"}),
        (("sinfo",), {"SLURM_CLUSTERS": "production"}),
    ],
)
def test_a_command_that_means_another_cluster_is_refused(lab: Lab, argv: tuple[str, ...], env: dict[str, str]) -> None:
    with pytest.raises(LabError, match="another cluster"):
        lab.run(*argv, env=env)


def test_a_start_that_fails_says_why_and_leaves_nothing() -> None:
    lab = Lab(nodes=1, conf={"SelectType": "select/no_such_plugin"})
    with pytest.raises(LabError, match="ended at once"):
        lab.start()
    assert not lab.directory.exists()
    assert [name for name in network.namespaces() if lab.tag in name] == []


def test_processes_of_nodes_and_controller_end_with_the_lab() -> None:
    with Lab(nodes=1) as lab:
        stubborn = "trap '' TERM; echo up; while :; do sleep 1; done"
        processes = [
            lab.node("gpu001").popen(["bash", "-c", stubborn], name="stubborn"),
            lab.popen_controller(["sleep", "600"]),
        ]
        eventually(lambda: "up" in lab.log("gpu001-stubborn.out"), 10, "the stubborn process up")
    assert [process.poll() is not None for process in processes] == [True, True]


def test_a_slurmd_that_is_killed_and_started_again_comes_back_idle(lab: Lab) -> None:
    node = lab.node("gpu008")
    node.kill_slurmd()
    node.start_slurmd()
    lab.wait_idle(["gpu008"])


@needs_root
def test_a_pulled_cable_cuts_the_node_off_and_plugging_it_heals(lab: Lab) -> None:
    listener = lab.listen()
    port = listener.getsockname()[1]
    program = f"import socket; socket.create_connection(('{lab.switch_address}', {port}), 1)"

    def reaches() -> bool:
        return lab.node("gpu007").popen(["python3", "-c", program], name="call").wait(20) == 0

    assert reaches()
    lab.link("gpu007", up=False)
    assert not reaches()
    lab.link("gpu007", up=True)
    eventually(reaches, 20, "the node reaches the controller again")
    lab.wait_idle(["gpu007"])


def test_a_port_of_the_controllers_machine_is_relayed_to_this_one(lab: Lab) -> None:
    listener = lab.listen(host="127.0.0.1")
    port = listener.getsockname()[1]
    server = threading.Thread(target=_echo_once, args=(listener,))
    server.start()
    with socket.create_connection(("127.0.0.1", lab.relay(port)), timeout=5) as caller:
        caller.sendall(b"hello")
        assert caller.recv(16) == b"hello"
    server.join(5)
    with lab.connect_in_switch("127.0.0.1", port) as direct:
        assert direct.getpeername()[1] == port


def test_a_relay_to_a_closed_port_hangs_up(lab: Lab) -> None:
    (port,) = system.free_ports(1)
    with socket.create_connection(("127.0.0.1", lab.relay(port)), timeout=5) as caller:
        assert caller.recv(16) == b""


def test_the_python_of_the_tests_comes_first_for_jobs_and_daemons(lab: Lab) -> None:
    told = lab.run("python3", "-c", "import sys; print(sys.prefix)").stdout.strip()
    assert told == sys.prefix


@needs_root
def test_a_job_of_an_ordinary_user_runs_as_that_user(lab: Lab) -> None:
    (lab.work / "whoami.sh").write_text("#!/bin/bash\nsrun id -un\n")
    job = lab.submit("whoami.sh", nodes=2, uid="nobody", gid="nogroup")
    lab.wait_job(job, "COMPLETED")
    assert lab.output(job).splitlines() == ["nobody", "nobody"]


WITHOUT_ROOT = """
import os
from tests.lab.cluster import Lab
assert os.geteuid() != 0
with Lab(nodes=4) as lab:
    (lab.work / "job.sh").write_text("#!/bin/bash\\nsrun bash -c 'echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES'\\n")
    job = lab.submit("job.sh", nodes=4, gpus_per_node=2)
    lab.wait_job(job, "COMPLETED")
    directory, told = lab.directory, sorted(lab.output(job).splitlines())
assert not directory.exists()
print(lab.switch_address, *told, sep="|")
"""


@needs_root
def test_without_root_the_same_lab_runs_on_loopback() -> None:
    """Run by nobody, from a copy of the lab and by a Python that nobody may read."""
    with tempfile.TemporaryDirectory(prefix="tocsin-without-root-") as home:
        shutil.copytree(
            ROOT / "tests" / "lab", Path(home, "tests", "lab"), ignore=shutil.ignore_patterns("__pycache__")
        )
        Path(home).chmod(0o755)
        environment = {"PATH": os.environ["PATH"], "HOME": "/tmp", "PYTHONPATH": home, "PYTHONDONTWRITEBYTECODE": "1"}
        identity = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        command = [*identity, "/usr/bin/python3", "-c", WITHOUT_ROOT]
        done = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "|".join(["127.0.0.1", *(f"gpu00{number} 0,1" for number in range(1, 5))])


def _echo_once(listener: socket.socket) -> None:
    caller, _ = listener.accept()
    with caller:
        caller.sendall(caller.recv(16))
