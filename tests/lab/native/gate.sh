#!/bin/bash
# Stands before a Slurm command under its name: notes the call, then lets it pass, wait or fail as the rules say.
# A rule is a file in rules/: its first line is the kind (before, after, fail), its second the words to look for,
# its third how often (fail). It holds while the file is there. A file `drop` makes those that wait give up.
here=$(cd "$(dirname "$0")" && pwd)
name=$(basename "$0")
call="$name $*"
real=$(type -aP "$name" | grep -v "^$here/" | head -n 1)
printf '%s %s\n' "$EPOCHREALTIME" "$call" >>"$here/calls"

wait_for_release() {
    : >"$1.waiting.$$"
    while [ -e "$1" ] && [ ! -e "$here/drop" ]; do
        sleep 0.05
    done
    rm -f "$1.waiting.$$"
    [ ! -e "$here/drop" ] || exit 1
}

late=
for rule in "$here"/rules/*.rule; do
    { read -r kind && read -r words && read -r times; } 2>/dev/null <"$rule" || continue
    [[ $call == *"$words"* ]] || continue
    case $kind in
    before) wait_for_release "$rule" ;;
    after) late=$rule ;;
    fail)
        for ((turn = 1; turn <= times; turn++)); do
            if mkdir "$rule.$turn" 2>/dev/null; then
                echo "$name: error: Unable to contact slurm controller (connect failure)" >&2
                exit 1
            fi
        done
        ;;
    esac
done
[ -n "$late" ] || exec "$real" "$@"
"$real" "$@"
code=$?
wait_for_release "$late"
exit $code
