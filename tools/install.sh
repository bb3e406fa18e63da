#!/bin/bash
# The one install step of `make demo` and `make test`, for a fresh Debian 12 or anything newer that has apt.
#
#     tools/install.sh demo|test
#
# It brings the programs that are missing (apt, only as root), makes .venv and installs tocsin into it, editable, with
# the extras that are asked for. It does nothing, and fast, when nothing has changed since the last time.
set -euo pipefail
cd "$(dirname "$0")/.."

what=${1:-}
case $what in
demo | test) ;;
*)
    echo "usage: tools/install.sh demo|test" >&2
    exit 2
    ;;
esac

say() { echo "install: $*"; }

# What must be there, and the package that brings it. Programs of Slurm live in sbin, which is not on every PATH.
export PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
programs=(
    "gcc gcc" "g++ g++" "ip iproute2" "nsenter util-linux" "nft nftables"
    "munged munge" "slurmctld slurmctld" "slurmd slurmd" "sbatch slurm-client"
)
[ "$what" = demo ] || programs+=("git git" "gdb gdb" "valgrind valgrind")

python() { # the first Python that is new enough
    local one
    for one in python3 python3.14 python3.13 python3.12 python3.11; do
        if "$one" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$one"
            return
        fi
    done
}

missing_packages() {
    local pair found
    for pair in "${programs[@]}"; do
        command -v "${pair% *}" >/dev/null || echo "${pair#* }"
    done
    [ -e /usr/include/stdio.h ] || echo libc6-dev
    [ "$what" = demo ] || [ -e /usr/include/slurm/spank.h ] || echo libslurm-dev
    [ -e "${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}" ] || echo ca-certificates
    found=$(python)
    if [ -z "$found" ] || ! "$found" -c 'import ensurepip, venv' 2>/dev/null; then
        printf '%s\n' python3 python3-venv
    fi
}

# Packages of daemons start them on installation. A policy-rc.d that says no keeps them quiet; an existing one stays.
install_packages() {
    local policy=/usr/sbin/policy-rc.d
    if [ ! -e $policy ]; then
        trap 'rm -f /usr/sbin/policy-rc.d' EXIT
        printf '#!/bin/sh\nexit 101\n' >$policy
        chmod 755 $policy
    fi
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

mapfile -t packages < <(missing_packages | sort -u)
if [ ${#packages[@]} -gt 0 ]; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        say "these are missing, and only root can bring them: apt-get install --no-install-recommends ${packages[*]}" >&2
        exit 1
    fi
    say "apt: ${packages[*]}"
    install_packages "${packages[@]}"
fi

# Everything that an installation depends on. `test` holds all that `demo` needs.
sources() {
    echo pyproject.toml CMakeLists.txt tools/install.sh
    find node_daemon/native slurm_plugins/spank -name '*.[ch]' -o -name '*.cpp' -o -name CMakeLists.txt | LC_ALL=C sort
}
# shellcheck disable=SC2046
state=$(cat $(sources) | sha256sum | cut -d' ' -f1)

up_to_date() {
    local one
    .venv/bin/python -c '' 2>/dev/null || return 1
    for one in "$what" test; do
        [ "$(cat ".venv/installed-$one" 2>/dev/null)" != "$state" ] || return 0
    done
    return 1
}

if up_to_date; then
    exit 0
fi
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    say "making .venv"
    "$(python)" -m venv --clear .venv
fi
say "pip: tocsin with the extra '$what' (the first time brings torch)"
# Quiet: pip's warnings are about the machine, not about this.
.venv/bin/python -m pip install -qq --disable-pip-version-check -e ".[$what]"
# A directory of its own: torch's CUDA builds bring another NCCL, which lies in the same place of site-packages.
nccl=nvidia-nccl-cu12==2.32.3
if [ "$what" = test ] && [ ! -e ".venv/nccl/nvidia_nccl_cu12-${nccl#*==}.dist-info" ]; then
    say "pip: $nccl, whose host code the tests call (200 MB)"
    rm -rf .venv/nccl
    .venv/bin/python -m pip install -qq --disable-pip-version-check --no-deps --target .venv/nccl "$nccl"
fi
# Tests hold what the collector believes of CUPTI to these headers, and let it call the libraries; it is built without.
headers=(nvidia-cuda-cupti==13.5.25 nvidia-cuda-cupti-cu12==12.9.79 nvidia-cuda-runtime==13.5.37 nvidia-cuda-crt==13.5.37)
if [ "$what" = test ] && [ "$(cat .venv/cupti/which 2>/dev/null)" != "${headers[*]}" ]; then
    say "pip: ${headers[*]}, which the CUPTI collector is held to (26 MB)"
    rm -rf .venv/cupti
    .venv/bin/python -m pip install -qq --disable-pip-version-check --no-deps --target .venv/cupti "${headers[@]}"
    find .venv/cupti/nvidia \( -name '*.so*' -o -name '*.a' \) ! -name 'libcupti.so*' -delete
    echo "${headers[*]}" >.venv/cupti/which
fi
echo "$state" >".venv/installed-$what"
say "done"
