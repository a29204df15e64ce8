# SPDX-License-Identifier: Apache-2.0
"""The ends of all of Muster's programs: their exit statuses, and the signals that end them.

The kernel drops a signal to process 1 of a container that has no handler for it. A blocked one
waits instead, also across ``exec``: the shell in front of Python blocks them where the image's
``env`` can, and Python does so before it imports anything that takes time. ``muster drain`` has
further statuses, for how a drain has ended.
"""

from __future__ import annotations

import signal

EXIT_DONE = 0
EXIT_FAULT = 1
"""``muster doctor`` has found a fault that a job cannot run with."""
EXIT_USAGE = 2
"""The command line or the configuration is wrong."""
EXIT_NO_JOB = 66
"""The store has no such job."""

EXIT_UNAVAILABLE = 69
"""The store is not reachable."""
EXIT_DEFECT = 70
"""A defect of Muster."""

EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_FOUND = 127
"""Both as in a shell."""
EXIT_INTERRUPTED = 130
EXIT_REMOVED = 134
"""SIGABRT: the status of a worker that its launcher has removed from the job, and knows."""
EXIT_KILLED = 137
EXIT_BROKEN_PIPE = 141
EXIT_TERMINATED = 143
"""SIGTERM; also the status of a drained container, as a 0 would end the job."""
EXIT_UNKNOWN = 255
"""As in ssh: it is not known how the remote command ended."""


ENDING_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP})
"""Signals that are sent to end a process, and end one without a handler."""


def block_signals() -> None:
    """Block these signals: they wait."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)


def unblock_signals() -> None:
    """Unblock these signals: handlers are installed, or the default is meant."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)
