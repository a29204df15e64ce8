# SPDX-License-Identifier: Apache-2.0
"""Signals that come before this process can handle them, kept until it can.

The kernel drops a signal to process 1 of a container that has no handler for it. A blocked one
waits instead, also across ``exec``: the shell in front of Python blocks them where the image's
``env`` can, and Python does so before it imports anything that takes time.
"""

from __future__ import annotations

import signal

ENDING = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP})
"""Signals that are sent to end a process, and end one without a handler."""


def block() -> None:
    """Block these signals: they wait."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)


def unblock() -> None:
    """Unblock these signals: handlers are installed, or the default is meant."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
