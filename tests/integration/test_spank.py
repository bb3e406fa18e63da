"""The SPANK plugin in a real Slurm: srun, sbatch and salloc, what the user says, and what is broken."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from diagnosis.contracts import probeframe
from tests.integration.gloo_double import build
from tests.integration.spank_site import SpankSite, told
from tests.lab.cluster import TASK_PROLOG, Lab
from tests.lab.system import eventually

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount and become another user")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpankSite]:
    with Lab(nodes=2, gpus=False, cred_expire_s=5) as lab:
        site = SpankSite(lab)
        site.install(build(tmp_path_factory.getbasetemp()).directory)
        yield site


@pytest.fixture
def site(installed: SpankSite) -> SpankSite:
    installed.configure()
    installed.clear()
    installed.nccl.unlink(missing_ok=True)
    return installed


def attached(site: SpankSite, node: str, job: int, restart: int = 0) -> dict[str, str]:
    return {
        "TOCSIN_FRAME_DIR": f"{site.lab.frame_root}/{node}/{job}.{restart}",
        "LD_PRELOAD": str(site.gloo),
    }


def env_of(output: str, marker: str) -> dict[str, str]:
    """What `env` printed between the line `marker` and the next line of dashes."""
    return told(output.partition(f"{marker}\n")[2].partition("---\n")[0])


def test_each_task_of_srun_writes_its_frame_and_the_job_hears_nothing(site: SpankSite) -> None:
    done = site.srun("-N2", "--ntasks-per-node=2", "sh", "-c", f"{site.trainer}; echo $SLURM_JOB_ID")
    (job,) = set(done.stdout.split()) - {"ok", "nothing"}
    assert [path.parent.parent.name for path in site.frames(int(job))] == ["gpu001"] * 2 + ["gpu002"] * 2
    assert done.stderr == ""


RANK = """\
import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
os._exit(0)  # as a crash ends it: the frame keeps what the communicator did
"""


def test_one_task_with_torchrun_has_a_frame_for_each_rank(site: SpankSite) -> None:
    (site.lab.work / "rank.py").write_text(RANK)
    options = ("--nproc-per-node=2", "--master-addr=127.0.0.1", "--master-port=29400")
    environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    site.srun("-n1", "torchrun", *options, "rank.py", env=environment)
    frames = [probeframe.parse(path.read_bytes()) for path in site.frames()]
    assert sorted((int(frame.header["rank"]), int(frame.header["local_rank"])) for frame in frames) == [(0, 0), (1, 1)]
    assert all(int(frame.slots[0]["done"]) >= 1 for frame in frames)


def test_the_batch_script_and_its_steps_are_attached(site: SpankSite) -> None:
    job = batch(site, "echo batch; env; echo ---; srun -n1 sh -c 'echo step; env; echo ---'")
    output = site.lab.output(job)
    assert env_of(output, "batch") == env_of(output, "step") == attached(site, "gpu001", job)


def test_a_requeued_job_has_a_directory_of_its_own(site: SpankSite) -> None:
    script = 'if [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then touch began; sleep 600; fi; ' + (
        "echo batch; env; echo ---; srun sh -c 'echo step; env; echo ---'"
    )
    (site.lab.work / "began").unlink(missing_ok=True)
    job = submit(site, script, requeue=True)
    eventually((site.lab.work / "began").exists, 20, "the job's first attempt")
    site.lab.run("scontrol", "requeue", str(job))
    site.lab.wait_job(job, "COMPLETED")
    output = site.lab.output(job)
    assert env_of(output, "batch") == env_of(output, "step") == attached(site, "gpu001", job, restart=1)
    assert sorted(path.name for path in site.lab.frame_root.glob("gpu001/*")) == [f"{job}.0", f"{job}.1"]


def test_a_step_of_salloc_is_attached_and_the_option_holds_for_the_whole_allocation(site: SpankSite) -> None:
    command = ("-n1", "-w", "gpu001", "srun", "sh", "-c", "env; echo job=$SLURM_JOB_ID")
    output = site.lab.run("salloc", *command).stdout
    assert told(output) == attached(site, "gpu001", int(output.rpartition("job=")[2]))
    assert told(site.lab.run("salloc", "--tocsin=off", *command).stdout) == {"TOCSIN_DISABLE": "1"}


def test_off_is_off_for_the_script_and_its_steps_unless_a_step_says_on(site: SpankSite) -> None:
    steps = "srun -n1 sh -c 'echo step; env; echo ---'; srun -n1 --tocsin=on sh -c 'echo on; env; echo ---'"
    job = batch(site, f"echo batch; env; echo ---; {steps}", tocsin="off")
    output = site.lab.output(job)
    assert env_of(output, "batch") == env_of(output, "step") == {"TOCSIN_DISABLE": "1"}
    assert env_of(output, "on") == attached(site, "gpu001", job)


def test_a_step_that_says_off_loses_what_the_script_has(site: SpankSite) -> None:
    site.nccl.touch()
    step = "export LD_PRELOAD=libm.so.6:$LD_PRELOAD; srun -n1 --tocsin=off sh -c 'echo step; env; echo ---'"
    job = batch(site, f"echo batch; env; echo ---; {step}")
    output = site.lab.output(job)
    assert env_of(output, "batch") == {**attached(site, "gpu001", job), "NCCL_PROFILER_PLUGIN": str(site.nccl)}
    assert env_of(output, "step") == {"TOCSIN_DISABLE": "1", "LD_PRELOAD": "libm.so.6"}


def test_the_environment_switches_off_as_well(site: SpankSite) -> None:
    done = site.srun("-n1", "env", env={"TOCSIN_DISABLE": "1"})
    assert told(done.stdout) == {"TOCSIN_DISABLE": "1"}
    assert site.frames() == [] and not list(site.lab.frame_root.glob("*/*"))
    # The option is the nearer word.
    done = site.srun("-n1", "--tocsin=on", "env", env={"TOCSIN_DISABLE": "1"})
    assert told(done.stdout).keys() == {"TOCSIN_FRAME_DIR", "LD_PRELOAD"}


def test_what_the_user_preloads_and_profiles_with_stays(site: SpankSite, tmp_path: Path) -> None:
    site.nccl.touch()
    program = "import os; print(sorted({line.split()[-1] for line in open('/proc/self/maps') if '.so' in line}))"
    own = {"LD_PRELOAD": "libutil.so.1", "NCCL_PROFILER_PLUGIN": "inspector"}
    done = site.srun("-n1", "sh", "-c", f'env; exec python3 -c "{program}"', env=own)
    assert told(done.stdout)["LD_PRELOAD"] == f"libutil.so.1:{site.gloo}"
    assert told(done.stdout)["NCCL_PROFILER_PLUGIN"] == str(site.nccl)
    assert told(done.stdout)["TOCSIN_NCCL_CHAIN"] == "inspector"
    assert "libutil.so.1" in done.stdout.splitlines()[-1] and str(site.gloo) in done.stdout.splitlines()[-1]


def test_verbose_says_what_is_attached_on_each_node(site: SpankSite) -> None:
    done = site.srun("-N2", "-n4", "--tocsin=verbose", "sh", "-c", "echo $SLURM_JOB_ID; echo $TOCSIN_PROBE_DEBUG")
    (job,) = set(done.stdout.split()) - {"1"}
    lines = [
        f"tocsin: {node}: attached, frames in {site.lab.frame_root}/{node}/{job}.0" for node in site.lab.node_names
    ]
    assert sorted(done.stderr.splitlines()) == lines


def test_a_word_that_nobody_knows_is_told_and_taken_for_off(site: SpankSite) -> None:
    done = site.srun("-n1", "--tocsin=loud", "env")
    assert told(done.stdout) == {"TOCSIN_DISABLE": "1"}
    assert "tocsin: --tocsin=loud" in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_site_may_leave_it_off_until_a_job_asks(site: SpankSite) -> None:
    site.configure(arguments="default=off colour=blue")
    assert told(site.srun("-n1", "-w", "gpu001", "env").stdout) == {}
    assert told(site.srun("-n1", "--tocsin", "env").stdout).keys() == {"TOCSIN_FRAME_DIR", "LD_PRELOAD"}
    eventually(lambda: "colour=blue: not known" in site.lab.log("gpu001.log"), 10, "the odd argument in slurmd's log")


def test_beside_a_task_prolog_everything_is_attached_once(site: SpankSite) -> None:
    prolog = site.directory / "task_prolog"
    prolog.write_text(
        f"#!/bin/sh\nTOCSIN_FRAME_ROOT={site.lab.frame_root} TOCSIN_PROBE_LIBRARY={site.gloo} "
        f"TOCSIN_NCCL_PLUGIN={site.nccl} exec {TASK_PROLOG}\n"
    )
    prolog.chmod(0o755)
    script = "env; echo job=$SLURM_JOB_ID"
    output = site.srun("-n1", "-w", "gpu001", f"--task-prolog={prolog}", "sh", "-c", script).stdout
    assert told(output) == attached(site, "gpu001", int(output.rpartition("job=")[2]))


# -- a broken installation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "broken",
    [
        "no library",
        pytest.param("closed library", marks=needs_root),
        "no plugin",
        "other Slurm",
        "no daemon",
        "odd file",
        "no file",
    ],
)
def test_a_broken_installation_fails_no_job_and_tells_its_user_nothing(site: SpankSite, broken: str) -> None:
    node = site.lab.frame_root / "gpu001"
    before = site.lab.log("gpu001.log")
    if broken == "no library":
        site.configure(library=site.directory / "absent.so")
    elif broken == "closed library":
        site.gloo.parent.chmod(0o700)
    elif broken == "no plugin":
        site.configure(plugin=site.directory / "absent.so")
    elif broken == "other Slurm":
        site.configure(plugin=of_another_slurm(site))
    elif broken == "no daemon":
        node.rmdir()
    elif broken == "odd file":
        site.conf.write_text("library = not/absolute\n")
    else:
        site.conf.unlink()
        site.conf.mkdir()
    try:
        done = site.srun("-n1", "-w", "gpu001", "env", uid=65534 if broken == "closed library" else 0)
    finally:
        site.gloo.parent.chmod(0o755)
        node.mkdir(exist_ok=True)
        node.chmod(0o1777)
        if site.conf.is_dir():
            site.conf.rmdir()
    assert told(done.stdout) == {}
    # Slurm itself says that it cannot load a plugin, and goes on.
    by_slurm = ("absent.so", "another.so", "Incompatible")
    assert [line for line in done.stderr.splitlines() if not any(word in line for word in by_slurm)] == []
    if broken not in ("no plugin", "other Slurm"):
        log = site.lab.log("gpu001.log").removeprefix(before)
        assert log.count("tocsin: not watched") == 1


def of_another_slurm(site: SpankSite) -> Path:
    """The plugin as another Slurm's headers would have made it: its version number is one less."""
    made = (site.directory / "tocsin_spank.so").read_bytes()
    headers = Path("/usr/include/slurm/slurm_version.h").read_text()
    (number,) = re.findall(r"#define SLURM_VERSION_NUMBER (0x[0-9a-f]+)", headers)
    own, other = (int(number, 16) - less for less in (0, 0x100))
    assert made.count(own.to_bytes(4, "little")) == 1
    plugin = site.directory / "another.so"
    plugin.write_bytes(made.replace(own.to_bytes(4, "little"), other.to_bytes(4, "little")))
    plugin.chmod(0o755)
    return plugin


