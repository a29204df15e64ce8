# SPDX-License-Identifier: Apache-2.0
"""The exit statuses of all of Muster's programs, in the containers and on the command line.

``muster drain`` adds those that tell how a drain has ended.
"""

from __future__ import annotations

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
EXIT_HOROVOD_REMOVED = 134
"""SIGABRT: the status of a worker that Horovod has removed from the job; its driver knows it."""
EXIT_KILLED = 137
EXIT_BROKEN_PIPE = 141
EXIT_TERMINATED = 143
"""SIGTERM; also the status of a drained container, as a 0 would end the job."""
EXIT_UNKNOWN = 255
"""As in ssh: it is not known how the remote command ended."""
