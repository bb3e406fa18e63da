# Sourced: a throw-away Debian for a test, in namespaces of its own.
#
# The Debian lies in a directory that is removed at the end. Its mounts and processes live in mount and process
# namespaces of their own, so nothing outlives the script, `kill -9` included. What this machine knows about reaching
# packages (apt's mirror, proxies, certificates) is carried in; nothing else is.
#
# A script sources this, defines `inside ROOT ARGUMENTS...`, and ends with `debian "$@"`, or `debian` and arguments of
# its own: `inside` then runs as the namespaces' first process.
PARENT=${TMPDIR:-/var/tmp}

say() { echo "fresh: $*"; }

debian() {
    case ${1:-} in
    --inside) shift && inside "$@" ;;
    *) outside "$@" ;;
    esac
}

# Makes the directory, runs everything in namespaces, removes the directory.
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

# `debootstrap` into $root: minbase of this suite.
make_debian() {
    local scripts=/usr/share/debootstrap/scripts
    local script=$scripts/$1
    [ -e "$script" ] || script=$scripts/sid # a suite that is younger than this debootstrap
    timed debootstrap debootstrap --variant=minbase "$1" "$root" "$(mirror)" "$script" >"$root.log" 2>&1 || {
        tail -n 20 "$root.log" >&2
        exit 1
    }
}

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