# -- another root ------------------------------------------------------------------------------------------------------

MOUNTS = """\
root=$1
mount -t tmpfs tmpfs $root
mkdir -p $root/usr $root/proc $root/dev/shm $root{opt} $root{frame_root} $root{lab}/work
for link in bin sbin lib lib64; do ln -s usr/$link $root/$link; done
mount --rbind /usr $root/usr
mount -t proc proc $root/proc
for node in null zero; do touch $root/dev/$node; mount --bind /dev/$node $root/dev/$node; done
mkdir -p $root{opt}/trainer && mount --bind {opt}/trainer $root{opt}/trainer
cp {opt}/static $root/
"""
LIBRARY = "mkdir -p $root{opt}/lib && mount --bind {opt}/lib $root{opt}/lib\n"
SHM = "mount --bind /dev/shm $root/dev/shm\n"
NO_GLIBC = "rm $root/lib64\n"


def container(site: SpankSite, *parts: str, user: str = "") -> dict[str, str]:
    """The environment of a task that is to run in a root of its own, made of these parts."""
    root, script = site.lab.directory / "root", site.directory / "mounts.sh"
    root.mkdir(exist_ok=True)
    words = {"opt": site.directory, "frame_root": site.lab.frame_root, "lab": site.lab.directory}
    script.write_text("".join(part.format(**words) for part in (MOUNTS, *parts)))
    return {"CONTAINER": str(root), "CONTAINER_SCRIPT": str(script), **({"CONTAINER_USER": user} if user else {})}


