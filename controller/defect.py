# SPDX-License-Identifier: Apache-2.0
"""How the controller tells a defect of its own: what it costs, and where it came from."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)


def tell_defect(sentence: str, error: BaseException, **fields: str) -> None:
    """Log ``sentence`` as a defect of Muster, with the traceback; ``fields`` are for machines."""
    told = {"event": "defect", **fields}
    log.critical("a defect of muster: %s", sentence, exc_info=error, extra=told)
