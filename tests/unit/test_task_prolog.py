"""The TaskProlog as Slurm runs it: a program with an environment, whose export lines count."""

from __future__ import annotations

import ast
import os
import stat
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from slurm_plugins import task_prolog

SCRIPT = Path(task_prolog.__file__)


@dataclass(frozen=True)
class Site:
    """A node whose daemon has made its directory, and a task's environment there."""

    root: Path
    library: Path

    @property
    def node_directory(self) -> Path:
        return self.root / "gpu-n01"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "TOCSIN_FRAME_ROOT": str(self.root),
            "TOCSIN_PROBE_LIBRARY": str(self.library),
            "SLURMD_NODENAME": "gpu-n01",
            "SLURM_JOB_ID": "4242",
        }

    def run(self, **changes: str | None) -> dict[str, str]:
        """What the task would get. A change to None takes the variable away."""
        merged = {name: value for name, value in {**self.environment, **changes}.items() if value is not None}
        done = subprocess.run([SCRIPT], env=merged, capture_output=True, text=True, timeout=30)
        assert (done.returncode, done.stderr) == (0, "")
        pairs = (line.removeprefix("export ").partition("=") for line in done.stdout.splitlines())
        return {name: value for name, _, value in pairs}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    made = Site(tmp_path / "frames", tmp_path / "libtocsin_gloo.so")
    made.node_directory.mkdir(parents=True)
    made.node_directory.chmod(0o1777)
    # The loader complains about what it cannot preload, so this one must really be a library.
    subprocess.run(["cc", "-shared", "-nostdlib", "-x", "c", "/dev/null", "-o", made.library], check=True, timeout=30)
    return made


def test_a_task_gets_its_directory_and_the_probe(site: Site) -> None:
    told = site.run()
    assert told == {"TOCSIN_FRAME_DIR": str(site.node_directory / "4242.0"), "LD_PRELOAD": str(site.library)}
    about = Path(told["TOCSIN_FRAME_DIR"]).stat()
    assert (stat.S_IMODE(about.st_mode), about.st_uid) == (0o700, os.geteuid())


def test_a_restarted_job_gets_another_directory(site: Site) -> None:
    assert site.run(SLURM_RESTART_COUNT="3")["TOCSIN_FRAME_DIR"].endswith("/gpu-n01/4242.3")


def test_further_tasks_of_the_job_share_the_directory(site: Site) -> None:
    assert site.run() == site.run()
    assert [path.name for path in site.node_directory.iterdir()] == ["4242.0"]


def test_the_user_s_own_preload_comes_first_and_the_probe_once(site: Site) -> None:
    other = site.library.with_name("libother.so")
    other.write_bytes(site.library.read_bytes())
    assert site.run(LD_PRELOAD=str(other))["LD_PRELOAD"] == f"{other}:{site.library}"
    # What srun inherits from the batch step has the probe already.
    for inherited in (f"{other}:{site.library}", f"{site.library} {other}", f"{other}::{site.library}:{site.library}"):
        assert site.run(LD_PRELOAD=inherited)["LD_PRELOAD"] == f"{other}:{site.library}"


@pytest.mark.parametrize("value", ["1", "yes"])
def test_the_user_can_turn_it_off(site: Site, value: str) -> None:
    assert site.run(TOCSIN_DISABLE=value) == {}
    assert list(site.node_directory.iterdir()) == []


