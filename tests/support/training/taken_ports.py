# SPDX-License-Identifier: Apache-2.0
"""Restarts that torch burns by itself: the port of its rank 0 was taken by another program.

An agent looks for a free port, lets it go, and tells all ranks of it; until its worker listens
there, seconds later on a busy machine, anybody else on the machine may be given it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_TAKEN = re.compile(
    r"failed to listen on any local network address\. port: (\d+),[^\n]*\bEADDRINUSE\b"
)


def taken_ports(launcher_logs: Iterable[str]) -> int:
    """How many ports a rank 0 has found taken, as the logs of a job's nodes tell."""
    return len({port for log in launcher_logs for port in _TAKEN.findall(log)})
