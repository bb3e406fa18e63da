#!/usr/bin/python3 -IS
"""Slurm TaskProlog: attaches the probe to every task, without a change to the user's script.

Slurm runs this as the user before each task (before the batch script too) and puts every line `export NAME=value` of
its output into the task's environment. It makes the job's frame directory, `<frame root>/<node>/<job>.<restart>`, and
exports where it is and a LD_PRELOAD that has the probe at its end, behind whatever the user preloads.

It does nothing (no output, exit 0) where the node daemon has not made `<frame root>/<node>`, where the user set
TOCSIN_DISABLE=1, or where anything at all is wrong: a job never fails and never waits because of tocsin.

Settings, in /etc/tocsin/task_prolog.conf (lines `key = value`, # comments; both keys optional):

    frame_root = /dev/shm/tocsin
    library = /opt/tocsin/lib/.../node_daemon/native/lib/libtocsin_gloo.so

Without `library` it is looked for in this installation, beside the package that this file came with. The environment
variables TOCSIN_FRAME_ROOT and TOCSIN_PROBE_LIBRARY count for more than the file. They are the user's to set, as is
LD_PRELOAD itself, and reach no further than the user's own job.

Standard library only, and any Python from 3.6: it runs with whatever /usr/bin/python3 the node has.
"""

import os
import re
import stat
import sys

CONF_PATH = "/etc/tocsin/task_prolog.conf"
CONF_BYTES_MAX = 64 * 1024
FRAME_ROOT = "/dev/shm/tocsin"
LIBRARY_NAME = "libtocsin_gloo.so"
# ld.so splits LD_PRELOAD at spaces and colons and expands $; a line break would end the export line.
PATH_PATTERN = re.compile(r"/[\w.@+,=/-]*")
NODE_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
NUMBER_PATTERN = re.compile(r"[0-9]{1,10}")


def main():
    """Prints the export lines, or nothing."""
    try:
        lines = export_lines(os.environ)
    except (OSError, ValueError, KeyError):
        return
    sys.stdout.write("".join(line + "\n" for line in lines))


def export_lines(environ):
    """The lines for this task. Raises OSError, ValueError or KeyError where the probe cannot be attached."""
    if environ.get("TOCSIN_DISABLE", "") not in ("", "0"):
        return []
    settings = read_conf(CONF_PATH)
    root = checked(PATH_PATTERN, environ.get("TOCSIN_FRAME_ROOT") or settings.get("frame_root") or FRAME_ROOT)
    library = environ.get("TOCSIN_PROBE_LIBRARY") or settings.get("library") or own_library()
    checked(PATH_PATTERN, library)
    if not os.access(library, os.R_OK):
        return []
    node = checked(NODE_PATTERN, environ["SLURMD_NODENAME"])
    job = checked(NUMBER_PATTERN, environ["SLURM_JOB_ID"])
    restart = checked(NUMBER_PATTERN, environ.get("SLURM_RESTART_COUNT") or "0")
    name = job + "." + restart
    make_directory(os.path.join(root, node), name)
    return [
        "export TOCSIN_FRAME_DIR=" + os.path.join(root, node, name),
        "export LD_PRELOAD=" + merged_preload(environ.get("LD_PRELOAD", ""), library),
    ]


def read_conf(path):
    """The settings of the file, empty where there is none."""
    try:
        with open(path, encoding="utf-8") as source:
            text = source.read(CONF_BYTES_MAX)
    except FileNotFoundError:
        return {}
    pairs = (line.split("#", 1)[0].partition("=") for line in text.splitlines())
    return {key.strip(): value.strip() for key, equals, value in pairs if equals}


def own_library():
    """Where the probe lies when this file runs from the installed package or the source tree."""
    packages = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    return os.path.join(packages, "node_daemon", "native", "lib", LIBRARY_NAME)


def checked(pattern, text):
    """`text` if all of it matches, else ValueError."""
    if not pattern.fullmatch(text):
        raise ValueError(text)
    return text


def make_directory(parent, name):
    """Makes `name` in the daemon's directory, or takes the one that an earlier task of this user made.

    Follows no link, and refuses a parent that is neither root's nor this user's (the daemon runs as root on a cluster,
    as the user when somebody tries tocsin out) and a directory that is not this user's own and private.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    parent_fd = os.open(parent, flags)
    try:
        if os.fstat(parent_fd).st_uid not in (0, os.geteuid()):
            raise ValueError(parent)
        try:
            os.mkdir(name, 0o700, dir_fd=parent_fd)
        except FileExistsError:
            pass
        directory_fd = os.open(name, flags, dir_fd=parent_fd)
        try:
            about = os.fstat(directory_fd)
        finally:
            os.close(directory_fd)
    finally:
        os.close(parent_fd)
    if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
        raise ValueError(name)


def merged_preload(preload, library):
    """The user's own list, in its order, with the probe once at its end."""
    entries = [entry for entry in re.split("[ :]+", preload) if entry and entry != library]
    return ":".join(entries + [library])


if __name__ == "__main__":
    main()
