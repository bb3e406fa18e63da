#!/usr/bin/python3 -IS
"""Slurm TaskProlog: attaches the probes to every task, without a change to the user's script.

Slurm runs this as the user before each task (before the batch script too) and puts every line `export NAME=value` of
its output into the task's environment; `unset NAME` takes one out. The rules, which the SPANK plugin (spank/attach.c)
shares:

* The job's frame directory, `<frame root>/<node>/<job>.<restart>`, is made, and TOCSIN_FRAME_DIR names it.
* LD_PRELOAD gets the gloo probe at its end, behind whatever the user preloads.
* NCCL_PROFILER_PLUGIN gets the NCCL plugin. NCCL loads but one: where the user names another, that goes into
  TOCSIN_NCCL_CHAIN, and ours loads it behind itself. `none` stays none.
* A probe whose library is not there is left out. A task has all of this or none: where the node daemon has not made
  `<frame root>/<node>`, where the user set TOCSIN_DISABLE=1, or where anything at all is wrong, what an outer step (the
  batch script) has attached is taken away again, and nothing else happens. A job never fails and never waits because
  of tocsin.

Settings, in /etc/tocsin/attach.conf (lines `key = value`, # comments; all keys optional):

    frame_root = /dev/shm/tocsin
    library = /opt/tocsin/lib/python3.11/site-packages/node_daemon/native/lib/libtocsin_gloo.so
    nccl_plugin = /opt/tocsin/lib/python3.11/site-packages/node_daemon/native/lib/libnccl-profiler-tocsin.so

Without the libraries' paths they are looked for in the installation that this file came with. The environment variables
TOCSIN_FRAME_ROOT, TOCSIN_PROBE_LIBRARY and TOCSIN_NCCL_PLUGIN count for more than the file. They are the user's to set,
as is LD_PRELOAD itself, and reach no further than the user's own job.

Standard library only, and any Python from 3.6: it runs with whatever /usr/bin/python3 the node has, and imports
little, since every task waits for it.
"""

import contextlib
import os
import stat
import sys
from collections.abc import Mapping

CONF_PATH = "/etc/tocsin/attach.conf"
CONF_BYTES_MAX = 64 * 1024
FRAME_ROOT = "/dev/shm/tocsin"
LIBRARY_NAME = "libtocsin_gloo.so"
NCCL_PLUGIN_NAME = "libnccl-profiler-tocsin.so"
NCCL_PLUGIN_SHORT_NAME = "tocsin"
"""NCCL's own short form of that file name."""
PLUGIN_VARIABLE = "NCCL_PROFILER_PLUGIN"
CHAIN_VARIABLE = "TOCSIN_NCCL_CHAIN"
"""Names the plugin that ours is to load behind itself."""
GLIBC_LOADERS = {"x86_64": "/lib64/ld-linux-x86-64.so.2", "aarch64": "/lib/ld-linux-aarch64.so.1"}
"""Without it in the root file system a preloaded library would keep every program from starting."""
PATH_LENGTH_MAX = 4000
VALUE_LENGTH_MAX = 64 * 1024 - 1
PRINTABLE = frozenset(map(chr, range(0x20, 0x7F)))
DIGITS = frozenset("0123456789")
NODE_CHARACTERS = DIGITS | frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-_")
# Neither space nor colon, which part the entries of LD_PRELOAD, nor the $ that ld.so expands.
PATH_CHARACTERS = NODE_CHARACTERS | frozenset("/@+,=~%")


class Settings:
    """Where things are: plain absolute paths. Raises OSError or ValueError where they cannot be used."""

    def __init__(self, environ: "Mapping[str, str]") -> None:
        told = read_conf(CONF_PATH)
        root = environ.get("TOCSIN_FRAME_ROOT") or told.get("frame_root") or FRAME_ROOT
        library = environ.get("TOCSIN_PROBE_LIBRARY") or told.get("library") or own_library(LIBRARY_NAME)
        plugin = environ.get("TOCSIN_NCCL_PLUGIN") or told.get("nccl_plugin") or own_library(NCCL_PLUGIN_NAME)
        self.frame_root = checked_path(root)
        self.library = checked_path(library)
        self.nccl_plugin = checked_path(plugin)


