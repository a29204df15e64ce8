# SPDX-License-Identifier: Apache-2.0
"""The command line and environment of horovodrun in a launcher's container: pure.

The counts and the interface that its user gave keep their meaning. Muster decides where the hosts
are, and how their workers are started: an operator's settings for that are overridden. Options are
read as version 0.28.1 reads them: a unique prefix of an option stands for the whole, and the first
word that is no option begins the worker's command.
"""

from __future__ import annotations

import re
import shlex
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

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
_COUNTS = "the number of processes follows from --nodes, --min, --max and --slots-per-host"
_LOOPBACK = "all nodes are on this machine's loopback; leave it out"
_REFUSED_HERE = {
    **REFUSED,
    **dict.fromkeys((*PROCESSES, *LEAST, *MOST), _COUNTS),
    DISCOVERY: _HOSTS,
    **dict.fromkeys(INTERFACE, _LOOPBACK),
}
# On one machine a newcomer's imports are cached, so a loss need not stop the others for long.
_DEFAULTS_HERE = {**DEFAULTS, GLOO_TIMEOUT: ("30",)}
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
    """Parse horovodrun's arguments.

    A unique prefix of an option stands for the whole, and the first word that is no option
    begins the worker's command.
    """
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


NEEDED = re.compile(
    r"(HOME|USER|LOGNAME|SHELL|TMPDIR|TZ|LANG|LC_\w+|LD_LIBRARY_PATH|LD_PRELOAD|PYTHON\w+"
    r"|VIRTUAL_ENV|CONDA_\w+|HOROVOD_\w+|NCCL_\w+|GLOO_\w+)\Z",
    re.ASCII,
)
"""The variables that horovodrun needs, or has to hand on to its workers. It puts all of its
environment on command lines, so it gets no others: each pod has its own."""

LINE_MAX_BYTES = 128 * 1024
"""Maximum length of an argument in Linux: a worker's command is one, with all variables in it."""
LINE_OWN_BYTES = 4 * 1024
"""Maximum length of what horovodrun itself adds to it."""
LARGEST = 3


class LineError(ValueError):
    """A command line or an environment that cannot hold: one sentence."""


class JobSize(NamedTuple):
    """Fewest and most nodes of the job, and the worker processes of each."""

    least: int
    most: int
    slots: int

    @classmethod
    def of(cls, delivered: Mapping[str, str]) -> JobSize:
        """Parse the size that the sidecar has delivered; raises ``LineError``."""
        match = re.fullmatch(r"(\d+):(\d+)", delivered.get("PET_NNODES", ""))
        slots = delivered.get("MUSTER_SLOTS", "1")
        if match is None or not slots.isdigit():
            raise LineError("the sidecar has not delivered the size of the job: is it of 0.1.0?")
        return cls(int(match.group(1)), int(match.group(2)), int(slots))


def arguments(
    words: Sequence[str], discovery: str, interface: str, size: JobSize
) -> Tuple[List[str], List[str]]:
    """Return horovodrun's arguments, and a sentence for each of the user's that is overruled.

    ``discovery`` is the script that prints the host list, ``interface`` the one of the pod's
    address. Raises ``LineError``.
    """
    given = read_options(words)
    said: List[str] = []
    for option in given.options:
        if option.name in REFUSED:
            raise LineError(f"horovodrun's {option.name} cannot hold: {REFUSED[option.name]}")
        if option.name == DISCOVERY and option.value != discovery:
            said.append(f"{DISCOVERY} {option.value} is overruled by {discovery}")
    said += _counts(given, size)
    ours: Dict[str, Tuple[str, ...]] = {DISCOVERY: (discovery,)}
    names = given.names()
    if not set(names) & set(INTERFACE):
        ours[INTERFACE[0]] = (interface,)
    fewest = str(size.least * size.slots)
    if not set(names) & {*PROCESSES, *LEAST}:
        ours[LEAST[0]] = (fewest,)
    if not set(names) & set(PROCESSES):
        # It starts with no fewer than that, and takes in the hosts that are there.
        ours[PROCESSES[0]] = (given.value(LEAST) or fewest,)
    ours.update((name, values) for name, values in DEFAULTS.items() if name not in names)
    kept = [word for o in given.options if o.name != DISCOVERY for word in o.words]
    added = [word for name, values in ours.items() for word in (name, *values)]
    return [*added, *kept, *given.command], said


