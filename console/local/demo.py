# SPDX-License-Identifier: Apache-2.0
"""The drill of ``muster local --demo``: the command and the options that it stands for. Pure."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from rdzv.errors import ConfigError

SCRIPT = Path(__file__).with_name("demo_script.py")

_DRILL: Mapping[str, Any] = {
    "nodes": 3,
    "event_texts": ("drain:rank0@world3+3s", "add@world2+3s", "kill:rank0@world3+3s"),
}


def with_demo(options: Mapping[str, Any], defaults: Set[str]) -> dict[str, Any]:
    """Return ``options`` with the demo's command, and its drill for those that are ``defaults``.

    Raises ``ConfigError`` if a command is given, too.
    """
    if options["command"]:
        raise ConfigError("--demo has a script of its own: leave out the command, or --demo")
    drill = _DRILL if _DRILL.keys() <= defaults else {}
    return {**options, **drill, "command": (*_torchrun(), str(SCRIPT))}


def _torchrun() -> tuple[str, ...]:
    """Return the words that start torchrun: the shell's, else that of the Python that runs this."""
    if shutil.which("torchrun") is not None:
        return ("torchrun",)
    return (sys.executable, "-m", "torch.distributed.run")
