# SPDX-License-Identifier: Apache-2.0
"""What tests stand on: the simulation's loop, and a hanging test that is told as one."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from tests.support.clocks.virtual import SimulatedLoop


def test_a_story_that_breaks_in_the_turn_in_which_it_ends_is_unwound_all_the_same() -> None:
    """The loop was asked to stop for its end, and never came to it."""
    loop = SimulatedLoop(Random(0))
    unwound = []

    async def pod() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            unwound.append(True)

    async def story() -> None:
        loop.create_task(pod())
        await asyncio.sleep(1)

    ending = loop.create_task(story())

    def broken() -> None:
        if ending.done():
            raise AssertionError("broken")

    loop.after_turn = broken
    with pytest.raises(AssertionError, match="broken"):
        loop.run_until_complete(ending)
    loop.end()
    assert unwound == [True]


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
