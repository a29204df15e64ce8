#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Prints the hosts that horovodrun may use now: the list that the sidecar renamed into place, as
# it stands, also while the sidecar or its store is away. horovodrun runs this each second with a
# lock held and without a time limit of its own, so nothing is read here that could make it wait:
# a file of the pod's own disk, which was renamed into place whole, does not.
case $0 in
*/*) list=${0%/*}/hosts ;;
*) list=./hosts ;;
esac

# A list that does not end with its revision line is no list of the sidecar's.
print_list() {
    [ -f "$list" ] || return 1
    hosts=$(cat "$list" 2>/dev/null) || return 1
    case ${hosts##*
} in
    rev-*:0) printf '%s\n' "$hosts" ;;
    *) return 1 ;;
    esac
}

# Normally the list is there before a launcher may start. An earlier call waits: a first call that
# fails would end the job. Afterwards a failed call changes nothing.
waited=0
until print_list; do
    if [ -e "$list" ] && [ "$waited" -ge 2 ] || [ "$waited" -ge 60 ]; then
        echo "discover_hosts.sh: no host list at $list: does the muster sidecar run?" >&2
        exit 1
    fi
    waited=$((waited + 1))
    sleep 1
done
