# SPDX-License-Identifier: Apache-2.0
"""One client's session: passes each request to the part of Muster that answers it.

The rendezvous answers for the state key, the run's key-value store for all else. A known value is
answered at once; otherwise the answer is an awaitable, on which the server holds the connection.

The session of a client behind a relay may outlive the sidecar: its connection, its place in the
rendezvous and the numbers of its requests go on in the next one, by the relay's preface and by the
note that the relay keeps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from launcher_shim.c10d.agent import TorchAgent
from launcher_shim.c10d.generation import Attachment
from launcher_shim.c10d.launchers import Launchers
from launcher_shim.c10d.request_order import RelayNumbers
from launcher_shim.c10d.rounds.records import Note
from launcher_shim.c10d.rounds.stages import (
    STATE_KEY_PREFIX,
    is_exit_barrier,
    served_run_of,
    state_key,
    torch_run_id,
)
from launcher_shim.c10d.state_codec import SENTINEL
from launcher_shim.c10d.values.operations import Kv
from launcher_shim.c10d.values.transactions import Stamp
from launcher_shim.tcpstore import wire
from rdzv.errors import LeaseLost
from rdzv.reconcile import first_of

Answer = bytes | Awaitable[bytes]

T = TypeVar("T")


class LauncherSession:
    """One client's session. ``author`` names its connection among all that the job ever had."""

    def __init__(
        self, launchers: Launchers, author: str, relay: RelayNumbers | None = None
    ) -> None:
        self.whole: Mapping[bytes, bytes] = {}
        self._launchers = launchers
        self._author = author
        self._relay = relay
        self._asked = 0
        self._held_back: Stamp | None = None
        """Stamp of the request that is being handled, if it had to wait until the session was
        ready."""
        self._signed = relay is not None and relay.following > 1
        self._attachment: Attachment | None = None
        """Set once a rendezvous is joined; before, and without one, the shared keys count."""
        self._asked_of: Kv | None = None
        """The keys of the stage for which it asked whether a torchrun has to start."""
        self._ready = False  # True for good, once there are keys to answer from
        self._state_key: bytes | None = None
        note = Note.read(relay.note) if relay is not None else None
        self._resuming = asyncio.ensure_future(self._resume(note)) if note is not None else None
        self._answers: dict[type, Callable[[Any], Answer]] = {
            wire.Get: self._get,
            wire.Wait: self._wait,
            wire.Check: self._check,
            wire.CompareSet: self._compare_set,
            wire.Set: self._set,
            wire.MultiGet: self._multi_get,
            wire.MultiSet: self._multi_set,
            wire.Add: self._add,
            wire.Append: self._append,
            wire.DeleteKey: self._delete,
            wire.NumKeys: lambda _: wire.i64(len(self._all_keys())),
            wire.ListKeys: lambda _: wire.key_list(self._all_keys()),
            wire.QueuePush: self._push,
            wire.QueuePop: self._pop,
            wire.QueueLen: lambda one: self._number(lambda keys: keys.queues.length(one.key)),
            wire.Barrier: self._barrier,
        }

    def handle(self, request: wire.Request) -> Answer:
        """Answer one request; see ``launcher_shim.c10d.connection.Session``."""
        self._asked += 1
        return self._serve(request, None)

    def keep(self, data: bytes, requests: Sequence[wire.Request]) -> None:
        """Keep the answer to the same bytes; see ``connection.Session``."""
        keys = self._kv or self._launchers.shared
        if keys is not None:
            self.whole = keys.answers.by_request
            keys.reads.keep_answer(data, requests)

    def _serve(self, request: wire.Request, held_back: Stamp | None) -> Answer:
        attachment = self._attachment
        if attachment is None and not self._ready:
            shared = self._launchers.shared if self._resuming is None else None
            self._ready = (self._asked_of or shared) is not None
            if not self._ready:
                return self._when_ready(request, held_back or self._newest_stamp())
        self._held_back = held_back  # for the call that follows, and it alone
        if attachment is None:
            return self._answers[type(request)](request)
        agent = attachment.agent
        agent.request_began()
        answer = self._answers[type(request)](request)
        if isinstance(answer, bytes):
            agent.request_ended()
            return answer
        # A task, not a coroutine around it: if it is cancelled before its first step, it must still
        # end the request.
        under_way = asyncio.ensure_future(answer)
        under_way.add_done_callback(lambda _: agent.request_ended())
        if isinstance(request, wire.PATIENT):
            agent.wait_began()
            under_way.add_done_callback(lambda _: agent.wait_ended())
        return under_way

    def closed(self) -> None:
        """End the session: the client is gone, or, behind a relay, this sidecar ends."""
        resuming = self._resuming
        if self._relay is not None and self._launchers.closing:
            if resuming is not None:
                resuming.cancel()
        elif resuming is not None and not resuming.done():
            resuming.add_done_callback(lambda _: self._leave())
        else:
            self._leave()

    def _leave(self) -> None:
        if self._agent is not None:
            self._agent.closed()
            self._launchers.detach(self._author)
        if self._signed:
            self._launchers.forget(self._kv, self._author)

    # -- how a request waits

    async def _when_ready(self, request: wire.Request, stamp: Stamp) -> bytes:
        if self._resuming is not None:
            await asyncio.shield(self._resuming)
        else:
            await self._launchers.ready()
        answer = self._serve(request, stamp)
        return answer if isinstance(answer, bytes) else await answer

    async def _resume(self, note: Note) -> None:
        self._attachment = await self._launchers.resume(note, self._author, self._nonce or "")
        self._state_key = state_key(torch_run_id(note.run_id))

    def _stamp(self) -> Stamp:
        """Return the stamp of the request that is being handled. Reads need none, and are many."""
        return self._held_back or self._newest_stamp()

    def _newest_stamp(self) -> Stamp:
        relay = self._relay
        if relay is None:
            return Stamp(self._author, self._asked)
        return Stamp(self._author, relay.number, relay.again, lasting=True)

    def _sign(self) -> Stamp:
        """Return the stamp of a request whose number is recorded, and note that one was."""
        self._signed = True
        return self._stamp()

    @property
    def _nonce(self) -> str | None:
        return self._relay.session.hex() if self._relay is not None else None

    @property
    def _agent(self) -> TorchAgent | None:
        return self._attachment.agent if self._attachment is not None else None

    @property
    def _kv(self) -> Kv | None:
        """Its own keys; None if the shared ones count."""
        return self._attachment.kv if self._attachment is not None else self._asked_of

    @property
    def _keys(self) -> Kv:
        # ``_kv or shared``, without another property: every read comes through here.
        attachment = self._attachment
        keys = attachment.kv if attachment is not None else self._asked_of or self._launchers.shared
        assert keys is not None
        return keys

    async def _carry_out(self, work: Callable[[Kv], Awaitable[T]]) -> T:
        """Do ``work``; do it again, in its next life, if the job has begun that meanwhile."""
        while True:
            keys = self._keys
            try:
                return await work(keys)
            except LeaseLost:
                if self._keys is keys:
                    raise

    # -- the rendezvous state

    def _compare_set(self, request: wire.CompareSet) -> Answer:
        if self._agent is not None and request.key == self._state_key:
            return self._wish(self._agent, request, again=self._stamp().again)
        if self._agent is None and request.key.startswith(wire.STAGE):
            return self._begin_stage(request)
        opens = request.desired == SENTINEL and not request.expected
        if self._agent is None and opens and request.key.startswith(STATE_KEY_PREFIX):
            return self._attach(request)
        stamp = self._sign()
        return self._vec(
            lambda keys: keys.writes.compare_set(
                request.key, request.expected, request.desired, stamp
            )
        )

    async def _attach(self, request: wire.CompareSet) -> bytes:
        run_id = served_run_of(request.key)
        self.whole = {}
        attachment = await self._launchers.attach(run_id, self._author, self._nonce)
        self._attachment, self._state_key = attachment, request.key
        return await self._wish(attachment.agent, request, again=False)

    async def _begin_stage(self, request: wire.CompareSet) -> bytes:
        """Answer a client that asks whether a torchrun has to start."""
        run_id = served_run_of(request.key, wire.STAGE)
        stamp, may_pass = self._sign(), request.expected == wire.MAY_PASS
        self.whole = {}
        self._asked_of, answer = await self._launchers.starts.begin(
            run_id, self._nonce, request.desired, stamp, may_pass=may_pass
        )
        return wire.vec(answer)

    async def _wish(self, agent: TorchAgent, request: wire.CompareSet, *, again: bool) -> bytes:
        if again and agent.claim.named:
            # Its wish may be done already: show the present state, and it wishes again if it is
            # not.
            answer = agent.get_state()
        else:
            if not agent.claim.named:
                await self._launchers.generations.vacant(agent)
            answer = await agent.compare_set(request.expected, request.desired)
        self._keep_note(agent)
        return wire.vec(answer)

    def _keep_note(self, agent: TorchAgent) -> None:
        if self._relay is not None:
            self._relay.keep(self._launchers.note_of(agent).encode())

    async def _vec(self, value: Callable[[Kv], Awaitable[bytes]]) -> bytes:
        return wire.vec(await self._carry_out(value))

    # -- reading

    def _value(self, key: bytes) -> bytes | None:
        """Return the value if known without the store: cached, the state, or a filler."""
        keys = self._keys
        value = keys.reads.cached(key)
        if value is None and self._agent is not None:
            if key == self._state_key:
                state = self._agent.get_state()
                self._keep_note(self._agent)
                return state
            if keys.cells.value(key) is None:
                filler = self._agent.filler(key, keys.cells.value)
                if filler is not None:
                    self._keep_note(self._agent)
                return filler
        return value

    def _exist(self, keys: Sequence[bytes]) -> bool:
        exists = self._keys.reads.cached_exists
        for key in keys:
            if exists(key):
                continue
            if self._value(key) is None:
                return False
        return True

    def _get(self, request: wire.Get) -> Answer:
        agent = self._agent
        if agent is not None and request.key == self._state_key and agent.is_held():
            return self._get_held(request.key, agent)
        value = self._value(request.key)
        return wire.vec(value) if value is not None else self._get_from_store(request.key)

    async def _get_held(self, key: bytes, agent: TorchAgent) -> bytes:
        await first_of(agent.hold(), self._launchers.rank_fails(agent))
        return wire.vec(self._value(key) or b"")  # drawn after the wait: it is what has changed

    async def _get_from_store(self, key: bytes) -> bytes:
        (value,) = await self._keys.reads.get_all([key])
        return wire.vec(value or b"")

    def _multi_get(self, request: wire.MultiGet) -> Answer:
        values = [self._value(key) for key in request.keys]
        present = [value for value in values if value is not None]
        if len(present) == len(values):
            return wire.multi_get(present)
        return self._multi_get_from_store(request.keys)

    async def _multi_get_from_store(self, keys: Sequence[bytes]) -> bytes:
        values = {key: self._value(key) for key in keys}
        missing = [key for key, value in values.items() if value is None]
        values.update(zip(missing, await self._keys.reads.get_all(missing), strict=True))
        return wire.multi_get([values[key] or b"" for key in keys])

    def _check(self, request: wire.Check) -> Answer:
        if self._exist(request.keys):
            return wire.READY
        return self._check_in_store(request.keys)

    async def _check_in_store(self, keys: Sequence[bytes]) -> bytes:
        unknown = [key for key in keys if self._value(key) is None]
        return wire.READY if await self._keys.reads.check(unknown) else wire.NOT_READY

    def _wait(self, request: wire.Wait) -> Answer:
        if self._exist(request.keys):
            return wire.STOP_WAITING
        if self._agent is None:
            return self._wait_in_store(request.keys)
        return self._wait_for_news(request.keys, self._agent)

    async def _wait_in_store(self, keys: Sequence[bytes]) -> bytes:
        await self._carry_out(lambda kv: kv.reads.wait(keys))
        return wire.STOP_WAITING

    async def _wait_for_news(self, keys: Sequence[bytes], agent: TorchAgent) -> bytes:
        """Wait for the keys, or until fillers are due, as their round will never form."""
        own = [key for key in keys if key != self._state_key]
        async with asyncio.TaskGroup() as tasks:
            arriving = tasks.create_task(self._carry_out(lambda kv: kv.reads.wait(own)))
            while not arriving.done() and not self._exist(keys):
                await first_of(asyncio.shield(arriving), agent.news())
            arriving.cancel()
        return wire.STOP_WAITING

    def _all_keys(self) -> list[bytes]:
        state = [] if self._state_key is None else [self._state_key]
        return [*state, *self._keys.cells.existing()]

    # -- writing

    def _set(self, request: wire.Set) -> Answer:
        stamp = self._sign()
        return self._silent(lambda keys: keys.writes.put([(request.key, request.value)], stamp))

    def _multi_set(self, request: wire.MultiSet) -> Answer:
        stamp = self._sign()
        return self._silent(lambda keys: keys.writes.put(request.items, stamp))

    def _append(self, request: wire.Append) -> Answer:
        stamp = self._sign()
        return self._silent(lambda keys: keys.writes.append(request.key, request.value, stamp))

    def _add(self, request: wire.Add) -> Answer:
        return self._add_after_barrier(request, self._sign())

    async def _add_after_barrier(self, request: wire.Add, stamp: Stamp) -> bytes:
        if self._agent is not None and is_exit_barrier(request.key):
            answer = await self._agent.exit_barrier()
            self._keep_note(self._agent)
            if answer is not None:
                return wire.i64(answer)
        return await self._number(lambda keys: keys.counters.add(request.key, request.delta, stamp))

    def _delete(self, request: wire.DeleteKey) -> Answer:
        stamp = self._sign()
        return self._number(lambda keys: keys.writes.delete(request.key, stamp))

    def _push(self, request: wire.QueuePush) -> Answer:
        stamp = self._sign()
        return self._silent(lambda keys: keys.queues.push(request.key, request.value, stamp))

    def _pop(self, request: wire.QueuePop) -> Answer:
        stamp = self._sign()
        return self._popped(lambda keys: keys.queues.pop(request.key, stamp))

    def _barrier(self, request: wire.Barrier) -> Answer:
        return self._arrive(request, self._sign().aside())

    async def _arrive(self, request: wire.Barrier, stamp: Stamp) -> bytes:
        async def arrive(keys: Kv) -> None:
            if await keys.counters.add(request.key, 1, stamp) < request.world_size:
                await keys.counters.count_reached(request.key, request.world_size)

        await self._carry_out(arrive)
        return wire.STOP_WAITING

    # Each makes its call in its own body: a request cancelled before its first step has made none.

    async def _silent(self, work: Callable[[Kv], Awaitable[None]]) -> bytes:
        await self._carry_out(work)
        return b""

    async def _number(self, number: Callable[[Kv], Awaitable[int]]) -> bytes:
        return wire.i64(await self._carry_out(number))

    async def _popped(self, taken: Callable[[Kv], Awaitable[tuple[int, bytes]]]) -> bytes:
        return wire.popped(*await self._carry_out(taken))
