# SPDX-License-Identifier: Apache-2.0
"""``step_loop.py``, beside a tracker in a session of its own, which torchrun does not end.

``TRACKERS`` is a directory: each rank first notes in ``met`` the trackers of its node that it finds
alive, and writes the number of its own to a file ``NODE.NUMBER``.
"""

from __future__ import annotations

import os
import runpy
import subprocess
from pathlib import Path

trackers, node = Path(os.environ["TRACKERS"]), os.environ["STEP_LOOP_NODE"]
alive = [
    path.name for path in trackers.glob(f"{node}.*") if Path(f"/proc/{path.suffix[1:]}").exists()
]
if alive:
    (trackers / "met").write_text(" ".join(alive))
tracker = subprocess.Popen(["sleep", "7777"], start_new_session=True)
(trackers / f"{node}.{tracker.pid}").touch()
runpy.run_path(str(Path(__file__).with_name("step_loop.py")), run_name="__main__")
