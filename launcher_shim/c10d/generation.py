# SPDX-License-Identifier: Apache-2.0
"""The runs of one generation of the job, as one sidecar follows and serves them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from operator import is_not

from launcher_shim.c10d.agent import TorchAgent
from launcher_shim.c10d.clean_up import KnownRounds, PastRounds, clean_up
from launcher_shim.c10d.quarantining import Quarantining
from launcher_shim.c10d.rounds.inputs import MembershipOfRun, RoundPolicy
from launcher_shim.c10d.rounds.mirrored_run import counting_round, master_token, own
from launcher_shim.c10d.rounds.records import Seat
from launcher_shim.c10d.rounds.rendezvous import Rendezvous
from launcher_shim.c10d.rounds.stages import (
    SHARED_RUN,
    KeptMasters,
    local_world_size,
    role_info_key,
    torch_run_id,
)
from launcher_shim.c10d.values.operations import Kv
from rdzv.drain.inputs import LiveRound, LiveRounds
from rdzv.errors import WireError
from rdzv.job import JobClient
from rdzv.members.registrar import Registrar
from rdzv.reconcile import Kernel, Loop, Outlook, first_of
from rdzv.snapshot import Snapshot
from rdzv.store import WatchEvent

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Attachment:
    """A connection's run: held by its session, moved by the endpoint.

    ``kv`` has the keys of the run, ``agent`` takes part in its rendezvous.
    """

    kv: Kv
    agent: TorchAgent

    def move(self, kv: Kv, rendezvous: Rendezvous) -> None:
        """Go on in the run of the job's next generation."""
        self.kv = kv
        self.agent.move(rendezvous)


Attachments = dict[str, Attachment]
"""Attachments by the name of the connection."""


@dataclass
class Run:
    """One rendezvous and its keys."""

    kv: Kv
    rendezvous: Rendezvous
    members: MembershipOfRun
    masters: KeptMasters
    tasks: Sequence[asyncio.Task[None]]
    attached: Attachments = field(default_factory=dict)
    _world: tuple[int, tuple[Seat, ...]] = (-1, ())
    _master: str = ""
    """Number and seats of the newest world, and its master; empty while that is unknown."""

    def live_round(self) -> LiveRound:
        """Return the round as drains see it.

        If a restored store has lost its master, it is the one that the sidecar has kept.
        """
        rendezvous, current = self.rendezvous, self.rendezvous.round
        if not current.frozen:
            return rendezvous.live_round("")
        world, run_id = (current.number, current.frozen), torch_run_id(rendezvous.run_id)
        master = master_token(run_id, current.number, self.kv.cells.value)
        if master and (world, master) != (self._world, self._master):
            self.masters.note(rendezvous.run_id, current, master)
        elif not master and world == self._world:
            master = self._master
        elif not master:
            master = self.masters.of(rendezvous.run_id, current)
        self._world, self._master = world, master
        return rendezvous.live_round(master)

    def workers(self) -> int:
        """Return how many workers a torchrun of this pod started in the round; 0 if unknown."""
        run_id = torch_run_id(self.rendezvous.run_id)
        for attachment in self.attached.values():
            node, world = attachment.agent.node, attachment.agent.world
            if node is not None and world is not None and node.seat in world.frozen:
                key = role_info_key(run_id, world.number, world.frozen.index(node.seat))
                return local_world_size(self.kv.cells.value(key))
        return 0

    def end(self) -> None:
        """Cancel its tasks, so that it writes nothing any more, and wake all waiters."""
        for task in self.tasks:
            task.cancel()
        self.rendezvous.end()
        self.kv.close()


