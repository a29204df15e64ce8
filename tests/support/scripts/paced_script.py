# SPDX-License-Identifier: Apache-2.0
"""Runs a training script at its own pace while a drill lasts, and from then on without a pause.

    python paced_script.py SCRIPT ARGUMENT...

Once the file ``PACED_SCRIPT_HURRY`` exists, nothing in this process sleeps for longer than
``HURRY_S``: a script has steps enough for a slow machine, and a fast one need not wait for them.
While ``PACED_SCRIPT_HOLD`` exists, the script does not begin.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from typing import Any

HURRY_S = 0.001


def main() -> None:
    hurry, sleep = os.environ["PACED_SCRIPT_HURRY"], time.sleep

    def paced(seconds: Any) -> None:
        sleep(min(seconds, HURRY_S) if os.path.exists(hurry) else seconds)

    while os.path.exists(os.environ["PACED_SCRIPT_HOLD"]):
        sleep(0.05)
    time.sleep = paced
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
