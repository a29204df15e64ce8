# SPDX-License-Identifier: Apache-2.0
"""Restarts that torch burns by itself: the port of its rank 0 was taken by another program.

An agent looks for a free port, lets it go, and tells all ranks of it; until its worker listens
there, seconds later on a busy machine, anybody else on the machine may be given it.
"""

from __future__ import annotations

import re

_TAKEN = re.compile(
    r"failed to listen on any local network address\. port: (\d+),[^\n]*\bEADDRINUSE\b"
)


def taken_ports(launcher_log: str) -> int:
    """How often the rank 0 of one node has found its port taken, as its log tells."""
    return len(set(_TAKEN.findall(launcher_log)))
