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
from tests.support.sidecars.endpoints import Pod, pod
from tests.support.sidecars.handlers import PATIENCE_S, Torchrun
from tests.support.sidecars.stages import HERE, Files, closed, container, passes, ran


def stored(one: Pod, run_id: str) -> set[str]:
    """What the store has of a run, by section."""
    run = HERE.run(run_id)
    return {run.split(kv.key)[0] for kv in one.client.mirror.under(run.prefix)}


async def test_what_is_left_of_a_stage_is_how_it_ended_for_whom_and_by_which_line(
    tmp_path: Path,
) -> None:
    path, names = tmp_path / "c10d.sock", ["digits", "digits (stage 2)", "digits (stage 3)"]
    async with pod(MemoryEngine(), "w-0", unix_path=str(path), kept=Files()) as one:
        mirror = one.client.mirror
        async with container(path) as port, asyncio.timeout(PATIENCE_S):
            for line in (b"pretrain", b"finetune", b"evaluate"):
                assert not await passes(port, line)
                await ran(port)
            while stored(one, names[0]) != {"round", "kv", "sum"} or "nodes" in stored(
                one, names[1]
            ):
                await mirror.changed_after(mirror.sequence)
            assert len(mirror.under(HERE.run(names[0]).kv)) == 1
            assert len(mirror.under(HERE.run(names[0]).sums)) == 1
            assert len(mirror.under(HERE.run(names[1]).kv)) > 1
            assert set(one.endpoint.rendezvous()) == {names[2]}
        async with container(path) as port:
            assert not await passes(port, b"finetune")
            assert not await passes(port, b"pretrain", "faces")
            for line in (b"pretrain", b"finetune", b"evaluate"):
                assert await passes(port, line)
            assert not await passes(port, b"publish")
            assert await ran(port) == 1
        assert closed(one)["digits (stage 4)"] == "success"


async def test_one_that_fails_in_a_stage_comes_back_to_it(tmp_path: Path) -> None:
    path = tmp_path / "c10d.sock"
    async with pod(MemoryEngine(), "w-0", unix_path=str(path)) as one, container(path) as port:
        await ran(port)
        for _ in range(2):
            failing = await asyncio.to_thread(Torchrun, port)
            assert (await asyncio.to_thread(failing.form)).size == 1
            await asyncio.to_thread(failing.end)
        assert await ran(port) == 1
        assert closed(one) == {"digits": "success", "digits (stage 2)": "success"}


async def test_a_container_that_is_started_again_does_not_run_its_first_stage_in_the_second(
    tmp_path: Path,
) -> None:
    path = tmp_path / "c10d.sock"
    async with pod(MemoryEngine(), "w-0", unix_path=str(path)) as one:
        async with container(path) as port:
            await ran(port)
        async with container(path) as port:
            again = await asyncio.to_thread(Torchrun, port)
            with pytest.raises(RendezvousClosedError):
                await asyncio.to_thread(again.form)
            await asyncio.to_thread(again.end)
        assert closed(one) == {"digits": "success"}


async def test_a_stage_is_known_to_the_sidecar_that_comes_next(tmp_path: Path) -> None:
    path, files, engine = tmp_path / "c10d.sock", Files(), MemoryEngine()
    async with container(path) as port:
        async with pod(engine, "w-0", unix_path=str(path), kept=files):
            await ran(port)
            ended = await asyncio.to_thread(Torchrun, port)
            await asyncio.to_thread(ended.form)
        # Its end, too, which no sidecar has seen.
        ending = asyncio.create_task(asyncio.to_thread(ended.end_well))
        async with pod(engine, "w-0", unix_path=str(path), kept=files) as one:
            async with asyncio.timeout(PATIENCE_S):
                await ending
            assert await ran(port) == 1
            assert closed(one)["digits (stage 3)"] == "success"


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


async def test_nothing_is_passed_over_that_could_not_be_kept(tmp_path: Path) -> None:
    class Full(Files):
        def put(self, name: str, content: bytes) -> None:
            raise OSError(28, "No space left on device")

    path = tmp_path / "c10d.sock"
    async with pod(MemoryEngine(), "w-0", unix_path=str(path), kept=Full()):
        async with container(path) as port:
            assert not await passes(port, b"pretrain")
            await ran(port)
        async with container(path) as port:
            for _ in range(2):
                assert not await passes(port, b"pretrain")


async def test_a_container_that_has_trained_is_never_passed_over(tmp_path: Path) -> None:
    """However little its sidecar remembers: the second stage would be taken for the first."""
    path, engine = tmp_path / "c10d.sock", MemoryEngine()
    async with container(path) as port:
        async with pod(engine, "w-0", unix_path=str(path)):
            assert not await passes(port, b"train")
            await ran(port)
        async with pod(engine, "w-0", unix_path=str(path)):
            assert not await passes(port, b"train")


async def test_one_that_asks_again_passes_over_one_stage(tmp_path: Path) -> None:
    """Its sidecar has noted that, and ended before it could say so."""
    path, files = tmp_path / "c10d.sock", Files()
    async with pod(MemoryEngine(), "w-0", unix_path=str(path), kept=files) as one:
        async with container(path) as port:
            for _ in range(2):
                assert not await passes(port, b"train")
                await ran(port)
        nonce = "c" * 32
        for _ in range(2):
            stamp = Stamp(nonce, 1)
            begun = one.endpoint.sessions.starts.begin(
                "digits", nonce, b"train", stamp, may_pass=True
            )
            assert (await begun)[1] == wire.PASSED
        assert Stages.from_json(files.content(layout.STAGES) or b"").finished == {"digits": 1}


async def test_pods_meet_in_a_stage_and_not_across_stages(tmp_path: Path) -> None:
    engine, paths = MemoryEngine(), [tmp_path / name for name in ("a", "b")]
    async with (
        pod(engine, "w-0", unix_path=str(paths[0]), least=2) as one,
        pod(engine, "w-1", unix_path=str(paths[1]), least=2),
        container(paths[0]) as port_0,
        container(paths[1]) as port_1,
    ):

        async def both_stages(port: int, address: str) -> list[int]:
            return [await ran(port, address), await ran(port, address)]

        first, second = await asyncio.gather(
            both_stages(port_0, "10.0.0.1"), both_stages(port_1, "10.0.0.2")
        )
        assert first == second == [2, 2]
        assert closed(one) == {"digits": "success", "digits (stage 2)": "success"}


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
