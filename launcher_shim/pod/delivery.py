# SPDX-License-Identifier: Apache-2.0
"""The surroundings of a delivered program: the run directory, the image's own programs, its log.

A log line is one line, whatever it contains: the sidecar's sentences may quote another pod, and
people read the container's log.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Dict, Mapping, Optional

from launcher_shim.rundir import layout


class RunDirectory:
    """The run directory as the training container sees it.

    ``expected``: the environment says that there is one, so it is worth waiting for files that the
    sidecar has not delivered yet.
    """

    def __init__(self, path: str, *, expected: bool) -> None:
        self.path = path
        self.expected = expected

    @classmethod
    def find(cls, environ: Mapping[str, str], program: str) -> RunDirectory:
        """Find it: by ``MUSTER_RUN_DIR``, else around this program, which was delivered to it."""
        path = environ.get("MUSTER_RUN_DIR")
        if path:
            return cls(path, expected=os.path.isdir(path))
        return cls(os.path.dirname(os.path.dirname(os.path.realpath(program))), expected=False)

    @property
    def c10d_socket(self) -> str:
        """The socket of the sidecar's rendezvous."""
        return os.path.join(self.path, layout.C10D_SOCKET)

    @property
    def notice_socket(self) -> str:
        """The socket for notices to the sidecar."""
        return os.path.join(self.path, layout.NOTICE_SOCKET)

    def delivered(self) -> Optional[Dict[str, str]]:
        """Return the variables for the command, or None while there are none.

        Raises ``ValueError`` with one sentence if they cannot be read.
        """
        path = os.path.join(self.path, layout.ENVIRONMENT)
        try:
            with open(path, encoding="utf-8") as file:
                lines = file.read().splitlines()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise ValueError(
                f"{path} cannot be read ({error.strerror}): mount the sidecar's run directory so"
                " that this user may read it"
            ) from error
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path} is not UTF-8, so no sidecar has written it: give the pod a run directory"
                " that nothing else writes to"
            ) from error
        pairs = (line.partition("=") for line in lines if "=" in line and line[0] != "#")
        return {name: value for name, _, value in pairs}

    def environment(
        self, environ: Mapping[str, str], delivered: Mapping[str, str]
    ) -> Dict[str, str]:
        """Build the command's environment; ``delivered``: as ``overruling.merged`` returns it."""
        modules = os.path.join(self.path, layout.MODULES)
        before = environ.get("PYTHONPATH")
        programs = os.path.join(self.path, layout.PROGRAMS)
        if os.path.isfile(os.path.join(programs, layout.TORCHRUN)):
            delivered = {
                **delivered,
                "PATH": os.pathsep.join([programs, environ.get("PATH", os.defpath)]),
            }
        return {
            **environ,
            **delivered,
            # The sidecar may have the directory under another path.
            "MUSTER_RUN_DIR": self.path,
            "PYTHONPATH": f"{modules}{os.pathsep}{before}" if before else modules,
        }


def images_own(name: str, program: str, environ: Mapping[str, str]) -> Optional[str]:
    """Find the program ``name`` that the PATH has beside ``program``; None if there is none."""
    for directory in os.get_exec_path(dict(environ)):
        path = os.path.join(directory, name)
        runs = os.path.isfile(path) and os.access(path, os.X_OK)
        if runs and not os.path.samefile(path, program):
            return path
    return None


class OneLine(logging.Formatter):
    """A formatter that names the program, and escapes control characters.

    The sidecar's sentences may quote another pod, and people read the container's log.
    """

    def __init__(self, program: str) -> None:
        super().__init__()
        self._program = program

    def format(self, record: logging.LogRecord) -> str:
        """Render one record; a traceback that follows it is our own text."""
        text = "%s: %s" % (self._program, printable(record.getMessage()))
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


def configure_log(program: str) -> None:
    """Send the log lines of ``program`` to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine(program))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def printable(text: str) -> str:
    """Escape control characters: foreign text must neither fake log lines nor steer a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
