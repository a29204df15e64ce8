# SPDX-License-Identifier: Apache-2.0
"""Two real torchruns in one command, one after the other, in a pod of its own."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from rdzv.store.embedded import EmbeddedServer
from tests.contract.relayed_pod import relayed_pod

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

PATIENCE_S = 200.0
"""For torch to be imported twice, on cores that are shared."""

SCRIPT = """
import os, sys
with open({told!r}, "a") as told:
    print(sys.argv[1], os.environ["WORLD_SIZE"], file=told)
"""


async def test_a_command_of_two_torchruns_ends_well(tmp_path: Path) -> None:
    stage, told = tmp_path / "stage.py", tmp_path / "told"
    await asyncio.to_thread(stage.write_text, SCRIPT.format(told=str(told)))
    torchrun = f"{sys.executable} -m torch.distributed.run --nproc-per-node=1 {stage}"
    line = f"{torchrun} first && {torchrun} second"
    async with (
        EmbeddedServer() as server,
        relayed_pod(server.endpoint, tmp_path / "run", "sh", "-c", line) as pod,
    ):
        assert pod.runner is not None
        async with asyncio.timeout(PATIENCE_S):
            _, err = await pod.runner.communicate()
        assert pod.runner.returncode == 0, err.decode()
    assert await asyncio.to_thread(told.read_text) == "first 1\nsecond 1\n"
