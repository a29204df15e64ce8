# SPDX-License-Identifier: Apache-2.0
"""One rank as the tests of drains run it: steps, saves where they are due, a line of log for each.

Its argument is a JSON object; ``save_errors`` is how many saves come to nothing, ``drains`` whether
it uses ``muster.drain()`` at all.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time

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
    with muster.drain() as drain:
        while step < settings["steps"]:
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
    tell("end", step)


main()
