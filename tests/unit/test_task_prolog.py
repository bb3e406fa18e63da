"""The TaskProlog as a program. What it attaches, and when, stands in `test_attach_rules`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm_plugins import task_prolog

SCRIPT = Path(task_prolog.__file__)


def test_without_settings_the_libraries_of_this_installation_are_taken() -> None:
    libraries = SCRIPT.resolve().parents[1] / "node_daemon" / "native" / "lib"
    assert task_prolog.own_library(task_prolog.LIBRARY_NAME) == str(libraries / "libtocsin_gloo.so")
    assert task_prolog.own_library(task_prolog.NCCL_PLUGIN_NAME) == str(libraries / "libnccl-profiler-tocsin.so")


def test_the_file_that_is_deployed_has_every_key_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    conf = SCRIPT.resolve().parents[1] / "deploy" / "attach.conf"
    monkeypatch.setattr(task_prolog, "CONF_PATH", str(conf))
    settings = task_prolog.Settings({})
    assert task_prolog.read_conf(str(conf)) == vars(settings)


def test_it_is_executable() -> None:
    assert os.access(SCRIPT, os.X_OK)
