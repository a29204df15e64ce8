# SPDX-License-Identifier: Apache-2.0
"""By which launch line a container passes over a stage that has ended well, pod by pod."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch.distributed", reason="the handlers are torch's")

import launcher_shim.c10d.launchers
from launcher_shim.c10d.launchers import was_run
from launcher_shim.c10d.rounds.records import Seat
from rdzv.store.memory.client import MemoryEngine
from tests.support.sidecars.endpoints import Pod, pod
from tests.support.sidecars.handlers import Torchrun
from tests.support.sidecars.stages import Files, container, passes, ran


@dataclass
class Job:
    """Pods on one store, and what their containers do."""

    engine: MemoryEngine
    directory: Path
    stack: AsyncExitStack

    def path(self, name: str) -> Path:
        return self.directory / name

    async def start(self, name: str, least: int) -> Pod:
        path = str(self.path(name))
        return await self.stack.enter_async_context(
            pod(self.engine, name, unix_path=path, kept=Files(), least=least)
        )

    async def ends_well(self, **lines: bytes) -> None:
        """Let pods go through the first stage in one world, each with a launch line of its own."""
        for name in lines:
            await self.start(name.replace("_", "-"), len(lines))
        async with AsyncExitStack() as stack:
            ports = [
                await stack.enter_async_context(container(self.path(name.replace("_", "-"))))
                for name in lines
            ]
            for port, line in zip(ports, lines.values(), strict=True):
                assert not await passes(port, line)
            both = [ran(port, f"10.0.0.{at}") for at, port in enumerate(ports, start=1)]
            assert await asyncio.gather(*both) == [len(lines)] * len(lines)

    async def passes(self, name: str, *lines: bytes) -> list[bool]:
        """Ask with each line, as the first of a container that has just been started."""
        told: list[bool] = []
        for line in lines:
            async with container(self.path(name)) as port:
                told.append(await passes(port, line))
        return told


@asynccontextmanager
async def job(tmp_path: Path) -> AsyncIterator[Job]:
    async with AsyncExitStack() as stack:
        yield Job(MemoryEngine(), tmp_path, stack)


Story = Callable[[Job], Awaitable[None]]


async def own_lines(one: Job) -> None:
    """Each pod passes over what it has run itself, and not what the other has."""
    await one.ends_well(w_0=b"train 0", w_1=b"train 1")
    for _ in range(2):
        assert await one.passes("w-0", b"train 0", b"train 1") == [True, False]
        assert await one.passes("w-1", b"train 0", b"train 1") == [False, True]


async def a_later_pod(one: Job) -> None:
    """It passes over what any of the world has run."""
    await one.ends_well(w_0=b"train 0", w_1=b"train 1")
    await one.start("w-2", least=2)
    lines = (b"train 0", b"train 1", b"train 2")
    assert await one.passes("w-2", *lines) == [True, True, False]


async def a_line_that_never_trained(one: Job) -> None:
    """Nobody passes over what was asked for while others trained."""
    await one.start("w-0", least=1)
    async with container(one.path("w-0")) as port:
        assert not await passes(port, b"train")
        training = await asyncio.to_thread(Torchrun, port)
        assert (await asyncio.to_thread(training.form)).size == 1
        await one.start("w-1", least=1)
        assert await one.passes("w-1", b"evaluate") == [False]
        await asyncio.to_thread(training.end_well)
    assert await one.passes("w-1", b"evaluate", b"train") == [False, True]
    assert await one.passes("w-0", b"evaluate", b"train") == [False, True]


async def one_that_was_not_done(one: Job) -> None:
    """Who was in the world and died before its work was done passes over nothing."""
    for name in ("w-0", "w-1"):
        await one.start(name, least=2)
    async with container(one.path("w-0")) as port_0, container(one.path("w-1")) as port_1:
        for port in (port_0, port_1):
            assert not await passes(port, b"train")
        done = await asyncio.to_thread(Torchrun, port_0, "10.0.0.1")
        dies = await asyncio.to_thread(Torchrun, port_1, "10.0.0.2")
        worlds = await asyncio.gather(*(asyncio.to_thread(run.form) for run in (done, dies)))
        assert [world.size for world in worlds] == [2, 2]
        await asyncio.to_thread(dies.end)
        await asyncio.to_thread(done.end_well)
    assert await one.passes("w-0", b"train") == [True]
    assert await one.passes("w-1", b"train") == [False]


async def one_that_was_started_again(one: Job) -> None:
    """Who starts again while others are about to end the stage passes over it afterwards."""
    for name in ("w-0", "w-1"):
        await one.start(name, least=2)
    async with container(one.path("w-0")) as port_0:
        async with container(one.path("w-1")) as port_1:
            for port, line in ((port_0, b"train 0"), (port_1, b"train 1")):
                assert not await passes(port, line)
            ends = await asyncio.to_thread(Torchrun, port_0, "10.0.0.1")
            done = await asyncio.to_thread(Torchrun, port_1, "10.0.0.2")
            await asyncio.gather(*(asyncio.to_thread(run.form) for run in (ends, done)))
            await asyncio.to_thread(done.come_to_the_exit_barrier)
            await asyncio.to_thread(done.end)
        assert await one.passes("w-1", b"train 1", b"train 1") == [False, False]
        await asyncio.to_thread(ends.end_well)
    assert await one.passes("w-1", b"train 1", b"train 0") == [True, False]


STORIES = [
    own_lines,
    a_later_pod,
    a_line_that_never_trained,
    one_that_was_not_done,
    one_that_was_started_again,
]


@pytest.mark.parametrize("story", STORIES)
async def test_a_stage_is_passed_over_by_a_line_that_it_was_run_by(
    story: Story, tmp_path: Path
) -> None:
    async with job(tmp_path) as one:
        await story(one)


def _who_asked_last(
    line: bytes, member: str, frozen: Sequence[Seat], values: Mapping[str, bytes | None]
) -> bool:
    return any(value is not None and value.endswith(b" " + line) for value in values.values())


PLANTED: dict[str, tuple[Story, dict[str, Any]]] = {
    "by a stranger": (a_line_that_never_trained, {"was_run": lambda *_: True}),
    "by another pod's line": (
        own_lines,
        {"was_run": lambda line, _, *known: was_run(line, "", *known)},
    ),
    "by one that died unfinished": (one_that_was_not_done, {"are_done": lambda *_: True}),
    "by its own line alone": (
        a_later_pod,
        {"was_run": lambda line, member, *known: member != "w-2" and was_run(line, member, *known)},
    ),
    "by the line of whoever asked last": (
        a_line_that_never_trained,
        {"was_run": _who_asked_last, "line_key": lambda _: b"/muster.stage/"},
    ),
}
"""Wrong rules, each with a story that finds it: what stands in for the right one, by name."""


@pytest.mark.parametrize("name", sorted(PLANTED))
async def test_a_wrong_rule_is_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story, wrong = PLANTED[name]
    for what, by in wrong.items():
        monkeypatch.setattr(launcher_shim.c10d.launchers, what, by)
    async with job(tmp_path) as one:
        with pytest.raises(AssertionError):
            await story(one)
