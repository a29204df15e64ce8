# SPDX-License-Identifier: Apache-2.0
"""The report to the sidecar of the launcher that runs below ``muster-run``.

A torchrun with another rendezvous endpoint never connects to the sidecar, so only this process can
report it. It searches all processes below it, because the command may be a shell script. The report
has only the options of the rendezvous: a command line may hold secrets.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from typing import Dict, Iterable, Mapping, NamedTuple, Optional, Sequence

from launcher_shim.pod.overruling import starts_own_job
from launcher_shim.pod.process_table import descendants, parts
from launcher_shim.pod.torchrun_line import read_line
from launcher_shim.pod.torchrun_options import VARIABLES
from launcher_shim.rundir import layout
from launcher_shim.rundir.safe_open import open_regular, read_untrusted

log = logging.getLogger(__name__)

LOOKS_EARLY, LOOK_EARLY_S = 60, 1.0
LOOK_S = 30.0
"""Poll interval after the first minute; a script may start another launcher at any time."""

REPORT_MAX_BYTES = 4096
TEXT_MAX = 255
PROGRAM_WORDS = 32
"""The number of words of a command line among which the launcher's name is searched: ``numactl -N 0
-m 0 torchrun``."""

_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate",
}
_REPORTED = ("nnodes", "rdzv-endpoint", "rdzv-backend", "standalone")
"""Options of torchrun that the report contains."""


class Launch(NamedTuple):
    """One launcher: ``launcher`` is "torchrun", "horovodrun", or empty while none is seen."""

    launcher: str = ""
    pid: int = 0
    options: Mapping[str, str] = {}

    def to_json(self, started: str) -> bytes:
        """Encode for the file; ``started`` names the run of ``muster-run`` that saw it."""
        fields: Dict[str, object] = {
            "schema": 1,
            "started": started,
            "launcher": self.launcher,
            "pid": self.pid,
        }
        fields.update((name.replace("-", "_"), text) for name, text in self.options.items())
        return json.dumps(fields).encode() + b"\n"


def read_launch(pid: int, words: Sequence[str], environ: Mapping[str, str]) -> Optional[Launch]:
    """Return the launcher that a process is, with its rendezvous options; None for any other.

    accelerate's counts as torchrun where that is what it becomes.
    """
    launcher, after = _program(words)
    if launcher not in ("torchrun", "accelerate"):
        return Launch(launcher, pid) if launcher else None
    if starts_own_job(environ):
        options = given_options((), environ, _REPORTED)  # whatever it was given is overruled
    elif launcher == "torchrun":
        options = given_options(words[after:], environ, _REPORTED)
    else:
        return None
    return Launch("torchrun", pid, {name: text[:TEXT_MAX] for name, text in options.items()})


def _program(words: Sequence[str]) -> "tuple[str, int]":
    for at, argument in enumerate(words[:PROGRAM_WORDS]):
        name = os.path.basename(argument)
        if name in ("torchrun", "horovodrun"):
            return name, at + 1
        after = words[at + 1] if len(words) > at + 1 else ""
        if name == "accelerate-launch" or (name, after) == ("accelerate", "launch"):
            return "accelerate", at + 1
        if argument == "-m" and after in _MODULES:
            return _MODULES[after], at + 2
        if name.endswith((".py", ".sh")):
            break  # the rest is for that script; a launcher that it starts is a process of its own
    return "", 0


def given_options(
    words: Sequence[str], environ: Mapping[str, str], wanted: Sequence[str]
) -> Dict[str, str]:
    """Return the ``wanted`` options of torchrun, from its arguments or else from variables."""
    options = {name: environ[VARIABLES[name]] for name in wanted if VARIABLES[name] in environ}
    options.update(
        (name, value) for name, value in read_line(words).values().items() if name in wanted
    )
    return options


def look(pids: Iterable[int]) -> Launch:
    """Find the launcher among processes; of several, the one with the lowest number."""
    for pid in sorted(pids):
        try:
            words = parts(f"/proc/{pid}/cmdline")
            if not _program(words)[0]:
                continue
            variables = (part.partition("=") for part in parts(f"/proc/{pid}/environ"))
            launch = read_launch(pid, words, {name: value for name, _, value in variables})
        except OSError:
            continue  # it has just ended, or may not be read
        if launch is not None:
            return launch
    return Launch()


class Reporter:
    """The report on the launcher below this process, written to the run directory if it changes."""

    def __init__(self, run_directory: str) -> None:
        self._path = os.path.join(run_directory, layout.LAUNCH, layout.LAUNCHER)
        self._started = os.urandom(6).hex()
        self._reported: Optional[Launch] = None

    async def run(self) -> None:
        """Poll until cancelled, or until a report cannot be written.

        Raises ``OSError`` if ``/proc`` cannot be read.
        """
        if not self._asked_for():
            return
        looks = 0
        while True:
            launch = look(descendants(os.getpid()))
            if launch != self._reported:
                if not self.report(launch):
                    return
                self._reported = launch
            looks += 1
            await asyncio.sleep(LOOK_EARLY_S if looks < LOOKS_EARLY else LOOK_S)

    def _asked_for(self) -> bool:
        return os.path.isdir(os.path.dirname(self._path))

    def report(self, launch: Launch) -> bool:
        """Write a report; return whether it was written."""
        nascent = f"{self._path}.{os.getpid()}"
        try:
            with open(nascent, "wb", opener=_create) as file:
                os.fchmod(file.fileno(), 0o644)  # for the sidecar, whatever the umask is
                file.write(launch.to_json(self._started))
            os.replace(nascent, self._path)
        except OSError as error:
            # A sidecar of another version does not look for it; training does not depend on it.
            log.debug("the launcher cannot be reported to the sidecar: %s", error.strerror)
            return False
        return True

    def withdraw(self) -> None:
        """Remove this process's report; keep that of another ``muster-run``."""
        try:
            report = json.loads(read_untrusted(self._path, REPORT_MAX_BYTES))
            if isinstance(report, dict) and report.get("started") == self._started:
                os.unlink(self._path)
        except (OSError, ValueError, RecursionError) as error:
            # There is no report, or it is not this process's to remove.
            log.debug("no report of a launcher was removed: %s", error)


def _create(path: str, flags: int) -> int:
    file = open_regular(path, flags, 0o644)
    os.fchmod(file, 0o644)  # whatever the umask is: the sidecar may be another user
    return file
