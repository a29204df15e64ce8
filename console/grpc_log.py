# SPDX-License-Identifier: Apache-2.0
"""gRPC's own log, which is off: what it says is told in Muster's words.

It goes by an environment variable, which a training that is started from here must not get from us.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

_VARIABLE = "GRPC_VERBOSITY"
_OFF = "NONE"


def switch_off() -> None:
    """Switch it off unless the user has said how much is wanted; before grpc is imported."""
    os.environ.setdefault(_VARIABLE, _OFF)


def without(environ: Mapping[str, str]) -> dict[str, str]:
    """Give the environment as it was before."""
    return {name: text for name, text in environ.items() if (name, text) != (_VARIABLE, _OFF)}
