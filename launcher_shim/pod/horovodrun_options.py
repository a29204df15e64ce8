# SPDX-License-Identifier: Apache-2.0
"""horovodrun's options, as version 0.28.1 reads them: one table, and those that cannot hold.

A unique prefix of an option stands for the whole, and the first word that is no option begins the
worker's command.
"""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Sequence

_HOSTS = "the launcher's sidecar tells which hosts there are; leave it out"
_NO_SSH = "no ssh is used; leave it out"
_GLOO = "an elastic job needs Gloo; leave it out"

REFUSED = {
    **dict.fromkeys(("-H", "--hosts", "-hostfile", "--hostfile"), _HOSTS),
    **dict.fromkeys(("-p", "--ssh-port", "-i", "--ssh-identity-file"), _NO_SSH),
    **dict.fromkeys(("--mpi", "--jsrun", "--mpi-args", "--tcp", "--binding-args"), _GLOO),
    "--reset-limit": (
        "each join and leave counts against it, so that it ends a job for being elastic; "
        "leave it out"
    ),
}
"""Options that cannot hold beside a sidecar: for each, the reason, and what to do."""

PROCESSES = ("-np", "--num-proc")
LEAST = ("--min-np", "--min-num-proc")
MOST = ("--max-np", "--max-num-proc")
INTERFACE = ("--network-interface", "--network-interfaces")
DISCOVERY = "--host-discovery-script"
SLOTS = "--slots-per-host"

GLOO_TIMEOUT = "--gloo-timeout-seconds"
DEFAULTS = {
    # Bounds how long a newcomer may take to start, image and imports, and how long a loss stops
    # the others: a pod's disk is cold.
    GLOO_TIMEOUT: ("60",),
    # Bounds how long the job may be paused, or wait below min: a week.
    "--elastic-timeout": ("604800",),
    # A container that was started again in its pod may come back; a new pod has a new name.
    "--blacklist-cooldown-range": ("5", "60"),
}
"""Options that an elastic job gets if its user gives no others."""

FLAGS = frozenset(
    (
        *("-h", "--help", "-v", "--version", "-cb", "--check-build", "--disable-cache"),
        *("--hierarchical-allreduce", "--no-hierarchical-allreduce", "--hierarchical-allgather"),
        *("--no-hierarchical-allgather", "--torus-allreduce", "--no-torus-allreduce", "--autotune"),
        *("--no-autotune", "--timeline-mark-cycles", "--no-timeline-mark-cycles", "--verbose"),
        *("--stall-check", "--no-stall-check", "--mpi-threads-disable", "--gloo", "--tcp"),
        *("--no-mpi-threads-disable", "--log-with-timestamp", "--log-without-timestamp"),
        *("-prefix-timestamp", "--prefix-output-with-timestamp", "--log-hide-timestamp"),
        *("--no-log-hide-timestamp", "--mpi", "--jsrun"),
    )
)
"""Options that take no value."""
TELLS_ONLY = frozenset(("-h", "--help", "-v", "--version", "-cb", "--check-build"))
"""Options with which it prints something and starts nothing."""
_WITH_TWO_VALUES = ("--blacklist-cooldown-range",)
_WITH_VALUE = (
    *("--start-timeout", "--output-filename", "--config-file", "--fusion-threshold-mb"),
    *("--cycle-time-ms", "--cache-capacity", "--autotune-log-file", "--autotune-warmup-samples"),
    *("--autotune-steps-per-sample", "--autotune-bayes-opt-max-samples", "--elastic-timeout"),
    *("--autotune-gaussian-process-noise", "--timeline-filename", "--num-nccl-streams"),
    *("--stall-check-warning-time-seconds", "--stall-check-shutdown-time-seconds"),
    *("--thread-affinity", "--gloo-timeout-seconds", "--log-level"),
    *(*PROCESSES, *LEAST, *MOST, *INTERFACE, DISCOVERY, SLOTS),
)
_OPTIONS = frozenset((*REFUSED, *FLAGS, *_WITH_VALUE, *_WITH_TWO_VALUES))


class GivenOption(NamedTuple):
    """One option of a command line, under its full name; ``words`` are all of it as written."""

    name: str
    value: Optional[str]
    words: Sequence[str]


class GivenOptions(NamedTuple):
    """The options that a command line gives before the worker's command, and that command."""

    options: List[GivenOption]
    command: Sequence[str]

    def value(self, names: Sequence[str]) -> Optional[str]:
        """Return the last value of an option, by any of its names; None if it is not given."""
        return next((o.value for o in reversed(self.options) if o.name in names), None)

    def names(self) -> List[str]:
        """Return the name of every option that is given."""
        return [option.name for option in self.options]


def read_options(words: Sequence[str]) -> GivenOptions:
    """Parse horovodrun's arguments."""
    left = list(words)
    given: List[GivenOption] = []
    while left and left[0] not in ("-", "--") and left[0].startswith("-"):
        written, equals, value = left[0].partition("=")
        name = full_name(written)
        values = 0
        if not equals and name not in FLAGS:
            values = 2 if name in _WITH_TWO_VALUES else 1
        taken = left[: values + 1]
        del left[: values + 1]
        text = value if equals else taken[-1] if values and len(taken) > 1 else None
        given.append(GivenOption(name, text, tuple(taken)))
    return GivenOptions(given, tuple(left))


def full_name(given: str) -> str:
    """Return the option that a word stands for."""
    if given in _OPTIONS:
        return given
    matches = [option for option in _OPTIONS if option.startswith(given)]
    if len(matches) == 1:
        return matches[0]
    # -p22: a single letter with its value behind it.
    return given[:2] if given[:2] in ("-H", "-p", "-i") else given
