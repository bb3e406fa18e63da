#!/bin/bash
# Both probes in a container with an old C library: Debian 11 has glibc 2.31, in which libdl stands apart.
#
#     tests/acceptance/old_glibc.sh bullseye   as root, with debootstrap
set -euo pipefail
repository=$(cd "$(dirname "$0")/../.." && pwd)
. "$repository/tests/acceptance/debian.sh"
FRAMES=/dev/shm/tocsin/gpu001/42.0

# A process of the job, in a pid namespace, with the Debian's own /dev/shm or with one in which the frames' root is bound.
contained() {
    unshare --mount --pid --fork --propagation private sh -ec '
        root=$0; shm=$1; shift
        mount -t proc proc "$root/proc"
        mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
        [ "$shm" = none ] || { mkdir -p "$root/dev/shm/tocsin"; mount --bind "$shm" "$root/dev/shm/tocsin"; }
        exec chroot "$root" "$@"' "$root" "$@"
}

drive() {
    contained "$1" /usr/bin/env -i PATH=/usr/bin:/bin "TOCSIN_FRAME_DIR=$FRAMES" LD_PRELOAD=/root/libtocsin_gloo.so \
        python3 /root/drive_plugin.py /root/libnccl-profiler-tocsin.so
}

inside() {
    root=$1
    make_debian "$2"
    carry_files
    mount_kernel_interfaces
    cp "$repository"/node_daemon/native/lib/lib*tocsin*.so "$repository/tests/acceptance/drive_plugin.py" "$root/root/"
    in_debian apt-get update -qq
    timed "installing Python" in_debian env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends python3 >>"$root.log" 2>&1 || { tail "$root.log" >&2; exit 1; }
    in_debian ldd --version | head -n 1
    # The library binds all its symbols when it is loaded, so a program that runs says that each was found.
    [ "$(in_debian LD_PRELOAD=/root/libtocsin_gloo.so grep -c libtocsin_gloo /proc/self/maps)" -gt 0 ]

    shm=$root/frames
    mkdir -p "$shm/gpu001/42.0"
    [ "$(drive "$shm")" = followed ]
    frame=$(ls "$shm/gpu001/42.0")
    case $frame in
    1-*.nccl.frame) say "attached: $frame" ;;
    *) say "no frame: $frame" >&2 && exit 1 ;;
    esac
    rm -r "$shm"
    # Where the frames are not to be seen: success all along, and one line.
    [ "$(drive none 2>"$root.log")" = "not followed" ]
    [ "$(cat "$root.log")" = "tocsin: not watched: not there (in a container: not mounted): $FRAMES" ]
    say "all well"
}

debian "$@"