class Generation:
    """The runs of generation ``number`` that are followed or served.

    ``make_policy`` makes one with this sidecar's first and last call. The runs' own work is done in
    ``tasks``.
    """

    def __init__(
        self,
        number: int,
        kernel: Kernel,
        *,
        registrar: Registrar,
        quarantining: Quarantining,
        masters: KeptMasters,
        make_policy: Callable[..., RoundPolicy],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self.number = number
        self.runs: dict[str, Run] = {}
        self._kernel = kernel
        self._client = client = kernel.client
        self._registrar = registrar
        self._quarantining = quarantining
        self._masters = masters
        self._make_policy = make_policy
        self._made: tuple[Snapshot, RoundPolicy] | None = None
        self._since_s = kernel.clock()
        self._tasks = tasks
        self._keys = client.keys.in_generation(number)
        self._member = registrar.identity.member
        self._live = LiveRounds()
        self._live_from: tuple[object, ...] = ()
        """The objects that ``_live`` was computed from; it is computed again if one is another
        object."""
        self.shared = self._kv(SHARED_RUN)
        """Keys of clients that belong to no rendezvous."""
        rounds = client.mirror.under(self._keys.runs)
        self.rounds = KnownRounds(self._keys, rounds, client.mirror.revision)

    def run(self, name: str) -> Run:
        """Return a run; start it if it is not followed yet."""
        run = self.runs.get(name)
        if run is None:
            run = self.runs[name] = self._start(name)
        return run

    def live_rounds(self) -> LiveRounds:
        """Return the round that counts and the one of this pod, as drains see them."""
        rounds = [run.live_round() for run in self.runs.values()]
        inputs = (*rounds, self._client.membership.snapshot(), self.rounds.trained)
        if len(inputs) != len(self._live_from) or any(map(is_not, inputs, self._live_from)):
            counts = counting_round(rounds, self._client.membership.snapshot())
            if counts is not None and counts.first and self.rounds.trained:
                counts = replace(counts, first=False)
            self._live_from, self._live = inputs, LiveRounds(counts, own(rounds, self._member))
        return self._live

    def follow(self) -> None:
        """Start the runs to be followed; end the others once no torchrun of this pod is in them."""
        followed = self.rounds.followed()
        for name in followed:
            self.run(name)
        for name in [one for one in self.rounds.names() if one not in followed]:
            if (run := self.runs.get(name)) is not None and not run.attached:
                served = run.rendezvous.place.has_node
                self.runs.pop(name).end()
                if served:
                    node = run.kv.keys.node(self._member)
                    self._drop(run.kv, [node], f"forget node of {name}")

    def take_over(self, name: str, attached: Attachments) -> None:
        """Move torchruns of a former generation into this one: their world there is over.

        This happens without a job UID, if others have begun the next generation during a cut.
        Otherwise two worlds would train side by side.
        """
        run = self.run(name)
        run.attached.update(attached)
        for attachment in attached.values():
            log.info("a torchrun of %s goes on in generation %s", name, self.number)
            attachment.move(run.kv, run.rendezvous)

    def end(self) -> dict[str, Attachments]:
        """End every run; return the attachments that are still connected, by run."""
        former = {name: run.attached for name, run in self.runs.items() if run.attached}
        for run in self.runs.values():
            run.end()
        self.runs.clear()
        self.shared.close()
        return former

    # -- internals

    def _start(self, name: str) -> Run:
        client, keys = self._client, self._keys.run(name)
        members = MembershipOfRun(client.membership, name, self._fenced_name)
        rendezvous = Rendezvous(
            self._kernel,
            self._registrar.guard(self.number),
            member=self._member,
            drains=self._keys.drains,
            keys=keys,
            run_id=name,
            launched=self._registrar.identity.policy,
            policy=self._policy,
            membership=members.at,
            life_since_s=self._since_s,
            came=self._quarantining.came,
            entered=self._quarantining.entered,
            died=self._quarantining.died,
            last_seen=self.rounds.of(name),
        )
        kv = self._kv(name)
        past = PastRounds(client, kv, rendezvous, self._tasks)
        work = {"rendezvous": rendezvous.run(), "rounds": past.run()}
        tasks = [self._tasks.create_task(one, name=f"{part} {name}") for part, one in work.items()]
        return Run(kv, rendezvous, members, self._masters, tasks)

    def _policy(self) -> RoundPolicy:
        snapshot, launched = self._client.membership.snapshot(), self._registrar.identity.policy
        if self._made is not None and self._made[0] is snapshot:
            return self._made[1]
        if (rules := snapshot.rules) is None:
            return self._make_policy(launched.min_nodes, launched.max_nodes)
        policy = self._make_policy(
            **asdict(rules.policy),
            desired=rules.expected,
            paused=rules.paused,
            shrinks=snapshot.all_know_sizes,
        )
        self._made = snapshot, policy
        return policy

    def _fenced_name(self) -> str | None:
        return self._member if self._registrar.fenced else None

    def _kv(self, name: str) -> Kv:
        client = self._client
        registered = self._registrar.guard(self.number)
        kv = Kv(self._keys.run(name), client.mirror, client.store, registered)
        if left := kv.left_behind(self._member):
            self._drop(kv, left, "forget former connections")
        return kv

    def _drop(self, kv: Kv, left: Sequence[str], name: str) -> None:
        dropping = clean_up(self._registrar, self.number, lambda: kv.forget_records(left))
        self._tasks.create_task(dropping, name=name)


class Generations(Loop):
    """The generations that the member registers in, each with runs of its own.

    ``enter`` creates the one of a number. ``current`` is None until the member is registered.
    """

    def __init__(
        self, client: JobClient, registrar: Registrar, enter: Callable[[int], Generation]
    ) -> None:
        super().__init__()
        self.current: Generation | None = None
        self.closing = False
        """Whether the sidecar ends, and starts no run any more."""
        self._client = client
        self._registrar = registrar
        self._enter = enter
        self._entered = asyncio.Event()

    @property
    def number(self) -> int | None:
        """The number of the current generation; None before the first."""
        return self.current.number if self.current is not None else None

    async def run(self) -> None:
        """Follow the registration until cancelled."""
        unsubscribe = self._client.mirror.subscribe(self._apply)
        try:
            await super().run()
        finally:
            unsubscribe()

    async def step(self) -> Outlook:
        """Change the generation with the registration."""
        generation, membership = self._registrar.generation, self._client.membership
        if generation is None:
            return Outlook(self._registrar.registered.wait)
        if generation != self.number:
            self._change(generation)
        return Outlook(partial(membership.changed_from, membership.snapshot()))

    def run_of(self, name: str) -> Run:
        """Return a run of the current generation; start it if it is not followed yet."""
        assert self.current is not None
        return self.current.run(name)

    async def first(self) -> Generation:
        """Wait until the member is registered; return the current generation."""
        while self.current is None:
            await self._entered.wait()
        return self.current

    async def caught_up(self) -> None:
        """Wait until the current generation is the one that the member is registered in.

        Returns at once if it is not registered: the last known one still counts.
        """
        while self._registrar.generation not in (None, self.number):
            await self._entered.wait()

    def connected(self) -> list[tuple[str, TorchAgent]]:
        """Return the torchruns of this pod that are connected now, each with its run id."""
        return [
            (run_id, attachment.agent)
            for run_id, run in (self.current.runs.items() if self.current is not None else ())
            for attachment in run.attached.values()
        ]

    async def vacant(self, newcomer: TorchAgent | None = None) -> None:
        """Wait until no other torchrun has the pod's one place.

        Raises ``WireError`` if one is alive.
        """
        asked: dict[TorchAgent, int] = {}
        while others := [
            one for one in self.connected() if one[1] is not newcomer and one[1].takes_part
        ]:
            for run_id, other in others:
                if other.waits or other.asked > asked.setdefault(other, other.asked):
                    raise WireError(_refusal(run_id, other.pid))
            # Until one of them sends a request, ends, or is given up.
            stirs = [wait for _, other in others for wait in (other.stirs(), other.news())]
            await first_of(*stirs)

    def follow_runs(self) -> None:
        """Start the runs to be followed, and end others, unless this sidecar is closing."""
        if self.current is not None and not self.closing:
            self.current.follow()

    def _change(self, generation: int) -> None:
        former = self.current.end() if self.current is not None else {}
        self.current = self._enter(generation)
        self.follow_runs()
        for name, attached in former.items():
            self.current.take_over(name, attached)
        entered, self._entered = self._entered, asyncio.Event()
        entered.set()

    def _apply(self, events: Sequence[WatchEvent]) -> None:
        """Apply one batch of the mirror's events, so that drains see the runs of that moment."""
        revision = self._client.mirror.revision
        if self.current is not None and self.current.rounds.apply(events, revision):
            self.follow_runs()


def _refusal(run_id: str, pid: int) -> str:
    return (
        f"a torchrun of this pod (process {pid}) takes part in the run {run_id} already, and a pod"
        " has one place in its job: end that one first, or start this one by itself, with"
        " --standalone --nnodes=1 --rdzv-conf=is_host=1; see"
        " docs/operations.md#a-second-torchrun-in-a-pod"
    )
