# SPDX-License-Identifier: Apache-2.0
"""The decision whether ``muster-run`` restarts a torchrun that has ended by itself: pure.

torchrun counts the failures of its workers, and ends with an error at one more than its
``--max-restarts``, however much was trained between them. Progress distinguishes a job that has
some bad luck from one that cannot train: with it, the same command is started with a new budget.
"""

from __future__ import annotations

import re
from typing import FrozenSet, Mapping, NamedTuple, Optional, Tuple

from launcher_shim.pod.early_signals import ENDING

VARIABLE = "MUSTER_RESTART_STEPS"
DEFAULT_STEPS = 200
MAX_STEPS = 999_999_999

_COUNT = re.compile(r"\d{1,9}", re.ASCII)


class Ended(NamedTuple):
    """One command that has ended.

    ``status`` is as in a shell. ``steps``: the number that its ranks have made; None if they report
    none, or it is no torchrun. ``passed``: the signals that were passed on to it. ``drained``: the
    end of its pod has begun.
    """

    status: int
    steps: Optional[int]
    passed: FrozenSet[int] = frozenset()
    drained: bool = False


def restart_steps(environ: Mapping[str, str]) -> int:
    """Read the number of steps for a restart, 0 for none ever; raises ``ValueError``."""
    text = (environ.get(VARIABLE) or str(DEFAULT_STEPS)).strip()
    if _COUNT.fullmatch(text) is None:
        raise ValueError(
            f"{VARIABLE} is {text!r}: give a number of steps from 0 (never) to {MAX_STEPS}, as in"
            f" {DEFAULT_STEPS}"
        )
    return int(text)


def starts_again(ended: Ended, least_steps: int) -> Tuple[bool, str]:
    """Decide whether a command that has ended starts again, and why; the reason may be empty.

    ``least_steps``: the number that must have been made; 0: it is never started again.
    """
    status, steps = ended.status, ended.steps
    by_signal = status - 128 in ended.passed or bool(ENDING & ended.passed)
    if status == 0 or steps is None or not least_steps or by_signal or ended.drained:
        return False, ""
    made = f"torchrun ended with {status} after {steps} steps"
    if steps < least_steps:
        return False, f"{made}: it is not started again, for that takes {least_steps} ({VARIABLE})"
    return True, f"{made}: it is started again, with all of its restarts ({VARIABLE}={least_steps})"
