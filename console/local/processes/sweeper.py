# SPDX-License-Identifier: Apache-2.0
"""A process that outlives ``muster local`` by a moment, to end what that left behind.

It holds the reading end of a pipe. When the writing end closes, by a normal end as by a
``kill -9``, it ends every process of the run, removes the nodes' disks, and then ends itself.
"""

from __future__ import annotations

import shutil
import sys
import time

from console.local.processes.marked import end_all, marked

TIME_TO_END_S = 10.0


def main() -> None:
    """Wait for the end of standard input, then sweep; arguments: the run and its directory."""
    _, run, directory = sys.argv
    sys.stdin.buffer.read()
    end_all(lambda: marked(run), set(), time.monotonic() + TIME_TO_END_S)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