@needs_root
@pytest.mark.parametrize("first", ["container plugin", "tocsin"])
@pytest.mark.parametrize(
    ("uid", "namespace_user"), [(0, ""), (65534, "same"), (65534, "root")], ids=["root", "user", "user as root"]
)
def test_a_task_in_another_root_is_attached(site: SpankSite, uid: int, namespace_user: str, first: str) -> None:
    site.configure(tocsin_first=first == "tocsin")
    environment = container(site, LIBRARY, SHM, user=namespace_user)
    command = f"{site.trainer}; test -e /root || echo id=$(id -u)"
    done = site.srun("-N2", "-n2", "sh", "-c", command, env=environment, uid=uid)
    assert [path.parent.parent.name for path in site.frames()] == ["gpu001", "gpu002"]
    assert {path.stat().st_uid for path in site.frames()} == {uid}
    assert set(done.stdout.split()) == {"ok", "nothing", f"id={0 if namespace_user == 'root' else uid}"}


@needs_root
@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ((SHM,), "the probe's library is not there"),
        ((LIBRARY,), "the node daemon's frame directory is not there"),
        ((LIBRARY, SHM, NO_GLIBC), "there is no glibc"),
    ],
    ids=["no library", "no shm", "no glibc"],
)
def test_a_task_whose_root_lacks_something_runs_without_and_says_so_once(
    site: SpankSite, parts: tuple[str, ...], why: str
) -> None:
    done = site.srun("-N2", "-n4", "/static", env=container(site, *parts))
    assert told(done.stdout) == {} and "SLURM_PROCID=3" in done.stdout
    errors = done.stderr.splitlines()
    assert len(errors) == 1 and errors[0].startswith(f"tocsin: not watched: in the container {why}")
    assert site.frames() == []


