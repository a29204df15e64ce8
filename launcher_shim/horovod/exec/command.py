# SPDX-License-Identifier: Apache-2.0
"""The shell text that horovodrun sends to a worker's host, parsed: pure.

Horovod 0.28.1 sends ``cd DIRECTORY > /dev/null 2>&1 ; env NAME=VALUE... PROGRAM ARGUMENT...``, and
puts the launcher's whole environment there. Parsed, it runs without a shell, and the pod's own
environment stays as it is.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import subprocess
import sys
from contextlib import suppress
from typing import Mapping, NamedTuple, Optional, Tuple

from launcher_shim.warm import wire
from launcher_shim.warm.start import forget_notes, is_wanted, made_stub, start_zygote
from launcher_shim.warm.stub import ANSWER_TIMEOUT_S, note

_AFTER_DIRECTORY = [">", "/dev/null", "2>&1", ";", "env"]

_FROM_LAUNCHER_TOO = frozenset(("PYTHONUNBUFFERED",))

_OF_A_POD = ("MUSTER_", "KUBERNETES_", "POD_", "NVIDIA_", "CUDA_", "LC_", "SSH_")
"""Prefixes of the variables that describe one pod; the launcher's do not apply to a worker."""
_OF_A_POD_TOO = frozenset(
    (
        *("HOME", "HOSTNAME", "LANG", "LD_LIBRARY_PATH", "LD_PRELOAD", "LOGNAME", "OLDPWD"),
        *("PATH", "PWD", "PYTHONHOME", "PYTHONPATH", "SHELL", "SHLVL", "TERM", "TMPDIR", "USER"),
        *("VIRTUAL_ENV", "_"),
    )
)


class CommandError(ValueError):
    """A command that horovodrun would not send: one sentence why."""


class WorkerCommand(NamedTuple):
    """A parsed command. ``environment`` is all that horovodrun sent along."""

    directory: str
    environment: Mapping[str, str]
    argv: tuple[str, ...]

    @property
    def host(self) -> str:
        """The host that the command is for."""
        return self.environment["HOROVOD_HOSTNAME"]

    @property
    def local_rank(self) -> int:
        """The number of its slot on the host."""
        return int(self.environment["HOROVOD_LOCAL_RANK"])


def read_command(text: str) -> WorkerCommand:
    """Parse a command; raises ``CommandError``."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise CommandError("the command's quotes do not match: %s" % error) from error
    if "\0" in text:
        raise CommandError("the command holds a NUL")
    if words[:1] != ["cd"] or ">" not in words:
        raise CommandError("the command does not begin with cd DIRECTORY > /dev/null")
    mark = words.index(">")
    rest = words[mark:]
    if rest[: len(_AFTER_DIRECTORY)] != _AFTER_DIRECTORY:
        raise CommandError("the command does not go on with env after its cd")
    # Horovod does not quote the directory: one with blanks comes in several words.
    directory = " ".join(words[1:mark])
    environment: dict[str, str] = {}
    argv = rest[len(_AFTER_DIRECTORY) :]
    while argv and "=" in argv[0]:
        name, _, value = argv.pop(0).partition("=")
        environment[name] = value
    if not argv:
        raise CommandError("the command has no program")
    if not environment.get("HOROVOD_HOSTNAME"):
        raise CommandError("the command does not say HOROVOD_HOSTNAME")
    local_rank = environment.get("HOROVOD_LOCAL_RANK", "")
    if not (local_rank.isascii() and local_rank.isdigit() and len(local_rank) < 5):
        raise CommandError("the command does not say HOROVOD_LOCAL_RANK")
    return WorkerCommand(directory, environment, tuple(argv))


def merge_environment(own: Mapping[str, str], sent: Mapping[str, str]) -> dict[str, str]:
    """Merge the worker's environment: Horovod's variables, then the pod's, then the launcher's."""
    given = {name: value for name, value in sent.items() if _from_launcher(name)}
    others = {
        name: value
        for name, value in sent.items()
        if name not in _OF_A_POD_TOO and not name.startswith(_OF_A_POD)
    }
    return {**others, **own, **given}


def _from_launcher(name: str) -> bool:
    return name in _FROM_LAUNCHER_TOO or name.startswith(wire.OF_HOROVOD)


UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
"""horovodrun sets it for each worker."""


class WarmStarts:
    """The starts of one agent's workers. ``stub``: the program that asks for a fork; None: none.

    The agent starts the zygote before it listens, and the sidecar registers the pod once the
    agent does: so no world waits for the imports of a new pod.
    """

    def __init__(self, stub: Optional[str] = None) -> None:
        self._stub = stub

    @classmethod
    def begun(cls, environ: Mapping[str, str], archive: str) -> WarmStarts:
        """Start the zygote, if it is wanted, and wait for its imports; its end is this thread's.

        ``archive`` has Muster's modules. What hinders it is said in one line.
        """
        try:
            if not is_wanted(environ):
                return cls()
            forget_notes(environ)
            stub = made_stub(archive)
            # As the agent kills what a command leaves.
            start_zygote(stub, archive, {**environ, **UNBUFFERED}, whole_groups=True)
        except (ValueError, OSError, subprocess.SubprocessError) as error:
            sys.stderr.write("muster-exec: workers start without a zygote: %s\n" % error)
            note(environ, str(error))
            return cls()
        return cls(stub)

    def words(self, argv: Tuple[str, ...], environ: Mapping[str, str]) -> Tuple[str, ...]:
        """Return the words that start a worker with these variables: ``argv``, or its stub's."""
        if self._stub is None:
            return argv
        program = shutil.which(argv[0], path=environ.get("PATH", os.defpath))
        if program is None or not _same_python(program, sys.executable):
            why = "%s is another Python than %s" % (program or argv[0], sys.executable)
            sys.stderr.write("muster-exec: a worker starts without the zygote: %s\n" % why)
            note(environ, why)
            return argv
        return (self._stub, *argv[1:])

    async def settled(self) -> None:
        """Wait until no killed worker is left, as far as the zygote knows, or is not there.

        Like a stub it waits for a minute at most.
        """
        if self._stub is None:
            return
        with suppress(OSError):
            reader, writer = await asyncio.open_unix_connection(wire.beside(self._stub))
            try:
                writer.write(wire.encode({"imported": []}))
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(reader.read(1), ANSWER_TIMEOUT_S)  # it closes the line
            finally:
                writer.close()


def _same_python(one: str, other: str) -> bool:
    """Return whether two programs are one interpreter with the same packages.

    Those of a virtual environment are links to another one's.
    """
    folders = {os.path.realpath(os.path.dirname(path)) for path in (one, other)}
    return len(folders) == 1 and os.path.realpath(one) == os.path.realpath(other)
