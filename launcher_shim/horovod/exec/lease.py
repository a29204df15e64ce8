# SPDX-License-Identifier: Apache-2.0
"""For how long each side of a command looks for the other: it follows the lease of the sidecars.

A sidecar that was killed counts as there for its lease, and may be replaced for as long. Python 3.8
and the standard library.
"""

from __future__ import annotations

import math
import os

from launcher_shim.rundir import layout

LEASE_TTL_S = 10
"""The sidecar's, where it is not told."""
MARGIN_S = 5
"""Beyond the lease: for another sidecar to start, and to be found. A worker whose launcher is gone
with its sidecar has been killed by then: see ``agent/tunnel/absence.py``."""
ABANDONED_GRACE_S = 1.5
"""Between SIGTERM and SIGKILL of a command whose launcher's side is gone. A longer one helps a
worker that tidies up, and is taken from the margin."""

_NAME = "MUSTER_LEASE_TTL"


def read_lease_ttl_s(told: str) -> int:
    """The lease in whole seconds, as the sidecar tells it; the usual one where it does not."""
    plain = told.isascii() and told.isdigit() and len(told) < 7
    return int(told) if plain else LEASE_TTL_S


def delivered_lease_ttl_s(run_dir: str) -> int:
    """The lease of the sidecar that delivers to ``run_dir``."""
    try:
        with open(os.path.join(run_dir, layout.ENVIRONMENT)) as file:
            lines = dict(line.rstrip("\n").partition("=")[::2] for line in file)
    except (OSError, ValueError):
        return LEASE_TTL_S
    return read_lease_ttl_s(lines.get(_NAME, ""))


def patience_s(lease_ttl_s: int) -> int:
    """How long the launcher's side looks for a command to which there is no way."""
    return lease_ttl_s + MARGIN_S


def detached_max_s(lease_ttl_s: int) -> int:
    """How long a command without a way to the launcher's side runs on until it gets SIGTERM.

    In whole seconds, and so that it has been killed by when that side gives up.
    """
    return patience_s(lease_ttl_s) - math.ceil(ABANDONED_GRACE_S)
