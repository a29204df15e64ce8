# SPDX-License-Identifier: Apache-2.0
"""torch's own agent loop over real endpoints while pods are drained: no restart is burnt."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch.distributed", reason="the agent is torch's")

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import SignalException

from rdzv.records.drain import Commit, Drain, Vote
from rdzv.store import Put
from rdzv.store.memory.client import MemoryEngine, MemoryStore
from tests.support.sidecars.endpoints import Pod, pod
from tests.support.sidecars.handlers import RUN_ID, handler_at
from tests.support.sidecars.jobs import KEYS

HERE = KEYS.in_generation(1)
MAX_RESTARTS = 3
NAMES = ("w-0", "w-1", "w-2")
PATIENT_S = 300.0
"""A last call so long that all three are waited for."""

DEADLINE_S = 90.0
"""Ends what hangs."""


class MakeBelieve(SimpleElasticAgent):  # type: ignore[misc]
    """torch's agent with workers that only wait. ``closes``: as 2.3 to 2.7 do when they end."""

    def __init__(self, spec: WorkerSpec, *, closes: bool) -> None:
        super().__init__(spec)
        self.worlds: list[tuple[int, str]] = []
        self.terminated = threading.Event()
        self.finished = threading.Event()
        self.looks = 0
        self._closes = closes

    @property
    def burnt(self) -> int:
        return MAX_RESTARTS - int(self._remaining_restarts)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        master = f"{worker_group.master_addr}:{worker_group.master_port}"
        self.worlds.append((worker_group.group_world_size or 0, master))
        return {0: "worker"}

    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:
        pass

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self.terminated.is_set():
            raise SignalException("terminated", signal.SIGTERM)
        self.looks += 1
        if self.finished.is_set():
            values = dict.fromkeys(range(worker_group.group_world_size or 1))
            return RunResult(state=WorkerState.SUCCEEDED, return_values=values)
        return RunResult(state=WorkerState.HEALTHY)

    def _shutdown(self, *args: object, **options: object) -> None:
        if self._closes:
            self._worker_group.spec.rdzv_handler.shutdown()


class Torchrun:
    """An agent in a thread of its own, with its own connection to its pod."""

    def __init__(self, port: int, address: str, *, closes: bool = False, workers: int = 1) -> None:
        self.agent: MakeBelieve | None = None
        self.failure: BaseException | None = None
        self._port, self._address, self._closes = port, address, closes
        self._workers = workers
        self._thread = threading.Thread(target=self._run, name=address, daemon=True)
        self._thread.start()

    @property
    def worlds(self) -> list[tuple[int, str]]:
        return self.agent.worlds if self.agent else []

    @property
    def looks(self) -> int:
        """How often it has looked at its workers and for waiters."""
        return self.agent.looks if self.agent else 0

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def terminate(self) -> None:
        assert self.agent is not None
        self.agent.terminated.set()

    def finish(self) -> None:
        """Let its workers end well."""
        assert self.agent is not None
        self.agent.finished.set()

    def _run(self) -> None:
        handler, _ = handler_at(self._port, self._address)
        try:
            spec = WorkerSpec(
                role="trainer",
                local_world_size=self._workers,
                entrypoint="train",
                rdzv_handler=handler,
                max_restarts=MAX_RESTARTS,
                monitor_interval=0.1,
            )
            self.agent = MakeBelieve(spec, closes=self._closes)
            self.agent.run()
        except BaseException as failure:
            self.failure = failure
        finally:
            handler._stop_heartbeats()


class Job:
    """Pods, each with a torchrun; all of them are the first world."""

    def __init__(self, stack: AsyncExitStack, *, closes: bool) -> None:
        self.pods: dict[str, Pod] = {}
        self.torchruns: dict[str, Torchrun] = {}
        self._engine = MemoryEngine()
        self._stack = stack
        self._stacks: dict[str, AsyncExitStack] = {}
        self._closes = closes

    async def add(self, name: str, uid: str = "", *, workers: int = 1) -> None:
        self._stacks[name] = await self._stack.enter_async_context(AsyncExitStack())
        self.pods[name] = await self._stacks[name].enter_async_context(
            pod(self._engine, name, uid=uid, last_call_s=PATIENT_S)
        )
        address = f"127.0.0.{len(self.torchruns) + 1}"
        self.torchruns[name + uid] = Torchrun(
            self.pods[name].port, address, closes=self._closes, workers=workers
        )

    async def remove(self, name: str) -> None:
        await self._stacks[name].aclose()

    async def put(self, *puts: Put) -> None:
        await MemoryStore(self._engine).txn([], puts)

    async def formed(self, times: int, *names: str) -> set[tuple[int, str]]:
        """Wait until these have formed so many worlds; return the last of each."""
        torchruns = [self.torchruns[name] for name in names]
        await until(lambda: all(len(one.worlds) == times for one in torchruns))
        return {one.worlds[-1] for one in torchruns}


@asynccontextmanager
async def job(*, closes: bool = True, workers: Sequence[int] = (1, 1, 1)) -> AsyncIterator[Job]:
    async with AsyncExitStack() as stack:
        one = Job(stack, closes=closes)
        for name, number in zip(NAMES, workers, strict=True):
            await one.add(name, workers=number)
        try:
            yield one
        finally:
            torchruns = one.torchruns.values()
            for torchrun in torchruns:
                if torchrun.agent is not None:
                    torchrun.terminate()
            await until(lambda: all(torchrun.ended for torchrun in torchruns))


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not what():  # noqa: ASYNC110 - torch's threads have no event to give
            await asyncio.sleep(0.02)


def drain_of(name: str) -> Drain:
    return Drain(f"uid-{name}", name, "evicted", "prestop")


