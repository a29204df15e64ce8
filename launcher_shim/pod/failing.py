# SPDX-License-Identifier: Apache-2.0
"""The report of a rank's uncaught exception to the sidecar: its type, its text and where it was.

It is a file of the run directory, renamed into place, one for each local rank. The user's output is
as without it: the exception is printed as Python would.
"""

from __future__ import annotations

import json
import os
import time
from types import TracebackType
from typing import Mapping, Optional, Type

from launcher_shim.rundir import layout

TEXT_MAX = 1000
"""The longest text in a report, in characters; the sidecar masks it and cuts it again."""


def report(
    kind: Type[BaseException],
    error: BaseException,
    trace: Optional[TracebackType],
    environ: Mapping[str, str],
) -> None:
    """Write the report into the run directory.

    Raises ``OSError`` if that fails; ``KeyError`` or ``ValueError`` without the variables of
    torchrun and the sidecar.
    """
    local_rank = int(environ["LOCAL_RANK"])
    fields = {
        "schema": 1,
        "pid": os.getpid(),
        "rank": int(environ["RANK"]),
        "local_rank": local_rank,
        "master": "%s:%s" % (environ["MASTER_ADDR"], environ["MASTER_PORT"]),
        "kind": kind.__name__[:TEXT_MAX],
        "text": str(error)[:TEXT_MAX],
        "where": _where(trace),
        "at_boot_s": round(time.clock_gettime(time.CLOCK_BOOTTIME), 3),
    }
    path = os.path.join(environ["MUSTER_RUN_DIR"], layout.RANK_ERRORS, "%d.json" % local_rank)
    aside = "%s.%d" % (path, os.getpid())
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with open(os.open(aside, flags, 0o644), "w", encoding="ascii") as file:
        os.fchmod(file.fileno(), 0o644)  # whatever the umask is: the sidecar may be another user
        json.dump(fields, file)
    os.replace(aside, path)


_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen")


def _where(trace: Optional[TracebackType]) -> str:
    """Return ``FILE:LINE`` of the last line of the script, or of the last one at all.

    What a library raises is of no help without the line that called it.
    """
    found = ""
    own = ""
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        found = "%s:%d" % (os.path.basename(name), trace.tb_lineno)
        if (
            "site-packages" not in name
            and "dist-packages" not in name
            and "/lib/python" not in name
        ):
            own = found
        trace = trace.tb_next
    return own or found
