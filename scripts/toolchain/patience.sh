# SPDX-License-Identifier: Apache-2.0
# Sourced by what downloads or builds: networks break off, and other runs may be at the same.

# patiently SECONDS COMMAND...
# Runs a program until it succeeds, three times at most and each for so long at most: one that stands
# still is ended, and what has arrived of a download that broke off is mostly there already.
patiently() {
  local seconds=$1 try
  shift
  # pip and go end with a status of their own when they are interrupted.
  trap 'exit 130' INT
  for try in 1 2 3; do
    # Not the lock of the caller's: what a program that was ended leaves behind would go on holding it.
    timeout --foreground --kill-after=30 "$seconds" "$@" 9>&- && {
      trap - INT
      return
    }
    if ((try < 3)); then
      echo "${0##*/}: $1 failed (attempt $try of 3); again in $((5 * try)) s" >&2
      sleep $((5 * try))
    fi
  done
  trap - INT
  return 1
}

# alone DESCRIPTOR
# Waits until nobody else holds the lock on an open file; for an hour at most.
alone() {
  flock --timeout 3600 "$1" || {
    echo "${0##*/}: another run has been at the same for an hour: end it, and try again" >&2
    return 1
  }
}
