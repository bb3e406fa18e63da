"""Slurm's own commands, run against the lab and against nothing else."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.lab.config import CLUSTER
from tests.lab.system import LabError, eventually

ANSWER_TIMEOUT_S = 20.0
CANCEL_TIMEOUT_S = 5.0


class Client:
    """The commands of one cluster. `enter` is put before each command, `environment` is all they get to see."""

    def __init__(self, slurm_conf: Path, work: Path, enter: list[str], environment: Mapping[str, str]) -> None:
        self._slurm_conf = slurm_conf
        self._work = work
        self._enter = enter
        self._environment = dict(environment)

    def run(
        self,
        *argv: str,
        check: bool = True,
        timeout: float = ANSWER_TIMEOUT_S,
        env: Mapping[str, str] | None = None,
        stdin: str = "",
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the controller's machine. LabError when it fails (`check`) or means another cluster."""
        self._refuse_others(argv, env or {})
        done = subprocess.run(
            [*self._enter, *argv],
            env={**self._environment, **(env or {})},
            cwd=self._work,
            input=stdin,
            text=True,
            capture_output=True,
            timeout=timeout,
        )
        if check and done.returncode != 0:
            raise LabError(f"{' '.join(argv)}: rc {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")
        return done

    def submit(
        self, script: Path | str, *arguments: str, env: Mapping[str, str] | None = None, **options: str | int | bool
    ) -> int:
        """`sbatch` a script and return the job's id. Options as sbatch names them: `nodes=4, gpus_per_node=2`.
        A relative path is one in `work`, where "train.sh" lies.

        `env` is what the user had exported in the shell. Output goes to `work/slurm-<id>.out`, appended at a requeue.
        """
        given: dict[str, str | int | bool] = {"output": "slurm-%j.out", "open_mode": "append", **options}
        words = [_option(name, value) for name, value in given.items() if value is not False]
        done = self.run("sbatch", "--parsable", *words, str(script), *arguments, env=env)
        return int(done.stdout.strip().partition(";")[0])

    def output(self, job: int) -> str:
        """What the job has printed so far, all its attempts."""
        path = self._work / f"slurm-{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def job(self, job: int) -> dict[str, str]:
        """The fields of `scontrol show job`; empty when Slurm does not know the job (any more)."""
        done = self.run("scontrol", "show", "job", "-o", str(job), check=False)
        if done.returncode != 0:
            return {}
        return dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)

    def job_state(self, job: int) -> str:
        """Slurm's long state word (RUNNING), "" when the job is unknown."""
        return self.job(job).get("JobState", "")

    def job_nodes(self, job: int) -> tuple[str, ...]:
        """The names of the nodes the job has now."""
        listed = self.job(job).get("NodeList", "")
        if listed in ("", "(null)"):
            return ()
        return tuple(self.run("scontrol", "show", "hostnames", listed).stdout.split())

    def wait_job(self, job: int, state: str, timeout_s: float = 60.0) -> float:
        """Wait until the job is in that state; returns the seconds it took. LabError with Slurm's words if not."""
        began = time.monotonic()
        try:
            eventually(lambda: self.job_state(job) == state, timeout_s, f"job {job} {state}", 0.1)
        except LabError as error:
            raise LabError(f"{error}: {self.job(job)}") from error
        return time.monotonic() - began

    def node_states(self) -> dict[str, str]:
        """Slurm's long state of each node, suffixes and all (`idle`, `drained*`)."""
        lines = self.run("sinfo", "-h", "-N", "-o", "%N %T").stdout.splitlines()
        return dict(line.split() for line in lines)

    def drain_reasons(self) -> dict[str, str]:
        """The reason of each node that is down, drained or draining: `sinfo -R`."""
        lines = self.run("sinfo", "-h", "-R", "-N", "-o", "%N %E").stdout.splitlines()
        return {name: reason for name, _, reason in (line.partition(" ") for line in lines)}

    def idle(self, nodes: Iterable[str]) -> bool:
        """True when these nodes are idle and answer. A slurmctld that is silent for 3 s has no idle nodes."""
        try:
            done = self.run("sinfo", "-h", "-N", "-o", "%N %T", check=False, timeout=3)
        except subprocess.TimeoutExpired:
            return False
        return set(nodes) <= {line.split()[0] for line in done.stdout.splitlines() if line.endswith(" idle")}

    def wait_idle(self, nodes: Iterable[str], timeout_s: float = 30.0) -> None:
        """Wait until these nodes are idle and answer."""
        wanted = sorted(nodes)
        eventually(lambda: self.idle(wanted), timeout_s, f"idle: {' '.join(wanted)}", 0.1)

    def cancel_all(self) -> None:
        """Cancel all jobs and give their steps a moment to end. A silent slurmctld is no obstacle."""
        try:
            listed = self.run("squeue", "-h", "-o", "%A", check=False, timeout=CANCEL_TIMEOUT_S).stdout.split()
            if listed:
                self.run("scancel", *sorted(set(listed)), check=False, timeout=CANCEL_TIMEOUT_S)
                eventually(self._nothing_queued, CANCEL_TIMEOUT_S, "queue empty", 0.1)
        except (subprocess.TimeoutExpired, LabError):
            return

    def _nothing_queued(self) -> bool:
        done = self.run("squeue", "-h", "-o", "%A", check=False, timeout=CANCEL_TIMEOUT_S)
        return done.returncode == 0 and not done.stdout.strip()

    def _refuse_others(self, argv: tuple[str, ...], env: Mapping[str, str]) -> None:
        if env.get("SLURM_CONF", str(self._slurm_conf)) != str(self._slurm_conf) or "SLURM_CLUSTERS" in env:
            raise LabError("a lab command may not name another cluster's configuration")
        if any(word in ("-M", "--clusters", "--cluster") or word.startswith("--cluster") for word in argv):
            raise LabError("a lab command may not name another cluster")
        if f"ClusterName={CLUSTER}\n" not in self._slurm_conf.read_text():
            raise LabError(f"{self._slurm_conf} is not the lab's")


def _option(name: str, value: str | int | bool) -> str:
    option = f"--{name.replace('_', '-')}"
    return option if value is True else f"{option}={value}"
