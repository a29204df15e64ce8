# SPDX-License-Identifier: Apache-2.0
"""The ends of a rank that waits at a boundary: by its torchrun, without one, or well."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from contextlib import contextmanager, suppress
from typing import Iterator

log = logging.getLogger(__name__)


def end_without_torchrun() -> None:
    """End this process: no torchrun is left to let it go on, or to end it."""
    log.error("the torchrun of this rank is gone while the rank waits: the rank ends, too")
    os._exit(128 + signal.SIGTERM)


def end_well(why: str) -> None:
    """End the process at once with status 0: the world that its script may call is gone."""
    log.warning("%s", why)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError, ValueError):  # closed, or without a reader
                stream.flush()
    os._exit(0)


@contextmanager
def sigterm_ends() -> Iterator[None]:
    """Let SIGTERM end the process within the block: a handler might wait for others."""
    handler = signal.getsignal(signal.SIGTERM)
    ours_to_set = threading.current_thread() is threading.main_thread() and handler is not None
    if ours_to_set:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        if ours_to_set:
            signal.signal(signal.SIGTERM, handler)
