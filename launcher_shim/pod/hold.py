# SPDX-License-Identifier: Apache-2.0
"""``muster-hold``: the hold of ``muster-run`` as a preStop command, for an entry point that stays.

The kubelet sends SIGTERM to the container when this has ended; until then training goes on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from typing import Dict

from launcher_shim.exit_status import EXIT_USAGE
from launcher_shim.pod.delivery import RunDirectory
from launcher_shim.pod.early_signals import unblock
from launcher_shim.pod.grace import grace_s, reserve_s
from launcher_shim.pod.log_lines import configure
from launcher_shim.pod.notices import OutgoingNotice, give_notice

log = logging.getLogger(__name__)

USAGE = "usage: muster-hold, without arguments, as the preStop command of the training container"


def main() -> int:
    """Hold SIGTERM back until the release; return the exit status."""
    unblock()
    configure("muster-hold")
    if sys.argv[1:]:
        sys.stderr.write(USAGE + "\n")
        return 0 if sys.argv[1:] == ["--help"] else EXIT_USAGE
    run_dir = RunDirectory.find(os.environ, sys.argv[0])
    delivered: Dict[str, str] = {}
    try:
        delivered = run_dir.delivered() or {}
    except ValueError as error:  # SIGTERM is held all the same, for the usual grace
        log.warning("holding as if nothing had been delivered: %s", error)
    try:
        grace = grace_s({**os.environ, **delivered})
    except ValueError as error:
        log.error("%s", error)
        return EXIT_USAGE
    return asyncio.run(_hold(run_dir, grace))


async def _hold(run_dir: RunDirectory, grace: float) -> int:
    end_s = asyncio.get_running_loop().time() + grace
    notice = OutgoingNotice(
        "hold", "preStop of the training container", end_s, end_s - reserve_s(grace)
    )
    release = await give_notice(run_dir.notice_socket, notice)
    log.info("the container may end: %s (%s)", release.how, release.sentence)
    return 0
