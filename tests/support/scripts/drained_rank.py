# SPDX-License-Identifier: Apache-2.0
"""One rank as the tests of drains run it: steps, saves where they are due, a line of log for each.

Its argument is a JSON object; ``save_errors`` is how many saves come to nothing, ``drains`` whether
it uses ``muster.drain()`` at all. After each ``steps_a_loop`` (0: never) it leaves its loop, and
evaluates until the file ``evaluated`` is there.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import muster


def main() -> None:
    """Train."""
    settings = json.loads(sys.argv[1])
    chance = random.Random(settings["seed"])
    log = os.open(settings["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    errors = settings["save_errors"]

    def tell(what: str, step: int) -> None:
        os.write(log, b"%s %d\n" % (what.encode(), step))

    step = muster.last_commit() or 0
    tell("begin", step)
    if not settings["drains"]:
        while True:
            time.sleep(settings["step_s"])
    while step < settings["steps"]:
        last = settings["steps"]
        if settings["steps_a_loop"]:
            last = min(last, step + settings["steps_a_loop"])
        step, errors = loop(settings, chance, tell, step, last, errors)
        if settings["steps_a_loop"]:
            tell("evaluate", step)
            while not os.path.exists(settings["evaluated"]):
                time.sleep(0.005)
    tell("end", step)


def loop(
    settings: dict[str, Any],
    chance: random.Random,
    tell: Callable[[str, int], None],
    step: int,
    last: int,
    errors: int,
) -> tuple[int, int]:
    """Train up to the step ``last``; return where it ended, and the saves still to fail."""
    with muster.drain() as drain:
        while step < last:
            step += 1
            time.sleep(settings["step_s"] * chance.uniform(0.2, 1.8))
            tell("step", step)
            if not drain.commit_due(step):
                continue
            time.sleep(settings["save_s"] * chance.uniform(0.2, 1.8))
            if errors:
                errors -= 1
                tell("error", step)
                if settings["save_errors_end_it"]:
                    raise OSError("no space left")
                continue
            tell("save", step)
            drain.committed(step)
            tell("on", step)
    return step, errors


main()
