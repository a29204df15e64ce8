# SPDX-License-Identifier: Apache-2.0
"""The delay of a worker's exit status until horovodrun has read a host list without its host.

While fewer hosts than min are listed, horovodrun keeps all workers waiting. A worker that ends then
would count as the first of those that gather for the next change, once there are enough again: that
change would begin without one of the others, and they would wait for each other. Once horovodrun
has followed a list without the host, it ignores that end.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Callable

from launcher_shim.exit_status import EXIT_HOROVOD_REMOVED
from launcher_shim.rundir import layout

SEEN_S = 5.0
"""Time after which horovodrun has read a list: it polls every 1.4 s or so."""
LIMIT_S = 600.0
"""Time for which horovodrun waits for enough hosts by default."""
LOOK_S = 0.2


def delay_exit(
    host: str,
    status: int,
    run_dir: Path,
    now_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until horovodrun may learn that a worker on ``host`` ended with ``status``.

    ``run_dir`` is the launcher's, with the host list and the job's min.
    """
    if status in (0, EXIT_HOROVOD_REMOVED):
        return
    began_s = since_s = now_s()
    while now_s() < min(since_s + SEEN_S, began_s + LIMIT_S):
        try:
            listed, least = _listed(run_dir), _least(run_dir)
        except (OSError, ValueError):
            return  # not a run directory of a launcher
        if host in listed:
            return
        if len(listed) < least:
            since_s = now_s()
        sleep(LOOK_S)


def _listed(run_dir: Path) -> set[str]:
    """Read the hosts that have slots."""
    lines = (run_dir / layout.HOSTS).read_text().splitlines()
    return {host for host, _, slots in (line.partition(":") for line in lines) if slots != "0"}


def _least(run_dir: Path) -> int:
    """Read the least number of nodes; raises ``ValueError`` if it is not there."""
    for line in (run_dir / layout.ENVIRONMENT).read_text().splitlines():
        name, _, value = line.partition("=")
        if name == "PET_NNODES":
            return int(value.partition(":")[0])
    raise ValueError("the least number of nodes is not told")
