# SPDX-License-Identifier: Apache-2.0
"""Reports of the controller's own defects: the consequence, and the traceback."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)


def tell_defect(sentence: str, error: BaseException, **fields: str) -> None:
    """Log ``sentence`` as a defect of Muster, with the traceback; ``fields`` are for machines."""
    told = {"event": "defect", **fields}
    log.critical("a defect of muster: %s", sentence, exc_info=error, extra=told)
