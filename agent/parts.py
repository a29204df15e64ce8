# SPDX-License-Identifier: Apache-2.0
"""The one place where a sidecar is put together: its parts, and how they know of each other.

Everything that runs a sidecar, or some of its parts, builds them here: the product, the
simulation, tests and benchmarks. ``agent.running`` runs a whole one.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Literal

from agent.drain.decisions import Coordinator, DrainView, RoundSource
from agent.drain.gate_writer import GateWriter
from agent.drain.notice import NoticeSocket
from agent.drain.own import OwnDrain
from agent.drain.saves import LauncherSaves, SaveReporter
from agent.hosts import HostDelivery
from agent.launcher_check import LauncherPolicy
from agent.launcher_watch import FailureReporter, LauncherWatcher
from agent.neighbour_watch import PeerWatch
from agent.rundir.files import RunDir
from agent.shards import ShardDesk, ShardSocket
from agent.stuck import StillWatch
from agent.surroundings import MemberSettings, Sockets, Surroundings
from agent.tunnel.tunnel import LauncherEnd, Tunnel
from agent.tunnel.worker_end import WorkerEnd
from agent.upkeep import StateReporter, StoreVersion, Sweeper
from agent.world_keeper import WorldKeeper
from launcher_shim.c10d.endpoint import Endpoint
from launcher_shim.c10d.rounds.stages import Kept
from launcher_shim.hosts import token_of
from launcher_shim.rundir.rank_reports import StepLine
from rdzv.dataclass import dataclass
from rdzv.drain.gate import ON_CUT_S
from rdzv.drain.inputs import DrainPolicy
from rdzv.job import JobClient
from rdzv.keys import JobKeys
from rdzv.members.gone import Losses, RollBack
from rdzv.members.registrar import Registrar
from rdzv.members.registration import EMPTY_LEASE_TIMES, Held
from rdzv.reconcile import Kernel
from rdzv.records.codec import KEPT
from rdzv.records.drain import Commit
from rdzv.shard_ledger import ShardLedger


class Drains:
    """The parts that see drains through, for one member whose launcher is in ``rounds``.

    ``notice_path``: the socket that takes notices, or None for no socket. ``grace_s``: the pod's
    termination grace. ``below_min``: as in ``rdzv.drain.inputs.DrainPolicy``. ``on_cut``: whether
    ranks wait once their pod has had no lease for ``ON_CUT_S``. ``stuck_after_s`` and
    ``when_stuck``: as in ``MemberSettings``. ``ledgers`` returns those of all data sets in shards.
    ``boot_clock`` is that of ``agent.process``, in seconds.
    """

    def __init__(
        self,
        run_dir: RunDir,
        kernel: Kernel,
        registrar: Registrar,
        rounds: RoundSource,
        *,
        notice_path: Path | None,
        grace_s: float,
        below_min: Literal["hold", "commit"],
        on_cut: Literal["train", "hold"],
        stuck_after_s: float,
        when_stuck: Literal["tell", "reform"],
        ledgers: Callable[[], Sequence[ShardLedger]],
        boot_clock: Callable[[], float],
    ) -> None:
        identity = registrar.identity
        view = DrainView(kernel.client, rounds, identity.pod_uid, run_dir, ledgers)
        self.own = OwnDrain(kernel, run_dir, identity, grace_s=grace_s, boot_s=boot_clock)
        on_cut_s = ON_CUT_S if on_cut == "hold" else math.inf
        self.gate_writer = GateWriter(kernel, run_dir, registrar, view, self.own, on_cut_s=on_cut_s)
        policy = DrainPolicy(below_min)
        self.coordinator = Coordinator(kernel, identity.member, view, self.own, policy)
        watch = StillWatch(run_dir, kernel.clock, stuck_after_s)
        self.saves = SaveReporter(
            *(kernel, run_dir, registrar, view, rounds),
            watch=watch,
            ends_stuck=when_stuck == "reform",
            grace_s=grace_s,
        )
        self.launcher_saves = LauncherSaves(kernel, run_dir, identity.member)
        self.notices = NoticeSocket(notice_path, self.own.notify, self.own.phase_after)
        self._client = kernel.client

    @property
    def commit(self) -> Commit:
        """The commit record; an idle one if there is none."""
        return self._client.membership.snapshot().commit or Commit()

    @property
    def last_commit_step(self) -> int:
        """The newest step that all ranks saved; -1 for none."""
        last = self._client.membership.snapshot().commit_to_start_from
        return -1 if last is None else last.step

    @property
    def last_commit_keeps_samples(self) -> int:
        """1 if the last commit keeps the samples, 0 if it does not; -1 for none."""
        last = self._client.membership.snapshot().commit_to_start_from
        return -1 if last is None else int(last.samples == KEPT)

    @property
    def last_saved_step(self) -> int:
        """The newest step that a rank of this pod saved in its round; -1 for none."""
        own = self.saves.own
        return -1 if own is None or own.newest is None else own.newest

    def by_outcome(self) -> dict[str, float]:
        """Count this generation's drain records by outcome."""
        counted = dict.fromkeys(("", "committed", "uncommitted", "expired"), 0.0)
        for drain in self._client.membership.snapshot().drains.values():
            counted[drain.outcome] += 1
        return {outcome or "none yet": count for outcome, count in counted.items()}

    async def run(self) -> None:
        """Take notices and see drains through until cancelled."""
        await asyncio.to_thread(self._restore)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.notices.run(), name="notices")
            tasks.create_task(self.own.run(), name="own-drain")
            await self.gate_writer.wait_for_store()
            tasks.create_task(self.coordinator.run(), name="coordinator")
            tasks.create_task(self.gate_writer.run(), name="gate-writer")
            tasks.create_task(self.saves.run(), name="saves")
            tasks.create_task(self.launcher_saves.run(), name="launcher-saves")

    def _restore(self) -> None:
        self.own.restore()
        self.gate_writer.restore()


