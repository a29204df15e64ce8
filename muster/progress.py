# SPDX-License-Identifier: Apache-2.0
"""How far this rank is, told to the sidecar through one small file per rank.

The file is ``$MUSTER_RUN_DIR/progress/<local rank>.json``. It is renamed into place, so a reader
never sees half of one, and it says who wrote it: pid, rank, world size and how often the launcher
has restarted the workers.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import time
from typing import Callable, Mapping, Optional

log = logging.getLogger(__name__)

SCHEMA = 1

WRITE_INTERVAL_S = 0.05
"""Steps that follow each other faster are told together, by the newest of them."""


class ProgressFile:
    """Writes one rank's progress file, at most once per ``WRITE_INTERVAL_S``."""

    def __init__(
        self,
        directory: str,
        environ: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._environ = environ
        self._clock = clock
        self._next_write_s = float("-inf")
        self._untold: Optional[int] = None
        self._made_directory = False

    def report(self, step: int) -> None:
        """Tell ``step`` now, or keep it for the next call or ``flush``."""
        now = self._clock()
        self._untold = step
        if now >= self._next_write_s:
            self._next_write_s = now + WRITE_INTERVAL_S
            self.flush()

    def flush(self) -> None:
        """Write what has not been told yet; a directory that cannot be written ends the telling."""
        if self._untold is None:
            return
        step, self._untold = self._untold, None
        try:
            self._write(step)
        except OSError as error:
            # Training goes on without it: a full disk must not stop a job over a progress file.
            log.warning("progress is no longer told: %s", error)
            self._next_write_s = float("inf")

    def _write(self, step: int) -> None:
        local_rank = int(self._environ.get("LOCAL_RANK", "0"))
        record = {
            "schema": SCHEMA,
            "pid": os.getpid(),
            "restart": int(self._environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            "rank": int(self._environ.get("RANK", "0")),
            "local_rank": local_rank,
            "world_size": int(self._environ.get("WORLD_SIZE", "1")),
            "step": step,
            "time": time.time(),
        }
        path = os.path.join(self._directory, "%d.json" % local_rank)
        temporary = os.path.join(self._directory, ".%d.%d.tmp" % (local_rank, os.getpid()))
        if not self._made_directory:
            os.makedirs(self._directory, exist_ok=True)
            self._made_directory = True
        with open(temporary, "w", encoding="ascii") as file:
            file.write(json.dumps(record))
        os.replace(temporary, path)


_file: Optional[ProgressFile] = None
_told_nobody = False


def report_step(step: int) -> None:
    """Say that this rank is at ``step``; call it at each step boundary.

    Takes a few microseconds. Without ``MUSTER_RUN_DIR`` (no sidecar) it does nothing.
    """
    global _file, _told_nobody
    if _file is None:
        if _told_nobody:
            return
        run_dir = os.environ.get("MUSTER_RUN_DIR")
        if not run_dir:
            _told_nobody = True
            return
        _file = ProgressFile(os.path.join(run_dir, "progress"), os.environ)
        atexit.register(_file.flush)
    _file.report(step)