def main() -> None:
    """Prints the lines, or nothing."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        sys.stdout.write("".join(line + "\n" for line in export_lines(os.environ)))


def export_lines(environ: "Mapping[str, str]") -> "list[str]":
    """The lines for this task. Raises OSError or ValueError where the task must be left as it is."""
    settings = Settings(environ)
    for name in ("LD_PRELOAD", PLUGIN_VARIABLE, CHAIN_VARIABLE):
        value = environ.get(name, "")
        if len(value) > VALUE_LENGTH_MAX or not PRINTABLE.issuperset(value):
            raise ValueError(name)  # a line break would end the export line
    changes = changed_environment(environ, settings)
    unset = [f"unset {name}" for name, value in changes.items() if value is None and name in environ]
    return [f"export {name}={value}" for name, value in changes.items() if value is not None] + unset


def changed_environment(environ: "Mapping[str, str]", settings: Settings) -> "dict[str, str | None]":
    """The variables of this task that are tocsin's affair, each with its value, None where it is not to be set."""
    frame_directory = None
    if environ.get("TOCSIN_DISABLE", "") in ("", "0"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            look_around(settings)
            frame_directory = job_directory(environ, settings.frame_root)
    attach = frame_directory is not None
    changes = {"TOCSIN_FRAME_DIR": frame_directory}
    changes.update(merged_preload(environ.get("LD_PRELOAD", ""), settings.library, attach))
    plugin, chained = environ.get(PLUGIN_VARIABLE, ""), environ.get(CHAIN_VARIABLE, "")
    changes.update(merged_plugin(plugin, chained, settings.nccl_plugin, attach))
    return changes


def look_around(settings: Settings) -> None:
    """Raises FileNotFoundError where no probe can be read, or the C library that they need is not there."""
    if not any(os.access(path, os.R_OK) for path in (settings.library, settings.nccl_plugin)):
        raise FileNotFoundError(settings.library)
    loader = GLIBC_LOADERS.get(os.uname().machine)
    if loader is not None and not os.access(loader, os.F_OK):
        raise FileNotFoundError(loader)


def job_directory(environ: "Mapping[str, str]", frame_root: str) -> str:
    """The directory of this job's frames, made. Raises OSError, ValueError or KeyError where there can be none."""
    node = checked(environ["SLURMD_NODENAME"], NODE_CHARACTERS, 255)
    job = checked(environ["SLURM_JOB_ID"], DIGITS, 10)
    restart = checked(environ.get("SLURM_RESTART_COUNT") or "0", DIGITS, 5)
    parent = "{}/{}".format(frame_root.rstrip("/"), node)
    make_directory(parent, f"{job}.{restart}")
    return f"{parent}/{job}.{restart}"


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


def own_library(name: str) -> str:
    """Where a probe lies when this file runs from an installed package or from the source tree."""
    packages = os.path.realpath(__file__).rsplit("/", 2)[0]
    return f"{packages}/node_daemon/native/lib/{name}"


def checked(text: str, characters: "frozenset[str]", length_max: int) -> str:
    """`text` where it is a plain name, else ValueError."""
    if not 0 < len(text) <= length_max or text[0] in ".-" or not characters.issuperset(text):
        raise ValueError(text)
    return text


def checked_path(text: str) -> str:
    """`text` where it is an absolute path of plain characters, else ValueError."""
    if not text.startswith("/"):
        raise ValueError(text)
    return checked(text, PATH_CHARACTERS, PATH_LENGTH_MAX)


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


def merged_preload(preload: str, library: str, attach: bool) -> "dict[str, str | None]":
    """LD_PRELOAD: the user's own list, in its order, with the probe once at its end, or without it."""
    entries = [entry for entry in preload.replace(" ", ":").split(":") if entry]
    others = [entry for entry in entries if entry != library and entry.rpartition("/")[2] != LIBRARY_NAME]
    if attach and os.access(library, os.R_OK):
        return {"LD_PRELOAD": ":".join([*others, library])}
    if len(others) < len(entries):
        return {"LD_PRELOAD": ":".join(others) or None}
    return {}


def merged_plugin(plugin: str, chained: str, ours: str, attach: bool) -> "dict[str, str | None]":
    """NCCL_PROFILER_PLUGIN: ours, with the one that the user names behind it; or the user's own again."""
    is_there = is_our_plugin(plugin, ours)
    if attach and os.access(ours, os.R_OK) and plugin.lower() != "none":
        return {PLUGIN_VARIABLE: ours, **({CHAIN_VARIABLE: plugin} if plugin and not is_there else {})}
    if not is_there:
        return {}
    other = chained if chained and not is_our_plugin(chained, ours) else None
    return {PLUGIN_VARIABLE: other, **({CHAIN_VARIABLE: None} if chained else {})}


def is_our_plugin(plugin: str, ours: str) -> bool:
    """Whether NCCL would load our plugin for this: the one of the settings, or that of another version of tocsin."""
    return plugin in (ours, NCCL_PLUGIN_SHORT_NAME) or plugin.rpartition("/")[2] == NCCL_PLUGIN_NAME


if __name__ == "__main__":
    main()
