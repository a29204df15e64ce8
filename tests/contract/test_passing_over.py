# SPDX-License-Identifier: Apache-2.0
"""By which launch line a container passes over a stage that has ended well, pod by pod."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest

pytest.importorskip("torch.distributed", reason="the handlers are torch's")

import launcher_shim.c10d.launchers
from launcher_shim.c10d.launchers import was_run
from launcher_shim.c10d.rounds.records import Seat
from tests.support.sidecars.rendezvous import QUICK, Job, Torchrun, job

pytestmark = pytest.mark.virtual

Story = Callable[[Job], Awaitable[None]]


async def passes(one: Job, name: str, *lines: bytes) -> list[bool]:
    """Ask with each line, as the first of a container that has just been started."""
    return [await one.passes(one.container(name), line) for line in lines]


async def trains(one: Job, **lines: bytes) -> list[Torchrun]:
    """Let pods train in one world, by these launch lines."""
    for name in lines:
        await one.sidecar(name)
    containers = {name: one.container(name) for name in lines}
    for name, line in lines.items():
        assert not await one.passes(containers[name], line)
    torchruns = [one.torchrun(name, container=it) for name, it in containers.items()]
    await one.world("".join(lines))
    return torchruns


async def end(one: Job) -> None:
    """Let all who train end well."""
    for torchrun in one.everyone:
        torchrun.order("finish")
    await one.until(lambda: all(torchrun.ended for torchrun in one.everyone))


async def own_lines(one: Job) -> None:
    """Each pod passes over what it has run itself, and not what the other has."""
    await trains(one, a=b"train 0", b=b"train 1")
    await end(one)
    for _ in range(2):
        assert await passes(one, "a", b"train 0", b"train 1") == [True, False]
        assert await passes(one, "b", b"train 0", b"train 1") == [False, True]


async def a_later_pod(one: Job) -> None:
    """It passes over what any of the world has run."""
    await trains(one, a=b"train 0", b=b"train 1")
    await end(one)
    await one.sidecar("c")
    lines = (b"train 0", b"train 1", b"train 2")
    assert await passes(one, "c", *lines) == [True, True, False]


async def a_line_that_never_trained(one: Job) -> None:
    """Nobody passes over what was asked for while others trained."""
    await trains(one, a=b"train", b=b"train")
    await one.sidecar("c")
    assert await passes(one, "c", b"evaluate") == [False]
    await end(one)
    assert await passes(one, "c", b"evaluate", b"train") == [False, True]
    assert await passes(one, "a", b"evaluate", b"train") == [False, True]


async def one_that_was_not_done(one: Job) -> None:
    """Who was in the world and died before its work was done passes over nothing."""
    _, dies = await trains(one, a=b"train", b=b"train")
    dies.kill()
    await end(one)
    assert await passes(one, "a", b"train") == [True]
    assert await passes(one, "b", b"train") == [False]


async def one_that_was_started_again(one: Job) -> None:
    """Who starts again while others are about to end the stage passes over it afterwards."""
    _, done = await trains(one, a=b"train 0", b=b"train 1")
    await done.comes_to_the_exit_barrier()
    done.kill()
    assert await passes(one, "b", b"train 1", b"train 1") == [False, False]
    await end(one)
    assert await passes(one, "b", b"train 1", b"train 0") == [True, False]


STORIES = [
    own_lines,
    a_later_pod,
    a_line_that_never_trained,
    one_that_was_not_done,
    one_that_was_started_again,
]


@pytest.mark.parametrize("story", STORIES)
async def test_a_stage_is_passed_over_by_a_line_that_it_was_run_by(story: Story) -> None:
    async with job(QUICK) as one:
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
        {"was_run": lambda line, member, *known: member != "c" and was_run(line, member, *known)},
    ),
    "by the line of whoever asked last": (
        a_line_that_never_trained,
        {"was_run": _who_asked_last, "line_key": lambda _: b"/muster.stage/"},
    ),
}
"""Wrong rules, each with a story that finds it: what stands in for the right one, by name."""


@pytest.mark.parametrize("name", sorted(PLANTED))
async def test_a_wrong_rule_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    story, wrong = PLANTED[name]
    for what, by in wrong.items():
        monkeypatch.setattr(launcher_shim.c10d.launchers, what, by)
    async with job(QUICK) as one:
        with pytest.raises(AssertionError):
            await story(one)
