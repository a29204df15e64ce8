# SPDX-License-Identifier: Apache-2.0
"""The c10d endpoint of one pod: its server, and the rendezvous that its launchers take part in."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

from launcher_shim.c10d.kept_stages import Kept, KeptStages
from launcher_shim.c10d.known_rounds import KnownRounds
from launcher_shim.c10d.launch_lines import line_key, recorded, was_done, was_run
from launcher_shim.c10d.past_rounds import PastRounds
from launcher_shim.c10d.pod_seat import PodSeat
from launcher_shim.c10d.quarantining import Quarantining
from launcher_shim.c10d.rounds.drain_view import master_token, newest
from launcher_shim.c10d.rounds.inputs import Membership as RunMembership
from launcher_shim.c10d.rounds.inputs import Policy
from launcher_shim.c10d.rounds.rendezvous import Rendezvous
from launcher_shim.c10d.rounds.resume_note import Note
from launcher_shim.c10d.rounds.run_membership import run_membership
from launcher_shim.c10d.serving.relayed import Relay
from launcher_shim.c10d.serving.server import C10dServer
from launcher_shim.c10d.serving.session import SHARED_RUN, LauncherSession
from launcher_shim.c10d.stages import container_of, torch_run_id
from launcher_shim.c10d.torch.agent import Agent, connect
from launcher_shim.c10d.values.ledger import Stamp
from launcher_shim.c10d.values.operations import Kv
from launcher_shim.tcpstore import wire
from rdzv.drain.decision import savers
from rdzv.drain.inputs import LiveRound
from rdzv.errors import StoreError
from rdzv.members.guard import Registered
from rdzv.members.registrar import Registrar
from rdzv.membership import Membership
from rdzv.mirror import Mirror
from rdzv.records.quarantine import TERMS, Terms
from rdzv.snapshot import Snapshot
from rdzv.store import Store, WatchEvent

log = logging.getLogger(__name__)

CLEAN_UP_S = 120.0
"""Longest wait for the store to drop what closed connections left on record: longer than most
outages."""
CLEAN_UP_PAUSE_S = 0.5
"""Between two attempts."""

IDLE_S = 10.0
"""How long a pod that drains is kept waiting before it is told to ask again."""

FAREWELLS_S = 2.0
"""Within so long a relay has told a new sidecar which of its clients live on, or are gone."""

COALESCE_S = 0.02
"""Pause between two looks at what the mirror and the rendezvous tell of."""


Attached = dict[str, tuple[Agent, Callable[[Kv], None]]]
"""By connection: the agent behind it, and how to hand its session other keys."""


@dataclass
class _Run:
    """One rendezvous and its keys, in one generation."""

    kv: Kv
    rendezvous: Rendezvous
    tasks: Sequence[asyncio.Task[None]]
    attached: Attached = field(default_factory=dict)

    def end(self) -> None:
        """Let nothing more be written, and nobody wait."""
        for task in self.tasks:
            task.cancel()
        self.rendezvous.end()
        self.kv.close()


class Endpoint:
    """Serves c10d on loopback and, where a path is given, on a unix socket.

    ``kept`` has what the next sidecar of this pod is to know; None: there will be none.
    ``port``: 0 chooses one, None serves on the unix socket alone. ``policy`` turns the job's
    record into a run's policy. ``clock`` is monotonic, in seconds.
    """

    def __init__(
        self,
        *,
        registrar: Registrar,
        membership: Membership,
        mirror: Mirror,
        store: Store,
        port: int | None,
        unix_path: str | None,
        last_call_s: float,
        first_call_s: float = 30.0,
        clock: Callable[[], float],
        random: Random,
        kept: Kept | None = None,
        terms: Terms = TERMS,
    ) -> None:
        self.port: int | None = None
        self.listening = asyncio.Event()
        self._listening_s = 0.0
        self.fenced = False
        self._registrar = registrar
        self._membership = membership
        self._mirror = mirror
        self._store = store
        self._wanted_port = port
        self._unix_path = unix_path
        self._calls = partial(Policy, last_call_s=last_call_s, first_call_s=first_call_s)
        self._clock = clock
        self._random = random
        self._generation: int | None = None
        self._generation_since_s = 0.0
        self._entered = asyncio.Event()
        self._runs: dict[str, _Run] = {}
        self._known: KnownRounds | None = None
        self._shared: Kv | None = None
        self._sessions = 0
        self.closing = False
        self._tasks: asyncio.TaskGroup
        self._server = C10dServer(self._open_session)
        self._quarantining = Quarantining(
            member=registrar.identity.member,
            pod_uid=registrar.identity.pod_uid,
            store=store,
            mirror=mirror,
            membership=membership,
            registered=lambda: None if self._generation is None else self._registered(),
            clock=clock,
            terms=terms,
        )
        self._seat = PodSeat(self.launchers)
        self._restarted = unix_path is not None and registrar.held is not None
        self._stages = KeptStages(kept)
        self._run_memberships: dict[
            str, tuple[Snapshot, int, str | None, frozenset[str], RunMembership]
        ] = {}

    async def run(self) -> None:
        """Serve until cancelled; raises ``ConfigError`` if the port is taken."""
        await self._stages.read()
        async with asyncio.TaskGroup() as self._tasks:
            self._tasks.create_task(self._quarantining.run(), name="quarantine")
            unsubscribe = self._mirror.subscribe(self._apply)
            try:
                if self._wanted_port is not None:
                    self.port = await self._server.listen_loopback(self._wanted_port)
                if self._unix_path is not None:
                    await self._server.listen_unix(self._unix_path)
                self._listening_s = self._clock()
                self.listening.set()
                await self._follow_generations()
            finally:
                self.closing = True
                unsubscribe()
                await self._server.close()

    @property
    def connections(self) -> int:
        """Launchers that are connected now."""
        return len(self._server.connections)

    @property
    def outlived(self) -> bool:
        """Whether a torchrun behind a relay would outlive this sidecar."""
        return any(connection.relayed for connection in self._server.connections)

    def launchers(self) -> list[tuple[str, Agent]]:
        """The torchruns that are connected now, each with its run id."""
        return [
            (run_id, agent)
            for run_id, run in self._runs.items()
            for agent, _ in run.attached.values()
        ]

    def rendezvous(self) -> dict[str, Rendezvous]:
        """The rendezvous that are followed, by run id."""
        return {run_id: run.rendezvous for run_id, run in self._runs.items()}

    @property
    def any_closed(self) -> bool:
        """Whether a run of this life of the job was closed."""
        return self._known is not None and self._known.any_closed

    async def caught_up(self) -> None:
        """Wait until the runs are those of the life that the member is registered in.

        At once where it is not registered: what was known before counts on.
        """
        while self._registrar.generation not in (None, self._generation):
            await self._entered.wait()

    def live_round(self) -> LiveRound | None:
        """The round of the newest run, as drains look at it; None where there is no run."""
        chosen = newest(_live_round(run) for run in self._runs.values())
        if chosen is not None and self._known is not None and self._known.trained:
            return replace(chosen, first=False)
        return chosen

    async def live_round_changed(self, known: LiveRound | None) -> LiveRound | None:
        """Wait until ``live_round`` is another than ``known``; return it."""
        while (now := self.live_round()) == known:
            async with asyncio.TaskGroup() as tasks:
                # The mirror tells what happens in the store, the rendezvous what time does.
                changes = [
                    tasks.create_task(self._mirror.changed_after(self._mirror.sequence)),
                    *(tasks.create_task(run.rendezvous.news()) for run in self._runs.values()),
                ]
                await asyncio.wait(changes, return_when=asyncio.FIRST_COMPLETED)
                for change in changes:
                    change.cancel()
            await asyncio.sleep(COALESCE_S)
        return now

    # -- what sessions ask for

    @property
    def shared(self) -> Kv | None:
        """Keys of clients that belong to no rendezvous; None until the member is registered."""
        return self._shared

    async def ready(self) -> Kv:
        """Wait until the member is registered; return the shared keys."""
        while self._shared is None:
            await self._entered.wait()
        return self._shared

    async def attached(
        self, run_id: str, author: str, move: Callable[[Kv], None], nonce: str | None
    ) -> tuple[Kv, Agent]:
        """Join a rendezvous: wait until it is known, and connect to it.

        ``move`` is called with other keys when the job begins its next life. ``nonce`` names a
        connection that may outlive the sidecar.
        Raises ``WireError`` for one that comes beside another torchrun of this pod.
        """
        await self._registrar.registered.wait()
        run = self._run(await self._meant_for(container_of(nonce), run_id))
        agent = connect(run.rendezvous, nonce)
        run.attached[author] = (agent, move)
        return run.kv, agent

    async def _meant_for(self, container: str, run_id: str) -> str:
        """Name the stage that the next torchrun of this pod is of, once there is no other."""
        if self._restarted:
            # A torchrun that has outlived the sidecar before this one may not be back yet: its
            # relay comes within moments, and it has its place once the member is registered.
            await self.ready()
            await asyncio.sleep(self._listening_s + FAREWELLS_S - self._clock())
        await self._seat.vacant()
        name = self._stages.known.next(container, run_id)
        if container and self._ended_well(name):
            # One that has ended while no sidecar was there may still have to say so.
            await asyncio.sleep(self._listening_s + FAREWELLS_S - self._clock())
            await self._seat.vacant()
            name = self._stages.known.next(container, run_id)
        return name

    async def begin_stage(
        self, run_id: str, nonce: str | None, line: bytes, stamp: Stamp, *, may_pass: bool
    ) -> tuple[Kv, bytes]:
        """Answer a torchrun that is about to start, and say where that is.

        ``PASSED``: it need not start, for its stage has ended well. ``AGAIN``: not now, for its
        pod drains, and would have no place. Empty: it starts.
        ``line`` is a digest of its launch line: whoever starts something else is no restart of
        what has ended well. ``may_pass``: no torchrun of its container has taken part yet.
        """
        await self._registrar.registered.wait()
        if nonce is not None and nonce == self._stages.known.passed_by:
            return self._run(run_id).kv, wire.PASSED  # it asks again, as its answer was lost
        name = await self._meant_for(container_of(nonce), run_id)
        if await self._idles(name):
            return self._run(name).kv, wire.AGAIN
        kv = self._run(name).kv
        if not self._ended_well(name):
            value = recorded(container_of(nonce), line)
            await kv.put([(line_key(self._registrar.identity.member), value)], stamp)
            return kv, b""
        passed = (
            nonce is not None
            # Whatever a pod that drains starts, it would train nothing: no work is left out.
            and (may_pass or self._drains(name))
            and await self._was_run(name, line)
            and await self._stages.pass_over(nonce, name)
        )
        if passed:
            log.info("a torchrun passes over %s, which has ended well already", name)
        return kv, wire.PASSED if passed else b""

    async def _idles(self, name: str) -> bool:
        """Whether this pod drains and ``name`` goes on; waits for a while for that to change.

        Its torchrun would be shown no place, and end with 1 when the others have ended well.
        """
        try:
            async with asyncio.timeout(IDLE_S):
                while self._drains(name) and not self._ended_well(name):
                    await self._run(name).rendezvous.news()
        except TimeoutError:
            return True
        return False

    def _drains(self, name: str) -> bool:
        members = self._members(name, self._run(name).rendezvous.round.number)
        return self._registrar.identity.member in members.leaving

    async def _was_run(self, name: str, line: bytes) -> bool:
        """Whether ``name``, which has ended well, was run by that launch line, here to its end."""
        run, here = self._run(name), self._registrar.identity.member
        current = run.rendezvous.round
        own = [seat for seat in current.frozen if seat.member == here]
        held = [] if self._drains(name) else own
        run_id, cells = torch_run_id(name), run.kv.cells
        if not all(was_done(seat, run_id, current.number, cells) for seat in held):
            return False  # it died on its way to the exit barrier: its work would be left out
        members = [seat.member for seat in current.frozen]
        values = await run.kv.get_all([line_key(member) for member in members])
        known = dict(zip(members, values, strict=True))
        return was_run(line, here, current.frozen, known)

    def _ended_well(self, name: str) -> bool:
        return self._known is not None and self._known.ended_well(name)

    async def resumed(
        self, note: Note, author: str, move: Callable[[Kv], None], nonce: str
    ) -> tuple[Kv, Agent]:
        """Join it again for a client that outlived the sidecar before this one."""
        await self.ready()
        run = self._run(note.run_id)
        kept, foreign = note.node, note.generation != self._generation
        if kept is not None and foreign:
            # Its world was of a former life of the job: it asks again in this one, from the start.
            kept = replace(kept, state="left", ask=0, left_reason="hung", round=0)
        agent = connect(run.rendezvous, nonce, kept)
        if not foreign:
            agent.resume(note.finished_round, note.filled_round)
        run.attached[author] = (agent, move)
        log.info(
            "a torchrun of %s has outlived its sidecar and goes on",
            note.run_id,
            extra={"event": "resumed"},
        )
        return run.kv, agent

    async def vacant(self, newcomer: Agent) -> None:
        """Return once no other torchrun of the pod takes part; raises ``WireError`` if one does."""
        await self._seat.vacant(newcomer)

    def note_of(self, agent: Agent) -> Note:
        """Describe an agent to the sidecar that serves it next."""
        return Note(
            agent.run_id,
            self._generation or 0,
            agent.node,
            agent.finished_round,
            agent.claim.filled_round,
        )

    def detach(self, author: str) -> None:
        """Take note that a connection is closed."""
        for name, run in self._runs.items():
            agent, _ = run.attached.pop(author, (None, None))
            if agent is not None and agent.ended_well:
                self._finished(container_of(agent.claim.nonce), name)
        self._follow_runs()

    def _finished(self, container: str, name: str) -> None:
        """Let the container's next torchrun be of the next stage."""
        if self._stages.known.finish(container, name) and not self.closing:
            self._tasks.create_task(self._stages.keep(), name="keep stages")

    def forget(self, kv: Kv | None, author: str) -> None:
        """Drop what a closed connection's operations left on record, without waiting for it.

        ``kv``: None for the shared keys.
        """

        async def work() -> None:
            keys = kv or await self.ready()
            await keys.forget_author(author)

        self._follow_runs()
        if not self.closing:
            self._tasks.create_task(self._clean_up(work), name=f"forget {author}")

    # -- how

    def _open_session(self, peer: str, relay: Relay | None) -> LauncherSession:
        member = self._registrar.identity.member
        if relay is not None:
            return LauncherSession(self, f"{member}.{relay.session.hex()}", relay)
        self._sessions += 1
        return LauncherSession(
            self, f"{member}.{self._random.getrandbits(48):012x}.{self._sessions}"
        )

    async def _follow_generations(self) -> None:
        """Give every life of the job its own runs."""
        while True:
            await self._registrar.registered.wait()
            generation = self._registrar.generation
            if generation is not None and generation != self._generation:
                former = self._leave_generation()
                self._generation = generation
                self._generation_since_s = self._clock()
                self._shared = self._kv(SHARED_RUN)
                keys = self._membership.keys.in_generation(generation)
                rounds = self._mirror.under(keys.runs)
                self._known = KnownRounds(keys, rounds, self._mirror.revision)
                self._follow_runs()
                for run_id, attached in former.items():
                    self._move(run_id, attached)
                entered, self._entered = self._entered, asyncio.Event()
                entered.set()
            await self._membership.changed_from(self._membership.snapshot())

    def _leave_generation(self) -> dict[str, Attached]:
        """End every run; returns who is still connected to which."""
        former = {run_id: run.attached for run_id, run in self._runs.items() if run.attached}
        for run in self._runs.values():
            run.end()
        self._runs.clear()
        self._run_memberships.clear()
        if self._shared is not None:
            self._shared.close()
        return former

    def _move(self, run_id: str, attached: Attached) -> None:
        """Let torchruns of a former life go on in this one: their world there is over.

        Happens without a job UID, when others have begun the next life behind a cut. Left in the
        old one, two worlds would train side by side for ever.
        """
        run = self._run(run_id)
        run.attached.update(attached)
        for agent, move in attached.values():
            log.info("a torchrun of %s goes on in generation %s", run_id, self._generation)
            move(run.kv)
            agent.move(run.rendezvous)

    def _apply(self, events: Sequence[WatchEvent]) -> None:
        """Take in one batch of the mirror's: drains are looked at with the runs of that moment."""
        if self._known is not None and self._known.apply(events, self._mirror.revision):
            self._follow_runs()

    def _follow_runs(self) -> None:
        """Start what is to be followed; let go of the rest, once nobody here is in it."""
        if self._known is None or self.closing:
            return
        followed = self._known.followed()
        for name in followed:
            self._run(name)
        for name in self._known.names() - followed:
            if (run := self._runs.get(name)) is not None and not run.attached:
                self._retire(name)

    def _retire(self, name: str) -> None:
        assert self._generation is not None
        run = self._runs.pop(name)
        self._run_memberships.pop(name, None)
        served = run.rendezvous.has_node
        run.end()
        if served:
            node = run.kv.keys.node(self._registrar.identity.member)
            work = self._clean_up(lambda: run.kv.forget_records([node]))
            self._tasks.create_task(work, name=f"forget node of {name}")

    def _run(self, run_id: str) -> _Run:
        run = self._runs.get(run_id)
        if run is None:
            run = self._runs[run_id] = self._start(run_id)
        return run

    def _start(self, run_id: str) -> _Run:
        assert self._generation is not None
        generation = self._membership.keys.in_generation(self._generation)
        member = self._registrar.identity.member
        rendezvous = Rendezvous(
            member=member,
            registered=self._registered(),
            drains=generation.drains,
            keys=generation.run(run_id),
            run_id=run_id,
            mirror=self._mirror,
            store=self._store,
            policy=self._policy,
            membership=lambda number: self._members(run_id, number),
            clock=self._clock,
            random=self._random,
            life_since_s=self._generation_since_s,
            came=self._quarantining.came,
            ended=self._quarantining.ended,
            known=self._known.of(run_id) if self._known is not None else None,
        )
        kv = self._kv(run_id)
        past = PastRounds(self._membership.keys, self._mirror, self._store, kv, rendezvous)
        work = {"rendezvous": rendezvous.run(), "rounds": past.run(self._tasks)}
        return _Run(
            kv,
            rendezvous,
            [self._tasks.create_task(one, name=f"{name} {run_id}") for name, one in work.items()],
        )

    def _kv(self, run_id: str) -> Kv:
        assert self._generation is not None
        keys = self._membership.keys.in_generation(self._generation).run(run_id)
        kv = Kv(keys, self._mirror, self._store, self._registered())
        if left := kv.left_behind(self._registrar.identity.member):
            work = self._clean_up(lambda: kv.forget_records(left))
            self._tasks.create_task(work, name="forget former connections")
        return kv

    def _registered(self) -> Registered:
        assert self._generation is not None
        generation = self._membership.keys.in_generation(self._generation)
        member_key = generation.member(self._registrar.identity.member)
        return Registered(member_key, self._lease_id, self._registrar.registered.wait)

    def _lease_id(self) -> int | None:
        return self._registrar.lease_id if self._registrar.registered.is_set() else None

    def _policy(self) -> Policy:
        identity, job = self._registrar.identity, self._membership.snapshot().job
        if job is None:
            return self._calls(identity.min_workers, identity.max_workers)
        return self._calls(job.min_workers, job.max_workers, desired=job.desired)

    def _members(self, run_id: str, number: int) -> RunMembership:
        """Look at the membership; the same object for as long as nothing in it moved."""
        snapshot = self._membership.snapshot()
        known = self._run_memberships.get(run_id)
        fenced = self._registrar.identity.member if self.fenced else None
        saved = self._saved(snapshot, run_id, number)
        if known is None or known[0] is not snapshot or known[1:4] != (number, fenced, saved):
            made = run_membership(snapshot, run_id, number, fenced, saved)
            known = self._run_memberships[run_id] = (snapshot, number, fenced, saved, made)
        return known[4]

    def _saved(self, snapshot: Snapshot, run_id: str, number: int) -> frozenset[str]:
        """Who leaves and has saved while others still do; cheap while nobody saves."""
        if not snapshot.drains or snapshot.commit is None or snapshot.commit.phase != "commit":
            return frozenset()
        return frozenset(savers(snapshot, self._membership.votes(), run_id, number).values())

    async def _clean_up(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do what bears being done again, until it is done or ``CLEAN_UP_S`` are over."""
        reason = ""
        try:
            async with asyncio.timeout(CLEAN_UP_S):
                while True:
                    await self._registrar.registered.wait()
                    try:
                        await work()
                    except StoreError as error:
                        reason = str(error)
                    else:
                        return
                    await asyncio.sleep(CLEAN_UP_PAUSE_S)
        except TimeoutError:
            if not self._registrar.registered.is_set():
                reason = "the member is not registered"
        log.info("what a closed connection left stays on record: %s", reason or "the store is slow")


def _live_round(run: _Run) -> LiveRound:
    rendezvous = run.rendezvous
    run_id = torch_run_id(rendezvous.run_id)
    master = master_token(run_id, rendezvous.round.number, run.kv.cells.value)
    return rendezvous.live_round(master)
