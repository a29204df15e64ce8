# SPDX-License-Identifier: Apache-2.0
"""torch's own agent loop over real endpoints while pods are drained: no restart is burnt."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
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

from rdzv.records.commit import Commit, Vote
from rdzv.records.drain import Drain
from rdzv.store import Put
from rdzv.store.memory.client import MemoryEngine, MemoryStore
from tests.support.sidecars.endpoints import Pod, pod
from tests.support.sidecars.handlers import RUN_ID, handler_at
from tests.support.sidecars.jobs import KEYS

HERE = KEYS.in_generation(1)
MAX_RESTARTS = 3
PATIENT_S = 30.0
"""A last call so long that who comes late, because this machine is slow, is waited for."""


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

    def __init__(self, port: int, address: str, *, closes: bool = False) -> None:
        self.agent: MakeBelieve | None = None
        self.failure: BaseException | None = None
        self._port, self._address, self._closes = port, address, closes
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
                local_world_size=1,
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


async def until(what: Callable[[], bool], timeout_s: float = 25) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def put(engine: MemoryEngine, *puts: Put) -> None:
    await MemoryStore(engine).txn([], puts)


def drain_of(name: str) -> Drain:
    return Drain(f"uid-{name}", name, "evicted", "prestop")


@pytest.mark.parametrize("closes", [False, True], ids=["leaves", "closes"])
async def test_one_is_drained_and_its_name_comes_back_in_another_pod(closes: bool) -> None:
    engine = MemoryEngine()
    async with AsyncExitStack() as stack:
        pods: dict[str, Pod] = {}
        leaving = await stack.enter_async_context(AsyncExitStack())
        for name in ("w-0", "w-1", "w-2"):
            where = leaving if name == "w-0" else stack
            pods[name] = await where.enter_async_context(pod(engine, name, last_call_s=PATIENT_S))
        torchruns = {
            name: Torchrun(one.port, f"127.0.0.{at + 1}", closes=closes)
            for at, (name, one) in enumerate(pods.items())
        }
        try:
            await until(lambda: all(len(t.worlds) == 1 for t in torchruns.values()))
            ((size, master),) = {t.worlds[0] for t in torchruns.values()}
            assert size == 3
            # What each sidecar tells the drains is what the workers were told.
            for one in pods.values():
                live = one.endpoint.live_round()
                assert live is not None
                assert (live.members, live.master) == (("w-0", "w-1", "w-2"), master)
                assert (live.number, live.left, live.newcomers) == (0, frozenset(), False)

            await put(engine, Put(HERE.drain("uid-w-0"), drain_of("w-0").to_json()))
            commit = Commit(1, RUN_ID, 0, "done", 40, ("uid-w-0",), granted=("uid-w-0",))
            seen = pods["w-1"].endpoint.live_round()
            await put(engine, Put(HERE.commit, commit.to_json()))
            await until(lambda: all(len(torchruns[n].worlds) == 2 for n in ("w-1", "w-2")))
            async with asyncio.timeout(10):
                while seen is None or not (seen.live and seen.number == 1 and seen.master):
                    seen = await pods["w-1"].endpoint.live_round_changed(seen)
            assert seen.members == ("w-1", "w-2")
            assert {torchruns[n].worlds[1] for n in ("w-1", "w-2")} == {(2, seen.master)}
            assert seen.master != master
            leaver = torchruns["w-0"]
            assert len(leaver.worlds) == 1

            leaver.terminate()
            await until(lambda: leaver.ended)
            assert isinstance(leaver.failure, SignalException)
            await leaving.aclose()
            await put(
                engine,
                Put(HERE.commit, replace(commit, round=1, refused=True, joins=True).to_json()),
            )
            again = await stack.enter_async_context(
                pod(engine, "w-0", uid="uid-of-another", last_call_s=PATIENT_S)
            )
            torchruns["w-0 again"] = Torchrun(again.port, "127.0.0.1")
            there = [torchruns[n] for n in ("w-1", "w-2", "w-0 again")]
            await until(lambda: all(t.worlds and t.worlds[-1][0] == 3 for t in there))
            assert [t.agent.burnt for t in torchruns.values() if t.agent] == [0, 0, 0, 0]
            assert [len(t.worlds) for t in there] == [3, 3, 1]
            assert again.endpoint.rendezvous()[RUN_ID].closed == ""
        finally:
            for torchrun in torchruns.values():
                if torchrun.agent is not None:
                    torchrun.terminate()
            await until(lambda: all(t.ended for t in torchruns.values()))


async def test_who_has_saved_goes_at_its_deadline_and_the_others_finish_their_save() -> None:
    engine = MemoryEngine()
    async with AsyncExitStack() as stack:
        names = ("w-0", "w-1", "w-2")
        pods = {
            name: await stack.enter_async_context(pod(engine, name, last_call_s=PATIENT_S))
            for name in names
        }
        torchruns = {
            name: Torchrun(one.port, f"127.0.0.{at + 1}", closes=True)
            for at, (name, one) in enumerate(pods.items())
        }
        try:
            await until(lambda: all(len(t.worlds) == 1 for t in torchruns.values()))
            commit = Commit(1, RUN_ID, 0, "commit", 40, ("uid-w-0",))
            await put(
                engine,
                Put(HERE.drain("uid-w-0"), drain_of("w-0").to_json()),
                Put(HERE.commit, commit.to_json()),
                Put(HERE.vote(1, "w-0"), Vote(1, 0, "uid-w-0", 40, acked=40).to_json()),
                Put(HERE.vote(1, "w-1"), Vote(1, 0, "uid-w-1", 40).to_json()),
            )
            torchruns["w-0"].terminate()
            await until(lambda: torchruns["w-0"].ended)
            for name in ("w-1", "w-2"):
                await until(lambda name=name: "w-0" in _left(pods[name]))  # type: ignore[misc]
            # Each agent has looked for waiters again: it does so after each of its intervals.
            looks = {name: torchruns[name].looks for name in names}
            await until(lambda: all(torchruns[n].looks > looks[n] + 5 for n in ("w-1", "w-2")))
            assert [len(t.worlds) for t in torchruns.values()] == [1, 1, 1]
            done = replace(commit, phase="done")
            await put(engine, Put(HERE.commit, done.to_json()))
            await until(lambda: all(len(torchruns[n].worlds) == 2 for n in ("w-1", "w-2")))
            assert {torchruns[n].worlds[1][0] for n in ("w-1", "w-2")} == {2}
        finally:
            for torchrun in torchruns.values():
                if torchrun.agent is not None:
                    torchrun.terminate()
            await until(lambda: all(t.ended for t in torchruns.values()))


async def test_a_leaver_whose_ranks_end_with_the_job_waits_for_nobody() -> None:
    engine = MemoryEngine()
    async with AsyncExitStack() as stack:
        names = ("w-0", "w-1", "w-2")
        pods = {
            name: await stack.enter_async_context(pod(engine, name, last_call_s=PATIENT_S))
            for name in names
        }
        torchruns = {
            name: Torchrun(one.port, f"127.0.0.{at + 1}", closes=True)
            for at, (name, one) in enumerate(pods.items())
        }
        try:
            await until(lambda: all(len(t.worlds) == 1 for t in torchruns.values()))
            commit = Commit(1, RUN_ID, 0, "done", 40, ("uid-w-0",), granted=("uid-w-0",))
            by_hand = replace(drain_of("w-0"), source="operator", outcome="committed")
            await put(
                engine,
                Put(HERE.drain("uid-w-0"), by_hand.to_json()),
                Put(HERE.commit, commit.to_json()),
            )
            await until(lambda: all(len(torchruns[n].worlds) == 2 for n in ("w-1", "w-2")))
            for name in ("w-1", "w-2"):
                torchruns[name].finish()
            await until(lambda: all(torchruns[n].ended for n in ("w-1", "w-2")))
            await until(lambda: _succeeded(pods["w-0"]))
            # Its sidecar tells its ranks so; its agent waits for all of its former world then.
            torchruns["w-0"].finish()
            await until(lambda: torchruns["w-0"].ended)
            assert [t.failure for t in torchruns.values()] == [None, None, None]
        finally:
            for torchrun in torchruns.values():
                if torchrun.agent is not None:
                    torchrun.terminate()
            await until(lambda: all(t.ended for t in torchruns.values()))


def _left(one: Pod) -> frozenset[str]:
    live = one.endpoint.live_round()
    return live.left if live is not None else frozenset()


def _succeeded(one: Pod) -> bool:
    live = one.endpoint.live_round()
    return live is not None and live.succeeded
