# SPDX-License-Identifier: Apache-2.0
"""The checks that training is set up as the library needs it, and what follows if it is not.

They raise before a sample or a step is lost. ``MUSTER_CHECKS=warn`` logs instead, for a script that
cannot be changed at once.
"""

from __future__ import annotations

import logging
import os

log = logging.getLogger(__name__)

CHECKS_VARIABLE = "MUSTER_CHECKS"


def refuse(error: Exception) -> None:
    """Raise ``error``, or log it as a warning with ``MUSTER_CHECKS=warn``."""
    if os.environ.get(CHECKS_VARIABLE) != "warn":
        raise error
    log.warning("%s (%s=warn: training goes on)", error, CHECKS_VARIABLE)
