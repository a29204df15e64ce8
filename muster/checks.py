# SPDX-License-Identifier: Apache-2.0
"""The checks that training is set up as the library needs it, and what follows if it is not.

They raise before a sample or a step is lost. ``MUSTER_CHECKS=warn`` logs instead, for a script that
cannot be changed at once.
"""

from __future__ import annotations

import logging
import os
from typing import List

log = logging.getLogger(__name__)

CHECKS_VARIABLE = "MUSTER_CHECKS"

passed_over: List[str] = []
"""Faults that this process was let pass: its saves then do not count as keeping samples."""


def refuse(error: Exception) -> None:
    """Raise ``error``, or log it as a warning with ``MUSTER_CHECKS=warn``."""
    if os.environ.get(CHECKS_VARIABLE) != "warn":
        raise error
    passed_over.append(str(error))
    log.warning("%s (%s=warn: training goes on)", error, CHECKS_VARIABLE)
