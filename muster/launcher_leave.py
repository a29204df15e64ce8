# SPDX-License-Identifier: Apache-2.0
"""For Horovod: a rank saves before the launcher goes, and whoever is started then goes on from it.

What befalls workers costs Horovod's ranks nothing: each commit is in their memory. A launcher that
ends ends them all. So its pod, once told to go, waits for the rank that saves.
"""

from __future__ import annotations

import logging
import time

from muster.draining import own_gate
from muster.gate import POLL_S
from muster.progress import own_file

log = logging.getLogger(__name__)

PARKED_S = 10.0
"""How long a rank that has saved waits to be ended with its launcher: what it trains meanwhile is
lost. Longer, and the other ranks' collectives run out of time if nothing comes of it."""


def save_asked() -> bool:
    """Whether to save now, because the job's launcher has to go: ask right before each commit.

    Only the rank that saves asks, and it tells its steps by ``muster.report_step``: by that a
    launcher knows that it is worth waiting. False where no sidecar runs.
    """
    file, gate = own_file(), own_gate()
    if file is None or gate is None:
        return False
    file.saver = True
    reading = gate.read()
    ask = reading.ask if reading is not None else 0
    return ask != 0 and (file.answered is None or file.answered[0] != ask)


def report_save(step: int) -> None:
    """Say that ``step`` is saved where another pod finds it; call it after each save.

    If it was asked for, this returns only when the launcher is not to go any more, or has not gone
    within ``PARKED_S``: mostly never. Otherwise, and where no sidecar runs, it does nothing.
    """
    file, gate = own_file(), own_gate()
    if file is None or gate is None or not save_asked():
        return
    reading = gate.read()
    ask = reading.ask if reading is not None else 0
    file.answered = (ask, step)
    try:
        file.write(step)
    except OSError as error:
        log.warning("cannot tell the sidecar that step %d is saved: %s", step, error)
        return
    until_s = time.monotonic() + PARKED_S
    while time.monotonic() < until_s:
        reading = gate.read()
        if reading is None or reading.ask != ask:
            return
        time.sleep(POLL_S)
