# SPDX-License-Identifier: Apache-2.0
"""Signals that come before this process can handle them are kept until it can.

The kernel drops a signal to process 1 of a container that has no handler for it. A blocked one
waits instead, also across ``exec``: the shell in front of Python blocks them where the image's
``env`` can, and Python does so before it imports anything that takes time.
"""

from __future__ import annotations

import signal

ENDING = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP})
"""What ends a process that has no handler for it, and is sent to end one."""


def block() -> None:
    """Keep them waiting."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)


def unblock() -> None:
    """Take what has come: handlers are there, or the default is meant."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
