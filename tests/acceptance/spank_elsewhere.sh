#!/bin/bash
# The SPANK plugin in the Slurm of another Debian: compiled there, and put to the tests that it passes here.
#
#     tests/acceptance/spank_elsewhere.sh trixie|forky   as root, with debootstrap; trixie has Slurm 24.11, forky 26.05
#
# The probe's library is the one that was built on this machine: that it runs there is a part of the test.
set -euo pipefail
repository=$(cd "$(dirname "$0")/../.." && pwd)
. "$repository/tests/acceptance/debian.sh"
LIBRARIES=node_daemon/native/lib
PACKAGES="slurmctld slurmd slurm-client munge libslurm-dev gcc g++ libc6-dev iproute2 mount procps python3-pytest python3-numpy"

# As in a Debian of its own: its root is the root of the mount namespace, so that the tests can make further ones.
in_its_own_root() {
    # shellcheck disable=SC2016
    unshare --mount --propagation private sh -ec '
        mount --rbind "$0" "$0"; cd "$0"; pivot_root . .; umount -l .; cd /root/tocsin; exec "$@"' "$root" \
        /usr/bin/env -i HOME=/root TERM=dumb LANG=C.UTF-8 PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
        PYTHONPATH=/root/tocsin PYTHONDONTWRITEBYTECODE=1 "$@"
}

inside() {
    root=$1
    make_debian "$2"
    carry_files
    # The list of a suite that is still growing has a date, and a mirror may be kept as it was on a day.
    echo 'Acquire::Check-Valid-Until "false";' >"$root/etc/apt/apt.conf.d/99any-day"
    printf '#!/bin/sh\nexit 101\n' >"$root/usr/sbin/policy-rc.d"
    chmod 755 "$root/usr/sbin/policy-rc.d"
    mount_kernel_interfaces
    git -c safe.directory='*' clone --quiet "$repository" "$root/root/tocsin"
    mkdir -p "$root/root/tocsin/$LIBRARIES"
    cp "$repository/$LIBRARIES/libtocsin_gloo.so" "$root/root/tocsin/$LIBRARIES/"
    in_debian apt-get update -qq
    # shellcheck disable=SC2086
    timed "installing Slurm" in_debian env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends $PACKAGES >>"$root.log" 2>&1 || {
        tail -n 20 "$root.log" >&2
        exit 1
    }
    say "$(in_debian slurmctld -V)"
    # No torch there: the test with torchrun is for here.
    timed "the tests" in_its_own_root python3 -m pytest -q -c /dev/null --rootdir=/root/tocsin -p no:cacheprovider \
        tests/integration/test_spank.py -k "not torchrun"
    say "all well"
}

debian "$@"