@dataclass(frozen=True, slots=True)
class MemberParts:
    """The parts of a member: its view of the job, its registration, its work for the whole job."""

    client: JobClient
    registrar: Registrar
    kernel: Kernel
    losses: Losses
    roll_back: RollBack
    sweeper: Sweeper
    store_version: StoreVersion
    states: StateReporter
    peers: PeerWatch | None
    """None: it watches no other sidecar."""


@dataclass(frozen=True, slots=True)
class LauncherParts:
    """The parts that serve the launcher beside this sidecar, and watch it."""

    hosts: HostDelivery
    endpoint: Endpoint
    drains: Drains
    watcher: LauncherWatcher
    failures: FailureReporter
    tunnel: Tunnel
    shards: ShardSocket
    desk: ShardDesk
    world: WorldKeeper


def job_client(around: Surroundings, keys: JobKeys) -> JobClient:
    """Build the client of the job; members that live in one process may share it."""
    return JobClient.of(around.store, keys, clock=around.clock, random=around.random)


def member_parts(
    around: Surroundings,
    settings: MemberSettings,
    client: JobClient,
    *,
    held: Held | None = None,
    on_held: Callable[[Held], Awaitable[None]] | None = None,
) -> MemberParts:
    """Build one member's parts.

    ``held`` is the registration of the previous sidecar of this pod, and ``on_held`` keeps each new
    one for the next.
    """
    identity = settings.identity
    registrar = Registrar(
        client,
        identity,
        lease_ttl_s=settings.lease_ttl_s,
        clock=around.clock,
        random=around.random,
        held=held,
        on_held=on_held,
    )
    kernel = Kernel(client, registrar.fence, registrar.registered.wait, around.clock, around.random)
    return MemberParts(
        client=client,
        registrar=registrar,
        kernel=kernel,
        losses=Losses(client, identity.member),
        roll_back=RollBack(kernel, registrar, patience_s=EMPTY_LEASE_TIMES * settings.lease_ttl_s),
        sweeper=Sweeper(kernel, identity.member, identity.pod_uid, pause_s=settings.sweep_pause_s),
        store_version=StoreVersion(client, around.clock),
        states=StateReporter(kernel, registrar),
        peers=PeerWatch(kernel, registrar, around.dial) if around.dial else None,
    )


