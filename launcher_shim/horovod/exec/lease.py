# SPDX-License-Identifier: Apache-2.0
"""The time for which each side of a command looks for the other, by the lease of the sidecars.

A sidecar that was killed counts as there for its lease, and may be replaced within that time.
Python 3.8 and the standard library.
"""

from __future__ import annotations

import math
import os

from launcher_shim.rundir import layout

LEASE_TTL_S = 10
"""The sidecar's lease in seconds, if it is not delivered."""
MARGIN_S = 5
"""Addition to the lease, in seconds: for another sidecar to start, and to be found. A worker whose
launcher is gone with its sidecar has been killed by then: see ``agent/tunnel/absence.py``."""
ABANDONED_GRACE_S = 1.5
"""Seconds between SIGTERM and SIGKILL of a command whose launcher's side is gone. A longer time
helps a worker that tidies up, and is taken from the margin."""

_NAME = "MUSTER_LEASE_TTL"


def read_lease_ttl_s(told: str) -> int:
    """Parse the lease that the sidecar delivers, in whole seconds; default: ``LEASE_TTL_S``."""
    plain = told.isascii() and told.isdigit() and len(told) < 7
    return int(told) if plain else LEASE_TTL_S


def delivered_lease_ttl_s(run_dir: str) -> int:
    """Read the lease of the sidecar that delivers to ``run_dir``, in seconds."""
    try:
        with open(os.path.join(run_dir, layout.ENVIRONMENT)) as file:
            lines = dict(line.rstrip("\n").partition("=")[::2] for line in file)
    except (OSError, ValueError):
        return LEASE_TTL_S
    return read_lease_ttl_s(lines.get(_NAME, ""))


def patience_s(lease_ttl_s: int) -> int:
    """Return for how many seconds the launcher's side tries to reach a command."""
    return lease_ttl_s + MARGIN_S


def detached_max_s(lease_ttl_s: int) -> int:
    """Return for how many seconds a command without its launcher's side runs before SIGTERM.

    In whole seconds, and so that it has been killed by the time that side gives up.
    """
    return patience_s(lease_ttl_s) - math.ceil(ABANDONED_GRACE_S)
