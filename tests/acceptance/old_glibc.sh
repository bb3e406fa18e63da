#!/bin/bash
# The preloaded library in a container with an old C library: Debian 11 has glibc 2.31, in which libdl stands apart.
#
#     tests/acceptance/old_glibc.sh bullseye   as root, with debootstrap
set -euo pipefail
repository=$(cd "$(dirname "$0")/../.." && pwd)
. "$repository/tests/acceptance/debian.sh"

inside() {
    root=$1
    make_debian "$2"
    mount_kernel_interfaces
    cp "$repository/node_daemon/native/lib/libtocsin_gloo.so" "$root/root/"
    in_debian ldd --version | head -n 1
    # The library binds all its symbols when it is loaded, so a program that runs says that each was found.
    [ "$(in_debian LD_PRELOAD=/root/libtocsin_gloo.so grep -c libtocsin_gloo /proc/self/maps)" -gt 0 ]
    say "all well"
}

debian "$@"
