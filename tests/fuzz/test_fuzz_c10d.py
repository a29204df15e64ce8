# SPDX-License-Identifier: Apache-2.0
"""A short run of the coverage-guided fuzz; run the harness itself for a long one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

HARNESS = Path(__file__).with_name("fuzz_c10d.py")
RUNS = 150_000
"""Of one seed: they differ by what addresses in memory decide. An idle machine takes some 10 s."""
SECONDS = 60
"""On a busy one what is done by then must do."""


def test_i8_fuzzed_frames_and_states_fail_no_more_than_themselves(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    run = subprocess.run(
        [
            *(sys.executable, HARNESS, "-seed=1", f"-runs={RUNS}"),
            *(f"-max_total_time={SECONDS}", "-timeout=30", corpus),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS + 180,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    done = re.search(r"Done (\d+) runs", run.stderr)
    assert done is not None, run.stderr[-4000:]
    assert int(done[1]) > 1000
    assert "cov: " in run.stderr