def endpoint_of(
    around: Surroundings,
    settings: MemberSettings,
    member: MemberParts,
    sockets: Sockets,
    *,
    kept: Kept | None = None,
    steps: Callable[[], Sequence[StepLine]] = tuple,
    failed: Callable[[], Collection[str]] = tuple,
) -> Endpoint:
    """Build the rendezvous endpoint of a member.

    ``kept`` stores what the next sidecar of the pod has to know; None: there will be none.
    ``steps`` reads the steps that the ranks publish, ``failed`` the masters of the worlds in which
    one has failed.
    """
    return Endpoint(
        kernel=member.kernel,
        registrar=member.registrar,
        port=sockets.c10d_port,
        unix_path=sockets.c10d_path,
        first_call_s=settings.first_call_s,
        last_call_s=settings.last_call_s,
        kept=kept,
        terms=settings.quarantine,
        steps=steps,
        failed=failed,
    )


def drains_of(
    around: Surroundings,
    settings: MemberSettings,
    member: MemberParts,
    rounds: RoundSource,
    run_dir: RunDir,
    notice_path: Path | None,
    ledgers: Callable[[], Sequence[ShardLedger]] = tuple,
) -> Drains:
    """Build the parts that see drains through, for a member whose launcher is in ``rounds``.

    ``ledgers`` returns those of all data sets in shards.
    """
    return Drains(
        run_dir,
        member.kernel,
        member.registrar,
        rounds,
        notice_path=notice_path,
        grace_s=settings.grace_s,
        below_min=settings.below_min,
        on_cut=settings.on_cut,
        stuck_after_s=settings.stuck_after_s,
        when_stuck=settings.when_stuck,
        ledgers=ledgers,
        boot_clock=around.boot_clock,
    )


def launcher_parts(
    around: Surroundings,
    settings: MemberSettings,
    member: MemberParts,
    run_dir: RunDir,
    sockets: Sockets,
    *,
    ready: Callable[[], bool],
) -> LauncherParts:
    """Build the launcher's parts; ``ready`` returns whether a launcher may start."""
    client, registrar, identity = member.client, member.registrar, settings.identity
    hosts = HostDelivery(
        member.kernel,
        run_dir,
        registrar.held_generation or 0,
        registrar.registered,
        lambda: registrar.held_generation,
        nudges=identity.role == "launcher",
    )
    endpoint = endpoint_of(
        *(around, settings, member, sockets),
        kept=run_dir,
        steps=run_dir.steps,
        failed=lambda: {one.master for one in run_dir.failures()},
    )
    desk = ShardDesk(client, registrar, endpoint, random=around.random)
    drains = drains_of(
        *(around, settings, member, endpoint, run_dir, sockets.notice_path), ledgers=desk.ledgers
    )
    policy = LauncherPolicy(
        settings.keys.job_name,
        identity.policy.min_nodes,
        identity.policy.max_nodes,
        settings.launcher_port,
        identity.slots,
        relayed=settings.relayed,
    )
    watcher = LauncherWatcher(
        run_dir,
        client,
        registrar,
        endpoint,
        policy,
        ready=ready,
        clock=around.clock,
    )
    failures = FailureReporter(
        run_dir, client, registrar, endpoint, settings.quarantine, clock=around.clock
    )
    shards = ShardSocket(sockets.shards_path, desk.answer)
    tunnel = tunnel_of(around, member, sockets, settings.lease_ttl_s)
    world = WorldKeeper(
        *(run_dir, client, registrar, endpoint), port=settings.launcher_port, clock=around.clock
    )
    return LauncherParts(hosts, endpoint, drains, watcher, failures, tunnel, shards, desk, world)


def tunnel_of(
    around: Surroundings, member: MemberParts, sockets: Sockets, lease_ttl_s: float
) -> Tunnel:
    """Build this pod's end of the tunnel, if it has one."""
    client, registrar = member.client, member.registrar
    identity = registrar.identity
    end: LauncherEnd | WorkerEnd | None = None
    if sockets.tunnel is None or sockets.tunnel_path is None or sockets.exec_path is None:
        end = None
    elif identity.role == "launcher":
        end = LauncherEnd(
            sockets.tunnel_path,
            sockets.tunnel,
            client,
            lambda: registrar.generation,
            around.clock,
            lease_ttl_s,
        )
    else:
        end = WorkerEnd(
            (identity.address, identity.tunnel_port),
            sockets.tunnel,
            token_of(identity.member, identity.pod_uid),
            sockets.exec_path,
            client,
            lambda: registrar.generation,
            lambda: registrar.fenced,
            around.clock,
            lease_ttl_s,
        )
    return Tunnel(client, registrar, end)
