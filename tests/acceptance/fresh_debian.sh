#!/bin/bash
# Proves that a newcomer's machine is enough: a fresh minbase Debian 12, a clean clone, `make demo`.
#
#     tests/acceptance/fresh_debian.sh [s1] [h1] [h2] [none] [install]   as root, with debootstrap; default: s1 h1 h2 none
#
# `install` stops after the install step. What this machine knows about reaching packages is carried in.
set -euo pipefail
repository=$(cd "$(dirname "$0")/../.." && pwd)
. "$repository/tests/acceptance/debian.sh"

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
    make_debian bookworm
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

if [ $# -gt 0 ]; then debian "$@"; else debian s1 h1 h2 none; fi