@pytest.mark.parametrize("closes", [False, True], ids=["leaves", "closes"])
async def test_one_is_drained_and_its_name_comes_back_in_another_pod(closes: bool) -> None:
    async with job(closes=closes) as one:
        ((size, master),) = await one.formed(1, *NAMES)
        assert size == 3
        # What each sidecar tells the drains is what the workers were told.
        for each in one.pods.values():
            live = each.endpoint.live_rounds().counts
            assert live is not None
            assert (live.members, live.master) == (NAMES, master)
            assert (live.number, live.left, live.reforms) == (0, frozenset(), "")

        await one.put(Put(HERE.drain("uid-w-0"), drain_of("w-0").to_json()))
        commit = Commit(1, RUN_ID, 0, "done", 40, ("uid-w-0",), granted=("uid-w-0",))
        seen = one.pods["w-1"].endpoint.live_rounds()
        await one.put(Put(HERE.commit, commit.to_json()))
        worlds = await one.formed(2, "w-1", "w-2")
        async with asyncio.timeout(DEADLINE_S):
            while not ((now := seen.counts) and now.live and now.number == 1 and now.master):
                seen = await one.pods["w-1"].endpoint.live_rounds_changed(seen)
        # Who stays keeps its rank, if it can.
        assert now.members == ("w-2", "w-1")
        assert worlds == {(2, now.master)}
        assert now.master != master
        leaver = one.torchruns["w-0"]
        assert len(leaver.worlds) == 1

        leaver.terminate()
        await until(lambda: leaver.ended)
        assert isinstance(leaver.failure, SignalException)
        await one.remove("w-0")
        admitting = replace(commit, round=1, refused=True, joins=True)
        released = replace(drain_of("w-0"), outcome="committed")
        await one.put(
            Put(HERE.commit, admitting.to_json()), Put(HERE.drain("uid-w-0"), released.to_json())
        )
        await one.add("w-0", " again")
        await one.formed(3, "w-1", "w-2")
        ((size, _),) = await one.formed(1, "w-0 again")
        assert size == 3
        assert [t.agent.burnt for t in one.torchruns.values() if t.agent] == [0, 0, 0, 0]
        assert one.pods["w-0"].endpoint.rendezvous()[RUN_ID].round.closed == ""


async def test_each_sidecar_knows_how_many_workers_its_torchrun_started() -> None:
    async with job(workers=(1, 2, 3)) as one:
        await one.formed(1, *NAMES)
        started = [each.endpoint for each in one.pods.values()]
        await until(lambda: [endpoint.workers for endpoint in started] == [1, 2, 3])


async def test_who_has_saved_goes_at_its_deadline_and_the_others_finish_their_save() -> None:
    async with job() as one:
        await one.formed(1, *NAMES)
        commit = Commit(1, RUN_ID, 0, "commit", 40, ("uid-w-0",))
        await one.put(
            Put(HERE.drain("uid-w-0"), drain_of("w-0").to_json()),
            Put(HERE.commit, commit.to_json()),
            Put(HERE.vote(1, "w-0"), Vote(1, 0, "uid-w-0", 40, acked=40).to_json()),
            Put(HERE.vote(1, "w-1"), Vote(1, 0, "uid-w-1", 40).to_json()),
        )
        one.torchruns["w-0"].terminate()
        await until(lambda: one.torchruns["w-0"].ended)
        stay = [one.torchruns[name] for name in ("w-1", "w-2")]
        await until(lambda: all("w-0" in _left(one.pods[name]) for name in ("w-1", "w-2")))
        # torch's handler asks once a second, whoever looks: each has looked at a later answer.
        asked = [_asked(one.pods[name]) for name in ("w-1", "w-2")]
        await until(
            lambda: all(
                _asked(one.pods[name]) > before + 2
                for name, before in zip(("w-1", "w-2"), asked, strict=True)
            )
        )
        looks = [torchrun.looks for torchrun in stay]
        await until(
            lambda: all(t.looks > before + 5 for t, before in zip(stay, looks, strict=True))
        )
        assert [len(t.worlds) for t in one.torchruns.values()] == [1, 1, 1]
        await one.put(Put(HERE.commit, replace(commit, phase="done").to_json()))
        ((size, _),) = await one.formed(2, "w-1", "w-2")
        assert size == 2


async def test_a_leaver_whose_ranks_end_with_the_job_waits_for_nobody() -> None:
    async with job() as one:
        await one.formed(1, *NAMES)
        commit = Commit(1, RUN_ID, 0, "done", 40, ("uid-w-0",), granted=("uid-w-0",))
        by_hand = replace(drain_of("w-0"), source="operator", outcome="committed")
        await one.put(
            Put(HERE.drain("uid-w-0"), by_hand.to_json()), Put(HERE.commit, commit.to_json())
        )
        await one.formed(2, "w-1", "w-2")
        for name in ("w-1", "w-2"):
            one.torchruns[name].finish()
        await until(lambda: all(one.torchruns[name].ended for name in ("w-1", "w-2")))
        await until(lambda: _succeeded(one.pods["w-0"]))
        # Its sidecar tells its ranks so; its agent waits for all of its former world then.
        one.torchruns["w-0"].finish()
        await until(lambda: one.torchruns["w-0"].ended)
        assert [t.failure for t in one.torchruns.values()] == [None, None, None]


def _left(one: Pod) -> frozenset[str]:
    live = one.endpoint.live_rounds().counts
    return live.left if live is not None else frozenset()


def _asked(one: Pod) -> int:
    """How many requests its torchrun has sent."""
    ((_, agent),) = one.endpoint.launchers()
    return agent.asked


def _succeeded(one: Pod) -> bool:
    live = one.endpoint.live_rounds().counts
    return live is not None and live.succeeded
