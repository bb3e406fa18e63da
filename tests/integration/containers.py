"""A job's process in a container: a root, mounts, /dev/shm, process numbers and perhaps a user of its own.

Made of namespaces, as pyxis, enroot and apptainer make theirs; of the node it sees /usr, read-only, and what is bound.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.integration.gloo_double import DEADLINE_S

_MOUNTS = """\
set -e
root=$1; proc=$2; shift 2
mount -t tmpfs tmpfs $root
mkdir -p $root/usr $root/proc $root/dev/shm $root/tmp
for link in bin sbin lib lib64; do ln -s usr/$link $root/$link; done
mount --rbind -o ro /usr $root/usr
[ $proc = no ] || mount -t proc proc $root/proc
mount -t tmpfs tmpfs $root/dev/shm
while [ "$1" != -- ]; do mkdir -p $root$1; mount --bind $1 $root$1; shift; done
shift
exec chroot $root "$@"
"""


def children_of(pid: int) -> list[int]:
    """Numbers of its children."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextmanager
def contained(
    root: Path, bound: Sequence[Path], *command: object, env: dict[str, str], proc: bool = True, uid: int = 0
) -> Iterator[subprocess.Popen[str]]:
    """Runs the command in a container; `bound` are seen at their own paths. It is process 1 in there, and as the user
    `uid` where that is not 0. Killed in the end."""
    root.mkdir(exist_ok=True)
    mounts = ("sh", "-c", _MOUNTS, "sh", root, "yes" if proc else "no", *bound, "--")
    user = ("setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups") if uid else ()
    process = subprocess.Popen(
        [*map(str, ("unshare", "--mount", "--pid", "--fork", "--kill-child", *mounts, *user, *command))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )
    try:
        yield process
    finally:
        # Its process 1, for to become a user takes away the death signal that --kill-child has set; the rest follows.
        for child in children_of(process.pid) if process.poll() is None else ():
            os.kill(child, signal.SIGKILL)
        process.communicate(timeout=DEADLINE_S)
