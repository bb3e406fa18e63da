#!/bin/bash
# Proves that a newcomer's machine is enough: a fresh minbase Debian 12, a clean clone, `make demo`.
#
#     tests/acceptance/fresh_debian.sh [s1] [h1] [h2] [none] [install]   as root, with debootstrap; default: s1 h1 h2 none
#
# `install` stops after the install step. The Debian lies in a directory that is removed at the end. Its mounts and
# processes live in mount and process namespaces of their own, so nothing outlives this script, `kill -9` included.
# What this machine knows about reaching packages (apt's mirror, pip's configuration, proxies, certificates) is
# carried in; nothing else is.
set -euo pipefail
repository=$(cd "$(dirname "$0")/../.." && pwd)
PARENT=${TMPDIR:-/var/tmp}

say() { echo "fresh: $*"; }

# -- outside: make the directory, run everything in namespaces, remove the directory ---------------------------------

outside() {
    [ "$(id -u)" = 0 ] || { echo "fresh: only root can do this" >&2; exit 2; }
    command -v debootstrap >/dev/null || { echo "fresh: debootstrap is missing" >&2; exit 2; }
    root=$(mktemp -d "$PARENT/tocsin-fresh.XXXXXX")
    chmod 755 "$root" # it becomes the / of other users too
    # The namespaces are gone when unshare returns, and with them every mount: only plain files are left to remove.
    trap 'rm -rf --one-file-system "$root" "$root.log"' EXIT
    unshare --mount --propagation private --pid --fork --kill-child=SIGKILL --mount-proc \
        "$0" --inside "$root" "$@"
}

# -- inside: the Debian ----------------------------------------------------------------------------------------------

# The first mirror from which this machine's apt takes bookworm itself.
mirror() {
    apt-get indextargets --format '$(RELEASE) $(COMPONENT) $(REPO_URI)' 'Created-By: Packages' |
        awk '$1 == "bookworm" && $2 == "main" { print $3; exit }'
}

# Configuration that says how to reach packages, at the same path in the Debian.
carry_files() {
    local path
    for path in /etc/resolv.conf /etc/hosts /etc/pip.conf /etc/xdg/pip /root/.config/pip /root/.pip; do
        [ -e "$path" ] || continue
        mkdir -p "$root$(dirname "$path")"
        cp -aL "$path" "$root$(dirname "$path")/"
    done
    apt-config dump | grep -i '^Acquire::.*proxy' >"$root/etc/apt/apt.conf.d/99proxy" || true
    if [ -e /etc/ssl/certs/ca-certificates.crt ]; then # becomes part of the bundle when ca-certificates is installed
        mkdir -p "$root/usr/local/share/ca-certificates"
        cp /etc/ssl/certs/ca-certificates.crt "$root/usr/local/share/ca-certificates/this-machine.crt"
    fi
}

# Directories of packages on this disk that pip is configured to use, read-only at the same path. An index's pages
# point beside it, so the directory above a file:// index comes along.
carry_package_directories() {
    local word path
    for word in $(python3 -m pip config list 2>/dev/null | sed "s/^[^=]*='\(.*\)'$/\1/"); do
        case $word in
        file://*) path=$(dirname "${word#file://}") ;;
        /*) path=$word ;;
        *) continue ;;
        esac
        if [ -d "$path" ] && [ "$path" != / ] && ! mountpoint -q "$root$path"; then
            mkdir -p "$root$path"
            mount --bind "$path" "$root$path"
            mount -o remount,bind,ro "$root$path"
        fi
    done
}

mount_kernel_interfaces() {
    mount -t proc proc "$root/proc"
    mount --bind /sys "$root/sys"
    mount --bind /dev "$root/dev"
    mount --bind /dev/pts "$root/dev/pts"
    mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
}

in_debian() {
    local keep
    keep=$(env | grep -iE '^(pip_[a-z_]*|[a-z]*_proxy|ssl_cert_[a-z]*|requests_ca_bundle|curl_ca_bundle)=' | tr '\n' ' ')
    # shellcheck disable=SC2086
    chroot "$root" /usr/bin/env -i HOME=/root TERM=dumb LANG=C.UTF-8 PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
        $keep "$@"
}

timed() {
    local what=$1 began
    shift
    began=$(date +%s)
    "$@"
    say "$what took $(($(date +%s) - began)) s"
}

# Everything that must be gone when a demo has ended; pid 1 here is this script.
check_nothing_left() {
    local left
    left=$(
        find "$root/dev/shm" "$root/tmp" -mindepth 1 -name 'tocsin*'
        [ ! -d "$root/run/netns" ] || find "$root/run/netns" -mindepth 1
        pgrep -a 'slurm|munged' || true
    )
    [ -z "$left" ] || { say "left behind: $left" >&2; exit 1; }
}

inside() {
    root=$1
    shift
    timed debootstrap debootstrap --variant=minbase bookworm "$root" "$(mirror)" >"$root.log" 2>&1 || {
        tail -n 20 "$root.log" >&2
        exit 1
    }
    carry_files
    carry_package_directories
    mount_kernel_interfaces
    git -c safe.directory='*' clone --quiet "$repository" "$root/root/tocsin"
    in_debian apt-get update -qq
    in_debian apt-get install -y -qq --no-install-recommends make >/dev/null 2>&1
    timed "the install step" in_debian /root/tocsin/tools/install.sh demo
    check_nothing_left # a daemon that apt started would show here
    for fault in "$@"; do
        [ "$fault" != install ] || break
        timed "make demo FAULT=$fault" in_debian make -C /root/tocsin demo "FAULT=$fault" </dev/null
        check_nothing_left
    done
    say "all well"
}

case ${1:-} in
--inside) shift && inside "$@" ;;
*) if [ $# -gt 0 ]; then outside "$@"; else outside s1 h1 h2 none; fi ;;
esac
