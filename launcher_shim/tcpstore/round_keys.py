# SPDX-License-Identifier: Apache-2.0
"""torch's own keys of one round of a rendezvous: no sockets, standard library only."""

from __future__ import annotations

import re
from typing import Optional

ROUND_KEY = re.compile(
    rb"/?torch\.rendezvous\.(?P<run>.+)\.(?P<round>\d{1,18})/(?P<name>.+)", re.DOTALL
)
_MEETING = re.compile(
    rb"MASTER_ADDR|MASTER_PORT|torchelastic/(role_info|assigned_ranks)/.+", re.DOTALL
)


def round_met_by(key: bytes) -> Optional[int]:
    """Return the round whose nodes meet by the value of ``key``; None for any other key.

    They meet once the round is complete, and start its workers after that.
    """
    match = ROUND_KEY.fullmatch(key)
    return None if match is None or not _MEETING.fullmatch(match["name"]) else int(match["round"])
