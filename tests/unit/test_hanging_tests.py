# SPDX-License-Identifier: Apache-2.0
"""A test that hangs is reported as one, and not for what its end has written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

HANGS = """
import asyncio

async def test_that_hangs():
    await asyncio.to_thread(int)  # its thread stays, and has a stack to be written
    print("hangs now")
    await asyncio.Event().wait()
"""


def test_a_test_that_hangs_in_its_event_loop_is_reported_to_have_timed_out(tmp_path: Path) -> None:
    path = tmp_path / "test_hanging.py"
    path.write_text(HANGS)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    # Its own time ends after it has begun to hang, wherever that begins late as well.
    for timeout_s in (1, 10, 100):
        ended = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.conftest"),
                *("-c", ROOT / "pyproject.toml", "--rootdir", tmp_path),
                *(f"--timeout={timeout_s}", "--timeout-method=signal", path),
            ],
            cwd=ROOT,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
        if "hangs now" in ended.stdout:
            break
    assert "hangs now" in ended.stdout, ended.stdout + ended.stderr
    assert "Stack of" in ended.stdout, ended.stdout
    assert "from pytest-timeout" in ended.stdout, ended.stdout
    assert "BlockingError" not in ended.stdout, ended.stdout
