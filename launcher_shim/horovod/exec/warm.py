# SPDX-License-Identifier: Apache-2.0
"""Workers of horovodrun that need not import torch (``MUSTER_WARM=1``): forks of a zygote.

The agent starts the zygote before it listens, and the sidecar registers the pod once the agent
does: so no world waits for the imports of a new pod.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from typing import Mapping, Optional, Tuple

from launcher_shim.pod.warm import wire
from launcher_shim.pod.warm.start import forget_notes, is_wanted, made_stub, start_zygote
from launcher_shim.pod.warm.stub import ANSWER_TIMEOUT_S, note

UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
"""horovodrun sets it for each worker."""


class WarmStarts:
    """The starts of one agent's workers. ``stub``: the program that asks for a fork; None: none."""

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
