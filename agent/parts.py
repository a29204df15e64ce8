# SPDX-License-Identifier: Apache-2.0
"""The one place where a sidecar is put together: its parts, and how they know of each other.

Everything that runs a sidecar, or some of its parts, builds them here: the product, the simulation,
tests and benchmarks. ``agent.running`` runs a whole one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path

from agent.drain.decisions import RoundSource
from agent.drain.service import Drains
from agent.hosts import HostDelivery
from agent.launcher_check import LauncherPolicy
from agent.launcher_watch import FailureReporter, LauncherWatcher
from agent.neighbour_watch import PeerWatch
from agent.rundir.files import RunDir
from agent.shards import ShardDesk, ShardSocket
from agent.surroundings import MemberSettings, Sockets, Surroundings
from agent.tunnel.tunnel import LauncherEnd, Tunnel
from agent.tunnel.worker_end import WorkerEnd
from agent.upkeep import StoreVersion, Sweeper
from agent.verdict.telling import StateTeller
from agent.world_keeper import WorldKeeper
from launcher_shim.c10d.endpoint import Endpoint
from launcher_shim.c10d.rounds.stages import Kept
from launcher_shim.horovod.hosts import token_of
from launcher_shim.rundir.rank_reports import StepLine
from rdzv.dataclass import dataclass
from rdzv.job import JobClient
from rdzv.keys import JobKeys
from rdzv.members.gone import Losses, RollBack
from rdzv.members.registrar import Registrar
from rdzv.members.registration import EMPTY_LEASE_TIMES, Held
from rdzv.reconcile import Kernel
from rdzv.shard_ledger import ShardLedger


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
    states: StateTeller
    peers: PeerWatch | None
    """None: it watches no other sidecar."""


@dataclass(frozen=True, slots=True)
class LauncherParts:
    """The parts that serve the launcher beside this sidecar, and watch it."""

    hosts: HostDelivery
    endpoint: Endpoint
    drains: Drains
    lookout: LauncherWatcher
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
        states=StateTeller(kernel, registrar),
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
    lookout = LauncherWatcher(
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
    return LauncherParts(hosts, endpoint, drains, lookout, failures, tunnel, shards, desk, world)


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
