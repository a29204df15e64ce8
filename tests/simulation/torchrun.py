# SPDX-License-Identifier: Apache-2.0
"""A torchrun, as far as a rendezvous and a drain see it: torch's join loop over the wire's values.

What it does with a state is what ``dynamic_rendezvous`` of torch 2.15 does; its processes are the
rank of ``ranks.py``. It lives in the training container, which outlives any sidecar.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING

from launcher_shim.c10d.rounds.records import OWN_ROUNDS
from launcher_shim.c10d.rounds.stages import stage_name
from launcher_shim.c10d.state_codec import (
    SENTINEL,
    Flavour,
    NodeDesc,
    TorchState,
    decode,
    encode,
)
from launcher_shim.tcpstore import wire
from tests.simulation.ranks import Rank
from tests.simulation.relay import Connection

if TYPE_CHECKING:
    from tests.simulation.pods import Pod, SimulatedJob

RUN = "digits"
LAST_STAGE = 2
SECOND = stage_name(RUN, LAST_STAGE)
"""The run of the last torchrun, in a plot whose containers run one after the other."""
NOW = datetime(2026, 1, 1, tzinfo=UTC)
"""Of the times in a state only their kind is looked at."""

MONITOR_S = 1.5
KEEP_ALIVE_S = 5.0
JOIN_S = 600.0
EXIT_BARRIER_S = 300.0
FIRST_PORT = 20_000
OTHER_RUNS = 100_000_000


def port_of(run: str, number: int) -> int:
    """Where the ranks of one round meet; no two rounds share one."""
    return FIRST_PORT + number + (0 if run == RUN else OTHER_RUNS * len(run))


NO_RESTARTS = "no restarts are left"


class Ended(Exception):
    """The torchrun's process ends by itself."""

    def __init__(self, why: str, *, succeeded: bool = False) -> None:
        super().__init__(why)
        self.succeeded = succeeded


