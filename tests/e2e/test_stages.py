# SPDX-License-Identifier: Apache-2.0
"""Real torchruns in one command, one after the other, however they are started."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest

from rdzv.store.memory.server import EmbeddedServer
from tests.support.sidecars.processes import ROOT, until
from tests.support.sidecars.relayed_pod import RelayedPod, relayed_pod

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]

PATIENCE_S = 300.0
"""For torch to be imported by each of them, on cores that are shared."""

SCRIPT = """
import itertools, json, os, sys, time
import muster
from muster.resuming import check_start
gate = os.path.join(os.environ["MUSTER_RUN_DIR"], "gate.json")
check_start(0, sys.argv[1])
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


BIN = Path(sys.executable).parent
ACCELERATE = pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate")
STATIC = "--nnodes=2 --node_rank=1 --master_addr=head --master_port=29500"
ELASTIC = """
import sys
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
config = LaunchConfig(2, 2, 1, run_id="7", rdzv_backend="static", rdzv_endpoint="head:29500")
elastic_launch(config, sys.executable)(*sys.argv[1:])
"""
"""A launcher in Python that knows nothing of Muster."""


@pytest.mark.parametrize(
    "launchers",
    [
        pytest.param(("torchrun", "torchrun", f"torchrun {STATIC}"), id="by its name"),
        pytest.param(
            (
                f"{BIN}/torchrun {STATIC}",
                "python -m torch.distributed.run --standalone",
                "python {elastic}",
            ),
            id="past the delivered one",
        ),
        pytest.param(
            (
                "accelerate launch --cpu",
                "python -m accelerate.commands.launch --multi_gpu --num_machines 2"
                " --num_processes 2 --machine_rank 1 --main_process_ip head"
                " --main_process_port 29500",
            ),
            id="accelerate",
            marks=ACCELERATE,
        ),
    ],
)
async def test_a_command_of_stages_ends_well_and_ends_well_again(
    launchers: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, told, elastic = tmp_path / "stage.py", tmp_path / "told", tmp_path / "elastic.py"
    await asyncio.to_thread(stage.write_text, SCRIPT.format(told=str(told)))
    await asyncio.to_thread(elastic.write_text, ELASTIC)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ['PYTHONPATH']}")
    monkeypatch.setenv("PATH", f"{BIN}{os.pathsep}{os.environ['PATH']}")
    starts = [launcher.format(elastic=elastic) for launcher in launchers]
    line = " && ".join(f"{start} {stage} {number}" for number, start in enumerate(starts))
    each_once = "".join(f"{number} 1 None\n" for number in range(len(starts)))
    async with (
        EmbeddedServer() as server,
        relayed_pod(server.endpoint, tmp_path / "run", "sh", "-c", line) as pod,
    ):
        assert await ended(pod) == 0
        assert await asyncio.to_thread(told.read_text) == each_once
        await pod.start_again("sh", "-c", line)
        assert await ended(pod) == 0
    assert await asyncio.to_thread(told.read_text) == each_once


LATE = """
import os, pathlib, sys, time
import muster
folder, stage = pathlib.Path(sys.argv[1]), sys.argv[2]
with open(folder / "told", "a") as told:
    print(stage, *map(os.environ.get, ("MUSTER_MEMBER", "WORLD_SIZE")), file=told)
assert os.environ["NODE_RANK"] == os.environ["GROUP_RANK"]
step, drain = 0, muster.drain()
with drain:
    while stage == "second" and not (folder / "end").exists():
        step += 1
        time.sleep(0.05)
        if drain.commit_due(step):
            drain.committed(step)
"""
"""The first stage ends at once, the second once it may."""


async def test_a_late_pod_joins_the_stage_that_runs_and_a_later_one_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, told = tmp_path / "stage.py", tmp_path / "told"
    await asyncio.to_thread(stage.write_text, LATE)
    await asyncio.to_thread(told.touch)
    monkeypatch.setenv("PATH", f"{BIN}{os.pathsep}{os.environ['PATH']}")

    async def started(*names: str) -> list[str]:
        text = await asyncio.to_thread(told.read_text)
        return [line for line in text.splitlines() if line.split()[1] in names]

    async with EmbeddedServer() as server, AsyncExitStack() as stack:

        async def pod(number: int) -> RelayedPod:
            line = (
                f"python -m torch.distributed.run {STATIC.replace('rank=1', f'rank={number}')}"
                f" {stage} {tmp_path} first && {BIN}/torchrun {stage} {tmp_path} second"
            )
            name = f"w-{number}"
            one = relayed_pod(
                server.endpoint,
                tmp_path / name,
                *("sh", "-c", line),
                MUSTER_MEMBER=name,
                MUSTER_MIN="2",
                MUSTER_MAX="3",
            )
            return await stack.enter_async_context(one)

        async def in_world(size: int, *names: str) -> None:
            async def seen() -> bool:
                return {f"second {name} {size}" for name in names} <= {*await started(*names)}

            await until(seen, PATIENCE_S)

        first = [await pod(0), await pod(1)]
        await in_world(2, "w-0", "w-1")
        late = await pod(2)
        await in_world(3, "w-0", "w-1", "w-2")
        assert "first" not in " ".join(await started("w-2"))
        await asyncio.to_thread((tmp_path / "end").touch)
        assert [await ended(one) for one in (*first, late)] == [0, 0, 0]
        assert await ended(await pod(3)) == 0
        assert await started("w-3") == []