@pytest.mark.parametrize("value", ["", "0"])
def test_an_empty_or_zero_switch_turns_nothing_off(site: Site, value: str) -> None:
    assert site.run(TOCSIN_DISABLE=value) != {}


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURMD_NODENAME": None},
        {"SLURMD_NODENAME": ""},
        {"SLURMD_NODENAME": "other"},
        {"SLURMD_NODENAME": "../gpu-n01"},
        {"SLURMD_NODENAME": ".."},
        {"SLURM_JOB_ID": None},
        {"SLURM_JOB_ID": "42_7"},
        {"SLURM_JOB_ID": "4/2"},
        {"SLURM_JOB_ID": "1" * 11},
        {"SLURM_JOB_ID": "\u0664\u0662"},  # digits, but not ours
        {"SLURM_RESTART_COUNT": "-1"},
        {"SLURM_RESTART_COUNT": "1 2"},
        {"TOCSIN_FRAME_ROOT": "relative"},
        {"TOCSIN_FRAME_ROOT": "/nowhere/at/all"},
        {"TOCSIN_FRAME_ROOT": "/dev/null"},
        {"TOCSIN_PROBE_LIBRARY": "/nowhere/libtocsin_gloo.so"},
        {"TOCSIN_PROBE_LIBRARY": "libtocsin_gloo.so"},
        {"TOCSIN_PROBE_LIBRARY": "/tmp/a b.so"},
        {"TOCSIN_PROBE_LIBRARY": "/tmp/a.so\nexport PATH=/evil"},
    ],
    ids=repr,
)
def test_anything_odd_attaches_nothing_and_fails_nothing(site: Site, changes: dict[str, str | None]) -> None:
    assert site.run(**changes) == {}
    assert list(site.node_directory.iterdir()) == []


@pytest.mark.parametrize("preload", ["\nexport PATH=/evil", "/a.so\rb", "/a\udcff.so"], ids=repr)
def test_a_preload_that_would_break_the_line_attaches_nothing(site: Site, preload: str) -> None:
    with pytest.raises(ValueError, match="LD_PRELOAD"):
        task_prolog.export_lines({**site.environment, "LD_PRELOAD": preload})
    assert list(site.node_directory.iterdir()) == []


def test_without_the_daemon_s_directory_nothing_happens(site: Site) -> None:
    site.node_directory.rmdir()
    assert site.run() == {}
    assert list(site.root.iterdir()) == []


def link_elsewhere(path: Path) -> None:
    path.symlink_to(path.parents[1])


def open_to_others(path: Path) -> None:
    path.mkdir()
    path.chmod(0o755)


def plain_file(path: Path) -> None:
    path.touch()


def foreign(path: Path) -> None:
    path.mkdir(0o700)
    os.chown(path, 65534, 65534)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a directory of another user")


@pytest.mark.parametrize(
    "prepare", [link_elsewhere, open_to_others, plain_file, pytest.param(foreign, marks=needs_root)]
)
def test_a_directory_that_is_not_the_user_s_own_is_refused(site: Site, prepare: Callable[[Path], None]) -> None:
    prepare(site.node_directory / "4242.0")
    assert site.run() == {}


def test_a_node_directory_that_is_a_link_is_refused(site: Site) -> None:
    site.node_directory.rename(site.root / "elsewhere")
    site.node_directory.symlink_to(site.root / "elsewhere")
    assert site.run() == {}


@needs_root
def test_a_node_directory_of_another_user_is_refused(site: Site) -> None:
    os.chown(site.node_directory, 65534, 65534)
    assert site.run() == {}


def test_the_file_settles_what_the_environment_leaves_open(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    conf = site.root.parent / "task_prolog.conf"
    conf.write_text(
        f"# where things are\nframe_root = {site.root}  # tmpfs\n\nlibrary={site.library}\nother = 1\nodd\n"
    )
    monkeypatch.setattr(task_prolog, "CONF_PATH", str(conf))
    environment = {"SLURMD_NODENAME": "gpu-n01", "SLURM_JOB_ID": "7"}
    assert task_prolog.export_lines(environment) == [
        f"export TOCSIN_FRAME_DIR={site.node_directory}/7.0",
        f"export LD_PRELOAD={site.library}",
    ]


def test_without_settings_the_library_of_this_installation_is_taken(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_prolog, "CONF_PATH", str(site.root / "absent.conf"))
    assert task_prolog.own_library() == str(
        SCRIPT.resolve().parents[1] / "node_daemon" / "native" / "lib" / "libtocsin_gloo.so"
    )
    monkeypatch.setattr(task_prolog, "own_library", lambda: str(site.library))
    environment = {"TOCSIN_FRAME_ROOT": str(site.root), "SLURMD_NODENAME": "gpu-n01", "SLURM_JOB_ID": "7"}
    assert len(task_prolog.export_lines(environment)) == 2


def test_it_is_executable_and_says_nothing_that_python_3_6_does_not_understand() -> None:
    assert os.access(SCRIPT, os.X_OK)
    ast.parse(SCRIPT.read_text(), feature_version=(3, 6))
