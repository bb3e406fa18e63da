"""A lab with the SPANK plugin installed, as an operator would: plugin, attach.conf, plugstack.conf.

Nothing here needs more than the standard library, so the same tests run inside another Debian with another Slurm.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from node_daemon.native import library_path
from tests.integration import spank_double
from tests.lab.cluster import Lab

ROUND = r"group world 0 2 0,1\nenqueue world w 1 6 8\nstart w\nfinish w\n"
"""What the stand-in for a training process is told to do: one all-reduce."""
FRAME_VARIABLES = (
    "LD_PRELOAD",
    "NCCL_PROFILER_PLUGIN",
    "TOCSIN_DISABLE",
    "TOCSIN_FRAME_DIR",
    "TOCSIN_NCCL_CHAIN",
    "TOCSIN_PROBE_DEBUG",
)


@dataclass(frozen=True)
class SpankSite:
    """`directory` is readable by every user and holds all that is installed."""

    lab: Lab

    @property
    def directory(self) -> Path:
        return self.lab.directory / "opt"

    @property
    def gloo(self) -> Path:
        return self.directory / "lib" / "libtocsin_gloo.so"

    @property
    def nccl(self) -> Path:
        return self.directory / "lib" / "libnccl-profiler-tocsin.so"

    @property
    def conf(self) -> Path:
        return self.directory / "attach.conf"

    @property
    def plugstack(self) -> Path:
        return self.lab.slurm_conf.parent / "plugstack.conf"

    @property
    def trainer(self) -> str:
        """A shell command: a process that does one collective."""
        trainer = self.directory / "trainer"
        return f"printf '{ROUND}' | LD_LIBRARY_PATH={trainer} {trainer}/driver"

    def install(self, double: Path) -> None:
        """Compiles and lays out everything. `double`: the directory of a built gloo double."""
        library = library_path("libtocsin_gloo.so")
        assert library is not None, "the probe is not built"
        self.gloo.parent.mkdir(parents=True)
        shutil.copy(library, self.gloo)
        spank_double.build_plugin(self.directory)
        spank_double.build_container_plugin(self.directory)
        spank_double.build_static(self.directory)
        shutil.copytree(double, self.directory / "trainer")
        self.configure()

    def configure(
        self,
        *,
        library: Path | None = None,
        plugin: Path | None = None,
        arguments: str = "",
        tocsin_first: bool = False,
    ) -> None:
        """Writes both files; `library` and `plugin` take the place of the right ones."""
        self.conf.write_text(
            f"frame_root = {self.lab.frame_root}\nlibrary = {library or self.gloo}\nnccl_plugin = {self.nccl}\n"
        )
        plugin = plugin or self.directory / "tocsin_spank.so"
        lines = [f"required {self.directory}/enter_root.so\n", f"optional {plugin} conf={self.conf} {arguments}\n"]
        self.plugstack.write_text("".join(reversed(lines) if tocsin_first else lines))

    def frames(self, job: int | None = None) -> list[Path]:
        """The frames of a job, of every job when None."""
        return sorted(self.lab.frame_root.glob(f"*/{job or '*'}.*/*.frame"))

    def clear(self) -> None:
        """Removes all frame directories."""
        for directory in self.lab.frame_root.glob("*/*"):
            shutil.rmtree(directory)

    def srun(self, *argv: str, env: dict[str, str] | None = None, uid: int = 0) -> subprocess.CompletedProcess[str]:
        """`srun` that must succeed, by another user where `uid` is not 0; without srun's words on having to wait."""
        identity = ("setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups") if uid else ()
        done = self.lab.run(*identity, "srun", *argv, env=env)
        done.stderr = "".join(line for line in done.stderr.splitlines(True) if not line.startswith("srun: job "))
        return done


def told(output: str) -> dict[str, str]:
    """The variables of FRAME_VARIABLES in the output of `env`; the last one counts."""
    pairs = (line.partition("=") for line in output.splitlines())
    return {name: value for name, _, value in pairs if name in FRAME_VARIABLES}
