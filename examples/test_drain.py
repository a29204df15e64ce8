# SPDX-License-Identifier: Apache-2.0
"""For your own CI: a node is drained while your script trains, and it loses no step.

    pytest examples/test_drain.py

Put your script in the place of ``examples/torch_ddp.py``, with steps for ten seconds or more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

DRILL = "local --strict --nodes 2 --event drain:rank0@world2+1s --report"


def test_a_drain_loses_no_step(tmp_path: Path) -> None:
    script = ["--", "torchrun", "examples/torch_ddp.py"]
    muster = [sys.executable, "-m", "muster", *DRILL.split(), str(tmp_path), *script]
    environ = {**os.environ, "CHECKPOINT_DIR": str(tmp_path / "checkpoints"), "STEPS": "250"}
    subprocess.run(muster, env=environ, timeout=600, check=True)
    timeline = json.loads((tmp_path / "timeline.json").read_text())
    told = [moment["detail"] for moment in timeline["moments"]]
    assert any(detail.startswith("committed at step") for detail in told)
    assert any(detail.endswith("no step is lost") for detail in told)
    assert [world["size"] for world in timeline["worlds"]] == [2, 1]
