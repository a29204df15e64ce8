# SPDX-License-Identifier: Apache-2.0
"""The switch for gRPC's own log, which is off: Muster reports errors in its own words.

gRPC reads an environment variable; a training that is started from here must not inherit it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

_VARIABLE = "GRPC_VERBOSITY"
_OFF = "NONE"


def switch_off() -> None:
    """Switch gRPC's log off unless the user has set its level; call before grpc is imported."""
    os.environ.setdefault(_VARIABLE, _OFF)


def without(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variable that ``switch_off`` sets."""
    return {name: text for name, text in environ.items() if (name, text) != (_VARIABLE, _OFF)}
