# SPDX-License-Identifier: Apache-2.0
"""For Horovod: one rank saves before the launcher goes, and the next launcher starts from that.

The loss of workers costs Horovod's ranks nothing: each commit is in their memory. A launcher that
ends also ends them all. So its pod, once told to go, waits for the rank that saves.
"""

from __future__ import annotations

import logging
import time
from typing import Optional

from muster.gate import POLL_S, own_gate
from muster.process import own_world, report_imports
from muster.progress import own_file, report_step

log = logging.getLogger(__name__)

PARKED_S = 10.0
"""Maximum wait of a rank that has saved for its end with the launcher, in seconds: steps trained
meanwhile would be lost. With a longer wait, the other ranks' collectives time out if the launcher
stays."""


def commit_due(step: int, *, rank: Optional[int] = None, world_size: Optional[int] = None) -> bool:
    """Report that this rank is at ``step``; True: save now, as the job's launcher has to go.

    Call it on every rank before each ``state.commit()``. It is True at rank 0 alone, which saves
    what is kept on disk, and calls ``committed(step)`` after each save. ``rank`` and ``world_size``
    are Horovod's unless given. False without a sidecar.
    """
    if rank is None or world_size is None:
        own, size = own_world("muster.horovod.commit_due")
        rank = own if rank is None else rank
        world_size = size if world_size is None else world_size
    report_step(step, rank, world_size)
    report_imports()
    return rank == 0 and save_asked()


def committed(step: int) -> None:
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


def save_asked() -> bool:
    """Return whether to save now, because the job's launcher has to go; call it before each commit.

    Only the rank that saves calls it, and reports its steps by ``muster.report_step``. This is what
    ``commit_due`` has of 0.1.0.
    """
    file, gate = own_file(), own_gate()
    if file is None or gate is None:
        return False
    file.saver = True
    reading = gate.read()
    ask = reading.ask if reading is not None else 0
    return ask != 0 and (file.answered is None or file.answered[0] != ask)
