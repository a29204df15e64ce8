# SPDX-License-Identifier: Apache-2.0
"""Two real torchruns in one command, one after the other, in a pod of its own."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from rdzv.store.memory.server import EmbeddedServer
from tests.support.sidecars.processes import ROOT
from tests.support.sidecars.relayed_pod import RelayedPod, relayed_pod

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]

PATIENCE_S = 200.0
"""For torch to be imported twice, on cores that are shared."""

SCRIPT = """
import itertools, json, os, sys, time
import muster
gate = os.path.join(os.environ["MUSTER_RUN_DIR"], "gate.json")
muster.check_start(0, sys.argv[1])
with open({told!r}, "a") as told:
    print(sys.argv[1], os.environ["WORLD_SIZE"], muster.last_commit(), file=told)
with muster.drain() as drain:
    for step in itertools.count(1):
        time.sleep(0.05)
        assert not drain.commit_due(step)
        if step == 10:
            drain.committed(step)
        with open(gate) as shown:
            if json.load(shown)["last_commit"]:
                break
"""
"""Trains until its save is on record; nothing of it may be there before."""


async def ended(pod: RelayedPod) -> int | None:
    """Wait for the training container to end; return its status."""
    assert pod.runner is not None
    async with asyncio.timeout(PATIENCE_S):
        _, err = await pod.runner.communicate()
    assert pod.runner.returncode == 0, err.decode()
    return pod.runner.returncode


async def test_a_command_of_two_torchruns_ends_well_and_ends_well_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, told = tmp_path / "stage.py", tmp_path / "told"
    await asyncio.to_thread(stage.write_text, SCRIPT.format(told=str(told)))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ['PYTHONPATH']}")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    torchrun = f"torchrun --nproc-per-node=1 {stage}"
    line = f"{torchrun} first && {torchrun} second"
    async with (
        EmbeddedServer() as server,
        relayed_pod(server.endpoint, tmp_path / "run", "sh", "-c", line) as pod,
    ):
        assert await ended(pod) == 0
        assert await asyncio.to_thread(told.read_text) == "first 1 None\nsecond 1 None\n"
        await pod.start_again("sh", "-c", line)
        assert await ended(pod) == 0
    assert await asyncio.to_thread(told.read_text) == "first 1 None\nsecond 1 None\n"
