# SPDX-License-Identifier: Apache-2.0
"""Torchruns that a container runs one after the other, and what a next sidecar knows of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from threading import Event

import pytest

from launcher_shim.c10d.rounds.stages import KeptStages, Stages
from tests.support.waiting import DEADLINE_S

pytest.importorskip("torch.distributed", reason="the handlers are torch's")

from torch.distributed.elastic.rendezvous import RendezvousClosedError

from launcher_shim.c10d.values.transactions import Stamp
from launcher_shim.rundir import layout
from launcher_shim.tcpstore import wire
from rdzv.store.memory.client import MemoryEngine
from tests.support.sidecars.delivered_torchrun import DeliveredTorchrun
from tests.support.sidecars.endpoints import pod
from tests.support.sidecars.rendezvous import ALONE, HERE, QUICK, Files, Job, job
from tests.support.sidecars.stages import container, passes, ran


def stored(one: Job, run_id: str) -> set[str]:
    """What the store has of a run, by section."""
    run = HERE.run(run_id)
    return {run.split(kv.key)[0] for kv in one.mirror.under(run.prefix)}


@pytest.mark.virtual
async def test_what_is_left_of_a_stage_is_how_it_ended_for_whom_and_by_which_line() -> None:
    names = ["digits", "digits (stage 2)", "digits (stage 3)"]
    async with job(ALONE, sidecars="a") as one:
        first = one.container("a")
        for line in (b"pretrain", b"finetune", b"evaluate"):
            assert not await one.passes(first, line)
            await one.ran(first)
        await one.until(lambda: stored(one, names[0]) == {"round", "kv", "sum"})
        await one.until(lambda: "nodes" not in stored(one, names[1]))
        assert len(one.mirror.under(HERE.run(names[0]).kv)) == 1
        assert len(one.mirror.under(HERE.run(names[0]).sums)) == 1
        assert len(one.mirror.under(HERE.run(names[1]).kv)) > 1
        assert set(one.sidecars["a"].pod.endpoint.rendezvous()) == {names[2]}
        again = one.container("a")
        assert not await one.passes(again, b"finetune")
        assert not await one.passes(again, b"pretrain", "faces")
        for line in (b"pretrain", b"finetune", b"evaluate"):
            assert await one.passes(again, line)
        assert not await one.passes(again, b"publish")
        assert await one.ran(again) == [1]
        assert one.closed()["digits (stage 4)"] == "success"


@pytest.mark.virtual
async def test_one_that_fails_in_a_stage_comes_back_to_it() -> None:
    async with job(ALONE, sidecars="a") as one:
        container = one.container("a")
        await one.ran(container)
        for _ in range(2):
            failing = one.torchrun("a", container=container)
            await one.until(lambda failing=failing: bool(failing.worlds))  # type: ignore[misc]
            failing.kill()
        assert await one.ran(container) == [1]
        assert one.closed() == {"digits": "success", "digits (stage 2)": "success"}


@pytest.mark.virtual
async def test_a_container_that_is_started_again_does_not_run_its_first_stage_in_the_second() -> (
    None
):
    async with job(ALONE, sidecars="a") as one:
        await one.ran(one.container("a"))
        again = one.torchrun("a")
        await one.until(lambda: again.ended)
        assert isinstance(again.failure, RendezvousClosedError)
        assert one.closed() == {"digits": "success"}


@pytest.mark.virtual
async def test_a_stage_is_known_to_the_sidecar_that_comes_next() -> None:
    async with job(ALONE, sidecars="a") as one:
        container = one.container("a")
        await one.ran(container)
        ended = one.torchrun("a", container=container)
        await one.until(lambda: bool(ended.worlds))
        await one.stop_sidecar("a")
        # Its end, too, which no sidecar has seen.
        ended.order("finish")
        await one.passed(1)
        await one.come_back("a")
        await one.until(lambda: ended.ended)
        assert await one.ran(container) == [1]
        assert one.closed()["digits (stage 3)"] == "success"


async def test_the_delivered_torchrun_passes_over_or_becomes_the_images_own(tmp_path: Path) -> None:
    torchrun = await asyncio.to_thread(DeliveredTorchrun, tmp_path)
    path = tmp_path / "c10d.sock"
    async with pod(MemoryEngine(), "w-0", unix_path=str(path), kept=Files()):
        async with container(path) as port:
            assert await torchrun.run(port, "a.py", "x y") == (7, "a.py x y\n")
            await ran(port)
        async with container(path) as port:
            assert await torchrun.run(port, "a.py", "x y") == (0, "")
            assert await torchrun.run(port, "b.py") == (7, "b.py\n")
    # Nobody serves that port any more.
    assert await torchrun.run(port, "a.py") == (7, "a.py\n")


@pytest.mark.virtual
async def test_nothing_is_passed_over_that_could_not_be_kept() -> None:
    class Full(Files):
        def put(self, name: str, content: bytes) -> None:
            raise OSError(28, "No space left on device")

    async with job(ALONE) as one:
        one.kept["a"] = Full()
        await one.sidecar("a")
        first = one.container("a")
        assert not await one.passes(first, b"pretrain")
        await one.ran(first)
        assert not await one.passes(one.container("a"), b"pretrain")


async def test_a_container_that_has_trained_is_never_passed_over(tmp_path: Path) -> None:
    """However little its sidecar remembers: the second stage would be taken for the first."""
    path, engine = tmp_path / "c10d.sock", MemoryEngine()
    async with container(path) as port:
        async with pod(engine, "w-0", unix_path=str(path)):
            assert not await passes(port, b"train")
            await ran(port)
        async with pod(engine, "w-0", unix_path=str(path)):
            assert not await passes(port, b"train")


@pytest.mark.virtual
async def test_one_that_asks_again_passes_over_one_stage() -> None:
    """Its sidecar has noted that, and ended before it could say so."""
    async with job(ALONE, sidecars="a") as one:
        first = one.container("a")
        for _ in range(2):
            assert not await one.passes(first, b"train")
            await one.ran(first)
        nonce, starts = "c" * 32, one.sidecars["a"].pod.endpoint.sessions.starts
        for _ in range(2):
            begun = starts.begin("digits", nonce, b"train", Stamp(nonce, 1), may_pass=True)
            assert (await begun)[1] == wire.PASSED
        kept = one.kept["a"].content(layout.STAGES)
        assert Stages.from_json(kept or b"").finished == {"digits": 1}


@pytest.mark.virtual
async def test_pods_meet_in_a_stage_and_not_across_stages() -> None:
    async with job(QUICK, sidecars="ab") as one:
        containers = [one.container(name) for name in "ab"]
        for _ in range(2):
            assert await one.ran(*containers) == [2, 2]
        assert one.closed() == {"digits": "success", "digits (stage 2)": "success"}


class SlowFiles:
    """A disk on which the first write is slow: it goes on once ``released``."""

    def __init__(self) -> None:
        self.first_begun, self.released = Event(), Event()
        self.on_disk: list[bytes] = []

    def content(self, name: str) -> bytes | None:
        return None

    def put(self, name: str, content: bytes) -> None:
        if not self.first_begun.is_set():
            self.first_begun.set()
            assert self.released.wait(DEADLINE_S)
        self.on_disk.append(content)


async def test_the_newest_stages_are_written_last_however_slow_the_disk_is() -> None:
    files = SlowFiles()
    stages = KeptStages(files)
    stages.stages.finish("container", "digits")
    first = asyncio.create_task(stages.keep())
    assert await asyncio.to_thread(files.first_begun.wait, DEADLINE_S)
    stages.stages.finish("container", "digits (stage 2)")
    second = asyncio.create_task(stages.keep())
    await asyncio.wait([second], timeout=0.2)
    files.released.set()
    assert await first
    assert await second
    assert files.on_disk[-1] == stages.stages.to_json()


async def test_what_a_client_was_not_told_is_taken_back() -> None:
    """It has given up, and starts its torchrun in the stage that it asked for."""
    files = SlowFiles()
    stages = KeptStages(files)
    passing = asyncio.create_task(stages.pass_over("c" * 32, "digits"))
    assert await asyncio.to_thread(files.first_begun.wait, DEADLINE_S)
    passing.cancel()
    await asyncio.sleep(0)
    files.released.set()
    with pytest.raises(asyncio.CancelledError):
        await passing
    assert stages.stages.next("c" * 16, "digits") == "digits"
    assert [Stages.from_json(kept).finished for kept in files.on_disk] == [{"digits": 1}, {}]