class Torchrun:
    """One life of one training container, or one stage of it. ``run``: which it is to come to."""

    def __init__(self, job: SimulatedJob, pod: Pod, number: int) -> None:
        self.pod = pod
        self.run = stage_name(pod.run, pod.stage)
        self.round: int | None = None
        self.joins = 0
        self.sticks = False
        """Whether its workers do not end when it stops them for a waiter."""
        self.finished = False
        self.runs = asyncio.Event()
        """Cleared while its agent is stopped: it sends no request, and its workers train on."""
        self.runs.set()
        self.process = job.loop.process(f"torchrun {pod.name}")
        self._job = job
        self._state_key = b"/torch.rendezvous." + pod.run.encode()
        self._random = Random(job.random.random())
        self._me = NodeDesc(f"10.0.0.{pod.name}", number, 0)
        self._connection = Connection(job.loop, number, pod.container)
        self._state = TorchState()
        self._token = b""
        self._orders: list[str] = []
        self._rank: Rank | None = None
        if pod.sidecar is not None:
            self._connection.meet(pod.sidecar)
        self.task = job.loop.spawn(self.process, self._run(), f"torchrun of {pod.name}")
        self.task.add_done_callback(job.ended)

    @property
    def real_round(self) -> int | None:
        """The round whose world its ranks are in, also if it is in one of its own."""
        own = self.round is not None and self.round >= OWN_ROUNDS
        return self._rank.round[1] if own and self._rank is not None else self.round

    @property
    def rank(self) -> Rank | None:
        """Its rank, while one trains."""
        return self._rank

    def meet(self) -> None:
        """Go on with a new sidecar."""
        assert self.pod.sidecar is not None
        self._connection.meet(self.pod.sidecar)

    def order(self, what: str) -> None:
        """Let its workers fail: ``rejoin`` with restarts left, ``fail`` without."""
        self._orders.append(what)

    def kill(self) -> None:
        """End it at once; the kernel closes its connection."""
        self._say("torchrun ends")
        self.pod.failures += 1
        self._job.loop.kill(self.process)
        self.round = None
        self._end_rank()
        self._connection.close()

    # -- its agent

    async def _run(self) -> None:
        try:
            if self._job.stages > 1:
                await self._ask_whether_to_start()
            await self._agent()
        except Ended as ended:
            if ended.succeeded:
                self._say("torchrun has finished")
            else:
                self._say(f"torchrun gives up: {ended}")
                self.pod.failures += 1
                self._job.invariants.gave_up(self, str(ended))
            self._end_rank()
            self.round = None
            self._connection.close()
            self.pod.container_ended(self, succeeded=ended.succeeded)

    async def _ask_whether_to_start(self) -> None:
        """Ask as the delivered ``torchrun`` does, before the image's own takes its place."""
        key = wire.STAGE + self.pod.run.encode()
        may_pass = b"" if self.pod.took_part else wire.MAY_PASS
        line = b"stage %d" % self.pod.stage
        while (answer := await self._connection.ask(wire.CompareSet(key, may_pass, line))) == AGAIN:
            continue
        if answer == wire.vec(wire.PASSED):
            self._say(f"passes over {self.run}")
            self._job.invariants.rounds.passed_over(self)
            raise Ended("its stage has ended well already", succeeded=True)
        self._connection.close()
        self._connection = Connection(self._job.loop, self._job.next_number(), self.pod.container)
        if self.pod.sidecar is not None:
            self._connection.meet(self.pod.sidecar)

    async def _agent(self) -> None:
        await self._sync_answer(wire.CompareSet(self._state_key, b"", SENTINEL))
        self.pod.took_part = True
        await self._form()
        while True:
            await asyncio.sleep(MONITOR_S * self._random.uniform(0.8, 1.2))
            await self.runs.wait()
            if self._rank is not None and self._rank.finished:
                await self._finish()
            if self._orders:
                await self._obey(self._orders.pop(0))
            await self._sync_answer(wire.Get(self._state_key))
            if self._state.wait_list:
                self._say("sees a waiter: leaves the round")
                await self._stop_workers()
                await self._form()

    async def _stop_workers(self) -> None:
        """Wait until they have ended; all the while its keep-alive thread asks on."""
        self._end_rank()
        self.round = None
        while self.sticks:
            await self._sync_answer(wire.Get(self._state_key))
            await asyncio.sleep(KEEP_ALIVE_S)

    async def _obey(self, order: str) -> None:
        self._say(f"its workers fail: {order}")
        self.pod.failures += 1
        self._end_rank()
        self.round = None
        if order == "rejoin":
            await self._form()
            return
        await self._set(replace(self._state, closed=True))
        raise Ended(NO_RESTARTS)

    async def _finish(self) -> None:
        """Meet the others in torch's exit barrier, and close the run."""
        assert self.round is not None
        self._say("its workers are done")
        self.finished = True
        size = len(self._state.participants)
        base = self._state_key + b".%d/torchelastic/agent/terminal_state/" % self.round
        here = await self._connection.ask(wire.Add(base + b"num_members", 1))
        if int.from_bytes(here, "little") == size:
            await self._connection.ask(wire.Set(base + b"last_member", b"<val_ignored>"))
        try:
            async with asyncio.timeout(EXIT_BARRIER_S):
                await self._connection.ask(wire.Wait((base + b"last_member",)))
        except TimeoutError:
            raise Ended("the others have not come to the exit barrier") from None
        await self._sync_answer(wire.Get(self._state_key))
        await self._set(replace(self._state, closed=True))
        raise Ended("the job is done", succeeded=True)

    async def _form(self) -> None:
        """``next_rendezvous``: leave the round, if in one, and join the next."""
        self._end_rank()
        self.round = None
        self.joins += 1
        await self._sync_answer(wire.Get(self._state_key))
        while self._me in self._state.participants:
            participants = {k: v for k, v in self._state.participants.items() if k != self._me}
            await self._set(replace(self._state, participants=participants))
        await self._join()
        number, world = self._state.round, self._state.participants
        self._say(f"is in round {number}, {world[self._me]} of {len(world)}")
        if number >= OWN_ROUNDS:
            self._job.invariants.in_its_own(self, number, world[self._me], len(world))
        else:
            self._job.invariants.formed(self, number, world[self._me], len(world))
        self.round = number
        prefix = self._state_key + b".%d/" % number
        address, port = prefix + b"MASTER_ADDR", prefix + b"MASTER_PORT"
        if world[self._me] == 0:
            await self._connection.ask(wire.Set(address, b"127.0.0.1"))
            await self._connection.ask(wire.Set(port, b"%d" % port_of(self.run, number)))
        master = []
        for key in (address, port):
            await self._connection.ask(wire.Wait((key,)))
            master.append(_vec(await self._connection.ask(wire.Get(key))).decode())
        what = (self._job, self.pod, (self.run, number), ":".join(master), len(world), self._random)
        self._rank = self._job.rank(*what, place=world[self._me])
        rank = self._job.loop.spawn(self.process, self._rank.run(), f"rank of {self.pod.name}")
        rank.add_done_callback(self._job.ended)
        self.pod.entered(self)

    async def _join(self) -> None:
        """torch's join operation."""
        deadline_s = self._job.loop.time() + JOIN_S
        shape, me = self.pod.shape, self._me
        waits = False
        while True:
            state = self._state
            if state.closed:
                raise Ended("the rendezvous is closed")
            full = len(state.participants) >= shape.most
            if me in state.redundancy_list:
                if full:
                    if not waits:
                        self._say("waits as a spare")
                    waits = True
                    await self._look_again()
                else:
                    if waits:
                        self._say("is a spare no more")
                    waits = False
                    deadline_s = self._job.loop.time() + JOIN_S
                    rest = state.redundancy_list - {me}
                    await self._set(replace(state, redundancy_list=rest))
            elif me in state.participants and state.complete:
                return
            elif self._job.loop.time() > deadline_s:
                raise Ended("its join has timed out")
            elif state.complete and not full and me not in state.wait_list:
                await self._set(replace(state, wait_list=state.wait_list | {me}))
            elif state.complete and full and me not in state.wait_list:
                await self._set(replace(state, redundancy_list=state.redundancy_list | {me}))
            elif not state.complete and me not in state.participants:
                participants = {**state.participants, me: 0}
                await self._set(
                    replace(
                        state,
                        participants=participants,
                        wait_list=state.wait_list - {me},
                        deadline=NOW if len(participants) == shape.least else state.deadline,
                        complete=len(participants) == shape.most,
                    )
                )
            else:
                await self._look_again()

    async def _look_again(self) -> None:
        await asyncio.sleep(1.0)
        await self._sync_answer(wire.Get(self._state_key))

    async def _set(self, state: TorchState) -> None:
        desired = encode(
            replace(state, last_heartbeats={**state.last_heartbeats, self._me: NOW}), AWARE
        )
        await self._sync_answer(wire.CompareSet(self._state_key, self._token or SENTINEL, desired))

    async def _sync_answer(self, request: wire.Request) -> None:
        blob = _vec(await self._connection.ask(request))
        if blob != SENTINEL:
            self._state, self._token = _decoded(blob), blob

    # -- small things

    def _end_rank(self) -> None:
        rank, self._rank = self._rank, None
        if rank is not None:
            rank.end()

    def _say(self, what: str) -> None:
        self._job.timeline.add(self.pod.name, what)


AWARE = Flavour(aware=True)
AGAIN = wire.vec(wire.AGAIN)


@lru_cache(maxsize=1024)
def _decoded(blob: bytes) -> TorchState:
    return decode(blob)[0]


def _vec(answer: bytes) -> bytes:
    return answer[8:]
