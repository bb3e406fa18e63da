#!/usr/bin/python3 -IS
"""Slurm TaskProlog: attaches the probe to every task, without a change to the user's script.

Slurm runs this as the user before each task (before the batch script too) and puts every line `export NAME=value` of
its output into the task's environment. It makes the job's frame directory, `<frame root>/<node>/<job>.<restart>`, and
exports its path and a LD_PRELOAD that has the probe at its end, behind whatever the user preloads.

It does nothing (no output, exit 0) where the node daemon has not made `<frame root>/<node>`, where the user set
TOCSIN_DISABLE=1, or where anything at all is wrong: a job never fails and never waits because of tocsin.

Settings, in /etc/tocsin/task_prolog.conf (lines `key = value`, # comments; both keys optional):

    frame_root = /dev/shm/tocsin
    library = /opt/tocsin/lib/python3.11/site-packages/node_daemon/native/lib/libtocsin_gloo.so

Without `library` it is looked for in the installation that this file came with. The environment variables
TOCSIN_FRAME_ROOT and TOCSIN_PROBE_LIBRARY count for more than the file. They are the user's to set, as is LD_PRELOAD
itself, and reach no further than the user's own job.

Standard library only, and any Python from 3.6: it runs with whatever /usr/bin/python3 the node has, and imports
little, since every task waits for it.
"""

import contextlib
import os
import stat
import sys
from collections.abc import Mapping

CONF_PATH = "/etc/tocsin/task_prolog.conf"
CONF_BYTES_MAX = 64 * 1024
FRAME_ROOT = "/dev/shm/tocsin"
LIBRARY_NAME = "libtocsin_gloo.so"
DIGITS = frozenset("0123456789")
NODE_CHARACTERS = DIGITS | frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-_")
# Neither space nor colon, which part the entries of LD_PRELOAD, nor the $ that ld.so expands.
PATH_CHARACTERS = NODE_CHARACTERS | frozenset("/@+,=~%")


def main() -> None:
    """Prints the export lines, or nothing."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        sys.stdout.write("".join(line + "\n" for line in export_lines(os.environ)))


def export_lines(environ: "Mapping[str, str]") -> "list[str]":
    """The lines for this task. Raises OSError, ValueError or KeyError where the probe cannot be attached."""
    if environ.get("TOCSIN_DISABLE", "") not in ("", "0"):
        return []
    settings = read_conf(CONF_PATH)
    root = environ.get("TOCSIN_FRAME_ROOT") or settings.get("frame_root") or FRAME_ROOT
    library = environ.get("TOCSIN_PROBE_LIBRARY") or settings.get("library") or own_library()
    if not os.access(checked_path(library), os.R_OK):
        return []
    node = checked(environ["SLURMD_NODENAME"], NODE_CHARACTERS, 255)
    job = checked(environ["SLURM_JOB_ID"], DIGITS, 10)
    restart = checked(environ.get("SLURM_RESTART_COUNT") or "0", DIGITS, 5)
    preload = merged_preload(environ.get("LD_PRELOAD", ""), library)
    parent = "{}/{}".format(checked_path(root).rstrip("/"), node)
    name = f"{job}.{restart}"
    make_directory(parent, name)
    return [f"export TOCSIN_FRAME_DIR={parent}/{name}", f"export LD_PRELOAD={preload}"]


def read_conf(path: str) -> "dict[str, str]":
    """The settings of the file, empty where there is none."""
    try:
        conf_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return {}
    try:
        text = os.read(conf_fd, CONF_BYTES_MAX).decode("utf-8")
    finally:
        os.close(conf_fd)
    pairs = (line.split("#", 1)[0].partition("=") for line in text.splitlines())
    return {key.strip(): value.strip() for key, equals, value in pairs if equals}


def own_library() -> str:
    """Where the probe lies when this file runs from an installed package or from the source tree."""
    packages = os.path.realpath(__file__).rsplit("/", 2)[0]
    return f"{packages}/node_daemon/native/lib/{LIBRARY_NAME}"


def checked(text: str, characters: "frozenset[str]", length_max: int) -> str:
    """`text` where it is a plain name, else ValueError."""
    if not 0 < len(text) <= length_max or text[0] in ".-" or not characters.issuperset(text):
        raise ValueError(text)
    return text


def checked_path(text: str) -> str:
    """`text` where it is an absolute path of plain characters, else ValueError."""
    if not text.startswith("/"):
        raise ValueError(text)
    return checked(text, PATH_CHARACTERS, 4096)


def make_directory(parent: str, name: str) -> None:
    """Makes `name` in the daemon's directory, or takes the one that an earlier task of this user made.

    Follows no link. Raises ValueError for a parent that is neither root's nor this user's (the daemon runs as root on
    a cluster, as the user when somebody tries tocsin out) and for a directory that is not this user's own and private.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    parent_fd = os.open(parent, flags)
    try:
        if os.fstat(parent_fd).st_uid not in (0, os.geteuid()):
            raise ValueError(parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent_fd)
        about = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
    finally:
        os.close(parent_fd)
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
        raise ValueError(name)


def merged_preload(preload: str, library: str) -> str:
    """The user's own list, in its order, with the probe once at its end."""
    if not preload.isprintable():
        raise ValueError("LD_PRELOAD")  # a line break would end the export line
    entries = [entry for entry in preload.replace(" ", ":").split(":") if entry and entry != library]
    return ":".join([*entries, library])


if __name__ == "__main__":
    main()
