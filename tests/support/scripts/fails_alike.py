# SPDX-License-Identifier: Apache-2.0
"""A training script that fails wherever it runs while the file ``FAILS_ALIKE`` is there.

As one does whose shared storage is away; after that it is ``drain_loop.py``.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path

if __name__ == "__main__":
    if os.path.exists(os.environ["FAILS_ALIKE"]):
        raise SystemExit("the shared storage is away")
    runpy.run_path(str(Path(__file__).with_name("drain_loop.py")), run_name="__main__")
