# SPDX-License-Identifier: Apache-2.0
"""A trainer of transformers that raises: it takes part no longer, and another one may train."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import muster
from tests.support.sidecars.pod_gate import PodGate

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

ROOT = Path(muster.__file__).parents[1]
START_S = 100.0
"""For the library to be imported, on cores that are shared."""


@pytest.mark.parametrize("how", ["with", "without"])
def test_a_second_trainer_trains_after_one_that_raised(tmp_path: Path, how: str) -> None:
    pod = PodGate(tmp_path / "run")
    pod.show(pod.gate)
    process = subprocess.Popen(
        [
            sys.executable,
            ROOT / "tests" / "support" / "scripts" / "retrying_loop.py",
            tmp_path / "out",
            how,
        ],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "MUSTER_RUN_DIR": str(pod.run_dir),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "HOME": str(tmp_path),
        },
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "first\n"
        told = pod.told()
        assert (told.step, told.drain) == (2, how == "without")
        said, complaints = process.communicate("go on\n", timeout=START_S)
        assert process.returncode == 0, complaints
        assert said.endswith("second\n")
        assert (pod.told().step, pod.told().drain) == (3, False)
    finally:
        process.kill()
        process.communicate()