def _counts(given: GivenOptions, size: JobSize) -> List[str]:
    """Describe the counts that differ from the job's; raises ``LineError`` if they cannot hold."""
    slots = _count(given, (SLOTS,))
    if slots not in (None, size.slots):
        raise LineError(
            f"{SLOTS} {slots} cannot hold: each node has {size.slots} slots; give the same, or"
            " leave it out"
        )
    fewest, most = size.least * size.slots, size.most * size.slots
    least = _count(given, LEAST) or _count(given, PROCESSES)
    limit = _count(given, MOST)
    start = _count(given, PROCESSES)
    for name, count in ((LEAST[0], least), (PROCESSES[0], start)):
        if count is not None and count > most:
            raise LineError(
                f"{name} {count} cannot hold: the job has at most {size.most} nodes with"
                f" {size.slots} slots each; give less, or inject with a larger --max"
            )
    if limit is not None and limit < fewest:
        raise LineError(
            f"{MOST[0]} {limit} cannot hold: the job has at least {size.least} nodes with"
            f" {size.slots} slots each; give more, or inject with a smaller --min"
        )
    said = []
    if least is not None and least != fewest:
        said.append(
            f"horovodrun waits below {least} processes, and the sidecars' --min is {fewest}:"
            " inject with the same"
        )
    if limit is not None and limit < most:
        said.append(
            f"horovodrun uses {limit} processes at most, and the sidecars' --max is {most}: the"
            " others are listed and wait; inject with the same"
        )
    return said


def _count(given: GivenOptions, names: Sequence[str]) -> Optional[int]:
    text = given.value(names)
    if text is None:
        return None
    if not re.fullmatch(r"[1-9]\d{0,5}", text, re.ASCII):
        raise LineError(f"{names[0]} {text}: give a number from 1")
    return int(text)


def local_slots(words: Sequence[str]) -> int:
    """Return the processes of each node of ``muster local``; raises ``LineError``."""
    slots = 1
    for name, value, _ in read_options(words).options:
        if name in _REFUSED_HERE:
            raise LineError(
                f"horovodrun's {name} cannot be given here: {_REFUSED_HERE[name]}; see"
                " docs/local.md#horovodrun"
            )
        if name == SLOTS:
            if not re.fullmatch(r"[1-9]\d{0,3}", value or "", re.ASCII):
                raise LineError(
                    f"--slots-per-host {value}: give a number, "
                    "because the sidecar registers that many slots"
                )
            slots = int(value or "")
    return slots


def local_arguments(words: Sequence[str], discovery: str, counts: Sequence[int]) -> List[str]:
    """Return horovodrun's arguments for ``muster local``; ``discovery`` is the script."""
    names, (start, least, most) = read_options(words).names(), counts
    options = {
        "-np": (f"{start}",),
        "--min-np": (f"{least}",),
        "--max-np": (f"{most}",),
        "--network-interface": ("lo",),
        DISCOVERY: (discovery,),
        **{name: values for name, values in _DEFAULTS_HERE.items() if name not in names},
    }
    return [*(word for name, values in options.items() for word in (name, *values)), *words]


def variables(environ: Mapping[str, str], run_dir: str, remote: str) -> Dict[str, str]:
    """Return the variables that horovodrun gets, and no more.

    ``remote`` is the folder of the program in the place of ssh. Variables that an operator has set
    for its own start, such as ``OMPI_MCA_plm_rsh_agent``, are left out.
    """
    return {
        **{name: value for name, value in environ.items() if NEEDED.match(name)},
        "PATH": ":".join(filter(None, (remote, environ.get("PATH")))),
        "MUSTER_RUN_DIR": run_dir,
        "PYTHONUNBUFFERED": "1",
    }


def environment(
    environ: Mapping[str, str], run_dir: str, remote: str, command_bytes: int
) -> Dict[str, str]:
    """Return the variables; raises ``LineError`` if they do not fit into a command."""
    kept = variables(environ, run_dir, remote)
    sizes = {name: _in_line(name, value) for name, value in kept.items()}
    whole = sum(sizes.values()) + command_bytes + LINE_OWN_BYTES
    if whole > LINE_MAX_BYTES:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:LARGEST]
        told = ", ".join(f"{name} ({sizes[name]} bytes)" for name in largest)
        raise LineError(
            f"a worker's command would have {whole} bytes, and {LINE_MAX_BYTES} is the most that"
            f" the system takes: make the largest variables smaller: {told}"
        )
    return kept


def _in_line(name: str, value: str) -> int:
    quoted = shlex.quote(value).encode(errors="surrogateescape")
    return len(name.encode(errors="surrogateescape")) + len(quoted) + 2
