# SPDX-License-Identifier: Apache-2.0
"""The files of the run directory that the sidecar delivers for the command beside it."""

from __future__ import annotations

import os
from typing import Dict, Mapping, Optional

from launcher_shim.rundir import layout

LOOPBACK = ("localhost", "127.0.0.1")


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


def rendezvous_port(delivered: Mapping[str, str]) -> Optional[int]:
    """Return the loopback port that torchrun has to connect to, or None."""
    host, _, port = delivered.get("PET_RDZV_ENDPOINT", "").rpartition(":")
    return int(port) if host in LOOPBACK and port.isdigit() else None
