# SPDX-License-Identifier: Apache-2.0
"""Whose the cluster is: tests end what tests have made, once no session of them uses it any more.

What a killed session has left, with pods that train on, is ended by the next one. A cluster that a
person has made, or brought up since, has no mark, and is left alone.
"""

from __future__ import annotations

import fcntl
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from kubelab.layout import MADE_BY_TESTS

from tests.support.cluster.lab import Kubelab

LOCK = Path("/run/lock/muster-kubelab-tests.lock")
"""Of the machine, as the cluster is; every session that uses the cluster holds a share of it."""
END_TIMEOUT_S = 600.0


@contextmanager
def claimed(lab: Kubelab) -> Iterator[None]:
    """Use the cluster, which the caller brings up then; whoever is the last ends it."""
    with LOCK.open("w") as file:
        if _is_only_one(file):
            _end(lab)
        # Between these two locks another session may end it, or begin to: nothing is lost by that.
        fcntl.flock(file, fcntl.LOCK_SH)
        try:
            yield
        finally:
            if _is_only_one(file):
                # A session's fixtures are torn down within the time of whichever test came last,
                # which has nothing to do with this.
                signal.setitimer(signal.ITIMER_REAL, 0)
                _end(lab)


def _is_only_one(file: IO[str]) -> bool:
    """Whether no other session uses the cluster; if so, none can until the lock is given back."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _end(lab: Kubelab) -> None:
    """End the cluster if tests have made it, and see to it that nothing of it is left."""
    if MADE_BY_TESTS.exists():
        lab.command("down", timeout_s=END_TIMEOUT_S)
        assert lab.left_behind() == []
