# SPDX-License-Identifier: Apache-2.0
"""For Horovod: one rank saves before the launcher goes, and the next launcher starts from that.

The loss of workers costs Horovod's ranks nothing: each commit is in their memory. A launcher that
ends also ends them all. So its pod, once told to go, waits for the rank that saves.
"""

from __future__ import annotations

import logging
import time

from muster.gate import POLL_S, own_gate
from muster.progress import own_file

log = logging.getLogger(__name__)

PARKED_S = 10.0
"""Maximum wait of a rank that has saved for its end with the launcher, in seconds: steps trained
meanwhile would be lost. With a longer wait, the other ranks' collectives time out if the launcher
stays."""


def save_asked() -> bool:
    """Return whether to save now, because the job's launcher has to go; call it before each commit.

    Only the rank that saves calls it. It must report its steps by ``muster.report_step``: they tell
    the launcher that it is worth waiting. False without a sidecar.
    """
    file, gate = own_file(), own_gate()
    if file is None or gate is None:
        return False
    file.saver = True
    reading = gate.read()
    ask = reading.ask if reading is not None else 0
    return ask != 0 and (file.answered is None or file.answered[0] != ask)


def report_save(step: int) -> None:
    """Report that ``step`` is saved where another pod can read it; call it after each save.

    If the save was asked for, this returns only if the launcher is not to go any more, or has not
    gone within ``PARKED_S``: mostly never. Otherwise, and without a sidecar, it does nothing.
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
