# SPDX-License-Identifier: Apache-2.0
"""The kill matrix names each planted bug, and what it says of ten, drawn by the tree, is true."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.sources import ROOT


def test_the_kept_kill_matrix_is_true() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    ended = subprocess.run(
        [sys.executable, "-m", "tests.support.kill_matrix", "--check", "--sample", "10"],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr + ended.stdout
    assert "checked: " in ended.stderr