@needs_root
@pytest.mark.parametrize("parts", [(LIBRARY, SHM), (SHM,), (LIBRARY,)], ids=["attached", "no library", "no shm"])
def test_a_program_that_enters_another_root_by_itself_is_attached_or_runs_without(
    site: SpankSite, parts: tuple[str, ...]
) -> None:
    environment = container(site, *parts)
    script, root = environment["CONTAINER_SCRIPT"], environment["CONTAINER"]
    command = f'sh -e {script} {root} && exec chroot {root} sh -c "{site.trainer}"'
    done = site.srun("-n1", "unshare", "--mount", "sh", "-c", command)
    assert done.stdout.split() == ["ok"] * 3 + ["ok", "nothing"]
    assert len(site.frames()) == (parts == (LIBRARY, SHM))


@needs_root
def test_slurm_runs_a_task_prolog_in_the_other_root_and_fails_the_step_without_it(site: SpankSite) -> None:
    """Why docs/attach.md keeps TaskProlog away from pyxis: a fact of Slurm, here so that a change of it shows."""
    environment = container(site, LIBRARY, SHM)
    done = site.lab.run("srun", "-n1", f"--task-prolog={TASK_PROLOG}", "/static", env=environment, check=False)
    assert done.returncode != 0 and "task_prolog" in done.stderr
    assert site.srun("-n1", "/static", env=environment).returncode == 0


# -- words -------------------------------------------------------------------------------------------------------------


def submit(site: SpankSite, script: str, *, tocsin: str = "", requeue: bool = False) -> int:
    path = site.lab.work / "spank.sh"
    path.write_text(f"#!/bin/bash\n{f'#SBATCH --tocsin={tocsin}' if tocsin else '#'}\n{script}\n")
    return site.lab.submit(path, ntasks=1, requeue=requeue, nodelist="gpu001")


def batch(site: SpankSite, script: str, *, tocsin: str = "") -> int:
    """A batch job that has ended well."""
    job = submit(site, script, tocsin=tocsin)
    site.lab.wait_job(job, "COMPLETED")
    return job
