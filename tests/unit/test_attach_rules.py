"""TaskProlog and SPANK plugin attach alike: both make the same environment of each case of one table."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from slurm_plugins import task_prolog
from tests.attach_cases import ATTACHED, BARE, CASES, NODE, Case, Site, after
from tests.integration.spank_double import build_rules

TASK_PROLOG = Path(task_prolog.__file__)
Attach = Callable[[Site, Mapping[str, str | None]], dict[str, str]]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a directory of another user")


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_rules(tmp_path_factory.mktemp("rules"))


@pytest.fixture(params=["TaskProlog", "SPANK plugin"])
def attach(request: pytest.FixtureRequest, rules: Path) -> Attach:
    """One of the two ways: from what a task has before to what it has after."""

    def run(site: Site, before: Mapping[str, str | None]) -> dict[str, str]:
        environment = site.environment(before)
        argv = [TASK_PROLOG] if request.param == "TaskProlog" else [rules, "/nonexistent.conf", site.directory]
        # By way of `env`, since the environment is the task's: what it preloads may not even exist.
        command = ["/usr/bin/env", *(f"{name}={value}" for name, value in environment.items()), *map(str, argv)]
        done = subprocess.run(command, env={}, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        return after(environment, done.stdout)

    return run


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name[:60])
def test_the_environment_becomes_what_the_table_says(case: Case, attach: Attach, tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.make(case.missing)
    wanted = site.environment({**case.before, **case.after})
    assert attach(site, case.before) == wanted
    made = [path.name for path in site.root.glob("*/*")]
    assert len(made) == ("TOCSIN_FRAME_DIR" in wanted)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    made = Site(tmp_path)
    made.make()
    return made


def test_the_directory_is_the_user_s_own_and_further_tasks_share_it(site: Site, attach: Attach) -> None:
    assert attach(site, {}) == attach(site, {}) == site.environment(ATTACHED)
    (directory,) = (site.root / NODE).iterdir()
    about = directory.stat()
    assert (directory.name, stat.S_IMODE(about.st_mode), about.st_uid) == ("4242.0", 0o700, os.geteuid())


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


@pytest.mark.parametrize(
    "prepare", [link_elsewhere, open_to_others, plain_file, pytest.param(foreign, marks=needs_root)]
)
def test_a_directory_that_is_not_the_user_s_own_is_refused(
    site: Site, attach: Attach, prepare: Callable[[Path], None]
) -> None:
    prepare(site.root / NODE / "4242.0")
    assert attach(site, {}) == site.environment(BARE)


def test_a_node_directory_that_is_a_link_is_refused(site: Site, attach: Attach) -> None:
    (site.root / NODE).rename(site.root / "elsewhere")
    (site.root / NODE).symlink_to(site.root / "elsewhere")
    assert attach(site, {}) == site.environment(BARE)


@needs_root
def test_a_node_directory_of_another_user_is_refused(site: Site, attach: Attach) -> None:
    os.chown(site.root / NODE, 65534, 65534)
    assert attach(site, {}) == site.environment(BARE)


CONF = """\
# where things are
frame_root = {root}  # tmpfs

library={gloo}
\tnccl_plugin =  {nccl}\t
other = 1
odd
= nothing
"""
UNTOLD = {"TOCSIN_FRAME_ROOT": None, "TOCSIN_PROBE_LIBRARY": None, "TOCSIN_NCCL_PLUGIN": None}


def from_file(conf: Path, site: Site, rules: Path, monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The lines of both ways where the environment settles nothing; the libraries are nowhere else."""
    environment = site.environment(UNTOLD)
    done = subprocess.run([rules, conf, "/nowhere"], env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(task_prolog, "CONF_PATH", str(conf))
    monkeypatch.setattr(task_prolog, "own_library", "/nowhere/{}".format)
    return [set(done.stdout.splitlines()), set(task_prolog.export_lines(environment))]


def test_the_file_settles_what_the_environment_leaves_open(
    site: Site, rules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = site.directory / "attach.conf"
    conf.write_text(site.filled(CONF))
    lines = {site.filled(f"export {name}={value}") for name, value in ATTACHED.items()}
    assert from_file(conf, site, rules, monkeypatch) == [lines, lines]


def test_without_a_file_and_without_libraries_nothing_happens(
    site: Site, rules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert from_file(site.directory / "absent.conf", site, rules, monkeypatch) == [set(), set()]


def test_without_a_file_the_libraries_beside_the_plugin_are_taken(site: Site, rules: Path) -> None:
    environment = site.environment({**UNTOLD, "TOCSIN_FRAME_ROOT": "{root}"})
    argv = [str(rules), "/nonexistent.conf", str(site.directory)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=30)
    assert after(environment, done.stdout) == {**environment, **{k: site.filled(v) for k, v in ATTACHED.items()}}
