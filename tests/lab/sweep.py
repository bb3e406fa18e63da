"""Sweeping: whatever a lab left whose owner is dead (`kill -9`) goes away, nothing else does.

A lab's directory names its owner by pid and start time. Namespaces and frame directories carry the owner's pid in
their name. Directories that another user made are never looked into: `/tmp` is everybody's.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from tests.lab import network, processes, system

LABS = Path("/tmp")
SHARED_MEMORY = Path("/dev/shm")
LAB_PREFIX = "tocsin-lab-"
_TAG = re.compile(r"(?:tocsin-lab-|tocsin-)((\d+)-\d+)(?:-[a-z0-9]+)?")


def write_owner(directory: Path) -> None:
    """Write this process into a lab's directory as its owner."""
    me = system.stat(os.getpid())
    (directory / "owner").write_text(f"{os.getpid()} {me.start_ticks if me else 0}\n")


def sweep() -> list[str]:
    """Remove what dead owners left; returns the tags of the labs swept."""
    swept = []
    for tag in sorted(_tags()):
        if not _owner_lives(tag):
            _remove(tag)
            swept.append(tag)
    return swept


def _tags() -> set[str]:
    names = [*_namespaces(), *(path.name for root in (LABS, SHARED_MEMORY) for path in _ours(root))]
    return {match[1] for name in names if (match := _TAG.fullmatch(name))}


def _namespaces() -> dict[str, Path]:
    """Only root makes them, so only root sweeps them."""
    return network.namespaces() if os.geteuid() == 0 else {}


def _ours(root: Path) -> list[Path]:
    """Lab directories under `root` that this user made; links and other people's directories are not ours."""
    found = [path for path in root.glob(f"{LAB_PREFIX}*") if not path.is_symlink() and path.is_dir()]
    return [path for path in found if path.stat().st_uid == os.geteuid()]


def _owner_lives(tag: str) -> bool:
    owner = LABS / f"{LAB_PREFIX}{tag}" / "owner"
    try:
        pid, ticks = (int(word) for word in owner.read_text().split())
    except (OSError, ValueError):
        return system.stat(int(tag.partition("-")[0])) is not None
    return system.alive(pid, ticks)


def _remove(tag: str) -> None:
    directory = LABS / f"{LAB_PREFIX}{tag}"
    spaces = {name: path for name, path in _namespaces().items() if name.startswith(f"{network.PREFIX}{tag}-")}
    for pid, ticks in processes.recorded(directory / "run"):
        if system.alive(pid, ticks):
            os.kill(pid, 9)
    processes.kill_members(directory, list(spaces.values()))
    network.remove_namespaces(list(spaces))
    shutil.rmtree(SHARED_MEMORY / directory.name, ignore_errors=True)
    shutil.rmtree(directory, ignore_errors=True)
