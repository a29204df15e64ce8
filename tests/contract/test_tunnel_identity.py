# SPDX-License-Identifier: Apache-2.0
"""The key of a sidecar's tunnel, made by a process of its own."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from agent.tunnel.identity import make_identity
from tests.support.sidecars.processes import until


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the process number of a Python that makes no key and does not end."""
    python, started = tmp_path / "python", tmp_path / "pid"
    lines = ("#!/bin/sh", f"echo $$ > {started}.new", f"mv {started}.new {started}")
    python.write_text("\n".join([*lines, "exec sleep 600", ""]))
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    return started


async def test_a_sidecar_that_is_stopped_while_its_key_is_made_leaves_no_process(
    started: Path,
) -> None:
    making = asyncio.create_task(make_identity())
    await until(lambda: asyncio.to_thread(started.exists))
    making.cancel()
    await asyncio.wait((making,))
    pid = int(await asyncio.to_thread(started.read_text))
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
