# SPDX-License-Identifier: Apache-2.0
"""The clock that all processes of a machine share, and that no restart of one of them resets.

A deadline that must outlive the sidecar, or that another container reads, is kept on it.
"""

from __future__ import annotations

import time


def boot_s() -> float:
    """Return the seconds since the machine booted, including the time it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
