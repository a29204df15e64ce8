# SPDX-License-Identifier: Apache-2.0
"""A process that outlives ``muster local`` by a moment, to end what that left behind.

It holds the reading end of a pipe. When the writing end closes, by a normal end as by a
``kill -9``, it ends every process of the run and then itself.
"""

from __future__ import annotations

import sys
import time

from console.local.processes import end_all, marked

TIME_TO_END_S = 10.0


def main() -> None:
    """Wait for the end of standard input, then end the run that the first argument names."""
    run = sys.argv[1]
    sys.stdin.buffer.read()
    end_all(lambda: marked(run), set(), time.monotonic() + TIME_TO_END_S)


if __name__ == "__main__":
    main()
